"""The table of runs, by which the list, a pipeline and a comparison show them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from studio.runs import Run
from trinity_core.base.timing import duration

SPARKLINE = 40
"""Maximum number of points of a run's curve in the table."""
MAY_LACK = ("scores", "rewards", "note")
"""Columns that are left out if all rows lack them."""


def show_table(runs: Sequence[Run], **options: Any) -> Any:
    """Draw the table of runs; return what is selected in it."""
    columns: dict[str, Any] = {
        "run": st.column_config.TextColumn(width=156),
        "score": st.column_config.TextColumn(help="The newest held-out score, with its 95 % interval", width=140),
        "scores": st.column_config.LineChartColumn(help="Held-out scores, from first to last", width=55),
        "rewards": st.column_config.LineChartColumn(help="Mean training reward, by step", width=60),
        "began": st.column_config.DatetimeColumn(format="DD MMM HH:mm"),
    }
    rows = [table_row(run, datetime.now(UTC)) for run in runs]
    for name in ("step", "note"):
        longest = max(len(str(row[name])) for row in rows)
        columns[name] = st.column_config.TextColumn(width=24 + 6 * min(longest, 28))
    shown = [name for name in rows[0] if name not in MAY_LACK or any(row[name] for row in rows)]
    return show_rows(rows, height="content", column_config=columns, column_order=shown, **options)


def show_rows(rows: Any, **options: Any) -> Any:
    """Draw rows as every table of Studio, with further options of a dataframe; return what is selected in it."""
    return st.dataframe(rows, hide_index=True, placeholder="–", **options)


def page_of_runs() -> Any:
    return st.session_state["runs page"]


def open_runs(*names: str) -> None:
    """Go to the page of a run, or of several beside each other."""
    st.switch_page(page_of_runs(), query_params={"run": names})


def open_clicked(event: Any, runs: Sequence[Run]) -> None:
    """Open the run whose cell was clicked. Keyboard focus first selects a state, which opens nothing."""
    if (cells := event.selection.cells) and cells[0][1] != "state":
        open_runs(runs[cells[0][0]].name)


def table_row(run: Run, now: datetime) -> dict[str, object]:
    curves, seconds, archived = (run.part or run).curves, run.seconds(now), ", archived" * run.note.archived
    name = f"↳ {run.name.rpartition('/')[2]}" if run.parent else run.name
    rewards = next((curve for name, curve in curves.items() if name.endswith("reward/mean")), {})
    return {
        "state": run.state.value + archived, "run": name, "note": run.note.text,
        "score": run.score_text,
        "scores": _thinned([*run.scores.values()]), "rewards": _thinned([point.value for point in rewards.values()]),
        "step": run.progress or "–", "algorithm": run.method, "model": run.model,
        "began": run.began.astimezone() if run.began else None, "took": None if seconds is None else duration(seconds),
    }  # fmt: skip


def _thinned(values: list[float]) -> list[float]:
    return values[:: max(1, len(values) // SPARKLINE)] if len(values) > 1 else []
