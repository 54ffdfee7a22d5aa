"""`summary.json`: whole or not there, so that a stage which a kill or a full disk cut short is not taken as done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trinity_core.config import Config, config_from_dict
from trinity_core.errors import TrinityError
from trinity_core.runtime.summary import SUMMARY, read_summary, write_summary

TASKS = {"explorer_input": {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = {"model_path": "m", "max_model_len": 8}
    return config_from_dict({"model": model, "mode": "bench", "buffer": TASKS, "checkpoint_root_dir": str(tmp_path)})


@pytest.mark.parametrize("left", ["", '{"step": ', "[]", "\udcff"])
def test_a_damaged_summary_is_none(left: str, config: Config, caplog: pytest.LogCaptureFixture) -> None:
    write_summary(config, {"step": 3})
    assert read_summary(config) == {"step": 3}
    (config.job_dir / SUMMARY).write_bytes(left.encode(errors="surrogateescape"))
    assert read_summary(config) is None
    assert "summary.json is damaged" in caplog.text


def test_a_full_disk_leaves_the_summary_as_it_was(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_summary(config) is None
    write_summary(config, {"step": 3, "folder": Path("a")})

    def full_disk(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(TrinityError, match="no space left"):
        write_summary(config, {"step": 4})
    assert read_summary(config) == {"step": 3, "folder": "a"}
