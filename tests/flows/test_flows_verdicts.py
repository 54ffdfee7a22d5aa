"""A flow asks a person: verdicts through Prefect's own server become data for DPO and SFT; none in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
from raising import raising

from flows.local.connection import require_nobody_asked
from trinity_core.base.errors import TrinityError
from trinity_core.config import config_from_dict
from trinity_core.data.experience import Experience
from trinity_core.data.tokenizer import load_tokenizer, policy_encoder
from trinity_core.exchange.store.earlier_rollouts import read_answers
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.run.stage import Stage
from trinity_core.run.verdicts import TaskVerdict, judged_rows, keep_verdicts, shown_tasks, with_verdicts

VERDICTS = "buffer.trainer_input.experience_buffer.human_verdicts"
ANSWERS = {"g0": ["It is 4.", "It is 5.", "<b>4</b>"], "g1": ["5 cups.", "6 cups."], "g2": ["2", "2"]}
"""Group -> answers; the longer ago, the better its reward."""


@pytest.fixture
def config(tmp_path, tiny_folder):
    """Of a DPO run on what a person says about a run whose rollouts are those of `ANSWERS`."""
    tokenizer, rows = load_tokenizer(str(tiny_folder)), []
    for group, answers in ANSWERS.items():
        for run, answer in enumerate(answers):
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("2 + 2?", f"{answer}<|im_end|>")]
            rows.append(
                Experience(
                    np.array(ids[0] + ids[1]),
                    len(ids[0]),
                    np.ones(len(ids[1]), bool),
                    group=group,
                    run=run,
                    reward=1.0 - run / 2,
                    info={"prompt": "2 + 2?", "response": answer},
                )
            )
    earlier = tmp_path / "earlier"
    with ExperienceStore.open(earlier / "buffer" / "explorer_output.db", str(earlier)) as store:
        store.put("explorer", 1, {}, rows, newest_version=0)
    buffer = {"storage_type": "rollouts", "path": str(earlier), "human_verdicts": {"enable": True, "answers": 3}}
    return config_from_dict(
        {
            "mode": "train",
            "name": "judged",
            "checkpoint_root_dir": str(tmp_path),
            "algorithm": {"algorithm_type": "dpo"},
            "model": {"model_path": str(tiny_folder), "max_model_len": 128},
            "buffer": {"train_batch_size": 2, "trainer_input": {"experience_buffer": buffer}},
        }
    )


def answers_of(config, kind) -> list[list[str]]:
    """What a trainer would learn from: the answers of each row."""
    encoder = policy_encoder(config.model)
    rows = read_answers(config.buffer.trainer_input.experience_buffer, encoder, kind).rows
    return [
        [encoder.tokenizer.decode(experience.tokens[experience.prompt_length :]) for experience in row] for row in rows
    ]


def test_tasks_whose_answers_differ_are_shown(config) -> None:
    shown = shown_tasks(config.buffer.trainer_input.experience_buffer)
    assert [[answer.info["response"] for answer in task.answers] for task in shown] == [
        ["It is 4.", "<b>4</b>", "It is 5."],
        ["5 cups.", "6 cups."],
    ]


def test_verdicts_are_rewards(config) -> None:
    """Kept before dropped, what the person wrote before both; what has no verdict is left out, but for beside that."""
    shown = shown_tasks(config.buffer.trainer_input.experience_buffer)
    encoder = policy_encoder(config.model)

    def rewards(*verdicts: TaskVerdict) -> list[tuple[str, float | None]]:
        return [(row.info["response"], row.reward) for row in judged_rows(shown, verdicts, encoder)]

    nothing = TaskVerdict(["no verdict"] * 2)
    assert rewards(TaskVerdict(["drop", "no verdict", "keep"]), nothing) == [("It is 4.", 0.0), ("It is 5.", 1.0)]
    written = judged_rows(shown, [TaskVerdict(["no verdict"] * 3), TaskVerdict(["keep", "no verdict"], " 4 ")], encoder)
    assert [(row.info["response"], row.reward) for row in written] == [("5 cups.", 1.0), ("6 cups.", 0.0), ("4", 2.0)]
    assert encoder.tokenizer.decode(written[-1].tokens[written[-1].prompt_length :]) == "4<|im_end|>"


def test_verdicts_are_what_is_learned_from(config) -> None:
    """Pairs for DPO, answers for SFT; they are kept, so a run that is started again asks nobody."""
    shown = shown_tasks(config.buffer.trainer_input.experience_buffer)
    with raising(TrinityError, key="buffer.trainer_input.experience_buffer.human_verdicts"):
        with_verdicts(config)
    assert keep_verdicts(config, shown, [TaskVerdict(["no verdict"] * len(task.answers)) for task in shown]) == 0
    said = [TaskVerdict(["drop", "no verdict", "keep"]), TaskVerdict(["keep", "drop"], "It is 4 cups.")]
    assert keep_verdicts(config, shown, said) == 5
    judged = with_verdicts(config)
    assert answers_of(judged, "preferences") == [
        ["It is 5.<|im_end|>", "It is 4.<|im_end|>"],
        ["It is 4 cups.<|im_end|>", "6 cups.<|im_end|>"],
    ]
    assert answers_of(judged, "demonstrations") == [
        ["It is 5.<|im_end|>"], ["It is 4 cups.<|im_end|>"], ["5 cups.<|im_end|>"],
    ]  # fmt: skip


def test_a_run_without_prefects_page_asks_nobody(config) -> None:
    with pytest.raises(TrinityError):
        require_nobody_asked(config)
    shown = shown_tasks(config.buffer.trainer_input.experience_buffer)
    keep_verdicts(config, shown, [TaskVerdict(["keep"] * len(task.answers)) for task in shown])
    require_nobody_asked(config)


def asking(config):
    """A flow that does what the flow `sft` does before it trains."""
    from prefect import flow

    from tasks.frontend import PREFECT

    @flow(name="judged", persist_result=False)
    def judged() -> Stage:
        return PREFECT.with_human_verdicts(Stage(config, None, "judged"))

    return judged


def paused_run() -> tuple[str, dict[str, Any]]:
    """Wait for a paused run; its id and its form."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.client.schemas.objects import FlowRun
    from prefect.exceptions import PrefectHTTPStatusError

    paused = {
        "flow_filter": FlowFilter(name={"any_": ["judged"]}),  # other tests share the API
        "flow_run_filter": FlowRunFilter(state={"type": {"any_": ["PAUSED"]}}),
    }

    def found(look: Callable[[], Any], lacking: str) -> Any:
        deadline = time.monotonic() + 60
        while not (seen := look()):
            assert time.monotonic() < deadline, lacking
            time.sleep(0.1)
        return seen

    def form_of(run: FlowRun) -> dict[str, Any] | None:
        where = {"id": run.id, "key": run.state.state_details.run_input_keyset["schema"]}
        try:
            return client.request("GET", "/flow_runs/{id}/input/{key}", path_params=where).json()
        except PrefectHTTPStatusError:  # a run pauses before it saves its form
            return None

    with get_client(sync_client=True) as client:
        [run] = found(lambda: client.read_flow_runs(**paused), "the flow does not pause")
        return str(run.id), found(lambda: form_of(run), "the paused flow has no form")


