"""Experience operators in a process of their own: real processes, one of which is killed in the middle of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trinity_core.base.errors import TransientFault
from trinity_core.config import Config, config_from_dict
from trinity_core.data.experience import Experience
from trinity_core.pipelines.operators import FailedGroup
from trinity_core.pipelines.own_process import OwnProcess

PLUGIN = """
import os, signal
from pathlib import Path

from trinity_core.pipelines import OPERATORS

@OPERATORS.register("dies")
def dies(experiences, marker, times=1):
    deaths = Path(marker)
    if deaths.exists() and deaths.stat().st_size >= times:
        return experiences
    with deaths.open("a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)

@OPERATORS.register("picky")
def picky(experiences):
    if any(one.group == "bad" for one in experiences):
        raise ValueError("a bad one")
    for one in experiences:
        one.info["process"] = os.getpid()
    return [one for one in experiences if one.run == 0]
"""


def rows() -> list[Experience]:
    return [
        Experience(np.arange(4), 2, np.ones(2, bool), np.zeros(2), np.zeros(2), 1.0, group=group, run=run)
        for group in ("good", "bad")
        for run in (0, 1)
    ]


def configured(tmp_path: Path, deaths: int) -> Config:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "deadly_operators.py").write_text(PLUGIN)
    operators = [{"name": "dies", "args": {"marker": str(tmp_path / "deaths"), "times": deaths}}, {"name": "picky"}]
    pipeline = {"operators": operators, "own_process": True}
    tree = {
        "model": {"model_path": "m", "max_model_len": 8},
        "mode": "explore",
        "plugin_dir": str(plugins),
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "checkpoint_root_dir": str(tmp_path),
        "data_processor": {"experience_pipeline": pipeline},
    }
    return config_from_dict(tree)


def test_a_process_that_dies_loses_no_experience(tmp_path: Path) -> None:
    operators = OwnProcess(configured(tmp_path, deaths=1))
    failed: list[FailedGroup] = []
    try:
        left, dropped = operators.run(rows(), failed.append)
        again, _ = operators.run(rows()[:2], failed.append)
        assert operators.run([], failed.append) == ([], {})
    finally:
        operators.close()
    assert [(one.group, one.run, one.tokens.tolist()) for one in left] == [("good", 0, [0, 1, 2, 3])]
    assert dropped == {"good": {"picky": 1}, "bad": {"picky failed": 2}}
    assert [(failure.group, str(failure.error)) for failure in failed] == [("bad", "ValueError: a bad one")]
    pid = left[0].info["process"]
    assert again[0].info["process"] == pid and not Path(f"/proc/{pid}").exists()


def test_a_process_that_always_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_core.pipelines.own_process.STARTS", 1)
    operators = OwnProcess(configured(tmp_path, deaths=9))
    with pytest.raises(TransientFault):
        operators.run(rows(), lambda _: None)
    operators.close()
    assert (tmp_path / "deaths").read_text() == "x"
