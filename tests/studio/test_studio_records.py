"""What the runs page shows of runs: curves over one another, answers side by side, the way of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from studio.curves import first_shown, laid_over, metric_names, read_curves, short_titles
from studio.eval_samples import sampled_steps, samples_of, side_by_side
from studio.lineage import Ancestor, ancestors, checkpoints_of, made_with
from trinity_core.checkpoints.commit import begin, commit
from trinity_core.checkpoints.resume import update_meta
from trinity_core.layout import JobLayout
from trinity_core.tracking import MetricsFile, SampledRollout, save_rollouts


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


def test_answers_to_the_same_task_stand_in_one_row(tmp_path: Path) -> None:
    def sample(task: int, answer: str) -> SampledRollout:
        return SampledRollout(f"question {task}", answer, 1.0, truth="4", task_index=task)

    save_rollouts(tmp_path / "a", "eval/test", 0, [sample(1, "a0"), sample(2, "b0")])
    save_rollouts(tmp_path / "a", "eval/test", 10, [sample(2, "b10"), sample(1, "a10")])
    save_rollouts(tmp_path / "a", "explorer", 3, [sample(7, "x")])
    save_rollouts(tmp_path / "b", "eval/test", 10, [sample(2, "other"), sample(3, "new")])
    assert sampled_steps(tmp_path / "a") == {"eval-test": [0, 10], "explorer": [3]}
    columns = {f"{run} {step}": samples_of(tmp_path / run, "eval-test", step) for run, step in (("a", 0), ("b", 10))}
    told = [
        (row.prompt, row.truth, [answer and answer.response for answer in row.answers.values()])
        for row in side_by_side(columns)
    ]
    assert told == [
        ("question 1", "4", ["a0", None]),
        ("question 2", "4", ["b0", "other"]),
        ("question 3", "4", [None, "new"]),
    ]
    assert samples_of(tmp_path / "b", "eval-test", 0) == []


def test_a_checkpoint_tells_the_models_that_it_came_from(tmp_path: Path) -> None:
    sft = run_folder(tmp_path / "p/all_sft", "org/base", {50: 0.25, 110: 0.5})
    converted = sft / "global_step_110/actor/huggingface"
    rft = run_folder(tmp_path / "p/all_rft", str(converted), {40: 0.75})
    assert ancestors(rft) == [Ancestor("org/base"), Ancestor(str(converted), "all_sft", 110, 0.5)]
    assert ancestors(sft) == [Ancestor("org/base")]
    assert ancestors(tmp_path / "nothing") == []


def test_a_run_that_continues_from_itself_has_an_end(tmp_path: Path) -> None:
    run = tmp_path / "p/one"
    run_folder(run, str(run / "global_step_2/actor/huggingface"), {2: 0.5})
    assert [each.run for each in ancestors(run)] == ["", "one"]


def test_checkpoints_have_scores_and_only_whole_ones_are_listed(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "one", "org/base", {2: 0.25, 4: 0.5})
    folder = JobLayout(run).huggingface(4)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (JobLayout(run).actor(2) / "model_world_size_1_rank_0.pt").unlink()
    assert [(each.step, each.score, each.is_converted) for each in checkpoints_of(run)] == [(4, 0.5, True)]


def test_data_and_settings_are_told_where_they_are_known() -> None:
    one, several = "buffer.explorer_input.taskset.path", "buffer.explorer_input.tasksets.0.path"
    evals, buffer = "buffer.explorer_input.eval_tasksets.0.path", "buffer.trainer_input.experience_buffer.path"
    params = {one: "gsm8k", several: "sums", evals: "test", buffer: "None", "seed": "1", "mode": "both", "name": "x"}
    assert made_with(params) == {"mode": "both", "seed": "1", one: "gsm8k", several: "sums"}
