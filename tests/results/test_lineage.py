"""Where a checkpoint comes from, and which checkpoints saw a row, from the records of small runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import called

from flows.cli import main
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.data.experience import Experience
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.champions import promote
from trinity_core.exchange.tracking.run_record import record_start
from trinity_core.results.lineage import lineage, sightings

DRAWN = {1: [0, 2], 2: [3, 2]}
"""Train step → rows of the task set in its batch."""


def checkpoint(run: Path, step: int, began: str) -> Path:
    folder = run / f"global_step_{step}"
    folder.mkdir(parents=True)
    write_json(folder / "trainer_state.json", {"began": {"model": began}})
    write_manifest(folder, step, None)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """SFT, RFT from its model, and a run from the latter's first checkpoint. Of the tasks' lines 2 is blank, 4 bad."""
    tasks, examples = tmp_path / "train.jsonl", tmp_path / "sft.jsonl"
    rows = [json.dumps({"question": f"{i}?"}) for i in range(5)]
    tasks.write_text("\n".join([rows[0], "", rows[1], "{bad", *rows[2:]]) + "\n")
    examples.write_text('{"question": "a", "answer": "b"}\n')
    sft, rft, child = (tmp_path / "checkpoints" / "p" / name for name in ("sft", "rft", "child"))
    buffer = {"name": "examples", "storage_type": "file", "path": str(examples)}
    record_start(sft, {"buffer": {"trainer_input": {"experience_buffer": buffer}}}, "sft")
    checkpoint(sft, 9, "org/base")
    taskset = {"name": "train", "path": str(tasks)}
    record_start(rft, {"buffer": {"explorer_input": {"tasksets": [taskset]}}}, "rft", software={"torch": "2.0"})
    write_json(
        rft / "summary.json", {"made_from": {"inputs": {str(tasks): "abc", "synchronizer.sync_method": "memory"}}}
    )
    rejected = rft / "rejected_rows" / "explorer" / "train.jsonl"
    rejected.parent.mkdir(parents=True)
    rejected.write_text(json.dumps({"source": str(tasks), "line": 4, "reason": "bad"}) + "\n")
    (rft / "buffer").mkdir(exist_ok=True)
    with ExperienceStore.open(rft / "buffer" / "explorer_output.db", str(rft)) as store:
        for step, drawn in DRAWN.items():
            groups = [f"explorer/{step}/{slot}" for slot in range(len(drawn))]
            experiences = [Experience(np.arange(4), 2, np.ones(2, bool), reward=1.0, group=group) for group in groups]
            ledger = [DrawnTask(group, f"train/{row}", 1) for group, row in zip(groups, drawn, strict=True)]
            store.put("explorer", step, {}, experiences, newest_version=0, drawn=ledger)
            assert store.lease(step, len(drawn), newest_version=0)
    checkpoint(rft, 1, str(sft / "global_step_9" / "actor" / "huggingface"))
    checkpoint(rft, 2, str(sft / "global_step_9" / "actor" / "huggingface"))
    record_start(child, {}, "rft")
    checkpoint(child, 5, str(rft / "global_step_1" / "actor" / "huggingface"))
    return tmp_path / "checkpoints"


def test_a_checkpoint_names_its_runs_rows_code_and_gates(runs: Path) -> None:
    rft, tasks = runs / "p" / "rft", runs.parent / "train.jsonl"
    promote(runs / "p", str(rft / "global_step_2" / "actor" / "huggingface"), None, {"champion": "org/base"})
    newest, parent, base = lineage(rft, all_rows=True)
    assert (newest.run, newest.step, newest.code, newest.data) == ("p/rft", 2, {"torch": "2.0"}, {str(tasks): "abc"})
    [rows] = newest.rows
    assert (rows.data_set, rows.count, rows.batches) == ("train", 4, (1, 2))
    assert rows.places == [f"{tasks}:{line}" for line in (1, 5, 6)]
    assert [gate["by"] for gate in newest.gates] == ["gate"]
    assert (parent.run, parent.step, parent.rows[0].count) == ("p/sft", 9, 1)
    assert (base.model, base.run) == ("org/base", "")
    first, *_ = lineage(rft / "global_step_1")
    assert (first.rows[0].count, first.rows[0].batches, first.gates) == (2, (1, 1), [])
    text = called(main, "lineage", str(rft)).stdout
    assert "org/base" in text and f"{tasks}:1" in text
    assert [link["step"] for link in json.loads(called(main, "lineage", str(rft), "--json").stdout)] == [2, 9, 0]


def test_a_row_names_every_checkpoint_that_saw_it(runs: Path) -> None:
    tasks = runs.parent / "train.jsonl"
    seen = {
        line: {one.run: (one.step, one.checkpoints) for one in sightings(runs, tasks, line)} for line in range(1, 8)
    }
    assert seen[1] == {"p/rft": (1, [1, 2]), "p/child": (0, [5])}
    assert seen[6] == {"p/rft": (2, [2])}, "the child began before that step"
    assert seen[2] == seen[3] == seen[4] == seen[7] == {}
    from_examples = {one.run: list(one.checkpoints) for one in sightings(runs / "p", runs.parent / "sft.jsonl", 1)}
    assert from_examples == {"p/sft": [9], "p/rft": [1, 2], "p/child": [5]}
    told = called(main, "lineage", str(runs), "--row", f"{tasks}:6", "--json")
    assert [one["checkpoints"] for one in json.loads(told.stdout)] == [[2]]
    assert called(main, "lineage", str(runs), "--row", "train.jsonl").returncode == 2


def test_a_pipeline_stands_for_its_stages(runs: Path) -> None:
    pipeline = runs / "p" / "pipeline"
    pipeline.mkdir()
    write_json(pipeline / "stages.json", {"sft": "sft", "rft": "rft", "bench": "bench"})
    assert [(link.run, link.step) for link in lineage(pipeline)] == [("p/rft", 2), ("p/sft", 9), ("", 0)]
    assert [one.run for one in sightings(pipeline, runs.parent / "sft.jsonl", 1)] == ["p/sft", "p/rft"]


def test_without_a_checkpoint_there_is_no_lineage(runs: Path) -> None:
    (runs / "p" / "none").mkdir()
    for path in (runs / "p" / "none", runs / "p" / "rft" / "global_step_7"):
        with pytest.raises(DataError):
            lineage(path)


def test_a_relative_folder_is_searched_too(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    assert [one.run for one in sightings(Path("checkpoints"), Path("train.jsonl"), 1)] == ["p/rft", "p/child"]
