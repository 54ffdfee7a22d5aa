"""Waits are spoken of at once, then ever less often, and at least once a minute."""

from trinity_core.waits import Reminder, Wait


def test_a_reminder_doubles_its_pause_up_to_a_minute() -> None:
    reminder = Reminder()
    assert [second for second in range(400) if reminder.due(second)] == [10, 20, 40, 80, 140, 200, 260, 320, 380]


def test_a_wait_says_for_what_and_for_how_long() -> None:
    wait = Wait("version 3 of the trainer")
    text = "waits for version 3 of the trainer, 0 s so far; last seen 2 s ago"
    assert wait.note("last seen 2 s ago") == wait.text == text
