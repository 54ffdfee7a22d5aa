"""Waits are spoken of at once, then ever less often, and at least once a minute."""

import errno
import time

import pytest

from trinity_core.base import files
from trinity_core.base.files import when_room
from trinity_core.base.waits import Reminder, poll, retry


def test_a_reminder_doubles_its_pause_up_to_a_minute() -> None:
    reminder = Reminder()
    assert [second for second in range(400) if reminder.due(second)] == [10, 20, 40, 80, 140, 200, 260, 320, 380]


def test_the_last_look_comes_before_the_limit_is_over() -> None:
    began = time.monotonic()
    assert len(list(poll(0.05, 0.02))) in (2, 3, 4) and time.monotonic() - began < 5
    assert len(list(poll(0.0, 0.01))) in (1, 2)


def test_only_what_passes_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    outcomes: list[object] = [OSError("full"), OSError("full"), 3]

    def work() -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def passes(error: Exception) -> bool:
        return isinstance(error, OSError)

    assert retry(work, passes, 5.0, 0.01, "there is no room") == 3
    assert len(caplog.records) == 2, "the wait is announced once, and its end"
    outcomes[:] = [OSError("full"), KeyError("other")]
    with pytest.raises(KeyError):
        retry(work, passes, 5.0, 0.01)
    outcomes[:] = [OSError("full")] * 10
    with pytest.raises(OSError):
        retry(work, passes, 0.0, 0.01)


def test_a_wait_for_room_within_another_one_takes_no_longer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "ROOM_SECONDS", 0.05)
    monkeypatch.setattr(files, "ROOM_PAUSE", 0.001)
    with pytest.raises(OSError):
        when_room(lambda: when_room(write, "inner"), "outer")
    assert any("inner" in message for message in caplog.messages)
    assert not any("outer" in message for message in caplog.messages), "it has not begun to wait"
