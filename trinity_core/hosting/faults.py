"""Which failures are retried, their messages, how concurrent runs are asked to end, and checks of processes that a run
waits for: without them a stopped or stuck process would be waited for forever."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.waits import Wait
from trinity_core.config import Config
from trinity_core.exchange.store.run_store import open_run_store, present
from trinity_core.exchange.store.schema import EXPLORER
from trinity_core.exchange.tracking.logs import log_name
from trinity_core.exchange.tracking.writers import RunOutcome

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Short, so that a cancellation (an exception in the main thread) takes effect at once."""


AGAIN = "Start the same run again: it resumes from its latest whole checkpoint."


class Stopped(TransientFault):
    """The run was asked to stop before it was done."""


class ProcessLost(TransientFault):
    """A process of the run is gone; `reason` says which. The message also says what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} {AGAIN}"


class CancelToken:
    """Once cancelled, every run that was opened in its context saves and ends."""

    def __init__(self) -> None:
        self.cancelled = False
        self.by_person = False
        """True if Ctrl+C or a signal caused it, rather than a failure of one of the runs."""

    def stop(self) -> None:
        """Ask all runs to save and end. The exception passing through the caller tells a cancellation from a
        failure."""
        self.by_person = RunOutcome.of(sys.exception()) is RunOutcome.CANCELLED
        self.cancelled = True

    def check(self) -> None:
        """Do nothing: each run watches its own processes."""

    def raise_if_cancelled(self) -> None:
        """Raise Stopped in a run that has saved and ended because it was asked to."""
        if self.cancelled:
            raise Stopped("The run has saved and ended, because another part of it failed or all were cancelled.")


CANCEL_TOKEN: ContextVar[CancelToken | None] = ContextVar("cancel_token", default=None)
"""Shared by the runs that the current context opens."""
ANOTHER_FOLLOWS: ContextVar[Callable[[], bool]] = ContextVar("another_follows", default=lambda: False)
"""True if another attempt at the current context's run follows after a transient fault."""


def is_cancelled() -> bool:
    token = CANCEL_TOKEN.get()
    return token is not None and token.cancelled


def is_transient(error: BaseException) -> bool:
    """True if the same run may succeed when it resumes from its latest checkpoint.

    Dead actors, lost nodes and time-outs are transient. Wrong configurations, wrong data, a full disk and bugs are not.
    """
    return isinstance(error, (TransientFault, *_losses())) and not isinstance(error, TrinityError)


def _losses() -> tuple[type[Exception], ...]:
    """Return Ray's exceptions for a lost process, node or object of the run."""
    from ray.exceptions import (
        GetTimeoutError,
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayChannelError,
        RaySystemError,
        WorkerCrashedError,
    )

    return (
        GetTimeoutError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayChannelError,
        RaySystemError, WorkerCrashedError,
    )  # fmt: skip


def raise_most_telling(failures: Collection[BaseException]) -> None:
    """Raise the most telling failure: a permanent one before transient ones, and Stopped, which follows another
    failure, last. Does nothing without failures."""
    if failures:
        raise min(failures, key=lambda failure: (is_transient(failure), isinstance(failure, Stopped)))


@contextmanager
def first_error_stays(succeeded: bool) -> Iterator[None]:
    """Around the end of a run that has failed: log another error instead of letting it replace the first."""
    try:
        yield
    except Exception as error:
        if succeeded:
            raise
        log.warning("ending the failed run failed too: %s", error, exc_info=error)


def result_of(ref: Any, check: Callable[[], None], stopped: Callable[[], bool] = lambda: False) -> Any:
    """Poll for the result of an actor's method. Raises the method's own exception, or Stopped.

    `check` raises if waiting has become pointless (`Cluster.check`).
    """
    return results_of([ref], check, stopped)[0]


def results_of(
    refs: Sequence[Any], check: Callable[[], None], stopped: Callable[[], bool] = lambda: False
) -> list[Any]:
    """Like `result_of`, for several calls at once; the first failure is raised while the others still work.

    If one trainer rank fails, the others wait for it in a collective operation, so waiting for them would not end.
    """
    import ray

    waiting, results = list(refs), {}
    while True:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for ref in done:
            results[ref] = get(ref)
        if not waiting:
            return [results[ref] for ref in refs]
        if stopped():
            raise Stopped("The run was stopped.")
        check()
        time.sleep(POLL_SECONDS)


