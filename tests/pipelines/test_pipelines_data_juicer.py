"""Data-Juicer's own operators on GSM8K's rows and on experiences, in a server of the run's own."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from endpoint_server import Asked, Reply, completion, serving
from raising import raising

from trinity_core.base.errors import InputError, TransientFault, TrinityError
from trinity_core.config import OperatorConfig
from trinity_core.data.experience import Experience
from trinity_core.pipelines.data_juicer.client import DataJuicer, steps_of
from trinity_core.pipelines.data_juicer.local import (
    ENVIRONMENT,
    MISSING,
    LocalDataJuicer,
    installed_operators,
    require_installed,
)
from trinity_core.pipelines.operators import OPERATORS, pipeline

installed = pytest.mark.skipif(not ENVIRONMENT.exists(), reason=MISSING)

ROWS = [
    {"question": "Natalia sold clips to 48 of her friends. How many?", "answer": "48"},  # 50 characters
    {"question": "2 + 2?", "answer": "4"},
    {"question": "Natalia sold clips to 48 of her friends. How many?", "answer": "48"},
    {"question": "Weng earns $12 an hour. How   much in 2 hours?", "answer": "24"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = LocalDataJuicer(api_address=tmp_path_factory.mktemp("run") / "api.json")
    yield server
    server.close()


@installed
def test_rows_are_filtered_deduplicated_and_mapped(server):
    operators = [
        {"text_length_filter": {"text_key": "question", "min_len": 10}},
        {"document_deduplicator": {"text_key": "question"}},
        {"whitespace_normalization_mapper": {"text_key": "question"}},
    ]
    left = server.process(ROWS, operators)
    assert [row["question"] for row in left] == [ROWS[0]["question"], ROWS[3]["question"]]
    assert [row["__dj__stats__"]["text_len"] for row in left] == [50, 46]
    assert server.process([], operators) == []


@installed
def test_operators_read_from_the_source_are_those_of_the_package():
    script = "import json, data_juicer.ops as o; print(json.dumps(list(o.OPERATORS.modules)))"
    done = subprocess.run([require_installed(), "-c", script], capture_output=True, text=True, timeout=120)
    assert installed_operators() == set(json.loads(done.stdout.splitlines()[-1]))


@installed
def test_faults_name_the_operator(server):
    for steps in ([{"text_lenght_filter": {}}], [{"text_length_filter": {"text_key": "txt"}}]):
        with pytest.raises(TrinityError):
            server.process(ROWS, steps)


@installed
def test_a_server_refuses_whoever_lacks_its_key(server):
    server.process(ROWS, [{"words_num_filter": {"text_key": "question"}}])
    stranger = DataJuicer(server._client.url)
    with pytest.raises(TrinityError):
        stranger.process(ROWS, [{"words_num_filter": {"text_key": "question"}}])
    assert (
        httpx.get(stranger.url, headers={"Authorization": f"Bearer {server._client.key}"}).json()["version"] == "1.6.1"
    )


def _experience(response, run):
    info = {"prompt": "2 + 2?", "response": response}
    return Experience(np.arange(4), 2, np.ones(2, bool), reward=1.0, group="a", run=run, info=info)


@installed
def test_experiences_are_dropped_and_their_numbers_shape_rewards(server):
    operators = [
        OperatorConfig(
            name="data_juicer",
            args={"operators": [{"text_length_filter": {"text_key": "response", "min_len": 2, "max_len": 10}}]},
        ),
        OperatorConfig(
            name="reward_shaping_mapper",
            args={"reward_shaping_configs": [{"stats_key": "text_len", "op_type": "SUB", "weight": 0.125}]},
        ),
    ]
    rows = [_experience("four", 0), _experience("4", 1), _experience("it is 4.", 2)]
    left, dropped = pipeline(operators, data_juicer_server=server).run(rows)
    assert [(e.run, e.reward) for e in left] == [(0, 0.5), (2, 0.0)] and dropped == {"a": {"data_juicer": 1}}


@installed
def test_a_killed_server_is_started_again_and_asks_models_that_the_run_serves(server, monkeypatch):
    """By the address that the run has written down. An answer that is no verdict is no score of 0."""
    aspects = ("accuracy", "grammar", "informativeness", "coherence")

    def judge(_: int, asked: Asked) -> Reply:
        content = asked.body["messages"][1]["content"]
        scores = json.dumps({"dimension_scores": dict(zip(aspects, (5, 4, 3, 4), strict=True))})
        return Reply(completion(scores if "four" in content else "no idea"))

    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    asks = {"llm_quality_score_filter": {
        "api_or_hf_model": "judge", "min_score": 0.0, "input_keys": ["response"], "field_names": ["Response"],
        "try_num": 1,
    }}  # fmt: skip
    args = {"operators": [asks]}
    assert len(server.process(ROWS, [{"words_num_filter": {"text_key": "question", "min_num": 5}}])) == 3
    before = server._child
    with serving(judge) as endpoint:
        server.api_address.write_text(json.dumps({"base_url": endpoint.url, "api_key": "secret"}))
        os.kill(before.process.pid, signal.SIGKILL)
        one = pipeline([OperatorConfig(name="data_juicer", args=args)], data_juicer_server=server)
        left, _ = one.run([_experience("four", 0), _experience("well", 1)])
    assert server._child is not before
    assert [experience.info.get("llm_quality_score") for experience in left] == [(5 + 4 + 3 + 4) / 4 / 5, None]
    assert {(one.body["model"], one.authorization) for one in endpoint.asked} == {("judge", "Bearer secret")}


@installed
def test_texts_of_experiences_stay_as_their_tokens_are(server):
    args = {"operators": [{"whitespace_normalization_mapper": {"text_key": "response"}}]}
    one = pipeline([OperatorConfig(name="data_juicer", args=args)], data_juicer_server=server)
    with raising(TrinityError, key="response"):
        one.failed_in_a_row[0] = 7
        one.run([_experience("it  is 4. ", 0)])


@installed
def test_a_column_of_numbers_and_texts_is_refused(server):
    for rows in ([{"text": "A"}, {"text": 1}], [{"text": 1}, {"text": "A"}]):
        with pytest.raises(TrinityError):
            server.process(rows, [{"words_num_filter": {"min_num": 1}}])


def test_a_configuration_of_data_juicer_gives_operators(tmp_path, caplog):
    path = tmp_path / "dj.yaml"
    path.write_text(
        "np: 4\ntext_keys: question\nprocess:\n  - words_num_filter: {min_num: 5}\n  - document_deduplicator:\n"
    )
    assert steps_of(None, str(path)) == [
        {"words_num_filter": {"text_key": "question", "min_num": 5}},
        {"document_deduplicator": {"text_key": "question"}},
    ]
    assert "without effect" in caplog.text and ": np" in caplog.text


@pytest.mark.parametrize(
    ("operators", "content"),
    [
        (None, None),
        ([{"a": {}}], "process: [{a: {}}]"),
        ([], None),
        (None, "process: words_num_filter"),
        (None, ""),
        (None, "process: ["),
        ([{"a": 3}], None),
    ],
)
def test_a_list_of_operators_that_is_none_is_refused(operators, content, tmp_path):
    path = tmp_path / "dj.yaml"
    Path(path).write_text(content or "")
    with pytest.raises(InputError):
        steps_of(operators, None if content is None else str(path))


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(TransientFault):
        DataJuicer("http://127.0.0.1:1").process(ROWS, [])


class _Rewarding:
    """A Data-Juicer that sets every reward."""

    def __init__(self, reward):
        self.reward = reward

    def process(self, rows, steps):
        return [{**row, "reward": self.reward} for row in rows]


def test_changed_rewards_are_taken_over():
    row = replace(_experience("four", 0), token_rewards=np.array([0.0, 0.5]))
    [changed] = OPERATORS["data_juicer"]([row], _Rewarding(6.0), operators=[{"x": None}])
    assert changed.total_reward == 6.0 and changed.token_rewards.tolist() == [0, 0.5]
    unscored = replace(row, reward=None, token_rewards=None)
    [same] = OPERATORS["data_juicer"]([unscored], _Rewarding(float("nan")), operators=[{"x": None}])
    assert same.reward is None
    with pytest.raises(TrinityError):
        OPERATORS["data_juicer"]([row], _Rewarding(None), operators=[{"x": None}])
