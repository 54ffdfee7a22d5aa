"""Which curves are drawn, and that a picture comes of them."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

from trinity_core.config import config_from_dict
from trinity_core.exchange.tracking import metrics_file
from trinity_core.exchange.tracking.curve import LearningCurve, curve_title
from trinity_core.exchange.tracking.metrics_file import MetricsFile, rewind


def test_one_curve_per_source_and_eval_set(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path, "title")
    for step in (2, 1):
        MetricsFile(tmp_path, "trainer").write(step, {"reward/mean": 1, "actor/final_loss": step, "other": 1})
        MetricsFile(tmp_path, "explorer").write(step, {"reward/mean": step / 2, "actor/final_loss": 9})
        MetricsFile(tmp_path, "eval").write(step, {"eval/a/accuracy": 0.1, "eval/b/accuracy": 0.2, "eval/a/reward": 1})
    assert curve.read() == {
        "eval/a/accuracy": {1: 0.1, 2: 0.1},
        "eval/b/accuracy": {1: 0.2, 2: 0.2},
        "explorer: reward/mean": {1: 0.5, 2: 1.0},
        "trainer: actor/final_loss": {1: 1.0, 2: 2.0},
    }
    path = curve.draw()
    assert path == tmp_path / "monitor" / "curve.png" and path.read_bytes().startswith(b"\x89PNG")


def test_an_accuracy_has_its_interval(tmp_path: Path) -> None:
    from matplotlib.axes import Axes

    for step, ends in ((1, {}), (2, {"eval/a/accuracy_low": 0.4, "eval/a/accuracy_high": 0.6}), (3, {})):
        MetricsFile(tmp_path, "eval").write(step, {"eval/a/accuracy": 0.5} | ends)
    curve = LearningCurve(tmp_path)
    with mock.patch.object(Axes, "fill_between") as band:
        assert curve.picture() is not None and [*curve.read()] == ["eval/a/accuracy"]
    assert band.call_args.args == ((2,), (0.4,), (0.6,))


def test_the_title_names_algorithm_model_and_data(tmp_path: Path) -> None:
    tree = {"project": "p", "name": "one", "model": {"model_path": "org/model", "max_model_len": 8}}
    tasks = {"explorer_input": {"taskset": {"name": "train", "path": "/data/org/sums"}}, "total_steps": 1}
    config = config_from_dict({**tree, "algorithm": {"algorithm_type": "grpo"}, "buffer": tasks})
    assert curve_title(config) == "p / one\ngrpo from org/model, on org/sums"
    later = config.with_values({"model.model_path": "/runs/p/one_sft/global_step_110/actor/huggingface"})
    assert curve_title(later) == "p / one\ngrpo from one_sft step 110, on org/sums"
    sft = {"algorithm": {"algorithm_type": "sft"}, "mode": "train"}
    rows = {"trainer_input": {"experience_buffer": {"path": "org/rows"}}, "total_steps": 1}
    assert curve_title(config_from_dict({**tree, **sft, "buffer": rows})) == "p / one\nsft from org/model, on org/rows"


def test_the_curves_have_one_axis_of_steps(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    MetricsFile(tmp_path, "explorer").write(60, {"reward/mean": 1.0})
    for step in (1, 30):
        MetricsFile(tmp_path, "trainer").write(step, {"actor/final_loss": 1.0})
    with mock.patch.object(Figure, "savefig", autospec=True) as saved:
        LearningCurve(tmp_path).picture()
    ranges = [axis.get_xlim() for axis in saved.call_args.args[0].axes]
    assert len(ranges) == 2 and ranges[0] == ranges[1]


def test_no_metrics_give_no_curve(tmp_path: Path) -> None:
    assert LearningCurve(tmp_path).draw() is None
    MetricsFile(tmp_path, "trainer").write(1, {"unknown": 1})
    assert LearningCurve(tmp_path).draw() is None


def test_a_curve_is_read_on_and_loses_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    curve, trainer = LearningCurve(tmp_path), MetricsFile(tmp_path, "trainer")
    for step in range(1, 101):
        trainer.write(step, {"actor/final_loss": 1.0})
    assert len(curve.read()["trainer: actor/final_loss"]) == 100
    trainer.write(101, {"actor/final_loss": 1.0})
    with mock.patch.object(metrics_file, "parse", wraps=metrics_file.parse) as parse:
        assert len(curve.read()["trainer: actor/final_loss"]) == 101
    assert parse.call_count == 1, "the new line alone is read"
    rewind(tmp_path, 50)
    trainer.write(51, {"actor/final_loss": 2.0})
    assert len(curve.read()["trainer: actor/final_loss"]) == curve.step == 51


def test_a_picture_keeps_no_figure(tmp_path: Path) -> None:
    """In a process with many objects they would stay until Python looks for circles, each with 3 MiB."""
    from matplotlib.figure import Figure

    MetricsFile(tmp_path, "trainer").write(1, {"actor/final_loss": 1.0})
    curve, before = LearningCurve(tmp_path), sum(isinstance(one, Figure) for one in gc.get_objects())
    curve.draw()
    assert sum(isinstance(one, Figure) for one in gc.get_objects()) <= before
