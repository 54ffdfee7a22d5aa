"""What a run that failed says: which of several failures, and in what words."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from trinity_core.base.errors import DataError, TransientFault
from trinity_core.hosting.faults import Stopped, get, is_transient, raise_most_telling

DIED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was …"
)


def test_the_more_definite_error_is_reported() -> None:
    """What stopped a part says more than that it was stopped."""
    errors = [DataError("a bad row"), TransientFault("the trainer is gone"), Stopped("The run was stopped.")]
    for count in (1, 2, 3):
        for order in permutations(errors[-count:]):
            with pytest.raises(type(errors[-count])) as raised:
                raise_most_telling(order)
            assert raised.value is errors[-count]


def raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What `get` makes of an error of Ray's."""

    def fail(ref: Any, timeout: float | None = None) -> Any:
        raise error

    monkeypatch.setattr("ray.get", fail)
    with pytest.raises(Exception) as caught:
        get(None)
    return caught.value


def died(name: str) -> Exception:
    from ray.core.generated.common_pb2 import ActorDiedErrorContext
    from ray.exceptions import ActorDiedError

    context = ActorDiedErrorContext(class_name="TrainerWorker", actor_id=bytes(16), pid=4711, name=name)
    context.error_message = DIED
    return ActorDiedError(cause=context)


@pytest.mark.parametrize("within_another_call", [False, True])
def test_an_actor_that_died_is_named_with_its_log(within_another_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayTaskError

    error = died("gsm8k/trainer_0")
    if within_another_call:
        error = RayTaskError("run", "Traceback …", error).as_instanceof_cause()
    fault = raised(error, monkeypatch)
    assert isinstance(fault, TransientFault) and is_transient(fault)
    assert str(fault).startswith("trainer_0 (TrainerWorker, process 4711) died: The actor is dead because its worker")
    assert "End of file. Its log is trainer_0.log" in str(fault) and "Start the same run again" in str(fault)


def test_an_actor_that_could_not_begin_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other call does; a defect keeps its traceback and is not tried again."""
    from ray.exceptions import ActorDiedError, RayTaskError

    wrong, defect = DataError("a bad row"), KeyError("x")
    assert raised(ActorDiedError(RayTaskError("__init__", "Traceback …", wrong)), monkeypatch) is wrong
    fault = raised(ActorDiedError(RayTaskError("__init__", "Traceback … KeyError", defect)), monkeypatch)
    assert isinstance(fault, RayTaskError) and fault.cause is defect and not is_transient(fault)
