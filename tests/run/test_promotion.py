"""The gate: its statistics under optional stopping, what it requires, leaked tasks, and the champion's file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config, load_config
from trinity_core.config.findings import ConfigError
from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data.experience import Experience
from trinity_core.data.files import RejectedRow, RowLocation
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.schedule import open_tasksets
from trinity_core.data.session_log import SESSION
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import policy_encoder
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.store.archive import whole_line
from trinity_core.exchange.tracking.answers import TaskAnswers
from trinity_core.exchange.tracking.champions import champion, champion_steps, go_back, history, point_alias, promote
from trinity_core.exchange.tracking.run_record import record_start
from trinity_core.results.leakage import leaked_tasks
from trinity_core.results.lineage import sightings
from trinity_core.run.attempt import PLAIN
from trinity_core.run.promotion import HeldOut, compare, read_held_out, run_gate, to_beat
from trinity_core.run.sequential import BettingTest, Finding, GateTest
from trinity_core.run.stage import for_gate


@given(st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=12))
def test_capital_is_a_fair_game_whatever_came_before(won: float, lost: float, earlier: Sequence[float]) -> None:
    """Under the null the capital is not expected to grow in any next step, so that no rule of stopping can help."""
    if won > lost:
        won, lost = lost, won
    before = BettingTest(0.0, 0.05)
    for value in earlier:
        before.add(value)
    expected = 0.0
    for value, chance in ((1.0, won), (-1.0, lost), (0.0, 1 - won - lost)):
        after = BettingTest(0.0, 0.05)
        for one in [*earlier, value]:
            after.add(one)
        expected += chance * after.capital
    assert expected <= before.capital * (1 + 1e-9)


@given(st.floats(0.0, 0.9), st.integers(1, 6))
def test_expected_capital_is_at_most_one_at_any_time(rate: float, tasks: int) -> None:
    """By enumeration of all answers: the floor test, where the candidate lies exactly at the floor."""
    expected = 0.0
    for answers in product((0.0, 1.0), repeat=tasks):
        test = BettingTest(rate, min(rate + 0.05, 1.0), low=0.0)
        for answer in answers:
            test.add(answer)
        expected += prod(rate if answer else 1 - rate for answer in answers) * test.capital
    assert expected <= 1 + 1e-9


@pytest.mark.parametrize(("gain", "low", "high"), [(-0.02, 0.0, 0.05), (0.0, 0.0, 0.06), (0.1, 0.93, 1.0)])
def test_promotions_when_one_looks_after_every_task(gain: float, low: float, high: float) -> None:
    rng, promoted, comparisons = np.random.default_rng(11), 0, 250
    for _ in range(comparisons):
        test = GateTest(["test"])
        for draw in rng.random(1500):
            test.add("test", float(draw > 0.9 + gain / 2), float(draw < 0.1 + gain / 2))
            if test.finding is not Finding.OPEN:
                break
        promoted += test.finding is Finding.SHOWN
    assert low <= promoted / comparisons <= high


def test_every_requirement_must_be_shown() -> None:
    test = GateTest(["new"], ["old"], {"new": 0.5})
    for _ in range(200):
        test.add("new", 0.0, 1.0)
    assert test.finding is Finding.OPEN and test.needs("old") and not test.needs("new")
    while test.finding is Finding.OPEN:
        test.add("old", 1.0, 0.0)
    assert test.finding is Finding.RULED_OUT
    assert {told["requirement"]: told["finding"] for told in (one.told() for one in test.requirements)} == {
        "gain": "shown", "no loss": "ruled out", "floor": "shown",
    }  # fmt: skip


def test_a_finding_stays_and_scores_outside_are_refused() -> None:
    test = BettingTest(0.0, 0.05)
    while test.finding is Finding.OPEN:
        test.add(1.0)
    for _ in range(500):
        assert test.add(-1.0) is Finding.SHOWN
    with pytest.raises(ValueError):
        test.add(1.5)


def configured(root: Path, data: Path, *overrides: str) -> Config:
    rows = [json.dumps({"question": f"How many are {i}?", "answer": f"#### {i}"}) for i in range(40)]
    for split in ("test", "old"):
        (data / f"{split}.jsonl").write_text("\n".join(rows))
    path = root / "gate.yaml"
    path.write_text(f"""
