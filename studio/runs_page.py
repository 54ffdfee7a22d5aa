"""The runs page: all runs with their states; of those that are chosen, curves, rollouts and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import streamlit as st

from studio.actions import Action, hindrance, perform
from studio.chosen_runs import escaped, show_checkpoints, show_curves, show_rollouts
from studio.prefect_runs import FlowRunSeen, PrefectRuns
from studio.run_list import RunRow, RunState, box_of, run_rows
from studio.settings import StudioSettings
from studio.started_processes import started_processes
from studio.tracked_runs import TrackedRun, served_at, store_faults, tracked_runs
from tasks.retries import api_faults
from trinity_core.tracking.mlflow_writer import run_page

LOOK_SECONDS = 4.0
Colour = Literal["gray", "blue", "orange", "green", "red"]
COLOURS: dict[RunState, Colour] = {
    RunState.WAITING: "gray",
    RunState.RUNNING: "blue",
    RunState.ENDING: "orange",
    RunState.DONE: "green",
    RunState.FAILED: "red",
    RunState.CANCELLED: "gray",
    RunState.KILLED: "red",
    RunState.ENDED: "gray",
}
HEADINGS = ("", "run", "state", "flow", "began", "took")
WIDTHS = [0.4, 3.0, 1.5, 1.2, 1.2, 0.9]


def runs_page(settings: StudioSettings) -> None:
    """Draw the page."""
    choose_from_address()
    list_runs(settings)


@st.fragment(run_every=LOOK_SECONDS)
def list_runs(settings: StudioSettings) -> None:
    """The list, looked up again every few seconds, and what belongs to the chosen runs."""
    rows = run_rows(flow_runs(settings), recorded(settings), started_processes(settings.state))
    if not rows:
        st.info("There are no runs yet. Start one on the page Configuration, or with `trinity run`.")
        return
    listed, about = st.columns([5, 6], gap="large")
    with listed:
        words = st.text_input(
            "Find", key="find run", placeholder="project, name or flow", icon=":material/search:",
            label_visibility="collapsed",
        )  # fmt: skip
        show_list(matching(rows, words))
    chosen = [row for row in rows if st.session_state.get(box_of(row.key))]
    with about:
        show_chosen(chosen, settings)


def flow_runs(settings: StudioSettings) -> list[FlowRunSeen]:
    """Prefect's flow runs; none, which is said, while it does not answer."""
    if not settings.api_url:
        return []
    try:
        return PrefectRuns(settings.api_url).recent()
    except api_faults() as error:
        st.warning(f"Prefect does not answer at {settings.api_url}: {error}")
        return []


def recorded(settings: StudioSettings) -> list[TrackedRun]:
    """MLflow's runs; none, which is said, while the store cannot be read."""
    try:
        return tracked_runs(settings.checkpoints)
    except store_faults() as error:
        st.warning(f"MLflow's store in {settings.checkpoints} cannot be read: {error}")
        return []


def choose_from_address() -> None:
    """`?run=project/name` chooses that run, for links from elsewhere."""
    wanted = st.query_params.get("run", "")
    if wanted and st.session_state.get("run of the address") != wanted:
        st.session_state["run of the address"] = wanted
        st.session_state["find run"] = wanted


def matching(rows: Sequence[RunRow], words: str) -> list[RunRow]:
    """The rows whose title or flow has all of these words, and those that are chosen."""
    wanted = words.lower().split()
    return [
        row
        for row in rows
        if st.session_state.get(box_of(row.key))
        or all(word in f"{row.title} {row.flow} {row.state.value}".lower() for word in wanted)
    ]


def show_list(rows: Sequence[RunRow]) -> None:
    """One line for each run, with a box to choose it."""
    now = datetime.now(UTC)
    with st.container(border=True, gap=None):
        for column, heading in zip(st.columns(WIDTHS, gap="xsmall"), HEADINGS, strict=True):
            column.caption(heading)
        for row in rows:
            box, title, state, flow, began, took = st.columns(WIDTHS, gap="xsmall", vertical_alignment="center")
            box.checkbox(row.title, key=box_of(row.key), label_visibility="collapsed")
            title.markdown(f"{'↳ ' * row.depth}{escaped(row.title)}")
            state.badge(row.state.value, color=COLOURS[row.state])
            flow.caption(row.flow or "–")
            began.caption(_when(row.began, now))
            took.caption(_duration(row.seconds(now)))


def show_chosen(chosen: Sequence[RunRow], settings: StudioSettings) -> None:
    """Buttons for a single run, and what the chosen runs have written."""
    if not chosen:
        st.info("Choose a run, or several to compare them.", icon=":material/left_click:")
        return
    if len(chosen) == 1:
        show_buttons(chosen[0], settings)
    tracked = {row.title: row.tracked for row in chosen if row.tracked is not None}
    if not tracked:
        st.info("Nothing is recorded of it yet.")
        return
    curves, rollouts, checkpoints = st.tabs(["Curves", "Rollouts", "Checkpoints"])
    with curves:
        show_curves({title: run.job_dir for title, run in tracked.items()})
    with rollouts:
        show_rollouts({title: run.job_dir for title, run in tracked.items()}, settings.checkpoints)
    with checkpoints:
        for row in chosen:
            if row.tracked is not None:
                if len(tracked) > 1:
                    st.markdown(f"##### {escaped(row.title)}")
                show_checkpoints(row, row.tracked, settings)


def show_buttons(row: RunRow, settings: StudioSettings) -> None:
    """What may be done with a run, and where else it is shown."""
    st.markdown(f"#### {escaped(row.title)}")
    if row.detail:
        st.text(row.detail)
    with st.container(horizontal=True):
        for action in Action:
            why_not = hindrance(action, row)
            if st.button(action.value, key=f"{action.value} {row.key}", disabled=bool(why_not), help=why_not or None):
                done(action, row, settings)
        if row.flow_run is not None:
            page = settings.api_url.removesuffix("/api")
            st.link_button("Prefect", f"{page}/runs/flow-run/{row.flow_run.id}", icon=":material/open_in_new:")
        if row.tracked is not None and (page := served_at(settings.checkpoints)):
            address = run_page(page, row.tracked.experiment, row.tracked.id)
            st.link_button("MLflow", address, icon=":material/open_in_new:")


def done(action: Action, row: RunRow, settings: StudioSettings) -> None:
    """Do what a button says."""
    faults: tuple[type[Exception], ...] = (*api_faults(), OSError)
    try:
        st.toast(perform(action, row, settings))
    except faults as error:
        st.error(f"{action.value}: {error}")


def _when(time: datetime | None, now: datetime) -> str:
    if time is None:
        return "–"
    local = time.astimezone()
    return f"{local:%H:%M:%S}" if local.date() == now.astimezone().date() else f"{local:%d %b %H:%M}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{rest:02d}"
