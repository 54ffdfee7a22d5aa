"""Checks and measurements in their own threads.

Streamlit aborts the code that draws a page when the page is redrawn: after any click in it, and after a lost
connection. Work in this module survives that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import streamlit as st

from studio.config_draft import ConfigDraft
from studio.dialogs import is_open
from studio.settings import StudioSettings
from studio.start_form import START_FAULTS
from trinity_core.threads import DaemonThreads

Say = Callable[[str], object]
Action = Callable[[ConfigDraft, StudioSettings, Say], dict[str, object]]
"""Returns results as values for the session's state; progress messages are shown."""

LOOK_SECONDS = 0.5
TASK, FAILURE = "background task", "background failure"


class BackgroundTask:
    """An action that runs with a snapshot of the draft."""

    def __init__(self, doing: str, action: Action, draft: ConfigDraft, settings: StudioSettings) -> None:
        self.doing, self.text, self.said = doing, draft.text, ""
        self.began = time.monotonic()
        self.outcome = DaemonThreads("studio").submit(action, replace(draft), settings, self._say)

    def _say(self, line: str) -> None:
        self.said = line


def is_busy() -> bool:
    return TASK in st.session_state


def begin(doing: str, action: Action, draft: ConfigDraft, settings: StudioSettings) -> None:
    """Start the session's task, unless one runs: a second click may arrive before the buttons are redrawn."""
    if is_busy():
        return
    st.session_state.pop(FAILURE, None)
    st.session_state[TASK] = BackgroundTask(doing, action, draft, settings)


def take_outcome() -> None:
    """Store a finished task's results, or its failure; the draft is then checked again."""
    task: BackgroundTask | None = st.session_state.get(TASK)
    if task is None or not task.outcome.done():
        return
    del st.session_state[TASK]
    st.session_state.pop("checked", None)  # files on disk may have changed
    try:
        st.session_state.update(task.outcome.result())
    except START_FAULTS as error:
        st.session_state[FAILURE] = (task.text, str(error))


def show_task(text: str) -> None:
    failed, failure = st.session_state.get(FAILURE, ("", ""))
    if is_busy():
        st.fragment(_show_progress, run_every=LOOK_SECONDS)(st.session_state[TASK])
    elif failure and failed == text:
        st.error(failure)


def _show_progress(task: BackgroundTask) -> None:
    if task.outcome.done():
        if not is_open():
            st.rerun()
        st.caption("Done. Close the dialog to see what was found.")
        return
    st.caption(f"{task.doing} {time.monotonic() - task.began:.0f} s")
    st.text(task.said)
