"""The runs page: the list of all runs, the page of the run in the address, or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from studio.prefect_runs import FlowRunSeen, PrefectRuns
from studio.run_page import page_of_runs, show_comparison, show_run
from studio.runs import Run, find_runs
from studio.settings import StudioSettings
from studio.texts import duration, score_text
from tasks.retries import api_faults

LOOK_SECONDS = 5.0
SPARKLINE = 40
"""Maximum number of points of a run's curve in the list."""


def runs_page(settings: StudioSettings) -> None:
    names = st.query_params.get_all("run")
    if names:
        st.page_link(page_of_runs(), label="All runs", icon=":material/arrow_back:", query_params={})
    first_look = [known_runs(settings)]
    going = not names or any(not run.state.is_over for run in first_look[0][0] if run.name in names)

    @st.fragment(run_every=LOOK_SECONDS if going else None)
    def renewed() -> None:
        draw(names, *(first_look.pop() if first_look else known_runs(settings)), settings)

    renewed()


def known_runs(settings: StudioSettings) -> tuple[list[Run], str]:
    """Return all runs, and why Prefect's are missing if it does not answer."""
    flow_runs: list[FlowRunSeen] = []
    try:
        if settings.api_url:
            flow_runs = PrefectRuns(settings.api_url).recent()
    except api_faults() as error:
        return find_runs(settings.checkpoints), f"Prefect does not answer at {settings.api_url}: {error}"
    return find_runs(settings.checkpoints, flow_runs), ""


def draw(names: Sequence[str], runs: Sequence[Run], away: str, settings: StudioSettings) -> None:
    """Draw the part that is refreshed every few seconds while a run is in progress."""
    if away:
        st.warning(away)
    by_name = {run.name: run for run in runs}
    missing = [name for name in names if name not in by_name]
    if missing:
        st.warning(
            f"There is no run {', '.join(missing)} below {settings.checkpoints}. If it was started a moment ago, it "
            "appears here once it has begun."
        )
    chosen = [by_name[name] for name in names if name in by_name]
    if len(chosen) == 1:
        show_run(chosen[0], runs, settings)
    elif chosen:
        show_comparison(chosen, settings)
    elif not names and runs:
        show_list(runs)
    elif not names:
        st.info("No runs yet. Start one on the page Configuration, or with `make quickstart` or `trinity run`.")


def show_list(runs: Sequence[Run]) -> None:
    """Show a sortable table; a click on a cell opens the run, checkboxes select runs to compare.

    Keyboard focus first selects the first cell, a state, which must not open anything.
    """
    now, names = datetime.now(UTC), [run.name for run in runs]
    above = st.container(horizontal=True)
    event = st.dataframe(
        [_row(run, now) for run in runs],
        hide_index=True,
        height="content",
        key=f"runs {hash(tuple(names))}",  # selections are row numbers
        on_select="rerun",
        selection_mode=["multi-row", "single-cell"],
        column_config={
            "run": st.column_config.TextColumn(width="medium"),
            "curve": st.column_config.LineChartColumn(help="The scores, or else the reward, by step", width="small"),
            "began": st.column_config.DatetimeColumn(format="DD MMM HH:mm"),
        },
    )
    st.caption("Click a run's name to open it. Check two or more to compare them.")
    if (cells := event.selection.cells) and cells[0][1] != "state":
        st.switch_page(page_of_runs(), query_params={"run": names[cells[0][0]]})
    with above:
        picked = st.multiselect(
            "Find runs",
            names,
            key="found",  # selections stay when a run is added
            placeholder="Find runs by name",
            label_visibility="collapsed",
            width=420,
        )
        chosen = list(dict.fromkeys([*picked, *(names[row] for row in event.selection.rows)]))
        label = f"Compare {len(chosen)} runs" if len(chosen) > 1 else "Open"
        if chosen and st.button(label, type="primary"):
            st.switch_page(page_of_runs(), query_params={"run": chosen})


def _row(run: Run, now: datetime) -> dict[str, object]:
    files = run.files
    total = f" of {files.total_steps}" if files.total_steps else ""
    return {
        "state": run.state.value,
        "run": f"{'↳ ' if run.parent else ''}{run.name}",
        "score": score_text(files.score, files.interval),
        "curve": _sparkline(run),
        "step": f"{files.step}{total}" if files.step else "–",
        "algorithm": " → ".join(files.steps) if files.steps else files.algorithm,
        "model": files.model,
        "began": run.began.astimezone() if run.began else None,
        "took": duration(run.seconds(now)),
    }


def _sparkline(run: Run) -> list[float]:
    """Return the scores of a run that has several, else its reward, thinned out."""
    rewards = next((c for name, c in run.files.curves.items() if name.endswith("reward/mean")), None)
    values = (
        list(run.files.scores.values()) if len(run.files.scores) > 2 or rewards is None else [*rewards.values.values()]
    )
    return values[:: max(1, len(values) // SPARKLINE)]
