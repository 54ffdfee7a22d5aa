"""Rows that are rejected are written down, and too many of them refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.data.files import RejectedRow, RowLocation
from trinity_core.data.rejected import RejectedRows

BAD = [RejectedRow(RowLocation("train.jsonl", line), "the line is not JSON") for line in (2, 7)]


def test_rejected_rows_are_written_with_file_line_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, path = RejectedRows(0.5, tmp_path / "explorer"), tmp_path / "explorer/a%2Fb.jsonl"
    rows.settle("a/b", BAD, kept=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"source": "train.jsonl", "line": line, "reason": "the line is not JSON"} for line in (2, 7)]
    assert str(path) in caplog.text
    rows.settle("a/b", [], kept=4)
    assert not path.exists(), "the file would list rows that are fine by now"


def test_more_rejected_rows_than_allowed_are_refused(tmp_path: Path) -> None:
    with raising(DataError, key="gsm8k"):
        RejectedRows(0.4, tmp_path).settle("gsm8k", BAD, kept=2)
    assert len((tmp_path / "gsm8k.jsonl").read_text().splitlines()) == 2, "they are listed all the same"
    with raising(DataError, key="gsm8k"):
        RejectedRows(1.0).settle("gsm8k", BAD, kept=0)
    with pytest.raises(DataError) as caught:
        RejectedRows(1.0).settle(
            "gsm8k", [*BAD, RejectedRow(RowLocation("train.jsonl", 9), "its prompt is empty")], kept=0
        )
    message = str(caught.value)
    assert message.count(BAD[0].reason) == 1 and "train.jsonl:2" in message and "train.jsonl:9" in message
