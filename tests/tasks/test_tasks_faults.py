"""What a run that failed says: which of several failures, and in what words."""

from __future__ import annotations

from itertools import permutations

from tasks.faults import Stopped, most_telling
from trinity_core.errors import DataError, TransientFault


def test_the_more_definite_error_is_reported() -> None:
    errors = [Stopped("The run was stopped."), TransientFault("the trainer is gone"), DataError("a bad row")]
    for given in permutations(errors):
        assert most_telling(given) is errors[2]


def test_a_part_that_was_stopped_does_not_hide_why() -> None:
    stopped, dead = Stopped("The run was stopped."), TransientFault("the trainer is gone")
    assert most_telling([stopped, dead]) is dead
    assert most_telling([stopped]) is stopped
