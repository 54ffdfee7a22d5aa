"""What the runs page shows of runs: curves over one another, the way of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from studio.curves import first_shown, laid_over, metric_names, read_curves, short_titles
from trinity_core.checkpoints.commit import begin, commit
from trinity_core.checkpoints.resume import update_meta
from trinity_core.layout import JobLayout
from trinity_core.tracking import MetricsFile


def run_folder(folder: Path, model: str, scores: dict[int, float]) -> Path:
    """A run that began with a model and has saved and scored these steps."""
    layout = JobLayout(folder).create()
    update_meta(layout.trainer_meta, model=model)
    for step, score in scores.items():
        made = begin(layout, step)
        (made / "actor").mkdir()
        (made / "actor/model_world_size_1_rank_0.pt").write_bytes(b"weights")
        commit(layout, step, made)
        MetricsFile(folder, "eval").write(step, {"eval/test/accuracy": score})
    return folder


def test_curves_of_several_runs_are_laid_over_one_another(tmp_path: Path) -> None:
    for name, rewards in (("a", (0.1, 0.2)), ("b", (0.5,))):
        explorer = MetricsFile(tmp_path / name, "explorer")
        for step, reward in enumerate(rewards, 1):
            explorer.write(step, {"reward/mean": reward, "reward/zero_variance_groups": 0.0})
    MetricsFile(tmp_path / "a", "trainer").write(1, {"actor/final_loss": 2.0, "actor/kl": float("nan")})
    MetricsFile(tmp_path / "a", "explorer").write(2, {"reward/mean": 0.3})  # a resumed run
    curves = {name: read_curves(tmp_path / name) for name in ("a", "b")}
    assert metric_names(curves) == ["actor/final_loss", "explorer/reward/mean", "explorer/reward/zero_variance_groups"]
    assert laid_over(curves, "explorer/reward/mean") == {
        "step": [1, 2, 1], "value": [0.1, 0.3, 0.5], "run": ["a", "a", "b"],
    }  # fmt: skip
    assert laid_over(curves, "actor/final_loss")["run"] == ["a"]
    assert laid_over(curves, "nothing") == {"step": [], "value": [], "run": []}


def test_reward_loss_and_accuracy_are_shown_first() -> None:
    names = ["actor/final_loss", "actor/lr", "eval/test/accuracy", "explorer/reward/mean", "reward/mean"]
    assert first_shown(names) == ["eval/test/accuracy", "explorer/reward/mean", "actor/final_loss"]
    assert first_shown([]) == []


def test_legends_leave_out_the_project_where_names_differ() -> None:
    assert short_titles(["p/a", "q/b"]) == {"p/a": "a", "q/b": "b"}
    assert short_titles(["p/a", "q/a"]) == {"p/a": "p/a", "q/a": "q/a"}
