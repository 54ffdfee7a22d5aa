"""Which curves are drawn, and that a picture comes of them."""

from __future__ import annotations

from pathlib import Path

from trinity_core.tracking.curve import choose_curves, draw_curve
from trinity_core.tracking.metrics_file import MetricsFile, read_metrics


def test_one_curve_per_source_and_eval_set(tmp_path: Path) -> None:
    for step in (2, 1):
        MetricsFile(tmp_path, "trainer").write(step, {"reward/mean": 1, "actor/final_loss": step, "other": 1})
        MetricsFile(tmp_path, "explorer").write(step, {"reward/mean": step / 2, "actor/final_loss": 9})
        MetricsFile(tmp_path, "eval").write(step, {"eval/a/accuracy": 0.1, "eval/b/accuracy": 0.2, "eval/a/reward": 1})
    assert choose_curves(read_metrics(tmp_path)) == {
        "eval/a/accuracy": {1: 0.1, 2: 0.1},
        "eval/b/accuracy": {1: 0.2, 2: 0.2},
        "explorer: reward/mean": {1: 0.5, 2: 1.0},
        "trainer: actor/final_loss": {1: 1.0, 2: 2.0},
    }
    path = draw_curve(tmp_path, "title")
    assert path == tmp_path / "monitor" / "curve.png" and path.read_bytes().startswith(b"\x89PNG")


def test_no_metrics_give_no_curve(tmp_path: Path) -> None:
    assert draw_curve(tmp_path) is None
    MetricsFile(tmp_path, "trainer").write(1, {"unknown": 1})
    assert draw_curve(tmp_path) is None