@pytest.mark.slow
def test_without_a_verdict_in_time_the_recipe_decides(config, prefect_api, monkeypatch) -> None:
    """The run ends with an error, or completes on the rewards."""
    monkeypatch.setattr("tasks.frontend.POLL_SECONDS", 0.5)
    short = config.with_values({f"{VERDICTS}.timeout": 1.0})
    with pytest.raises(TrinityError):
        asking(short)()
    state = asking(short.with_values({f"{VERDICTS}.on_timeout": "continue"}))(return_state=True)
    assert state.is_completed()
    assert answers_of(state.result().config, "preferences")[0] == ["It is 4.<|im_end|>", "<b>4</b><|im_end|>"]


@pytest.mark.slow
def test_a_retried_run_asks_again(config, prefect_api, monkeypatch) -> None:
    """The pause and the answer of an earlier attempt do not count."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from studio.prefect_runs import retry_run

    monkeypatch.setattr("tasks.frontend.POLL_SECONDS", 0.5)

    said = {"answer_1a": "Drop", "answer_1c": "KEEP\n", "better_2": "4 cups."}

    def answer() -> None:
        run, form = paused_run()
        assert said.keys() < form["properties"].keys()
        with get_client(sync_client=True) as client:
            refused = client.resume_flow_run(run, run_input={"answer_1a": "dropp"})
            assert refused.status.value == "REJECT" and "'dropp' does not match" in refused.details.reason
            client.resume_flow_run(run, run_input=said)

    failed = asking(config.with_values({f"{VERDICTS}.timeout": 1.0}))(return_state=True)
    run = failed.state_details.flow_run_id
    with get_client(sync_client=True) as client, ThreadPoolExecutor() as threads:
        retry_run(prefect_api, str(run))
        person = threads.submit(copy_context().run, answer)
        flow = asking(patient := config.with_values({f"{VERDICTS}.timeout": 60.0}))
        state = run_flow(flow, flow_run=client.read_flow_run(run), return_type="state")
        person.result(60)
    assert failed.is_failed()
    judged = state.result().config
    assert answers_of(judged, "preferences") == [
        ["It is 5.<|im_end|>", "It is 4.<|im_end|>"],
        ["4 cups.<|im_end|>", "5 cups.<|im_end|>"],
    ]
    assert asking(patient)().config == judged, "nobody is asked again"


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_it_is_paused_does_not_train(config, prefect_api, monkeypatch) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import Abort

    from studio.prefect_runs import cancel_run
    from tasks import frontend

    monkeypatch.setattr("tasks.frontend.POLL_SECONDS", 0.5)
    set_running = frontend._set_running

    def cancel() -> str:
        run, _ = paused_run()
        assert cancel_run(prefect_api, run)
        return run

    def after_the_cancellation() -> None:
        person.result(60)
        set_running()

    monkeypatch.setattr(frontend, "_set_running", after_the_cancellation)
    flow = asking(config.with_values({f"{VERDICTS}.timeout": 4.0, f"{VERDICTS}.on_timeout": "continue"}))
    with ThreadPoolExecutor() as threads:
        person = threads.submit(copy_context().run, cancel)
        with pytest.raises(Abort):
            flow()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(person.result(60)).state.is_cancelling()
