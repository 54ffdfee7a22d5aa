"""Metrics of runs over their steps or hours, as tables and charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os.path import commonpath
from typing import Any, NamedTuple

FIRST_ENDINGS = ("/accuracy", "reward/mean", "final_loss", "response_length/mean")
"""Endings of metrics shown by default, one metric each."""
FEW_POINTS = 60
DASHES = ([1, 0], [6, 4], [2, 3])


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
    # "format" in place of "labelExpr" writes a lone 0 as NaN.
    axis = {"labelExpr": "format(datum.value, '~s')", "tickMinStep": 1, "titlePadding": 2}
    x = {"field": by, "type": "quantitative", "scale": _scale(rows, by) | {"nice": False}, "title": by, "axis": axis}
    scale = _scale(rows, "raw") | {"type": "symlog" if is_log else "linear"}
    project = len(f"{path}/") if (path := commonpath([*curves])) else 0
    columns = max(1, 420 // (40 + 7 * (max(map(len, curves)) - project)))  # it does not wrap; 420 pixels always fit
    look = {
        "orient": "top", "title": None, "labelExpr": f"slice(datum.label, {project})", "labelLimit": 0,
        "symbolType": "stroke", "symbolOpacity": 1, "columns": columns, "padding": 0, "offset": 8,
    }  # fmt: skip
    legend = look | {"values": [run for run in curves if metric in curves[run]]} if len(curves) > 1 else None
    # The domain gives a run the same colour in all charts, even for metrics that other runs lack.
    by_run = {"field": "run", "type": "nominal", "legend": legend}
    colour = by_run | {"scale": {"domain": list(curves)}}
    # Equal curves of several runs are both seen.
    dashes = {} if is_one_run else {"strokeDash": by_run | {"scale": {"domain": list(curves), "range": DASHES}}}

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
    line = {"type": "line", "point": len(rows) <= FEW_POINTS * len(curves) and {"size": 24}}
    zoom = {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}
    layers.append(layer(line, "value", tooltip=tooltips, **dashes) | {"params": [zoom]})
    # Streamlit draws a chart first and gives it data of the top level afterwards: Vega would warn of empty scales.
    return {"height": 240, "layer": [{"data": {"values": rows}, "layer": layers}]}


def _scale(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return a scale that keeps points clear of the frame; of a single value from 0, Vega's would show hundredths."""
    values = {row[name] for row in rows}
    return {"zero": False, "padding": 6} | ({"domain": sorted([0, values.pop() or 1])} if len(values) == 1 else {})
