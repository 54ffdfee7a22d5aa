"""Task operators ask a model over HTTP: vLLM's server code, on an engine that says what a test wants."""

from __future__ import annotations

import json
from types import SimpleNamespace

import endpoint_server
import pytest
from endpoint_server import Reply, completion
from inference.openai_server import serving
from inference.test_openai_api_scripted import Speaker, say
from raising import raising

from trinity_core.base.errors import EndpointError, ModelError, TransientFault
from trinity_core.config import OperatorConfig
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.pipelines.tasks import TaskPipeline, curate
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question
from trinity_core.run.asked_models import ask_endpoint

VERDICT = '{"reasoning": 4, "knowledge": 4, "steps": 2, "ambiguity": 2}'
KEY = "TESTS_JUDGE_KEY"


@pytest.fixture(scope="module")
def speaker(tiny_folder):
    return Speaker(tokenizer=load_tokenizer(str(tiny_folder)))


@pytest.fixture(scope="module")
def api(speaker, tiny_folder):
    with serving(tiny_folder, speaker, max_model_len=1024) as served:
        yield served


@pytest.fixture
def judge(api, monkeypatch):
    monkeypatch.setenv(KEY, api.server.key)
    return AskedModel("policy", api.server.base_url(), KEY)


def test_rows_are_scored_by_an_endpoint(judge, speaker, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"question": question}) + "\n" for question in ("one", "two")))
    say(speaker, f"Not easy.\n{VERDICT}", "I cannot say.")
    args = {"api_or_hf_model": judge.name, "base_url": judge.base_url, "api_key_env": KEY, "input_keys": ["question"]}
    dataset = curate(
        TaskPipeline([str(path)], [OperatorConfig(name="llm_difficulty_score_filter", args=args)]), tmp_path / "out",
        SimpleNamespace(ask=ask_endpoint),
    )  # fmt: skip
    [row] = [json.loads(line) for line in (dataset.folder / "train.jsonl").read_text().splitlines()]
    assert row["llm_difficulty_score"] == pytest.approx(0.6) and dataset.rejected == 1  # (4 + 4 + 2 + 2) / 4 / 5
    prompts = [speaker.tokenizer.decode(tokens) for tokens in speaker.heard]
    assert all("how difficult a task is" in prompt for prompt in prompts)
    assert sorted("one" in prompt.split("<question>")[1] for prompt in prompts) == [False, True]


def test_an_endpoint_is_found_as_openais_clients_find_it(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    asked = AskedModel("qwen")
    with raising(ModelError, key="base_url"):
        ask_endpoint(asked, [Question("", "hello")])
    with endpoint_server.serving(lambda *_: Reply(completion("one"))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
        assert ask_endpoint(asked, [Question("", "count")]) == ["one"]
    assert server.asked[0].body["model"] == "qwen" and server.asked[0].authorization == "Bearer sk-1"


def test_an_answer_that_is_cut_off_is_none():
    with endpoint_server.serving(lambda *_: Reply(completion("one two", "length"))) as server:
        [answer] = ask_endpoint(AskedModel("policy", server.url), [Question("", "count", max_tokens=3)])
    assert isinstance(answer, NoAnswer) and "length" in answer.why and "max_tokens" in answer.why
    assert server.asked[0].body["max_tokens"] == 3


def test_who_refuses_or_is_away_is_named(judge, monkeypatch):
    with pytest.raises(EndpointError):
        ask_endpoint(AskedModel("nobody", judge.base_url, KEY), [Question("", "hello")])
    monkeypatch.delenv(KEY)
    with raising(ModelError, key=KEY):
        ask_endpoint(judge, [Question("", "hello")])


def test_an_endpoint_that_is_not_there_is_a_fault_that_passes(monkeypatch):
    monkeypatch.setattr("trinity_core.run.asked_models.ENDPOINT_SECONDS", 2.0)
    with pytest.raises(TransientFault):
        ask_endpoint(AskedModel("nobody", "http://127.0.0.1:9/v1"), [Question("", "hello")])
