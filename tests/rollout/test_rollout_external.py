"""Evaluation of an external endpoint: no engines, each answer is a request, and failures are not zeros."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from endpoint_server import Asked, Reply, completion, serving
from raising import raising

from trinity_core.base.errors import EndpointError, TransientFault, TrinityError
from trinity_core.config import Config, ConfigError, config_from_dict, public_dict
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.tracking.scores import evaluation_text, score_fingerprint, valid_scores
from trinity_core.hosting.placement import Machine, place
from trinity_core.rollout.explorer import Explorer
from trinity_core.rollout.inference.external_model import ExternalSession
from trinity_core.run.stage import StageRequest, choose_stage
from trinity_core.run.summary import read_summary, summary_of_scores, unscored_steps
from trinity_core.workflows import WORKFLOWS, RewardItem, SimpleWorkflow, Workflow

KEY = "sk-very-secret-4711"
COLUMNS = {"prompt_key": "question", "response_key": "answer"}


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINY_KEY", KEY)
    return "TINY_KEY"


def config_of(root: Path, tiny: TinyFolders, url: str, *overrides: str, **external: object) -> Config:
    evals = [
        {"name": "once", "path": str(tiny.data), "split": "test", "format": COLUMNS},
        {
            "name": "often", "path": str(tiny.data), "split": "test", "format": COLUMNS, "repeat_times": 4,
            "rollout_args": {"temperature": 0.5, "max_tokens": 12}, "default_workflow_type": "simple_workflow",
            "default_reward_fn_type": "format_reward",
        },
    ]  # fmt: skip
    endpoint = {"base_url": url, "model_name": "org/tiny", "max_retry_times": 0} | external
    tree = {
        "project": "p", "name": "n", "mode": "bench", "checkpoint_root_dir": str(root),
        "buffer": {"explorer_input": {"eval_tasksets": evals}},
        "explorer": {"external_model": endpoint, "max_retry_times": 0},
    }  # fmt: skip
    return config_from_dict(tree, list(overrides))


def evaluated(config: Config) -> dict[str, float]:
    async def main() -> dict[str, float]:
        explorer = Explorer(config, [])
        try:
            return await explorer.evaluate()
        finally:
            await explorer.close()

    return asyncio.run(main())


def truths(tiny: TinyFolders) -> dict[str, str]:
    rows = map(json.loads, (tiny.data / "test.jsonl").read_text().splitlines())
    return {row["question"]: row["answer"] for row in rows}


def test_an_endpoint_is_scored_without_engines(tmp_path: Path, tiny_folders: TinyFolders, key: str) -> None:
    """It knows all answers; in half of its answers to the second set it declares none."""
    known, seen, lock = truths(tiny_folders), {}, threading.Lock()

    def script(_: int, asked: Asked) -> Reply:
        question = asked.body["messages"][-1]["content"]
        if asked.body["temperature"] == 1.0:
            return Reply(completion(known[question]))
        with lock:
            seen[question] = seen.get(question, 0) + 1
            return Reply(completion("#### 1" if seen[question] % 2 else "no idea"))

    with serving(script) as server:
        config = config_of(tmp_path, tiny_folders, server.url, "model.max_model_len=999", api_key_env=key)
        numbers = evaluated(config)
    assert "eval/once/failed_requests" not in numbers and numbers["eval/once/accuracy"] == 1.0
    assert numbers["eval/often/accuracy"] == 0.5 and numbers["eval/often/pass@4"] == 1.0
    assert (numbers["eval/once/answers"], numbers["eval/often/answers"]) == (16, 64)
    assert numbers["eval/often/response_length"] == 5
    assert len({asked.body["seed"] for asked in server.asked}) == 80
    assert {asked.body.get("max_tokens") for asked in server.asked} == {None, 12}
    summary = summary_of_scores(config)
    assert summary["score"] == 0.75 and read_summary(config) == json.loads(json.dumps(summary))
    assert "often      accuracy 0.500" in evaluation_text(summary["evaluation"])
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "#### 1" in written and KEY not in written and KEY not in str(public_dict(config))


def test_failed_requests_are_missing_from_the_score(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    with serving(lambda number, _: Reply("oops", 500) if number % 4 == 3 else Reply(completion("#### 1"))) as server:
        numbers = evaluated(config_of(tmp_path, tiny_folders, server.url, requests_at_once=1))
    assert (numbers["eval/often/accuracy"], numbers["eval/often/judged"]) == (1.0, 48)
    assert (numbers["eval/often/answers"], numbers["eval/often/failed_requests"]) == (64, 16)


def test_an_endpoint_that_fails_gives_no_score(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    with serving(lambda *_: Reply("model not found", 404)) as server:
        config = config_of(tmp_path, tiny_folders, server.url)
        with pytest.raises(EndpointError):
            evaluated(config)
        assert len(server.asked) <= 32, "it is not asked all questions"
    with pytest.raises(TransientFault):
        evaluated(config)
    assert valid_scores(config) == {}


class Agent(Workflow):
    """Code with its own OpenAI client."""

    def run(self) -> list:
        with self.model.session(0) as session:  # type: ignore[attr-defined]
            completion = session.openai_client.chat.completions.create(
                model=session.model_name, messages=self.task.messages, temperature=0
            )
        reward = self.rewards.score_sync(
            "math_reward", [RewardItem(completion.choices[0].message.content, self.task.truth)]
        )[0]
        return session.experiences(reward, run=0)


def test_an_agent_with_its_own_client_is_scored(
    tmp_path: Path, tiny_folders: TinyFolders, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Right answers count; a request that the endpoint fails is missing; a wrong key ends the evaluation."""
    monkeypatch.setitem(WORKFLOWS, "agent", Agent)
    known = truths(tiny_folders)

    def script(_: int, asked: Asked) -> Reply:
        question = asked.body["messages"][-1]["content"]
        fails = question == next(iter(known))
        return (
            Reply(f"oops {KEY}", 500) if fails else Reply({"model": "m", "created": 0, **completion(known[question])})
        )

    with serving(script) as server:
        config = config_of(tmp_path, tiny_folders, server.url, api_key_env=key)
        agents = config.buffer.explorer_input.eval_tasksets[0].with_values({"default_workflow_type": "agent"})
        config = config.with_values({"buffer.explorer_input.eval_tasksets": [agents]})
        numbers = evaluated(config)
        assert {asked.authorization for asked in server.asked} == {f"Bearer {KEY}"}
        server.script = lambda *_: Reply({"error": {"message": f"bad key {KEY}"}}, 401)
        with pytest.raises(EndpointError) as caught:
            evaluated(config)
    assert KEY not in str(caught.value)
    assert (numbers["eval/once/accuracy"], numbers["eval/once/judged"]) == (1.0, 15)
    assert (numbers["eval/once/answers"], numbers["eval/once/failed_requests"]) == (16, 1)


