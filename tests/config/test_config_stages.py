"""A stage inherits what it does not give itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trinity_core.config import Config, config_from_dict, config_from_text, stages, to_yaml
from trinity_core.config.source import merge

GOOD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "documents/quick_start.yaml").read_text())


def staged(*listed: dict[str, Any], overrides: tuple[str, ...] = (), **sections: Any) -> list[Config]:
    tree = merge(GOOD, sections) | {"stages": list(listed)}
    return stages(config_from_dict(tree, overrides))


def test_without_stages_there_is_one_run() -> None:
    config = config_from_dict(GOOD)
    assert stages(config) == [config] and stages(config)[0] is config


def test_sections_are_merged_key_by_key() -> None:
    (stage,) = staged({"stage_name": "a", "algorithm": {"optimizer": {"weight_decay": 0.5}}})
    assert (stage.algorithm.optimizer.lr, stage.algorithm.optimizer.weight_decay) == (1e-5, 0.5)
    assert stage.algorithm.algorithm_type == "grpo" and stage.algorithm.repeat_times == 8


def test_defaults_follow_from_the_stages_own_settings() -> None:
    first, second = staged({"stage_name": "a", "algorithm": {"repeat_times": 2}}, {"stage_name": "b"})
    assert (first.buffer.train_batch_size, second.buffer.train_batch_size) == (256, 1024)


def test_another_algorithm_inherits_the_optimizer_alone() -> None:
    algorithm = {"kl_loss_fn": "low_var_kl", "policy_loss_fn_args": {"clip_range": 0.1}}
    same, other = staged(
        {"stage_name": "a", "algorithm": {"algorithm_type": "grpo"}},
        {"stage_name": "b", "algorithm": {"algorithm_type": "opmd"}},
        algorithm=algorithm,
    )
    assert same.algorithm.kl_loss_fn == "low_var_kl" and same.algorithm.policy_loss_fn_args["clip_range"] == 0.1
    assert other.algorithm.kl_loss_fn == "k2" and "clip_range" not in other.algorithm.policy_loss_fn_args
    assert other.algorithm.optimizer.lr == 1e-5


def test_stage_replaces_data_sets_and_lists() -> None:
    (stage,) = staged(
        {"stage_name": "a", "buffer": {"explorer_input": {"taskset": {"path": "x"}, "eval_tasksets": []}}}
    )
    (tasks,) = stage.buffer.explorer_input.tasksets
    assert (tasks.path, tasks.subset_name, tasks.format.prompt_key) == ("x", None, "prompt")
    assert stage.buffer.explorer_input.eval_tasksets == ()


def test_stage_length_is_not_inherited() -> None:
    first, second, third = staged(
        {"stage_name": "a", "buffer": {"total_steps": 3}},
        {"stage_name": "b", "buffer": {"total_epochs": 2}},
        {"stage_name": "c"},
        trainer={"total_steps": 9},
    )
    assert [stage.buffer.total_steps for stage in (first, second, third)] == [3, None, 9]
    assert second.buffer.total_epochs == 2


def test_stage_folders_are_siblings() -> None:
    first, second = staged({"stage_name": "a"}, {"stage_name": "b"}, name="run")
    assert [stage.job_dir.name for stage in (first, second)] == ["run_a", "run_b"]
    assert first.job_dir.parent == second.job_dir.parent
    assert first.ray_namespace != second.ray_namespace


def test_overrides_reach_all_stages_or_one_by_name() -> None:
    listed = ({"stage_name": "a"}, {"stage_name": "b", "trainer": {"save_interval": 3}})
    first, second = staged(*listed, overrides=("buffer.batch_size=4", "stages.b.trainer.save_interval=5"))
    assert (first.buffer.batch_size, second.buffer.batch_size) == (4, 4)
    assert (first.trainer.save_interval, second.trainer.save_interval) == (100, 5)


def test_trainer_files_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text("actor_rollout_ref:\n  actor:\n    grad_clip: 0.25\n")
    listed = ({"stage_name": "a", "trainer": {"trainer_config_path": str(path)}}, {"stage_name": "b"})
    first, second = staged(*listed)
    assert (first.trainer.grad_clip, second.trainer.grad_clip) == (0.25, 1.0)


def test_stage_interpolates_keys_above() -> None:
    (stage,) = staged({"stage_name": "a", "buffer": {"batch_size": "${algorithm.repeat_times}"}})
    assert stage.buffer.batch_size == 8


def test_an_interpolation_sees_the_stage_it_is_used_in() -> None:
    """Its own values before those above, for its own keys and for those that it inherits."""
    listed = (
        {"stage_name": "a", "buffer": {"batch_size": 4, "train_batch_size": "${buffer.batch_size}"}},
        {"stage_name": "b", "algorithm": {"repeat_times": 2}, "buffer": {"batch_size": "${algorithm.repeat_times}"}},
        {"stage_name": "c", "synchronizer": {"sync_interval": 6}},
        {"stage_name": "d", "trainer": {"save_interval": "${..synchronizer.sync_interval}"}},
    )
    trainer = {"save_interval": "${synchronizer.sync_interval}", "trainer_config": {"trainer": {"save_freq": "x"}}}
    first, second, third, fourth = staged(*listed, synchronizer={"sync_interval": 3}, trainer=trainer)
    assert (first.buffer.batch_size, first.buffer.train_batch_size, first.trainer.save_interval) == (4, 4, 3)
    assert (second.buffer.batch_size, third.trainer.save_interval, fourth.trainer.save_interval) == (2, 6, 3)


def test_a_name_that_is_interpolated_is_the_one_of_the_whole_run() -> None:
    listed = ({"stage_name": "a"}, {"stage_name": "b"})
    first, second = staged(*listed, name="run", checkpoint_root_dir="runs/${name}")
    assert first.checkpoint_root_dir == second.checkpoint_root_dir
    assert first.checkpoint_root_dir.endswith("runs/run")


def test_yaml_of_stages_loads_to_the_same_stages() -> None:
    tree = GOOD | {"stages": [{"stage_name": "a", "algorithm": {"algorithm_type": "opmd"}}, {"stage_name": "b"}]}
    config = config_from_dict(tree)
    again = config_from_text(to_yaml(config))
    assert again == config and stages(again) == stages(config)


def test_override_finds_a_stage_by_its_name_before_its_place() -> None:
    first, second = staged({"stage_name": "1"}, {"stage_name": "2"}, overrides=("stages.1.algorithm.optimizer.lr=0.5",))
    assert (first.algorithm.optimizer.lr, second.algorithm.optimizer.lr) == (0.5, 1e-5)


def test_override_within_a_stages_data_starts_from_what_it_inherits() -> None:
    buffer = {
        "trainer_input": {"experience_buffer": {"path": "postgresql://u@db/rollouts", "max_read_timeout": 3600}},
        "explorer_input": {"eval_tasksets": [{"name": "7", "path": "x"}, {"name": "b", "path": "y"}]},
    }
    overrides = (
        "stages.a.buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time=5",
        "stages.a.buffer.explorer_input.eval_tasksets.b.path=z",
    )
    first, second = staged({"stage_name": "a"}, {"stage_name": "b"}, overrides=overrides, buffer=buffer)
    stored = [stage.buffer.trainer_input.experience_buffer for stage in (first, second)]
    assert [(one.path, one.max_read_timeout) for one in stored] == [("postgresql://u@db/rollouts", 3600)] * 2
    assert [one.replay_buffer.reuse_cooldown_time for one in stored] == [5, None]
    paths = [[one.path for one in stage.buffer.explorer_input.eval_tasksets] for stage in (first, second)]
    assert paths == [["x", "z"], ["x", "y"]]
