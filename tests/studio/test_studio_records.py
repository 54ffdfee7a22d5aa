"""What the runs page shows of runs: curves over one another, the origin of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from studio.curves import Point, chart, first_shown, joined, one_after_another, rows_of
from studio.runs import SeenRun, ancestors
from trinity_core.base.layout import JobLayout
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.results.lineage import Ancestor


def run_folder(folder: Path, model: str, scores: dict[int, float]) -> Path:
    """A run that began with a model and has saved and scored these steps."""
    layout = JobLayout(folder).create()
    update_meta(layout.trainer_meta, model=model)
    for step, score in scores.items():
        temporary = begin(layout, step)
        (temporary / "actor").mkdir()
        (temporary / "actor/model_world_size_1_rank_0.pt").write_bytes(b"weights")
        commit(layout, step, temporary)
        MetricsFile(folder, "eval").write(step, {"eval/test/accuracy": score})
    return folder


def test_curves_of_several_runs_are_laid_over_one_another(tmp_path: Path) -> None:
    for name, rewards in (("a", (0.1, 0.2)), ("b", (0.5,))):
        explorer = MetricsFile(tmp_path / name, "explorer")
        for step, reward in enumerate(rewards, 1):
            explorer.write(step, {"reward/mean": reward, "reward/zero_variance_groups": 0.0})
    MetricsFile(tmp_path / "a", "trainer").write(1, {"actor/final_loss": 2.0, "actor/kl": float("nan")})
    MetricsFile(tmp_path / "a", "explorer").write(2, {"reward/mean": 0.3})  # a resumed run
    curves = {name: SeenRun(tmp_path / name).read().curves for name in ("a", "b")}
    assert [*curves["a"]] == ["actor/final_loss", "explorer/reward/mean", "explorer/reward/zero_variance_groups"]
    rows = rows_of(curves, "explorer/reward/mean", smoothing=0.5)
    assert [(row["run"], row["step"], row["raw"]) for row in rows] == [("a", 1, 0.1), ("a", 2, 0.3), ("b", 1, 0.5)]
    assert [row["value"] for row in rows] == pytest.approx([0.1, 0.2, 0.5]) and rows[0]["minutes"] < 1
    assert rows_of(curves, "nothing") == []
    spec = chart(curves, "actor/final_loss", 0.0, "step", False)
    colour = spec["layer"][0]["layer"][-1]["encoding"]["color"]
    assert colour["scale"]["domain"] == ["a", "b"], "each run keeps its colour"
    assert colour["legend"]["values"] == ["a"], "the other run has no such metric"


def test_equal_curves_of_two_runs_are_both_seen() -> None:
    curve = {"loss": {1: Point(2.0, 0.0), 2: Point(1.0, 9.0)}}
    runs = {"p/a": curve, "p/b": curve}

    def line(is_one_run: bool) -> dict[str, Any]:
        encoding: dict[str, Any] = chart(runs, "loss", 0.0, "step", False, is_one_run)["layer"][0]["layer"][-1][
            "encoding"
        ]
        return encoding

    first, second = line(is_one_run=False)["strokeDash"]["scale"]["range"][:2]
    assert first != second and "strokeDash" not in line(is_one_run=True)
    assert line(is_one_run=False)["color"]["legend"]["labelExpr"] == "slice(datum.label, 2)", "without the project"


def test_a_pipeline_has_one_clock_and_one_line_in_a_comparison() -> None:
    """Its stages follow one another; runs that are compared begin together."""
    sft, rft = ({"loss": {1: Point(2.0, minute * 60.0), 2: Point(1.0, minute * 60.0 + 60)}} for minute in (5, 9))
    stages = one_after_another({"score": {0: Point(0.5, 0.0)}}, {"sft": (sft, 2), "rft": (rft, 2)})
    place = [(row["run"], row["step"], row["minutes"]) for row in rows_of(stages, "loss", is_one_run=True)]
    assert place == [("sft", 1, 5.0), ("sft", 2, 6.0), ("rft", 3, 9.0), ("rft", 4, 10.0)]
    assert [row["minutes"] for row in rows_of({"a": sft, "b": rft}, "loss")] == [0.0, 1.0, 0.0, 1.0]
    whole = joined(stages.values())
    assert [*whole["loss"]] == [1, 2, 3, 4] and [*whole["score"]] == [0] and [*sft["loss"]] == [1, 2]


def test_an_interval_is_a_band(tmp_path: Path) -> None:
    numbers = {"eval/test/accuracy": 0.5, "eval/test/accuracy_low": 0.4, "eval/test/accuracy_high": 0.6}
    MetricsFile(tmp_path, "eval").write(4, numbers)
    spec = chart({"a": SeenRun(tmp_path).read().curves}, "eval/test/accuracy", 0.0, "step", True)
    layers = spec["layer"][0]["layer"]
    marks = [layer["mark"]["type"] for layer in layers]
    assert marks == ["area", "line"] and layers[1]["encoding"]["y"]["scale"]["type"] == "symlog"


def test_ancestors_of_another_checkpoint_root_are_models_and_no_runs(tmp_path: Path) -> None:
    """Its name may be that of another run here."""
    sft, rft, other = tmp_path / "p/sft", tmp_path / "p/rft", tmp_path / "elsewhere/p/sft"
    for folder in (sft, other):
        run_folder(folder, "org/base", {2: 0.5})
    run_folder(rft, str(JobLayout(sft).huggingface(2)), {})
    assert [(one.folder, one.step) for one in ancestors(rft)] == [(None, 0), (sft, 2)]
    model = str(JobLayout(other).huggingface(2))
    run_folder(rft, model, {})
    assert ancestors(rft) == [Ancestor(model)]


@pytest.mark.parametrize(
    ("steps", "x", "y"),
    [([0], [0, 1], [0, 1]), ([4], [0, 4], [0, 2.0]), ([-4], [-4, 0], [-2.0, 0]), ([0, 1], None, None)],
)
def test_a_single_value_is_shown_from_0(tmp_path: Path, steps: list[int], x: object, y: object) -> None:
    """It has no range to widen: Vega would write NaN below it, and show hundredths beside it."""
    for step in steps:
        MetricsFile(tmp_path, "eval").write(step, {"eval/test/accuracy": step / 2})
    spec = chart({"a": SeenRun(tmp_path).read().curves}, "eval/test/accuracy", 0.0, "step", False)
    encoding = spec["layer"][0]["layer"][-1]["encoding"]
    assert [encoding[axis]["scale"].get("domain") for axis in "xy"] == [x, y]


def test_reward_loss_and_accuracy_are_shown_first() -> None:
    names = ["actor/final_loss", "actor/lr", "eval/test/accuracy", "explorer/reward/mean", "reward/mean"]
    assert first_shown(names) == ["eval/test/accuracy", "explorer/reward/mean", "actor/final_loss"]
    assert first_shown([]) == []
