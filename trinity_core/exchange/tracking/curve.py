"""The learning curve as a picture."""

from __future__ import annotations

import base64
import gc
from io import BytesIO
from pathlib import Path

from trinity_core.base.files import private_folder, write_atomically
from trinity_core.base.layout import label_of
from trinity_core.config import Config
from trinity_core.exchange.tracking.metrics_file import MetricsReader

REWARDS = ("reward/mean", "accuracy/mean", "reward", "accuracy")
LOSSES = ("actor/final_loss", "loss")
ENDS = ("accuracy_low", "accuracy_high")
"""Per source, the first of these metrics that it has is drawn: a loss for the trainer, a reward for others."""


def curve_title(config: Config) -> str:
    """Return the run, and below it its algorithm, the model that it begins with, and its data."""
    buffer = config.buffer
    inputs = [buffer.trainer_input.experience_buffer] if config.is_supervised else buffer.explorer_input.training
    paths = dict.fromkeys(label_of(path) for data in inputs if isinstance(path := data.path, str) and path)
    on = f", on {', '.join(paths)}" if paths else ""
    model = label_of(config.model.model_path)
    return f"{config.project} / {config.name}\n{config.algorithm.algorithm_type} from {model}{on}"


def embedded(picture: bytes) -> str:
    """Return a PNG as an address that holds it, so that no file server is needed."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


class LearningCurve:
    """A run's learning curve; each drawing reads only new points.

    Uses matplotlib's object interface: no display, no global state, thread-safe.
    """

    def __init__(self, job_dir: Path | str, title: str = "") -> None:
        self.step = 0
        self._job_dir, self._title = Path(job_dir), title or Path(job_dir).name
        self._metrics = MetricsReader(job_dir, self._forget)
        self._points: dict[str, dict[str, dict[int, float]]] = {}
        """Source → metric that may be drawn → step → value."""

    def draw(self) -> Path | None:
        """Write the picture to `monitor/curve.png` and return its path; None without metrics."""
        picture = self.picture()
        if picture is None:
            return None
        target = self._job_dir / "monitor" / "curve.png"
        private_folder(target.parent)
        write_atomically(target, picture, durable=False)  # flows of the same run may draw at the same time
        return target

    def picture(self) -> bytes | None:
        """Draw reward (or loss) and eval accuracy over steps, as a PNG; None without metrics."""
        if not (curves := self.read()):
            return None
        # A figure is a reference cycle of 3 MiB. While it is drawn, it stays in the youngest generation, which is
        # collected without a walk over all imports.
        gc.disable()
        try:
            picture = self._picture(curves)
        finally:
            gc.enable()
        gc.collect(0)
        return picture

    def _picture(self, curves: dict[str, dict[int, float]]) -> bytes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        height = 2.4 * len(curves)
        figure = Figure(figsize=(7, height), dpi=110)
        FigureCanvasAgg(figure)
        # Automatic layout takes longer than drawing: four curves cost 0.7 s of CPU time instead of 0.3.
        figure.subplots_adjust(left=0.13, right=0.98, bottom=0.45 / height, top=1 - 0.45 / height, hspace=0.25)
        axes = figure.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (name, points) in zip(axes, curves.items(), strict=True):
            marker = "o" if len(points) < 30 else ""
            if within := [(step, *ends) for step in points if (ends := self._interval(name, step))]:
                axis.fill_between(*zip(*within, strict=True), alpha=0.2, linewidth=0)
            axis.plot(list(points), list(points.values()), marker=marker, markersize=3, linewidth=1.3)
            axis.set_ylabel(name, fontsize=8)
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("step")
        axes[0].set_title(self._title, fontsize=10)
        picture = BytesIO()
        figure.savefig(picture, format="png")
        return picture.getvalue()

    def read(self) -> dict[str, dict[int, float]]:
        """Return the curves to draw: one per source, and the accuracy (or reward) of each eval set."""
        for line in self._metrics.read():
            self.step = max(self.step, line.step)
            series = self._points.setdefault(line.source, {})
            for name in (
                name for name in line.metrics if name in REWARDS + LOSSES or _is_score(name) or name.endswith(ENDS)
            ):
                series.setdefault(name, {})[line.step] = line.metrics[name]
        curves: dict[str, dict[int, float]] = {}
        for source, series in sorted(self._points.items()):
            evals = sorted(name for name in series if source.startswith("eval") and _is_score(name))
            first = LOSSES + REWARDS if source == "trainer" else REWARDS + LOSSES
            for name in evals or [name for name in first if name in series][:1]:
                curves[name if source in name else f"{source}: {name}"] = dict(sorted(series[name].items()))
        return curves

    def _interval(self, name: str, step: int) -> tuple[float, float] | None:
        """Return the ends of the interval of an evaluation's accuracy, if it has one."""
        series = self._points.get("eval", {})
        low, high = (series.get(f"{name.removesuffix('accuracy')}{end}", {}).get(step) for end in ENDS)
        return None if low is None or high is None else (low, high)

    def _forget(self) -> None:
        self.step, self._points = 0, {}


def _is_score(name: str) -> bool:
    parts = name.split("/")
    return "accuracy" in parts and parts[-1] in ("accuracy", "mean")
