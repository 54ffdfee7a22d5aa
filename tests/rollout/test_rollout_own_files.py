"""Files that explorers write at a user's path: each run, and each explorer, has its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, config_from_dict
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.rollout.records import ExploredFile, OperatorInput


def run_named(root: Path, path: Path, name: str = "r", explorer: str = "explorer") -> Config:
    tree = {
        "project": "p",
        "name": name,
        "mode": "explore",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": "/m", "max_model_len": 16},
        "explorer": {"name": explorer},
        "synchronizer": {"sync_method": "checkpoint"},
        "data_processor": {"experience_pipeline": {"input_save_path": str(path.with_name(f"input-{path.name}"))}},
        "buffer": {
            "total_steps": 9,
            "explorer_input": {"taskset": {"path": "/tasks"}},
            "trainer_input": {"experience_buffer": {"storage_type": "file", "path": str(path)}},
        },
    }
    return config_from_dict(tree)


def explore(config: Config, *steps: int) -> None:
    """As an explorer does: stored steps are in both files."""
    with open_run_store(config) as store:
        explored, operator_input = ExploredFile(config, store), OperatorInput(config)
        stored = store.position(config.explorer.name).step
        explored.resume(stored)
        operator_input.resume(stored)
        for step in steps:
            rows = [
                Experience(tokens=np.arange(6), prompt_length=3, action_mask=np.ones(3, bool), group=f"{step}/{group}")
                for group in range(2)
            ]
            operator_input.append(step, rows)
            store.put(config.explorer.name, step, {}, rows, 0)
            explored.stored(step)


def lines(path: Path) -> tuple[int, int]:
    counts = [len(file.read_text().splitlines()) for file in (path, path.with_name(f"input-{path.name}"))]
    return counts[0], counts[1]


@pytest.mark.parametrize("other", [{"name": "r2"}, {"explorer": "second"}])
def test_file_of_another_run_is_not_emptied(tmp_path: Path, other: dict[str, str]) -> None:
    path = tmp_path / "out" / "explored.jsonl"
    explore(run_named(tmp_path, path), 1, 2, 3)
    with pytest.raises(TrinityError):
        explore(run_named(tmp_path, path, **other))
    assert lines(path) == (6, 6)
    explore(run_named(tmp_path, path), 4)
    assert lines(path) == (8, 8)
    for written in path.parent.glob("*.jsonl"):
        written.unlink()
    explore(run_named(tmp_path, path, **other), 1)
    assert lines(path) == (2, 2)


def test_each_explorer_has_a_file_in_a_folder(tmp_path: Path) -> None:
    for explorer in ("explorer", "second"):
        explore(run_named(tmp_path, tmp_path / "out", explorer=explorer), 1)
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 2


def test_file_of_the_user_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(TrinityError):
        explore(run_named(tmp_path, path))
    assert path.read_text()


def test_file_in_the_folder_moves_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a/p/r/buffer/explored.jsonl"
    explore(run_named(tmp_path / "a", path), 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    explore(run_named(tmp_path / "b", tmp_path / "b/p/r/buffer/explored.jsonl"), 2)
    assert lines(path) == (2, 2) and lines(tmp_path / "b/p/r/buffer/explored.jsonl") == (4, 4)


def test_step_that_was_half_written_when_the_run_was_killed_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out" / "explored.jsonl"
    explore(run_named(tmp_path, path), 1, 2)
    whole = path.read_text()
    path.write_text(whole[: whole.index("\n", len(whole) // 2 + 1) + 9])  # one line of step 2 and a bit of the next
    explore(run_named(tmp_path, path))
    assert path.read_text() == whole
