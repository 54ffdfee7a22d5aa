"""Waiting for the components of a run that work beside each other: when one fails, the others save and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from trinity_core.runtime.faults import POLL_SECONDS, most_telling
from trinity_core.runtime.session import Session


class Stoppable(Protocol):
    """A session, or several of them."""

    def stop(self) -> None:
        """Ask everything to save and end."""

    def check(self) -> None:
        """Raise what makes it useless to go on."""


def run_together(session: Session, components: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run beside each other, in threads, those components that the configuration's mode needs: name -> result.

    When one fails, the others are asked to save and end, and the failure is raised: of several the most telling one.
    """
    wanted = {name: call for name, call in components.items() if name in session.components}
    with ThreadPoolExecutor(max_workers=len(components)) as threads:
        futures = {name: threads.submit(call) for name, call in wanted.items()}
        wait_for_all(session, futures.values(), lambda future: future.exception() is not None)
    raise_most_telling([error for future in futures.values() if (error := future.exception()) is not None])
    session.raise_if_ended()
    return {name: future.result() for name, future in futures.items()}


def wait_for_all(
    session: Stoppable, futures: Collection[Future[Any]], has_failed: Callable[[Future[Any]], bool]
) -> None:
    """Wait until all futures are done; after a failure ask the others to save and end, and wait for that.

    A cancellation (an exception in this, the main, thread) does the same, and so does tracking that can never take the
    metrics. `has_failed` is asked about futures that are done.
    """
    try:
        while not all(future.done() for future in futures):
            if any(future.done() and has_failed(future) for future in futures):
                break
            session.check()
            time.sleep(POLL_SECONDS)
    finally:
        if not all(future.done() for future in futures):
            session.stop()
            wait(futures)


def raise_most_telling(failures: Collection[BaseException]) -> None:
    """Raise the failure, if any, that another attempt cannot get past; a component that was only stopped comes last."""
    if failures:
        raise most_telling(list(failures))
