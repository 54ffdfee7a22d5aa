"""Metrics of runs over their steps or hours, as tables and charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

FIRST_ENDINGS = ("/accuracy", "reward/mean", "final_loss", "response_length/mean")
"""Endings of metrics shown by default, one metric each."""
FEW_POINTS = 60


class Point(NamedTuple):
    value: float
    time: float
    """Unix seconds at which it was recorded."""


Curve = dict[int, Point]
"""One metric of a run, by step. If a resumed run wrote a step twice, the later value counts."""
Curves = dict[str, Curve]
"""Metric's full name → curve."""


def first_shown(names: Sequence[str]) -> list[str]:
    """Return the metrics shown by default: one for each of the first endings."""
    shown = (next((name for name in names if name.endswith(ending)), None) for ending in FIRST_ENDINGS)
    return list(dict.fromkeys(name for name in shown if name is not None))


def one_after_another(before: Curves, stages: Mapping[str, tuple[Curves, int]]) -> dict[str, Curves]:
    """Return the curves of each stage of a pipeline by the train steps of all, as MLflow has them: each stage, given
    with its number of steps, begins where the one before it ended. What was measured `before` is the first one's."""
    lines, begin = dict[str, Curves](), 0
    for stage, (curves, steps) in stages.items():
        moved = {name: {begin + step: point for step, point in curve.items()} for name, curve in curves.items()}
        lines[stage] = moved if lines else joined([before, moved])
        begin += steps
    return lines


def joined(parts: Iterable[Curves]) -> Curves:
    """Return the curves of several parts, each metric as one curve."""
    whole: Curves = {}
    for curves in parts:
        for name, curve in curves.items():
            whole.setdefault(name, {}).update(curve)
    return whole


def rows_of(
    curves: Mapping[str, Curves], metric: str, smoothing: float = 0.0, is_one_run: bool = False
) -> list[dict[str, Any]]:
    """Return a row per run and step: value as is and smoothed, minutes since the first step of the run, or of all if
    they are one, its interval."""
    rows: list[dict[str, Any]] = []
    for run, of_run in curves.items():
        curve, low, high = (of_run.get(name, {}) for name in (metric, f"{metric}_low", f"{metric}_high"))
        timed = joined(curves.values()) if is_one_run else of_run
        began = min((point.time for points in timed.values() for point in points.values()), default=0.0)
        smooth = None
        for step, (value, time) in curve.items():
            smooth = value if smooth is None else smoothing * smooth + (1 - smoothing) * value
            row = {"run": run, "step": step, "minutes": (time - began) / 60, "raw": value, "value": smooth}
            is_band = step in low and step in high
            rows.append(row | ({"low": low[step].value, "high": high[step].value} if is_band else {}))
    return rows


def chart(
    curves: Mapping[str, Curves], metric: str, smoothing: float, by: str, is_log: bool, is_one_run: bool = False
) -> dict[str, Any]:
    """Return a Vega-Lite chart: a line per run, or per stage of one, over `by` (`step` or `minutes`), intervals as
    bands. Altair would take a tenth of a second or more per chart."""
    rows = rows_of(curves, metric, smoothing, is_one_run)
    x = {
        "field": by, "type": "quantitative", "scale": {"zero": False, "nice": False, "padding": _padding(rows, by)},
        "title": by, "axis": {"labelExpr": "format(datum.value, '~s')", "tickMinStep": 1},  # "format": a lone 0 is NaN
    }  # fmt: skip
    scale = {"type": "symlog" if is_log else "linear", "zero": False, "padding": _padding(rows, "raw")}
    columns = max(1, 420 // (40 + 7 * max(map(len, curves))))  # it does not wrap by itself; 420 pixels always fit
    look = {"orient": "bottom", "title": None, "symbolOpacity": 1, "labelLimit": 0, "columns": columns}
    legend = look | {"values": [run for run in curves if metric in curves[run]]} if len(curves) > 1 else None
    # The domain gives a run the same colour in all charts, even for metrics that other runs lack.
    colour = {"field": "run", "type": "nominal", "scale": {"domain": list(curves)}, "legend": legend}

    def layer(mark: Mapping[str, Any], value: str, **more: Any) -> dict[str, Any]:
        y = {"field": value, "type": "quantitative", "title": None, "scale": scale, "axis": {"format": ".5~r"}}
        return {"mark": mark, "encoding": {"x": x, "y": y, "color": colour, **more}}

    layers = []
    if any("low" in row for row in rows):
        layers.append(layer({"type": "area", "opacity": 0.2}, "low", y2={"field": "high"}))
    if smoothing:
        layers.append(layer({"type": "line", "opacity": 0.25}, "raw"))
    value = {"field": "raw", "type": "quantitative", "title": "value", "format": ".4g"}
    tooltips = [{"field": "run", "type": "nominal"}, {"field": "step", "type": "quantitative"}, value]
    line = {"type": "line", "point": len(rows) <= FEW_POINTS * len(curves)}
    zoom = {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}
    layers.append(layer(line, "value", tooltip=tooltips) | {"params": [zoom]})
    # Streamlit draws a chart first and gives it data of the top level afterwards: Vega would warn of empty scales.
    return {"height": 240, "layer": [{"data": {"values": rows}, "layer": layers}]}


def _padding(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return pixels between the outermost points and the frame; a single value has no range that could be widened."""
    return 6 if len({row[name] for row in rows}) > 1 else 0
