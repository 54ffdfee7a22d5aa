"""Below the list of runs: what the chosen ones have written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import streamlit as st

from studio.curves import Curves, file_state, first_shown, laid_over, metric_names, read_curves, short_titles
from studio.eval_samples import SampleRow, sampled_steps, samples_of, side_by_side
from studio.lineage import Ancestor, ancestors, checkpoints_of, made_with
from studio.run_list import RunRow
from studio.surroundings import Surroundings
from studio.tracked_runs import TrackedRun, champion_step
from trinity_core.tracking.rollouts import SampledRollout

MOST_SHOWN = 1200
"""Characters of an answer that are shown at once."""
A_PAGE = 5
"""Tasks that are shown at once."""


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


def show_answers(runs: Mapping[str, Path]) -> None:
    """Sampled rollouts of an evaluation (or of an explorer) of each run, at a step of its own."""
    steps = {title: sampled_steps(job_dir) for title, job_dir in runs.items()}
    sources = list(dict.fromkeys(source for own in steps.values() for source in own))
    if not sources:
        st.info("No rollouts have been kept yet.")
        return
    source = st.selectbox("Sampled by", sources, key=f"source {' '.join(runs)}")
    columns: dict[str, list[SampledRollout]] = {}
    short = short_titles([*runs])
    for place, (title, own) in zip(st.columns(len(runs)), steps.items(), strict=True):
        with place:
            columns |= choose_steps(short[title], runs[title], source, own.get(source, []))
    rows = side_by_side(columns)
    if len(rows) > A_PAGE:
        last = (len(rows) - 1) // A_PAGE + 1
        page = st.number_input(f"Tasks, page of {last}", 1, last, key=f"page {' '.join(runs)}")
        rows = rows[(int(page) - 1) * A_PAGE : int(page) * A_PAGE]
    for row in rows:
        show_task(row)


def choose_steps(title: str, job_dir: Path, source: str, steps: list[int]) -> dict[str, list[SampledRollout]]:
    """The samples of the steps that are chosen for a run, by the title of their column."""
    if not steps:
        st.caption(f"{title} has none.")
        return {}
    chosen = st.multiselect(f"Steps of {title}", steps, default=steps[-1:], key=f"steps {source} {title}")
    return {f"{title}, step {step}": samples_of(job_dir, source, step) for step in chosen}


def show_task(row: SampleRow) -> None:
    """A task, and its answers beside each other."""
    with st.container(border=True):
        st.text(row.prompt)
        reference, *places = st.columns(1 + len(row.answers))
        with reference:
            st.caption("reference")
            st.code(row.truth or "–", language=None, wrap_lines=True)
        for place, (column, answer) in zip(places, row.answers.items(), strict=True):
            with place:
                show_answer(column, answer)


def show_answer(column: str, answer: SampledRollout | None) -> None:
    """An answer with its reward. Text of a model is shown as text alone."""
    reward = answer.reward if answer is not None else None
    colour = "gray" if reward is None else "green" if reward > 0 else "red"
    told = "" if reward is None else f" · :{colour}[reward {reward:g}]"
    st.caption(f"{escaped(column)}{told}")
    st.code(answer.response[:MOST_SHOWN] if answer is not None else "–", language=None, wrap_lines=True)


def show_checkpoints(row: RunRow, tracked: TrackedRun, around: Surroundings) -> None:
    """A run's checkpoints with their scores, and where they come from."""
    chain = ancestors(tracked.job_dir)
    with st.container(horizontal=True, vertical_alignment="center"):
        for ancestor in chain:
            show_ancestor(ancestor, around)
            st.markdown(":material/arrow_forward:")
        show_card(tracked.name, "this run")
    facts = made_with(tracked.params) | {"folder": around.shown(tracked.job_dir)}
    if launch := row.launch:
        file = around.shown(Path(launch.config)) if launch.config else ""
        facts = {"configuration": file, "overrides": " ".join(launch.overrides)} | facts
    st.table({name: escaped(value) for name, value in facts.items() if value}, border="horizontal")
    found = checkpoints_of(tracked.job_dir)
    if not found:
        st.info("It has no whole checkpoint yet.")
        return
    best = champion_step(around.checkpoints, tracked)
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


def show_ancestor(ancestor: Ancestor, around: Surroundings) -> None:
    """A card of a model in the chain."""
    score = "" if ancestor.score is None else f", score {ancestor.score:.3f}"
    if ancestor.run:
        show_card(ancestor.run, f"step {ancestor.step}{score}")
    else:
        show_card("model", around.shown(Path(ancestor.model)))


def show_card(title: str, about: str) -> None:
    """A name with a line below it."""
    with st.container(border=True, width="content", gap=None):
        st.markdown(f"**{escaped(title)}**")
        st.caption(escaped(about))


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]:$<>~#|" else letter for letter in text)
