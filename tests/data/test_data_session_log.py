"""The log of sessions after crashes and on full disks."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest

from trinity_core.data.session_log import SessionLog, read_endings, read_sessions, session_log_path


def test_a_line_cut_by_a_crash_spoils_no_other(tmp_path: Path) -> None:
    path = session_log_path(tmp_path, "explorer")
    SessionLog(path).add("a", ["1", "1"])
    with path.open("ab") as file:
        file.write(b'{"session": "b", "ans')
    SessionLog(path).add("c", ["2"])
    SessionLog(session_log_path(tmp_path, "other")).add("d", [])
    SessionLog(path).add("e", [], "without_feedback")
    assert read_sessions(tmp_path) == {"a": Counter(["1", "1"]), "c": Counter(["2"]), "d": Counter(), "e": Counter()}
    assert read_endings(tmp_path) == {"a": "", "c": "", "d": "", "e": "without_feedback"}


def test_what_finds_no_room_is_noted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, is_open = SessionLog(session_log_path(tmp_path, "explorer")), Path.open

    def full(path: Path, *args: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    log.add("a", ["1"])
    log.add("b", ["2"])
    monkeypatch.setattr(Path, "open", is_open)
    assert read_sessions(tmp_path) == {}
    log.close()
    assert read_sessions(tmp_path) == {"a": Counter(["1"]), "b": Counter(["2"])}
    log.add("c", [])
    assert list(read_sessions(tmp_path)) == ["a", "b", "c"]
