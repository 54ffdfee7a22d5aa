"""The runs page: the list of all runs, the page of the run in the address, or several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from studio.run_page import show_comparison, show_run
from studio.run_table import open_clicked, open_runs, page_of_runs, show_table
from studio.runs import Run, known_runs
from studio.settings import StudioSettings
from studio.texts import escaped
from trinity_core.base.errors import TrinityError
from trinity_core.exchange.tracking.notes import delete

LOOK_SECONDS = 5.0
TICKED = "ticked"
"""Key of the address for the names of ticked runs."""


def runs_page(settings: StudioSettings) -> None:
    names = st.query_params.get_all("run")
    if names:
        st.set_page_config(page_title=" · ".join(names))
        st.page_link(page_of_runs(), label="All runs", icon=":material/arrow_back:", query_params={})
    first_look = [known_runs(settings)]
    going = not names or not {*names} <= {run.name for run in first_look[0][0] if run.state.is_over}

    @st.fragment(run_every=LOOK_SECONDS if going else None)
    def renewed() -> None:
        draw(names, *(first_look.pop() if first_look else known_runs(settings)), settings)

    renewed()


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
        show_comparison(chosen, runs, settings)
    elif not names and runs:
        show_list(runs)
    elif not names:
        st.info("No runs yet. Start one on the page Configuration, or with `trinity quickstart` or `trinity run`.")


def show_list(runs: Sequence[Run]) -> None:
    """Show a sortable table; a click on a cell opens the run, checkboxes select runs to compare, archive or delete.
    Ticks are kept in the address, because Streamlit's selections are row numbers, which a new run changes."""
    above = st.container(horizontal=True, vertical_alignment="center")
    archived = [run for run in runs if run.note.archived]
    shows_all = bool(archived) and above.toggle(f"Archived ({len(archived)})", key="archived", bind="query-params")
    listed = [run for run in runs if shows_all or not run.note.archived]
    names = [run.name for run in listed]
    if not listed:
        st.info("All runs are archived.")
        return
    key = f"runs {hash(tuple(names))}"
    if st.session_state.get(TICKED, ("", []))[0] != key:
        ticked = [names.index(name) for name in st.query_params.get_all(TICKED) if name in names]
        st.session_state[TICKED] = (key, ticked)
    selected, mode = {"selection": {"rows": st.session_state[TICKED][1]}}, ["multi-row", "single-cell"]
    event = show_table(listed, key=key, on_select="rerun", selection_mode=mode, selection_default=selected)
    st.caption("Click a run (any cell but its state) to open it. Tick two or more to compare them.")
    open_clicked(event, listed)
    rows = [names[row] for row in event.selection.rows]
    if rows != st.query_params.get_all(TICKED):
        st.query_params[TICKED] = rows
    with above:
        # By its key the selection stays when a run is added.
        hint: dict[str, Any] = {"placeholder": "Find runs by name", "label_visibility": "collapsed"}
        picked = st.multiselect("Find runs", names, key="found", width=420, **hint)
        by_name = {run.name: run for run in listed}
        if chosen := [by_name[name] for name in dict.fromkeys([*picked, *rows])]:
            show_actions(chosen, runs)


def show_actions(chosen: Sequence[Run], runs: Sequence[Run]) -> None:
    """Show what can be done with ticked runs: a pipeline stands for its stages too."""
    label = f"Compare {len(chosen)} runs" if len(chosen) > 1 else "Open"
    if st.button(label, type="primary"):
        open_runs(*(run.name for run in chosen))
    names = {run.name for run in chosen}
    whole = [run for run in runs if run.folder is not None and names & {run.name, run.parent}]
    if not whole:
        return
    is_archived = all(run.note.archived for run in whole)
    if st.button("Restore" if is_archived else "Archive"):
        for run in whole:
            assert run.folder is not None
            replace(run.note, archived=not is_archived).save(run.folder)
        st.query_params[TICKED] = []
        st.rerun()
    names = {run.name for run in whole} | {run.parent for run in whole}  # a pipeline needs its earlier stages
    is_over = all(run.state.is_over for run in runs if run.name in names)
    with st.popover("Delete", disabled=not is_over):
        if is_over:
            confirm_delete(whole, runs)


def confirm_delete(chosen: Sequence[Run], runs: Sequence[Run]) -> None:
    st.markdown("\n".join(f"- {escaped(run.name)}: `{run.folder.resolve()}`" for run in chosen if run.folder))
    st.warning("Checkpoints, rollouts and metrics are removed from the disk. MLflow keeps its own records.")
    names = {run.name for run in chosen}
    if heirs := [run.name for run in runs if run.name not in names and run.source[0] in names]:
        st.warning(f"Begun from a checkpoint of these, and not to be resumed without it: {', '.join(heirs)}.")
    if st.button("Delete for good", type="primary"):
        try:
            delete(run.folder for run in chosen if run.folder is not None)
        except (OSError, TrinityError) as error:
            st.error(str(error))
        else:
            st.rerun()
