"""How a run ended, by the exception that ended it."""

from __future__ import annotations

import pytest
from prefect.exceptions import TerminationSignal

from trinity_core.base.errors import TrinityError
from trinity_core.exchange.tracking.writers import RunOutcome


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, RunOutcome.FINISHED),
        (TrinityError("no data"), RunOutcome.FAILED),
        (TimeoutError(), RunOutcome.FAILED),
        (KeyboardInterrupt(), RunOutcome.CANCELLED),
        (SystemExit(143), RunOutcome.CANCELLED),
        (TerminationSignal(15), RunOutcome.CANCELLED),
    ],
)
def test_only_a_cancellation_is_no_failure(error: BaseException | None, expected: RunOutcome) -> None:
    assert RunOutcome.of(error) is expected