URL = "http://127.0.0.1:1/v1"


def test_a_scored_endpoint_is_asked_again_if_it_changes(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    one = config_of(tmp_path, tiny_folders, URL)
    assert unscored_steps(one, "missing") == [0]
    changes = (
        {"timeout": 5},
        {"model_name": "other"},
        {"base_url": "http://127.0.0.1:2/v1"},
        {"request_args": {"a": 1}},
    )
    prints = {score_fingerprint(config_of(tmp_path, tiny_folders, URL, **change), 0) for change in changes}
    assert len(prints) == 4 and score_fingerprint(one, 0) in prints


def test_endpoint_run_has_no_engines(tmp_path: Path, tiny_folders: TinyFolders, key: str) -> None:
    config = config_of(
        tmp_path, tiny_folders, URL, "mode=both", f"model.model_path={tiny_folders.model}", "model.max_model_len=64",
        f"buffer.explorer_input.taskset.path={tiny_folders.data}", api_key_env=key,
    )  # fmt: skip
    stage = choose_stage(StageRequest(config, "evaluate"))
    assert (stage.config.name, stage.config.mode) == ("n_org-tiny", "bench")
    assert stage.placement.engines == 0
    base = choose_stage(StageRequest(config, "evaluate", which="base"))
    assert base.config.name == "n" and base.config.external_model is None and base.placement.engines == 1
    assert place(stage.config, Machine(8, 2)).gpus == 0


def test_an_unset_key_is_reported_before_anything_starts(
    tmp_path: Path, tiny_folders: TinyFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINY_KEY", raising=False)
    config = config_of(tmp_path, tiny_folders, URL, api_key_env="TINY_KEY")
    with raising(TrinityError, key="TINY_KEY"):
        choose_stage(StageRequest(config))


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": ""},
        {"base_url": "api.example.com"},
        {"base_url": "https://me:hunter2@example.com/v1"},
        {"base_url": "https://example.com/v1?key=hunter2"},
        {"model_name": ""},
        {"api_key_env": "sk-hunter2"},
    ],
)
def test_wrong_settings_are_reported_without_secrets(
    tmp_path: Path, tiny_folders: TinyFolders, wrong: dict[str, object]
) -> None:
    with raising(ConfigError, key=f"explorer.external_model.{next(iter(wrong))}") as caught:
        config_of(tmp_path, tiny_folders, URL, **wrong)
    assert "hunter2" not in str(caught.value) and "hunter2" not in repr(caught.value.problems)


def test_an_agents_client_has_a_key_and_ends_in_time() -> None:
    """Clients refuse to start without a key, and one that waits longer than its workflow would count as wrong."""
    settings = ExternalModelConfig(base_url="http://127.0.0.1:1/v1", model_name="m", timeout=300, max_retry_times=6)
    session = ExternalSession(settings, "", budget=810.0)
    assert session.api_key and session.openai_client.api_key == session.api_key
    client = session.openai_async_client
    assert (client.max_retries + 1) * float(str(client.timeout)) <= 810.0
    assert ExternalSession(settings, "k", budget=9000.0).openai_client.timeout == 300


class Continues(SimpleWorkflow):
    """Continues token ids, which no endpoint can do."""

    async def run(self) -> list:
        return await self.model.generate([1, 2, 3])


def test_workflow_that_needs_token_ids_gets_an_error(
    tmp_path: Path, tiny_folders: TinyFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKFLOWS, "continues", Continues)
    with serving(lambda *_: Reply()) as server:
        config = config_of(tmp_path, tiny_folders, server.url)
        config = config.with_values({
            "buffer.explorer_input.eval_tasksets": [
                config.buffer.explorer_input.eval_tasksets[0].with_values({"default_workflow_type": "continues"})
            ]
        })  # fmt: skip
        with pytest.raises(TrinityError, match=r"explorer\.external_model"):
            evaluated(config)
