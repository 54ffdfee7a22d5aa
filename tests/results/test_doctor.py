"""What `trinity doctor` finds in a run's records, and that it accuses no healthy one.

`benchmarks/wrong_runs.py` injects the faults into real runs; here each check sees the records that a fault leaves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.data.experience import Experience
from trinity_core.data.session_log import SESSION
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.run_record import record_end, record_start
from trinity_core.exchange.tracking.writers import RunOutcome
from trinity_core.results.doctor import CHECKS, diagnose, diagnose_runs
from trinity_core.results.evidence import Evidence, Score, gather

STEPS = range(1, 13)


def healthy(seed: int = 0, **changes: Any) -> Evidence:
    """The records of a run in which nothing is wrong, apart from `changes`."""
    rng = np.random.default_rng(seed)
    trained = {
        step: {
            "actor/grad_norm": 1 + rng.random(), "actor/lr": 1e-5, "advantages/zero_rows": 0.2,
            "rollout_gap/mean": 1e-4 * rng.random(), "staleness/max": 0.0, "response_length/mean": 20 + rng.normal(),
            "actor/kl_mean": 1e-5 * step,
        }
        for step in STEPS
    }  # fmt: skip
    explored = {
        step: {
            "reward/mean": 0.4 + 0.02 * step + 0.05 * rng.normal(), "reward/std": 0.48, "experiences": 64.0,
            "tasks": 8.0, "response_length/mean": 20 + rng.normal(), "truncated/mean": 0.05, "verifier_errors": 0.0,
            "failed_tasks": 0.0,
        }
        for step in STEPS
    }  # fmt: skip
    rows = {step: [row(step, g, run, rng) for g in range(8) for run in range(8)] for step in STEPS}
    records: dict[str, Any] = {
        "trained": trained,
        "explored": {"explorer": explored},
        "scores": {"test": [Score(0, 0.4, 0.3, 0.5), Score(12, 0.6, 0.5, 0.7)]},
        "batches": rows,
        "draws": [f"train/{i}" for _ in range(2) for i in range(48)],
        "eval_prompts": frozenset(f"held out {i}" for i in range(16)),
    }
    return Evidence(**records | changes)


def row(step: int, group: int, run: int, rng: np.random.Generator, **changes: Any) -> Experience:
    length = int(rng.integers(5, 40))
    fields: dict[str, Any] = {
        "tokens": np.arange(3 + length), "prompt_length": 3, "action_mask": np.ones(length, bool),
        "logprobs": np.full(length, -1.0), "versions": np.full(length, step - 1), "reward": float(rng.integers(0, 3)),
        "group": f"{step}/{group}", "run": run, "info": {"prompt": f"question {step} {group}"},
    }  # fmt: skip
    return Experience(**fields | changes)


def changed(steps: dict[int, dict[str, float]], since: int = 1, **values: float) -> dict[int, dict[str, float]]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {step: metrics | (named if step >= since else {}) for step, metrics in steps.items()}


def found(evidence: Evidence) -> set[str]:
    return {diagnosis.check for diagnosis in diagnose(evidence)}


@given(st.integers(0, 10_000))
def test_a_healthy_run_is_not_accused(seed: int) -> None:
    assert found(healthy(seed)) == set()


def test_a_run_that_has_hardly_begun_is_not_accused() -> None:
    assert found(Evidence()) == set()
    first = {1: {"actor/grad_norm": 0.0, "actor/lr": 1e-5, "advantages/zero_rows": 1.0}}
    assert found(Evidence(trained=first)) == set()


TRAINED, EXPLORED = dict(healthy().trained), dict(healthy().explored["explorer"])


def explored_with(since: int = 1, **values: float) -> dict[str, Any]:
    return {"explored": {"explorer": changed(EXPLORED, since, **values)}}


def by_length() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    rows = [row(1, g, run, rng) for g in range(16) for run in range(8)]
    for one in rows:
        one.reward = float(one.response_length)
    return {"batches": {1: rows}}


def trained_prompts() -> dict[str, Any]:
    rows = [row(1, 0, run, np.random.default_rng(run)) for run in range(8)]
    for one in rows:
        one.prompt_length, one.action_mask = 2, np.append(True, one.action_mask)
        one.logprobs, one.versions = np.append(0.0, one.logprobs), np.append(-1, one.versions)
    return {"batches": {1: rows}}


FAULTS: dict[str, dict[str, Any]] = {
    "failed": {"failure": ""},
    "contradiction": {"contradictions": ["group 3 is TRAINED, but no batch of a checkpoint has it"]},
    "repeated-tasks": {"draws": ["train/0", "train/1", "train/0", "train/0", "train/1"]},
    "skipped-tasks": {"skipped": ["step 5 of explorer drew 8 tasks and moved on by 72"]},
    "other-template": {"other_template": "sft/global_step_9/actor/huggingface"},
    "lost-optimizer": {"updates": {step: step - 6 * (step > 6) for step in STEPS}},
    "schedule-restarted": {"trained": {step: TRAINED[step] | {"actor/lr": 1e-5 * ((step - 1) % 6)} for step in STEPS}},
    "reward-without-score": {
        "scores": {"test": [Score(0, 0.4, 0.3, 0.5), Score(12, 0.42, 0.32, 0.52)]},
        **explored_with(6, reward__mean=0.97, reward__std=0.1),
    },
    "eval-leak": {"eval_prompts": frozenset(f"question {step} 0" for step in STEPS)},
    "no-update": {"trained": changed(TRAINED, 6, actor__grad_norm=0.0, advantages__zero_rows=1.0)},
    "unmoved": {"trained": changed(TRAINED, actor__kl_mean=1e-9)},
    "constant-reward": explored_with(8, reward__mean=0.0, reward__std=0.0),
    "reward-fell": explored_with(9, reward__mean=0.05),
    "score-fell": {"scores": {"test": [Score(0, 0.6, 0.5, 0.7), Score(12, 0.2, 0.1, 0.3)]}},
    "rollout-gap": {"trained": changed(TRAINED, 6, rollout_gap__mean=0.08)},
    "other-groups": {"trained": changed(TRAINED, experience__groups=1.0)},
    "unsampled-tokens": trained_prompts(),
    "reward-by-length": by_length(),
    "short-answers": {
        "trained": changed(TRAINED, response_length__mean=8.0),
        **explored_with(**{"experiences__dropped__filter": 9.0}),
    },
    "cut-off": explored_with(truncated__mean=0.97),
    "verifier-errors": explored_with(8, verifier_errors=20.0),
    "failed-tasks": explored_with(8, failed_tasks=3.0),
    "other-reference": {"trained": changed(TRAINED, actor__kl_mean=0.4)},
}


@pytest.mark.parametrize("check", sorted(FAULTS))
def test_each_fault_is_named_by_its_check(check: str) -> None:
    diagnoses = diagnose(healthy(**{"scores": {}, "folder": "p/run"} | FAULTS[check]))
    assert check in {diagnosis.check for diagnosis in diagnoses}
    assert all(diagnosis.evidence and diagnosis.cause and diagnosis.next_step for diagnosis in diagnoses)
    for diagnosis in diagnoses:
        _, option, command = diagnosis.next_step.partition("--checkpoint-dir ")
        assert not option or command.startswith("p/run")


@pytest.mark.parametrize(
    "trained",
    [
        {step: TRAINED[step] | {"actor/kl_mean": 1e-9, "actor/lr": 1e-9 * step} for step in STEPS},
        changed(TRAINED, actor__kl_mean=1e-9, advantages__zero_rows=0.95),
        {step: TRAINED[step] | {"actor/kl_mean": 1e-9} for step in STEPS if step < 10},
    ],
    ids=["warm-up", "equal rewards", "few steps"],
)
def test_a_policy_that_could_not_move_yet_is_not_accused(trained: dict[int, dict[str, float]]) -> None:
    assert "unmoved" not in found(Evidence(trained))


def test_changes_that_a_person_made_are_no_faults() -> None:
    """A resume with more steps begins another schedule; a solved task set has no higher score to reach."""
    restarted = {"totals": dict.fromkeys(range(1, 7), 6) | dict.fromkeys(range(7, 13), 12)}
    assert found(healthy(**FAULTS["schedule-restarted"] | restarted)) == set()
    both = {"scores": {"test": [Score(0, 0.4, 0.3, 0.5), Score(12, 0.9, 0.8, 0.95)]}}
    assert found(healthy(**FAULTS["reward-without-score"] | both)) == set()


def test_what_the_store_and_the_model_show(tmp_path: Path) -> None:
    """A step that moved on by more tasks than it drew; a checkpoint's template that is not the configured one."""
    model = tmp_path / "before/global_step_2/actor/huggingface"
    model.mkdir(parents=True)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    store = ExperienceStore.open(tmp_path / "store.db", str(tmp_path))
    for step, drawn in (1, 2), (2, 4), (3, 70):
        tasks = [DrawnTask(f"explorer/{step}/{place}", f"train/{drawn - place}", 0) for place in range(2)]
        store.put("explorer", step, {"drawn": drawn}, [], 0, drawn=tasks)
    (tmp_path / "monitor").mkdir()
    line = {"source": "explorer", "step": 3, "time": 0.0, "metrics": {"tasks": 2.0}}
    (tmp_path / "monitor" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for template, other in ("{{ messages }}", ""), ("{{ others }}", str(model)):
        settings = {"model": {"model_path": str(model), "custom_chat_template": template}}
        (tmp_path / "monitor" / "config.yaml").write_text(json.dumps(settings))
        evidence = gather(tmp_path, f"sqlite:///{tmp_path}/store.db", audited=False)
        assert (evidence.other_template, evidence.folder) == (other, str(tmp_path))
    assert evidence.skipped == ["step 3 of explorer drew 2 tasks and moved on by 66"]


def test_prompts_of_the_openai_api_are_trained_on_with_their_template() -> None:
    sessions = [
        row(1, group, 0, np.random.default_rng(0), info={"prompt": f"<user>question {group}<end>", SESSION: "s"})
        for group in range(8)
    ]
    for count, checks in (2, set()), (3, {"eval-leak"}):
        prompts = frozenset([*(f"question {group}" for group in range(count)), "held out", ""])
        assert found(healthy(batches={1: sessions}, eval_prompts=prompts)) == checks


def test_a_run_that_failed_before_its_first_step_is_a_finding(tmp_path: Path) -> None:
    """A run that has only begun, and one that was resumed since, have none: there is nothing to examine yet."""
    begun = record_start(tmp_path, {}, "rft")
    with raising(DataError, key=str(tmp_path)):
        diagnose_runs(tmp_path)
    try:
        raise TrinityError("all prompts are too long.")
    except TrinityError:
        record_end(tmp_path, begun, RunOutcome.FAILED)
    [[diagnosis]] = diagnose_runs(tmp_path).values()
    assert diagnosis.check == "failed" and diagnosis.cause == "all prompts are too long"
    record_start(tmp_path, {}, "rft")
    with raising(DataError, key=str(tmp_path)):
        diagnose_runs(tmp_path)


def test_scores_made_with_other_settings_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    scored = [(0, "0", 0.1, 0.3), (6, "before", 0.9, 0.9), (9, "now", 0.4, 0.3), (12, "now", 0.5, 0.4)]
    for step, made_with, easy, hard in scored:
        metrics = {"eval/a/easy/accuracy": easy, "eval/a/hard/accuracy": hard}
        MetricsFile(tmp_path, "eval").write(step, metrics, made_with=made_with)
    evidence = gather(tmp_path, None)
    scores = {name: [(score.step, score.accuracy) for score in of_set] for name, of_set in evidence.scores.items()}
    assert scores == {"a/easy": [(0, 0.1), (9, 0.4), (12, 0.5)], "a/hard": [(0, 0.3), (9, 0.3), (12, 0.4)]}


def test_every_check_has_a_fault_here() -> None:
    assert {name.replace("_", "-") for name in CHECKS} - {*FAULTS} == set()


def test_rewards_that_end_perfect_are_a_success() -> None:
    """All answers right, no advantage left, and the held-out score agrees."""
    solved = {"scores": {"test": [Score(0, 0.5, 0.4, 0.6), Score(12, 0.99, 0.97, 1.0)]}}
    still = {"trained": changed(TRAINED, 6, actor__grad_norm=0.0)}
    assert found(healthy(**solved | still | explored_with(6, reward__mean=1.0, reward__std=0.0))) == set()


def test_a_trained_adapter_begins_far_from_its_reference(tmp_path: Path) -> None:
    folder = tmp_path / "monitor"
    folder.mkdir()
    line = {"source": "trainer", "step": 1, "time": 0.0, "metrics": {"actor/kl_mean": 0.4}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for path, checks in (None, {"other-reference"}), ("adapter", set()):
        (folder / "config.yaml").write_text(json.dumps({"model": {"lora_configs": [{"path": path}]}}))
        assert found(gather(tmp_path, None)) == checks


@pytest.mark.parametrize(("updates", "checks"), [(1, {"other-reference"}), (4, set())])
def test_a_step_of_several_updates_ends_away_from_its_reference(updates: int, checks: set[str]) -> None:
    assert found(Evidence(trained={1: {"actor/kl_mean": 0.4}}, updates={1: updates})) == checks


@given(st.lists(st.integers(0, 5), max_size=40))
def test_draws_that_no_epoch_has_are_repeated_ones(rows: list[int]) -> None:
    """An order of epochs is one in which the count of the drawn task never falls."""
    counts = [rows[: place + 1].count(one) for place, one in enumerate(rows)]
    assert ("repeated-tasks" in found(Evidence(draws=[f"a/{one}" for one in rows]))) == (counts != sorted(counts))


def test_tasks_without_rows_and_groups_below_a_task_repeat_nothing(tmp_path: Path) -> None:
    """A step across two epochs, the last task of the first one dropped: the ledger lists it after the others."""
    store = ExperienceStore.open(tmp_path / "store.db", str(tmp_path))
    explorer, rng = "explorer", np.random.default_rng(0)
    for step, tasks in (1, (0, 1)), (2, (2, 0)), (3, (1, 2)):
        names = [f"{explorer}/{step}/{place}" for place in range(2)]
        drawn = [DrawnTask(name, f"train/{task}", 1) for name, task in zip(names, tasks, strict=True)]
        drawn.append(DrawnTask(f"{names[1]}/judge", drawn[1].task, 1))
        rows = [replace(row(1, 0, 0, rng), group=one.group) for one in drawn[step == 2 :]]
        store.put(explorer, step, {}, rows, 0, drawn=drawn)
    (tmp_path / "monitor").mkdir()
    line = {"source": explorer, "step": 3, "time": 0.0, "metrics": {"tasks": 2.0}}
    (tmp_path / "monitor" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    evidence = gather(tmp_path, f"sqlite:///{tmp_path}/store.db", audited=False)
    assert evidence.draws == [f"train/{task}" for task in (0, 1, 2, 0, 1, 2)]
