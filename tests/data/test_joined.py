"""Rows of data sets joined to tasks by a column that both have."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path

import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config import Config, ConfigError, config_from_dict
from trinity_core.data.joined import open_inputs
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.taskset import Taskset

TASKS = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": "2"}, {"prompt": "c", "id": 3}, {"prompt": "d"}]


def config_of(tmp_path: Path, mode: str = "explore", **inputs: object) -> Config:
    taskset = {"name": "t", "path": str(tmp_path / "tasks.jsonl"), "default_workflow_type": "math_workflow"}
    explored = {} if mode == "serve" else {"explorer_input": {"taskset": taskset}, "total_steps": 2}
    return config_from_dict({
        "mode": mode, "checkpoint_root_dir": str(tmp_path), "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": "m", "max_model_len": 64, "max_response_tokens": 16},
        "explorer": {"rollout_model": {"enable_openai_api": mode == "serve"}},
        "buffer": {"batch_size": 2, **explored},
        "data_processor": {"experience_pipeline": {"inputs": inputs}},
    })  # fmt: skip


def joined(tmp_path: Path, **inputs: object) -> list[dict[str, object]]:
    """The columns of each task."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    config = config_of(tmp_path, **inputs)
    [taskset] = [Taskset.open(taskset_config, 0) for taskset_config in config.buffer.explorer_input.tasksets]
    opened = open_inputs(config, [taskset], RejectedRows(0.5, tmp_path / "rejected"))
    return [opened.columns(row) for row in taskset.rows]


def test_rows_are_joined_by_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers and their text are one key; a task without a row, and one without the column, get nothing."""
    (tmp_path / "ratings.csv").write_text("id,stars,by\n1,4.5,Ann\n2,1,Bob\n9,3,Cid\n")
    ratings = {"path": str(tmp_path / "ratings.csv"), "join_key": "id"}
    database = sqlite3.connect(tmp_path / "levels.db")
    database.executescript(
        "create table levels (id integer primary key, level numeric(3, 1)); insert into levels values (1, 2.5), (3, 4)"
    )
    database.close()
    levels = {"path": f"sqlite:///{tmp_path}/levels.db", "storage_type": "sql", "join_key": "id", "columns": ["level"]}
    caplog.set_level(logging.INFO)
    assert joined(tmp_path, ratings=ratings, levels=levels) == [
        {"ratings.stars": "4.5", "ratings.by": "Ann", "levels.level": 2.5},
        {"ratings.stars": "1", "ratings.by": "Bob"},
        {"levels.level": 4.0},
        {},
    ]
    assert "Input 'levels' has rows for 2 of 4 tasks of 't'" in caplog.text


def test_rows_that_cannot_be_joined_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    rows = [{"id": 1, "stars": 5}, {"id": 1, "stars": 1}, {"stars": 2}, {"id": 2, "stars": None}, {"id": 3, "stars": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = joined(tmp_path, ratings={"path": str(path), "join_key": "id"})
    assert columns == [{"ratings.stars": 5}, {"ratings.stars": None}, {"ratings.stars": 1}, {}]
    lines = [json.loads(line) for line in (tmp_path / "rejected/input-ratings.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [2, 3] and all("id" in line["reason"] for line in lines)


@pytest.mark.parametrize(
    ("rows", "settings", "name"),
    [
        ([{"id": 7, "x": 1}], {"join_key": "id"}, "ratings"),
        ([{"id": 1.5}, {"id": None}, {"id": True}], {"join_key": "id"}, "input-ratings"),
        ([{"id": 1}], {"join_key": "id", "columns": ["stars"]}, "input-ratings"),
        ([], {"join_key": "id"}, "input-ratings"),
    ],
)
def test_an_input_that_joins_nothing_is_refused(
    tmp_path: Path, rows: list[dict[str, object]], settings: dict[str, object], name: str
) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raising(DataError, key=name):
        joined(tmp_path, ratings={"path": str(path), **settings})


def test_mistakes_are_told_at_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, ratings={"columns": ["a"]}, levels={"path": "x", "join_key": "a", "columns": ["a"]})
    where = "data_processor.experience_pipeline.inputs"
    assert [problem.key for problem in refused.value.problems] == [
        f"{where}.ratings.path", f"{where}.ratings.join_key", f"{where}.levels.columns",
    ]  # fmt: skip
    with raising(ConfigError, key="data_processor.experience_pipeline.inputs"):
        config_of(tmp_path, "serve", ratings={"path": "x", "join_key": "id"})