def get(ref: Any, timeout: float | None = None) -> Any:
    """Like `ray.get`, but raises an error meant for users: the actor's own, or which actor died."""
    import ray
    from ray.exceptions import (
        ActorDiedError,
        ActorUnschedulableError,
        NodeDiedError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
        WorkerCrashedError,
    )

    try:
        return ray.get(ref, timeout=timeout)
    except RayError as error:
        failed = error.args[0] if isinstance(error, ActorDiedError) and error.actor_init_failed else error
        cause = failed.cause if isinstance(failed, RayTaskError) else failed
        if isinstance(cause, TrinityError | TransientFault):
            raise cause from None
        if isinstance(cause, ActorUnschedulableError):
            raise TrinityError(f"Ray cannot start a process of the run. {cause.error_message}") from error
        if isinstance(cause, _losses()):
            lost = isinstance(cause, RayActorError | WorkerCrashedError | NodeDiedError | OutOfMemoryError)
            reason = loss_of(cause)
            raise (ProcessLost(reason) if lost else TransientFault(f"{reason} {AGAIN}")) from error
        raise failed from None


def loss_of(error: Exception) -> str:
    """Say which process of the run Ray has lost: Ray's message without its guesses at the cause."""
    facts = dict(re.findall(r"^\t(\w+): (.+)$", str(error), re.MULTILINE))
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    reason = " ".join(lines[1:] if facts else lines).partition(" Some common causes")[0]
    if "name" not in facts:
        return f"Ray has lost a part of the run ({type(error).__name__}): {reason}"
    actor = log_name(facts["name"])
    process = f", process {facts['pid']}" if "pid" in facts else ""
    return (
        f"{actor} ({facts.get('class_name', 'actor')}{process}) died: {reason} Its log is {actor}.log below `log` in "
        "the run's folder; if that ends without an error, the system may have killed it for lack of memory (`dmesg` "
        "says so)."
    )


ASK_SECONDS = 30.0
SILENCE_SECONDS = 600.0
"""Time limit for an answer. A busy process may run no Python code for minutes, for example while it writes a large
checkpoint."""


def within(seconds: float, lacking: str, check: Callable[[], None]) -> Callable[[], None]:
    """Return `check` with a time limit: `seconds` from now on it raises ProcessLost, naming what is `lacking`."""
    deadline = time.monotonic() + seconds

    def timed() -> None:
        check()
        if time.monotonic() > deadline:
            raise ProcessLost(f"{lacking} within {seconds:.0f} s.")

    return timed


def answering(actors: Mapping[str, Any], check: Callable[[], None]) -> Callable[[], None]:
    """Return `check` that also asks actors (by name) for their `progress`; they keep a thread free for it.

    It raises ProcessLost for an actor that does not answer. A dead actor is reported by the waiting call itself.
    """
    asked: dict[str, tuple[Any, float]] = {}

    def check_and_ask() -> None:
        import ray

        check()
        now = time.monotonic()
        for name, actor in actors.items():
            answer, asked_at = asked.get(name, (None, -ASK_SECONDS))
            if answer is None or (now - asked_at >= ASK_SECONDS and ray.wait([answer], timeout=0)[0]):
                asked[name] = actor.progress.remote(), now
            elif now - asked_at >= SILENCE_SECONDS:
                raise ProcessLost(f"{name} has not answered for {now - asked_at:.0f} s.")

    return check_and_ask


def starting(what: str, unplaced: Callable[[], Sequence[str]], check: Callable[[], None]) -> Callable[[], None]:
    """Return `check` that also logs what the start of `what` still lacks; `unplaced` names actors without an answer."""
    wait = Wait(f"{what} to start")

    def check_and_tell() -> None:
        check()
        late = ", ".join(unplaced())
        wait.note(f"still to answer: {late}" if late else "they are loading")

    return check_and_tell


def explorer_starts(config: Config) -> AbstractContextManager[None]:
    def note() -> None:
        with open_run_store(config) as store:
            store.mark_seen(EXPLORER, config.explorer.name)

    return present(note, f"explorer {config.explorer.name}")


def withdraw(config: Config, error: BaseException | None, components: set[str]) -> None:
    """Record after a failure that this run's explorer need not be waited for, unless another attempt follows.

    The same applies to the trainer if it is among the run's `components`. Does nothing without an explorer.
    """
    if error is None or "explore" not in components:
        return
    if isinstance(error, Exception) and is_transient(error) and ANOTHER_FOLLOWS.get()():
        return
    with first_error_stays(succeeded=False), open_run_store(config) as store:
        store.leave(config.explorer.name)
        if "train" in components:
            store.expect_trainer(False)
        log.info("explorer %s has left the run", config.explorer.name)
