"""The learning curve as a picture."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from trinity_core.files import write_atomically
from trinity_core.tracking.metrics_file import MetricLine, read_metrics

REWARDS = ("reward/mean", "accuracy/mean", "reward", "accuracy")
LOSSES = ("actor/final_loss", "loss")
"""The first of these that a source has is drawn for it: a loss for the trainer, a reward for others."""


def draw_curve(job_dir: Path | str, title: str = "", lines: list[MetricLine] | None = None) -> Path | None:
    """Draw reward (or loss) and the eval's accuracy over steps into `monitor/curve.png`; None if there are no metrics.

    `lines`: the run's metrics, if they have been read. Uses matplotlib's object interface: no display, no global state,
    safe in a thread.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = choose_curves(read_metrics(job_dir) if lines is None else lines)
    if not curves:
        return None
    figure = Figure(figsize=(7, 2.4 * len(curves)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), 1, squeeze=False, sharex=False)[:, 0]
    for axis, (name, points) in zip(axes, curves.items(), strict=True):
        marker = "o" if len(points) < 30 else ""
        axis.plot(list(points), list(points.values()), marker=marker, markersize=3, linewidth=1.3)
        axis.set_ylabel(name, fontsize=8)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    axes[0].set_title(title or Path(job_dir).name, fontsize=10)
    target = Path(job_dir) / "monitor" / "curve.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(target, picture.getvalue(), durable=False)  # flows of the same run draw it at the same time
    return target


def choose_curves(lines: list[MetricLine]) -> dict[str, dict[int, float]]:
    """The curves to draw: one per source, and the accuracy (or reward) of each eval set."""
    curves: dict[str, dict[int, float]] = {}
    for source in sorted({line.source for line in lines}):
        own = [line for line in lines if line.source == source]
        names = {name for line in own for name in line.metrics}
        evals = sorted(name for name in names if source.startswith("eval") and _is_score(name))
        first = LOSSES + REWARDS if source == "trainer" else REWARDS + LOSSES
        for name in evals or [name for name in first if name in names][:1]:
            points = {line.step: line.metrics[name] for line in own if name in line.metrics}
            curves[name if source in name else f"{source}: {name}"] = dict(sorted(points.items()))
    return curves


def _is_score(name: str) -> bool:
    parts = name.split("/")
    return "accuracy" in parts and parts[-1] in ("accuracy", "mean")
