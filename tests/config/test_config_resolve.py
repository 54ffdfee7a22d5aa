"""Defaults that follow from other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_core.algorithms.losses.policy_loss import policy_loss
from trinity_core.config import Config, config_from_dict, resolve, store_url, train_settings
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.resolve import replay_args
from trinity_core.config.source import merge
from trinity_core.config.validation import exact

GOOD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "documents/quick_start.yaml").read_text())
SFT = ("mode=train", "algorithm.algorithm_type=sft", "buffer.trainer_input.experience_buffer={path: data}")
PATH = "buffer.trainer_input.experience_buffer.path"


def made(*overrides: str, **sections: Any) -> Config:
    return config_from_dict(merge(GOOD, sections), overrides)


@pytest.mark.parametrize(
    ("overrides", "batch", "trained"),
    [
        ((), 128, 1024),
        (("buffer.train_batch_size=256",), 128, 256),
        (("buffer.batch_size=null", "buffer.train_batch_size=64"), 8, 64),
        (("buffer.batch_size=null",), 1, 8),
        (("algorithm.algorithm_type=rloo", "algorithm.repeat_times=4"), 128, 512),
    ],
)
def test_batch_sizes(overrides: tuple[str, ...], batch: int, trained: int) -> None:
    buffer = made(*overrides).buffer
    assert (buffer.batch_size, buffer.train_batch_size) == (batch, trained)


def test_expert_data_enlarges_the_train_batch() -> None:
    expert = "buffer.trainer_input.auxiliary_buffers.expert.path=x"
    share = "algorithm.sample_strategy_args.expert_data_ratio=0.2"
    buffer = made("algorithm.algorithm_type=mix", expert, share).buffer
    assert buffer.train_batch_size == 1280 and round(buffer.train_batch_size * 0.8) == 128 * 8


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"max_prompt_tokens": 10, "max_response_tokens": 20}, (10, 20, 30)),
        ({"max_model_len": 30, "max_response_tokens": 20}, (10, 20, 30)),
        ({"max_model_len": 30}, (29, 29, 30)),
        ({"max_model_len": 30, "max_prompt_tokens": 20, "max_response_tokens": 20}, (20, 20, 30)),
    ],
)
def test_token_limits(given: dict[str, int], resolved: tuple[int, int, int]) -> None:
    tree = {**GOOD, "model": {"model_path": "m", **given}}
    model = config_from_dict(tree).model
    assert (model.max_prompt_tokens, model.max_response_tokens, model.max_model_len) == resolved


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_brings_all_its_parts(name: str) -> None:
    known = ALGORITHMS[name]
    algorithm = resolve(Config().with_values({"algorithm.algorithm_type": name})).algorithm
    assert algorithm.policy_loss_fn == known.policy_loss_fn
    assert algorithm.policy_loss_fn_args == dict(known.policy_loss_fn_args)
    assert algorithm.rollout_correction == known.rollout_correction
    assert algorithm.repeat_times == known.default_repeat_times


def test_arguments_are_laid_over_the_algorithms() -> None:
    algorithm = made("algorithm.policy_loss_fn_args.clip_range=0.1").algorithm
    assert algorithm.policy_loss_fn_args == {"clip_range": 0.1, "clip_ratio_c": 3.0}


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_a_clip_range_replaces_the_ranges_of_both_sides(name: str) -> None:
    args = made(f"algorithm.algorithm_type={name}", "algorithm.policy_loss_fn_args.clip_range=0.1")
    assert not {"clip_range_low", "clip_range_high"} & set(args.algorithm.policy_loss_fn_args)
    one_side = "algorithm.policy_loss_fn_args={clip_range: 0.1, clip_range_high: 0.3}"
    args = made(f"algorithm.algorithm_type={name}", one_side).algorithm.policy_loss_fn_args
    assert args["clip_range_high"] == 0.3 and "clip_range_low" not in args


def test_a_replaced_part_starts_from_its_own_arguments() -> None:
    algorithm = made("algorithm.policy_loss_fn=gspo").algorithm
    assert algorithm.policy_loss_fn_args == {}


def test_a_replaced_loss_brings_its_own_aggregation() -> None:
    """Unless the user, or the algorithm for a reason other than its loss, has chosen one."""

    @policy_loss("of_tests", loss_agg_mode="seq-mean-token-sum")
    def of_tests(logprobs: Any, mask: Any) -> Any: ...

    assert made("algorithm.policy_loss_fn=of_tests").algorithm.loss_agg_mode == "seq-mean-token-sum"
    assert made("algorithm.policy_loss_fn=gspo").algorithm.loss_agg_mode == "seq-mean-token-mean"
    replaced = ("algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn=ppo")
    assert made(*replaced).algorithm.loss_agg_mode == "token-mean"
    assert made("algorithm.policy_loss_fn=gspo", "algorithm.loss_agg_mode=token-mean").algorithm.loss_agg_mode == (
        "token-mean"
    )
    normalised = ("algorithm.algorithm_type=dr_grpo", "algorithm.policy_loss_fn=cispo")
    assert made(*normalised).algorithm.loss_agg_mode == "seq-mean-token-sum-norm"


def test_arguments_of_parts_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIP", "0.1")
    algorithm = made("algorithm.policy_loss_fn_args={clip_range: '${oc.env:CLIP}', clip_range_low: null}").algorithm
    assert algorithm.policy_loss_fn_args == {"clip_range": 0.1, "clip_range_low": None, "clip_ratio_c": 3.0}


def test_mix_accepts_arguments_of_its_inner_strategy() -> None:
    expert = ("algorithm.algorithm_type=mix", "buffer.trainer_input.auxiliary_buffers.expert.path=x")
    args = "algorithm.sample_strategy_args={inner: staleness_control, max_staleness: 2}"
    loaded = made(*expert, args).algorithm.sample_strategy_args
    assert loaded == {"expert_data_ratio": 0.5, "inner": "staleness_control", "max_staleness": 2}
    queue = "buffer.trainer_input.experience_buffer.use_priority_queue=true"
    assert made(*expert, queue, "algorithm.sample_strategy_args.decay=1").algorithm.sample_strategy_args["decay"] == 1
    assert made(queue, "algorithm.sample_strategy_args.decay=1").algorithm.sample_strategy_args == {"decay": 1.0}


def test_priority_strategy_takes_the_options_of_the_replay_buffer() -> None:
    replay = {
        "reuse_cooldown_time": 60.0,
        "priority_fn": "decay_limit_randomization",
        "priority_fn_args": {"sigma": 1.0},
    }
    buffer = {"trainer_input": {"experience_buffer": {"replay_buffer": replay}}}
    enabled = "buffer.trainer_input.experience_buffer.replay_buffer.enable=true"
    drawn = replay_args(made("algorithm.sample_strategy=priority", "seed=7", buffer=buffer))
    assert drawn == replay_args(made(enabled, "seed=7", buffer=buffer)) == {"seed": 7, **replay}


def test_models_of_arguments_are_built_once() -> None:
    sizes = set()
    for _ in range(3):
        made("algorithm.sample_strategy_args.decay=1", f"{PATH.removesuffix('path')}use_priority_queue=true")
        sizes.add(exact.cache_info().currsize)
    assert len(sizes) == 1


def test_arguments_of_plugin_parts_are_untouched() -> None:
    plugged = made("plugin_dir=plugins", "algorithm.policy_loss_fn=mine", "algorithm.policy_loss_fn_args.power=2")
    assert plugged.algorithm.policy_loss_fn_args == {"power": 2}


def test_needs_critic_and_reference_follow_from_parts() -> None:
    assert made().needs_reference and not made().needs_critic
    assert not made("algorithm.kl_loss_fn=none").needs_reference
    assert not made("algorithm.kl_loss_fn_args.kl_coef=0").needs_reference
    assert made("algorithm.advantage_fn=ppo").needs_critic
    assert not made("algorithm.algorithm_type=ppo", "algorithm.advantage_fn=grpo").needs_critic


@pytest.mark.parametrize(("name", "times"), [("dpo", 2), ("sft", 1)])
def test_supervised_algorithms_set_their_repeats(name: str, times: int) -> None:
    config = made(*SFT, f"algorithm.algorithm_type={name}")
    assert config.algorithm.repeat_times == times
    assert config.buffer.trainer_input.experience_buffer.storage_type == "file"


def test_either_place_of_total_steps() -> None:
    for key in ("buffer.total_steps", "trainer.total_steps"):
        config = made(f"{key}=7")
        assert config.buffer.total_steps == 7


def test_task_sets_inherit_defaults() -> None:
    tree = merge(GOOD, {"model": {"temperature": 0.7, "top_k": 5}, "buffer": {"default_reward_fn_type": "outer"}})
    explorer_input = tree["buffer"]["explorer_input"]
    del explorer_input["taskset"]["default_workflow_type"], explorer_input["eval_tasksets"][0]["default_workflow_type"]
    explorer_input["default_workflow_type"] = "inner"
    explorer_input["eval_tasksets"][0]["default_reward_fn_type"] = "own"
    resolved = config_from_dict(tree).buffer.explorer_input
    (tasks,), (evaluation,) = resolved.tasksets, resolved.eval_tasksets
    assert resolved.taskset is None
    assert (tasks.default_workflow_type, tasks.default_reward_fn_type) == ("inner", "outer")
    assert (evaluation.default_workflow_type, evaluation.default_reward_fn_type) == ("inner", "own")
    assert (tasks.rollout_args.temperature, tasks.rollout_args.top_k, tasks.rollout_args.max_tokens) == (1.0, 5, None)
    assert (evaluation.rollout_args.temperature, evaluation.repeat_times) == (0.7, 1)


@pytest.mark.parametrize(
    ("taskset", "columns"),
    [
        ({}, ("messages", "conversations", "raw_system", "tools", "answer")),
        ({"format": {"tools_key": "functions"}}, ("messages", "conversations", "raw_system", "functions", "answer")),
        ({"format": {"prompt_key": "question"}}, ("plaintext", "messages", None, "tools", "answer")),
        ({"workflow_args": {"tools": ["calculate"]}}, ("plaintext", "messages", None, None, "response")),
    ],
)
def test_tool_calls_have_their_columns(taskset: dict[str, Any], columns: tuple[str | None, ...]) -> None:
    explorer_input = {"default_workflow_type": "toolcall_workflow", "taskset": {"path": "x", **taskset}}
    sections = {
        "explorer": {"rollout_model": {"tool_call_parser": "hermes"}},
        "buffer": {**GOOD["buffer"], "explorer_input": explorer_input},
    }
    config = config_from_dict({**GOOD, **sections})
    form = config.buffer.explorer_input.tasksets[0].format
    chosen = (form.prompt_type, form.messages_key, form.system_prompt_key, form.tools_key, form.response_key)
    assert chosen == columns and resolve(config) == config
    again = config_from_dict(config.model_dump(mode="json"))
    assert again.buffer.explorer_input.tasksets[0].format == form, "as it is when written down and read again"


def test_the_other_spelling_of_task_selector() -> None:
    key = "buffer.explorer_input.taskset.data_selector"
    (taskset,) = made(f"{key}.selector_type=priority", f"{key}.feature_keys=[p]").buffer.explorer_input.tasksets
    assert (taskset.task_selector.selector_type, taskset.task_selector.feature_keys) == ("priority", ("p",))


@pytest.mark.parametrize(("mode", "method"), [("both", "nccl"), ("explore", "checkpoint"), ("bench", "checkpoint")])
def test_the_sync_method_follows_from_the_mode(mode: str, method: str) -> None:
    assert made(f"mode={mode}", "synchronizer.sync_method=null").synchronizer.sync_method == method


def test_auxiliary_models_have_a_length() -> None:
    models = "[{model_path: a, max_prompt_tokens: 5, max_response_tokens: 6}, {model_path: b}]"
    auxiliary = made(f"explorer.auxiliary_models={models}", "cluster.gpu_per_node=8").explorer.auxiliary_models
    assert [model.max_model_len for model in auxiliary] == [11, 2048]


def test_the_job_folder_is_absolute_once_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = made("checkpoint_root_dir=runs", "project=p", "name=n")
    folder = Path("runs/p/n").absolute()
    monkeypatch.chdir(tmp_path)
    assert config.job_dir == folder and config.ray_namespace == "p/n"


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("sqlite:///gsm8k.db", "sqlite:///{buffer}/gsm8k.db"),
        ("sqlite:////data/x.db", "sqlite:////data/x.db"),
        ("null", "sqlite:///{buffer}/explorer_output.db"),
        ("sqlite:///", "sqlite:///{buffer}/explorer_output.db"),
        ("sqlite:///~/x.db", "sqlite:////home/me/x.db"),
        ("/data/x.sqlite3", "sqlite:////data/x.sqlite3"),
        ("postgresql+psycopg://me@host/db", "postgresql+psycopg://me@host/db"),
        ("backup.json", "sqlite:///{buffer}/explorer_output.db"),
    ],
)
def test_where_experiences_are_stored(path: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = made(f"{PATH}={path}")
    assert store_url(config) == url.format(buffer=config.job_dir / "buffer")


def test_data_set_path_is_not_the_store() -> None:
    config = made(*SFT)
    assert store_url(config) == f"sqlite:///{config.job_dir}/buffer/explorer_output.db"


def test_verl_keys_fill_native_settings_not_given() -> None:
    verl = {
        "actor_rollout_ref": {
            "model": {"enable_gradient_checkpointing": True},
            "actor": {
                "grad_clip": 0.5,
                "ppo_epochs": 3,
                "optim": {"lr": 5e-6, "weight_decay": 0.1, "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.2},
                "fsdp_config": {"param_offload": True},
                "checkpoint": {"save_contents": ["model", "hf_model"]},
            },
        },
        "critic": {"model": {"path": "critic"}},
        "trainer": {"max_actor_ckpt_to_keep": 2, "critic_warmup": 4},
    }
    config = made("algorithm.algorithm_type=ppo", trainer={"trainer_config": verl})
    optimizer = config.algorithm.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.lr_warmup_steps_ratio) == (1e-5, 0.1, 0.2)
    assert (config.trainer.grad_clip, config.trainer.max_checkpoints_to_keep) == (0.5, 2)
    assert config.model.critic_model_path == "critic"
    trained = train_settings(config)
    assert (trained.epochs, trained.param_offload, trained.optimizer_offload) == (3, True, False)
    assert trained.gradient_checkpointing and trained.save_huggingface == "always"
    assert trained.critic is not None
    assert (trained.critic.model_path, trained.critic.epochs, trained.critic.warmup_steps) == ("critic", 3, 4)
    assert trained.critic.gradient_checkpointing, "by default as for the policy"


def test_layers_are_not_compiled_by_default_where_it_is_untried() -> None:
    assert train_settings(made()).torch_compile is None
    shared = "trainer.ulysses_sequence_parallel_size=2", "cluster.gpu_per_node=3"
    for untried in (("trainer.zero_stage=3",), shared):
        assert train_settings(made(*untried)).torch_compile is False
    in_4_bits = "model.lora_configs=[{lora_rank: 8, load_in_4bit: true}]"
    assert (
        train_settings(made(in_4_bits, "cluster.gpu_per_node=1", "synchronizer.sync_method=memory")).torch_compile
        is False
    )
    assert train_settings(made(*shared, "trainer.torch_compile=true")).torch_compile


def test_token_sums_are_divided_by_the_longest_response() -> None:
    assert made("algorithm.algorithm_type=dr_grpo").algorithm.loss_agg_mode_args == {"normalizer": 1024}
    dr_grpo = made("algorithm.algorithm_type=dr_grpo", "algorithm.loss_agg_mode_args={normalizer: 7}")
    assert dr_grpo.algorithm.loss_agg_mode_args == {"normalizer": 7}
    assert resolve(dr_grpo) == dr_grpo
    chosen = made("algorithm.loss_agg_mode=seq-mean-token-sum-norm", "model.max_response_tokens=500")
    assert chosen.algorithm.loss_agg_mode_args == {"normalizer": 500}
    assert made().algorithm.loss_agg_mode_args == {}