mode: bench
project: p
name: gate
checkpoint_root_dir: {root}
model: {{model_path: {root}/base, max_model_len: 64, max_response_tokens: 8}}
buffer:
  explorer_input:
    eval_tasksets:
      - &set {{name: test, path: {data}, split: test, format: {{prompt_key: question, response_key: answer}}}}
      - {{<<: *set, name: old, split: old}}
gate: {{enable: true, no_loss: [old], tasks_per_look: 8}}
""")
    return load_config(path, list(overrides))


class Answering:
    """An attempt whose models answer as told: (version, set) → score of each row."""

    def __init__(self, config: Config, scores: dict[tuple[int, str], Any]) -> None:
        self.config, self.scores, self.asked = config, scores, 0

    def answer(self, version: int, folder: Path, taskset: str, rows: Sequence[int]) -> list[TaskAnswers]:
        self.asked += len(rows)
        return [TaskAnswers(row, "", f"file:{row}", [self.scores[version, taskset](row)]) for row in rows]


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Path) -> Config:
    return configured(tmp_path, tmp_path, f"model.model_path={tiny_folder}")


@pytest.mark.parametrize(
    ("candidate", "old", "finding"),
    [(1.0, 1.0, Finding.SHOWN), (0.0, 1.0, Finding.RULED_OUT), (1.0, 0.0, Finding.RULED_OUT)],
)
def test_models_answer_until_the_evidence_suffices(
    config: Config, candidate: float, old: float, finding: Finding
) -> None:
    config = config.with_values({"gate.min_gain": 0.4, "gate.max_loss": 0.4})
    held_out = read_held_out(config, "nowhere")
    assert {name: len(tasks) for name, tasks in held_out.tasks.items()} == {"test": 40, "old": 40}
    assert [task.index for task in held_out.tasks["test"]] != list(range(40)), "in random order"
    scores = {
        (1, "test"): lambda row: 0.5, (2, "test"): lambda row: candidate,
        (1, "old"): lambda row: 1.0, (2, "old"): lambda row: old,
    }  # fmt: skip
    attempt = Answering(config, scores)
    test = compare(attempt, Path("a"), Path("b"), held_out)  # type: ignore[arg-type]
    assert test.finding is finding
    assert attempt.asked < 160, "not all tasks are needed"


def test_a_gain_on_one_set_that_another_takes_back_is_none(config: Config) -> None:
    """The sets of the gain are tested together: their tasks come in one random order, whatever their sizes."""
    config = config.with_values({"gate.no_loss": (), "gate.tasks_per_look": 40})
    read = read_held_out(config, "nowhere").tasks
    for before, after, new in (("test", "old", 40), ("old", "test", 40), ("test", "old", 20)):
        scores = {(1, name): lambda row: 0.5 for name in (before, after)}
        scores |= {(2, before): lambda row: 1.0, (2, after): lambda row: 0.0}
        sets = {before: read[before][:new], after: read[after]}
        test = compare(Answering(config, scores), Path("a"), Path("b"), HeldOut(sets, {}, False))  # type: ignore[arg-type]
        assert test.finding is not Finding.SHOWN and test.tasks == {before: new, after: 40}


def test_answers_without_a_verdict_do_not_count_and_rewards_are_refused(config: Config) -> None:
    held_out = HeldOut({"test": read_held_out(config, "nowhere").tasks["test"]}, {}, False)
    config = config.with_values({"gate.no_loss": ()})
    scores = {(1, "test"): lambda row: 0.0, (2, "test"): lambda row: None if row % 2 else 1.0}
    test = compare(Answering(config, scores), Path("a"), Path("b"), held_out)  # type: ignore[arg-type]
    assert 0 < test.tasks["test"] <= 20
    scores[2, "test"] = lambda row: 7.0
    with pytest.raises(TrinityError):
        compare(Answering(config, scores), Path("a"), Path("b"), held_out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("gate.no_loss=[other]", "gate.no_loss"),
        ("gate.no_loss=[test,old]", "gate.no_loss"),
        ("gate.floors={other: 0.5}", "gate.floors"),
        ("gate.floors={test: 1}", "gate.floors.test"),
        ("mode=both", "gate.enable"),
        ("gate.error_rate=0", "gate.error_rate"),
    ],
)
def test_contradictions_of_the_gate(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, tmp_path, override)
    assert key in [finding.key for finding in refused.value.problems]


def task(index: int, question: str) -> Task:
    return Task(index, {"question": question}, "test", "math_workflow", format=FormatConfig(prompt_key="question"))


def trained_parent_and_run(root: Path) -> str:
    """A parent that learned from a file, and a run from its model that learned from rollouts; return that one's
    model."""
    parent, run = root / "p" / "sft", root / "p" / "rft"
    sft = root.parent / "sft.jsonl"
    sft.write_text(json.dumps({"question": "What is  TWO?", "answer": "2"}) + "\n")
    buffer = {"storage_type": "file", "path": str(sft), "format": {"prompt_key": "question", "response_key": "answer"}}
    record_start(parent, {"buffer": {"trainer_input": {"experience_buffer": buffer}}}, "sft")
    record_start(run, {}, "rft")
    state = run / "global_step_4" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"began": {"model": str(parent / "global_step_9" / "actor" / "huggingface")}}))
    archive = run / "buffer" / "experience_buffer.jsonl"
    archive.parent.mkdir()
    rows = [{"step": step, "group": f"g{step}", "prompt": f"What is {step}?"} for step in (3, 4, 5)]
    archive.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(run / "global_step_4" / "actor" / "huggingface")


def test_tasks_that_a_model_or_its_ancestors_were_trained_on(tmp_path: Path) -> None:
    """The parent learned from a file, the run itself from rollouts; steps after the checkpoint do not count."""
    model = trained_parent_and_run(tmp_path / "checkpoints")
    asked = ["What is two?", "What is 4?", "What is 5?", "What is nine?", "what is 4?"]
    tasks = [task(index, question) for index, question in enumerate(asked)]
    leaked = leaked_tasks(model, tasks)
    assert [one.index for one in leaked] == [0, 1, 4], "both tasks with this prompt"
    assert leaked_tasks("org/model", tasks) == []


@pytest.mark.parametrize(
    ("algorithm", "settings", "leaked", "seen"),
    [
        ("sft", {"min_reward": 0.5}, [0, 1, 3], [1, 4]),
        ("sft", {"min_reward": 2.0}, [3], [4]),
        ("sft", {}, [0, 1], [1]),
        ("dpo", {"min_reward": 2.0}, [0, 1], [1, 2]),
        ("dpo", {"min_gap": 1.0}, [], []),
    ],
)
def test_tasks_in_the_rollouts_that_a_run_trained_on(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], leaked: list[int], seen: list[int]
) -> None:
    """Not those that `min_reward` or `min_gap` left out or that are too long. Of a pair the lower answer counts for the
    row, not for its text."""
    run, file = tmp_path / "p" / "improved", tmp_path / "rollouts.jsonl"
    buffer = {"storage_type": "rollouts", "path": str(file), "rollouts": settings}
    inputs = {"trainer_input": {"experience_buffer": buffer}}
    record_start(run, {"algorithm": {"algorithm_type": algorithm}, "buffer": inputs}, "sft")
    (run / "global_step_4").mkdir()
    texts = [
        ("two", "What is two?", "2<|end|><|user|>And what  is 4?<|end|>4", 1.0),
        ("two", "What is two?", "3<|end|><|user|>What is nine?<|end|>9", 0.0),
        ("six", "What is six?", "6", 0.0),
        ("ten", "What is ten?", "10", 2.0),
        ("long", "What is long?", "This.", 3.0),
    ]
    RejectedRows(folder=JobLayout(run).rejected_rows / "trainer").write(
        str(file), [RejectedRow(RowLocation(str(file), 5), "is too long")]
    )
    rows = [
        Experience(np.arange(4), 2, np.ones(2, bool), reward=reward, group=group, run=run_)
        for run_, (group, *_, reward) in enumerate(texts)
    ]
    for row, (_, prompt, response, _) in zip(rows, texts, strict=True):
        row.info = {"prompt": f"<|user|>{prompt}<|end|>", "response": response}
    file.write_text("".join(json.dumps(whole_line(1, row)) + "\n" for row in rows))
    asked = ["What is two?", "What is 4?", "What is nine?", "What is ten?", "What is six?", "What is long?"]
    tasks = [task(index, question) for index, question in enumerate(asked)]
    assert [one.index for one in leaked_tasks(str(run / "global_step_4"), tasks)] == leaked
    sighted = [line for line in range(1, 6) if [one.run for one in sightings(tmp_path, file, line)] == ["p/improved"]]
    assert sighted == seen


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TWO_TURNS = {"messages": [user("What is two?"), answer("2"), user("What is four?"), answer("4"), user("Bye")]}
MESSAGES = {"prompt_type": "messages"}
EVERY_TURN = MESSAGES | {"enable_concatenated_multi_turn": True}


@pytest.mark.parametrize(
    ("row", "form", "leaked"),
    [
        (TWO_TURNS, MESSAGES, [1]),
        (TWO_TURNS, EVERY_TURN, [0, 1]),
        ({"messages": [user("What is two?"), answer("2") | {"weight": 0}, user("Why?"), answer("…")]}, EVERY_TURN, []),
        ({"messages": [answer("Hello"), user("What is two?"), answer("2")]}, EVERY_TURN, [0]),
        (
            {"messages": [user("What is two?"), answer("1 + 1"), {"role": "tool", "content": "2"}, answer("2")]},
            MESSAGES,
            [0],
        ),
        (
            {"chosen": [user("What is two?"), answer("2")], "rejected": [user("What is two?"), answer("3")]},
            MESSAGES,
            [0],
        ),
        ({"prompt": "What is two?", "chosen": "2", "rejected": "3"}, {}, [0]),
        ({"text": "They asked: what is  two? The answer is 2."}, {"prompt_type": "text"}, [0]),
        ({"prompt": "What is two?"}, {}, []),
    ],
)
def test_tasks_are_leaked_by_what_a_row_trains_on(
    tmp_path: Path, row: dict[str, Any], form: dict[str, Any], leaked: list[int]
) -> None:
    run, file = tmp_path / "p" / "run", tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    buffer = {"storage_type": "file", "path": str(file), "format": form}
    record_start(run, {"buffer": {"trainer_input": {"experience_buffer": buffer}}}, "run")
    tasks = [task(index, question) for index, question in enumerate(["What is two?", "What is four?", "Bye", " "])]
    assert [one.index for one in leaked_tasks(str(run / "global_step_4"), tasks)] == leaked


@pytest.mark.parametrize(
    ("algorithm", "strategy", "settings", "counts"),
    [
        ("sft", "default", {"share": 2}, True),
        ("sft", "default", {}, False),
        ("sft", "default", {"held_out": True}, False),
        ("mix", "mix", {}, True),
        ("grpo", "default", {"share": 2}, False),
        ("from_a_plugin", "default", {}, True),
        ("from_a_plugin", "default", {"held_out": True}, False),
    ],
)
def test_auxiliary_buffers_count_if_a_run_draws_from_them(
    tmp_path: Path, algorithm: str, strategy: str, settings: dict[str, Any], counts: bool
) -> None:
    run, file = tmp_path / "p" / "run", tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "What is two?", "response": "2"}) + "\n")
    inputs = {"auxiliary_buffers": {"more": {"storage_type": "file", "path": str(file), **settings}}}
    method = {"algorithm_type": algorithm, "sample_strategy": strategy}
    record_start(run, {"algorithm": method, "buffer": {"trainer_input": inputs}}, "run")
    assert bool(leaked_tasks(str(run / "global_step_4"), [task(0, "What is two?")])) == counts
    assert bool(sightings(tmp_path, file, 1)) == counts


def test_tasks_that_sessions_of_the_openai_api_trained_on(tmp_path: Path) -> None:
    model = Path(trained_parent_and_run(tmp_path))
    rendered = {"prompt": "<|user|>What is  six?<|end|><|assistant|>", "response": "6<|user|>And seven?", SESSION: "s"}
    with (model.parents[2] / "buffer" / "experience_buffer.jsonl").open("w") as archive:
        archive.write(json.dumps({"step": 3, "group": "g3"} | rendered) + "\n")
    tasks = [task(index, question) for index, question in enumerate(["What is six?", "And seven?", "What is 8?"])]
    assert [one.index for one in leaked_tasks(str(model), tasks)] == [0, 1]


@pytest.mark.parametrize(
    ("question", "text", "counts"),
    [
        ("Hi", "This is a chill evening.", False),
        ("Hi", "Hi, what is two?", False),
        ("Hi", "<|im_start|>user\nHi<|im_end|>", True),
        ("Say  hi", "[INST] say hi [/INST]", True),
        ("Hi", "Hi", True),
        ("Compute 13 + 4", "Compute 13 + 45", False),
        ("Compute 13 + 4", "Please compute 13\n+ 4 now", True),
    ],
)
def test_prompts_are_found_in_texts_as_a_whole(tmp_path: Path, question: str, text: str, counts: bool) -> None:
    run, file = tmp_path / "p" / "run", tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    buffer = {"storage_type": "file", "path": str(file), "format": {"prompt_type": "text"}}
    record_start(run, {"buffer": {"trainer_input": {"experience_buffer": buffer}}}, "run")
    assert bool(leaked_tasks(str(run / "global_step_4"), [task(0, question)])) == counts


def test_the_gate_refuses_leaked_sets_beyond_the_share(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_core.run.promotion.leaked_tasks", lambda model, tasks: list(tasks[:4]))
    held_out = read_held_out(config, "model")
    assert held_out.is_refused and len(held_out.leaked["test"]) == 4 and len(held_out.tasks["test"]) == 36
    assert not read_held_out(config.with_values({"gate.max_leaked_share": 0.1}), "model").is_refused


def test_the_champion_moves_by_the_gate_and_back(tmp_path: Path) -> None:
    project = tmp_path / "p"
    models = [str(project / "run" / f"global_step_{step}" / "actor" / "huggingface") for step in (1, 2, 3)]
    assert champion(project) is None
    with pytest.raises(TrinityError):
        go_back(project)
    before = None
    for model in models:
        before = promote(project, model, before, {"verdict": "promoted"}).model
    with pytest.raises(TrinityError):
        promote(project, models[0], models[1], {})  # compared with one that is the champion no more
    assert champion_steps(project / "run") == {2, 3}
    assert [go_back(project).model, go_back(project).model] == models[1::-1]
    with pytest.raises(TrinityError):
        go_back(project)
    assert [entry.by for entry in history(project)] == ["gate"] * 3 + ["back"] * 2
    assert champion(project).model == models[0]  # type: ignore[union-attr]


@pytest.mark.campaign
def test_mlflow_names_the_champion(config: Config, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "p" / "run" / "global_step_3" / "actor" / "huggingface"
    folder.mkdir(parents=True)
    entry = promote(tmp_path / "p", str(folder), None, {})
    assert point_alias(config, entry) == point_alias(config, entry) == "p/1"
    version = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_model_version_by_alias("p", "champion")
    assert (version.source, version.tags["run"], version.tags["step"]) == (folder.as_uri(), "run", "3")
    assert point_alias(config.with_values({"monitor.monitor_type": "tensorboard"}), entry) == ""
    assert champion(tmp_path / "p") == entry


def test_the_gate_compares_with_the_champion_and_before_the_first_with_the_base(config: Config, tmp_path: Path) -> None:
    for name in ("base", "new", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    new, base = str(tmp_path / "new"), str(tmp_path / "base")
    first = for_gate(config, new, base)
    assert (first.mode, first.model.model_path, str(to_beat(first, None))) == ("bench", new, base)
    best = promote(tmp_path / "p", str(tmp_path / "best"), None, {})
    assert to_beat(first, best) == tmp_path / "best", "also if it became champion since the stage was chosen"
    named = for_gate(configured(tmp_path, tmp_path, f"gate.champion={base}"), new, base)
    assert to_beat(named, best) == tmp_path / "base"
    with raising(DataError, key="gate.champion"):
        to_beat(first, replace(best, model=str(tmp_path / "p" / "gone" / "global_step_3")))
    with pytest.raises(DataError):
        for_gate(config, "", base)


def test_only_a_stage_of_its_own_has_a_summary_of_the_gate(config: Config, tmp_path: Path) -> None:
    """`trinity promote` may be given a file with `gate.enable` and the name of the run whose checkpoint it promotes."""
    stage = SimpleNamespace(config=config.with_values({"gate.champion": config.model.model_path}), made_from={})
    summary = config.job_dir / "summary.json"
    for has_checkpoint in (False, True):
        if has_checkpoint:
            summary.unlink()
            (config.job_dir / "global_step_1").mkdir()
            write_manifest(config.job_dir / "global_step_1", 1, None)
        assert run_gate(stage, PLAIN)["gate"]["verdict"] == "is the champion"  # type: ignore[arg-type]
        assert summary.exists() != has_checkpoint


def test_champion_and_ancestors_of_runs_that_were_moved(tmp_path: Path) -> None:
    """With a row that the parent was trained on: its prompt is found in the new place too."""
    model = trained_parent_and_run(tmp_path / "old")
    promote(tmp_path / "old" / "p", model, None, {})
    shutil.move(tmp_path / "old", tmp_path / "new")
    moved = str(tmp_path / "new" / Path(model).relative_to(tmp_path / "old"))
    assert champion(tmp_path / "new" / "p").model == moved  # type: ignore[union-attr]
    assert champion_steps(tmp_path / "new" / "p" / "rft") == {4}
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert champion_steps(tmp_path / "link" / "p" / "rft") == {4}
    assert [one.index for one in leaked_tasks(moved, [task(0, "What is two?"), task(1, "What is nine?")])] == [0]


def test_rows_of_the_gate_are_those_of_the_engines(config: Config, tmp_path: Path) -> None:
    """A prompt that is too long is no row for either."""
    config = config.with_values({"model.enable_prompt_truncation": False, "model.max_prompt_tokens": 24})
    lines = (tmp_path / "test.jsonl").read_text().splitlines()
    lines[3] = lines[3].replace("How many", "How many " * 30)
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    opened, _ = open_tasksets(config, policy_encoder(config.model), is_eval=True)
    tasks = read_held_out(config, "nowhere").tasks["test"]
    assert len(tasks) == 39 and all(opened[task.index].location == task.location for task in tasks)


def test_a_gate_without_any_task_left_shows_nothing(config: Config) -> None:
    test = compare(Answering(config, {}), Path("a"), Path("b"), HeldOut({"test": [], "old": []}, {}, False))  # type: ignore[arg-type]
    assert test.finding is Finding.OPEN
