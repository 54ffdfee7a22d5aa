"""Below the list of runs: what the chosen ones have written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import streamlit as st

from studio.access import TOKEN_VARIABLE
from studio.curves import Curves, file_state, first_shown, laid_over, metric_names, read_curves, short_titles
from studio.lineage import Ancestor, ancestors, checkpoints_of, made_with
from studio.run_list import RunRow
from studio.settings import StudioSettings
from studio.tracked_runs import TrackedRun, champion_step
from trinity_core.page_notes import rollouts_page
from trinity_core.view.viewed_run import RunFolders


@st.cache_data(max_entries=64, show_spinner=False)
def curves_at(job_dir: Path, state: tuple[int, int]) -> Curves:
    """`read_curves`, once for each state of the file."""
    return read_curves(job_dir)


def show_curves(runs: Mapping[str, Path]) -> None:
    """A chart for each chosen metric, with a line for each run."""
    short = short_titles([*runs])
    curves = {short[title]: curves_at(job_dir, file_state(job_dir)) for title, job_dir in runs.items()}
    names = metric_names(curves)
    if not names:
        st.info("There are no metrics yet.")
        return
    chosen = st.multiselect("Metrics", names, default=first_shown(names), key=f"metrics {' '.join(runs)}")
    for start in range(0, len(chosen), 2):
        for column, name in zip(st.columns(2), chosen[start : start + 2], strict=False):
            with column:
                st.caption(f"**{name}**")
                table = laid_over(curves, name)
                colour = "run" if len(curves) > 1 else None
                st.line_chart(table, x="step", y="value", color=colour, y_label="", height=240)


def show_rollouts(runs: Mapping[str, Path], checkpoints: Path) -> None:
    """The page of `trinity view` at these runs: their samples side by side if there are two."""
    names = [path.relative_to(checkpoints).as_posix() for path in runs.values() if path.is_relative_to(checkpoints)]
    if not names:
        st.info(f"Only runs below {checkpoints} are shown here: see `trinity view --checkpoint-dir`.")
        return
    if not (names := [name for name in names if name in RunFolders(checkpoints)]):
        st.info("There are no rollouts yet.")
        return
    run, *others = names
    address = rollouts_page(run, next(iter(others), ""), os.environ.get(TOKEN_VARIABLE, ""))
    st.link_button("Open in a tab of its own", address, icon=":material/open_in_new:")
    st.iframe(address, height=900)


def show_checkpoints(row: RunRow, tracked: TrackedRun, settings: StudioSettings) -> None:
    """A run's checkpoints with their scores, and where they come from."""
    chain = ancestors(tracked.job_dir)
    with st.container(horizontal=True, vertical_alignment="center"):
        for ancestor in chain:
            show_ancestor(ancestor, settings)
            st.markdown(":material/arrow_forward:")
        show_card(tracked.name, "this run")
    facts = made_with(tracked.params) | {"folder": settings.shown(tracked.job_dir)}
    if launch := row.launch:
        file = settings.shown(Path(launch.config)) if launch.config else ""
        facts = {"configuration": file, "overrides": " ".join(launch.overrides)} | facts
    st.table({name: escaped(value) for name, value in facts.items() if value}, border="horizontal")
    found = checkpoints_of(tracked.job_dir)
    if not found:
        st.info("It has no whole checkpoint yet.")
        return
    best = champion_step(settings.checkpoints, tracked)
    st.dataframe(
        [
            {
                "step": each.step,
                "score": "–" if each.score is None else f"{each.score:.4f}",
                "best": "★" if each.step == best else "",
                "Hugging Face": "converted" if each.is_converted else "",
                "folder": each.folder.name,
            }
            for each in found
        ],
        hide_index=True,
    )


def show_ancestor(ancestor: Ancestor, settings: StudioSettings) -> None:
    """A card of a model in the chain."""
    score = "" if ancestor.score is None else f", score {ancestor.score:.3f}"
    if ancestor.run:
        show_card(ancestor.run, f"step {ancestor.step}{score}")
    else:
        show_card("model", settings.shown(Path(ancestor.model)))


def show_card(title: str, about: str) -> None:
    """A name with a line below it."""
    with st.container(border=True, width="content", gap=None):
        st.markdown(f"**{escaped(title)}**")
        st.caption(escaped(about))


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]:$<>~#|" else letter for letter in text)
