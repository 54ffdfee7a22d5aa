"""Files that a newer release wrote: one error names the file, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from raising import raising

from flows.local.server import UpState
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.base.gate import state_dir
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config
from trinity_core.exchange.checkpoints.beginning import STATE, Beginning, begin_from, recorded_beginning
from trinity_core.exchange.store.run_store import identify, read_identity
from trinity_core.exchange.sync.checkpoint import CheckpointVersions
from trinity_core.pipelines.tasks import TaskPipeline, curate
from trinity_core.training.checkpoint import TrainerState

Written = tuple[Path, Callable[[], object]]
"""A file, and what reads it."""


def identity(folder: Path) -> Written:
    config = Config(checkpoint_root_dir=str(folder), project="tests", name="run")
    identify(config)
    return config.layout.identity, lambda: read_identity(config.job_dir)


def beginning(folder: Path) -> Written:
    def begin() -> None:
        begin_from(folder, str(folder / "model"), has_rows=False)

    begin()
    return JobLayout(folder).beginning, begin


def trainer_state(folder: Path) -> Written:
    write_json(folder / STATE, asdict(TrainerState(1, {"actor": 1})))
    return folder / STATE, lambda: TrainerState.read(folder)


def version(folder: Path) -> Written:
    versions = CheckpointVersions(folder)
    versions.publish(1, [("weight", torch.ones(2))])
    return folder / "global_step_1/actor/weights.json", lambda: versions.load(1)


def curated(folder: Path) -> Written:
    (folder / "tasks.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")

    def made() -> Path:
        return curate(TaskPipeline([str(folder / "tasks.jsonl")]), folder / "out").folder

    return made() / "dataset.json", made


def up(folder: Path) -> Written:
    UpState("http://127.0.0.1:1/api", []).save(folder)
    return state_dir(folder) / "up.json", lambda: UpState.load(folder)


@pytest.mark.parametrize("written", [identity, beginning, trainer_state, version, curated, up])
def test_file_of_a_newer_release_is_refused_by_its_name(tmp_path: Path, written: Callable[[Path], Written]) -> None:
    path, read = written(tmp_path)
    read()
    later = json.dumps(json.loads(path.read_bytes()) | {"later": 1})
    path.write_text(later)
    with raising(DataError, key=str(path)) as refused:
        read()
    assert "later" in str(refused.value) and path.read_text() == later


def test_checkpoint_whose_beginning_a_newer_release_wrote_is_refused(tmp_path: Path) -> None:
    state = JobLayout(tmp_path).step(1) / STATE
    state.parent.mkdir()
    write_json(state, {"began": asdict(Beginning("model")) | {"later": 1}})
    with raising(DataError, key=str(state)):
        recorded_beginning(tmp_path, 1)
