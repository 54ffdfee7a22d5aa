"""Settings without effect, and settings that others change: a notice with key and code."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_core.base.errors import TrinityError
from trinity_core.config import config_from_text, load_config, notices, stages, to_yaml
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.notices import remarks

RECIPES = Path(__file__).parents[2] / "configs"
VERL = "trainer.trainer_config"
ACTOR = f"{VERL}.actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction=bypass"
LOSS = "algorithm.policy_loss_fn_args"
CLIP = f"{LOSS}.clip_range=0.1"
CHORD = ("algorithm.algorithm_type=mix_chord", "buffer.trainer_input.auxiliary_buffers.expert.path=x")
MODEL = "explorer.auxiliary_models"
WEIGHTS = f"{ACTOR}.fsdp_config.param_offload"
CRITIC = f"{VERL}.critic.model.fsdp_config.param_offload"
QLORA = "model.lora_configs=[{lora_rank: 8, load_in_4bit: true}]"
INPUT, REPLAY = "buffer.explorer_input", "buffer.trainer_input.experience_buffer.replay_buffer"
SELECTOR = f"{INPUT}.taskset.task_selector"
TWO = f"{INPUT}.tasksets=[{{path: x, task_selector: {{seed: 1}}}}, {{path: y}}]"
CPU, ON_POLICY = "cluster.gpu_per_node=0", "synchronizer.sync_offset=0"


def found(*overrides: str) -> list[tuple[str, str]]:
    return [(finding.key, finding.code) for finding in remarks(load_config(RECIPES / "gsm8k/gsm8k.yaml", overrides))]


def with_type(name: str, *overrides: str) -> tuple[str, ...]:
    return (f"algorithm.algorithm_type={name}", *(f"algorithm.{override}" for override in overrides))


UPDATES = f"{ACTOR}.ppo_epochs=2"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (CLIP, UPDATES),
        (CLIP, BYPASS),
        (f"{WEIGHTS}=true",),
        ("trainer.param_offload=true", "trainer.zero_stage=3"),
        (CPU, f"{WEIGHTS}=true"),
        (*CHORD, f"{LOSS}.mu_peak=0.5", f"{LOSS}.mu_valley=0.5"),
        (*CHORD, f"{LOSS}.mu_peak=0.5", f"{LOSS}.mu_decay_steps=10"),
        ("synchronizer.sync_style=explorer_driven", ON_POLICY),
        ("synchronizer.sync_style=dynamic_by_explorer", ON_POLICY),
        (CPU, f"{MODEL}=[{{model_path: x}}]"),
        (f"{SELECTOR}.selector_type=shuffle", f"{SELECTOR}.seed=1"),
        (f"{INPUT}.taskset=null", TWO),
        (f"{INPUT}.eval_tasksets=[{{path: x, weight_by_step: {{}}, task_selector: {{selector_type: sequential}}}}]",),
        (f"{REPLAY}.enable=true", f"{REPLAY}.reuse_cooldown_time=9"),
        ("algorithm.sample_strategy=priority", f"{REPLAY}.priority_fn_args.decay=3"),
        (f"{REPLAY}.enable=false", f"{REPLAY}.priority_fn=linear_decay", f"{REPLAY}.reuse_cooldown_time=null"),
        with_type("dapo", "kl_loss_fn=k2", "kl_loss_fn_args.kl_coef=0.01"),
        with_type("dapo", "kl_loss_fn_args={kl_coef: 0.0, adaptive: false}"),
        with_type("grpo", "kl_loss_fn_args={adaptive: true, target_kl: 0.1, horizon: 100}"),
        with_type("grpo", "entropy_loss_fn_args={target_entropy: 0.0, entropy_coef_step: 0.1}"),
        with_type("raft", "advantage_fn_args={selection: threshold, threshold: 0.5}"),
        with_type("rec", "policy_loss_fn_args={regularizer: k2, regularizer_coef: 0.1, clip_mode: ring}"),
        with_type("rec", "policy_loss_fn_args={clip_mode: two-side, epsilon_low: 0.3}"),
        with_type("dppo", "rollout_correction=bypass"),
        with_type("opmd", "rollout_correction=tis_sequence"),
    ],
)
def test_settings_with_effect_get_no_notice(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("trainer.param_offload=true", "trainer.zero_stage=2"), WEIGHTS),
        (("trainer.param_offload=true", "trainer.torch_compile=true"), WEIGHTS),
        ((f"{WEIGHTS}=true", "cluster.gpu_per_node=1"), WEIGHTS),
        ((f"{WEIGHTS}=true", "synchronizer.sync_method=memory", QLORA), WEIGHTS),
        ((f"{CRITIC}=true", "algorithm.algorithm_type=ppo", "trainer.zero_stage=0"), CRITIC),
        ((f"{VERL}.critic.ppo_mini_batch_size=4",), f"{VERL}.critic.ppo_mini_batch_size"),
        ((f"{VERL}.critic.of_a_later_release=4",), f"{VERL}.critic.of_a_later_release"),
        ((CLIP,), f"{LOSS}.clip_range"),
        ((*CHORD, f"{LOSS}.mu_peak=0.5"), f"{LOSS}.mu_peak"),
        ((f"{INPUT}.eval_tasksets=[{{path: x, weight: 0.3}}]",), f"{INPUT}.eval_tasksets[0].weight"),
        (
            (f"{INPUT}.eval_tasksets=[{{path: x, weight_by_step: {{1: 2}}}}]",),
            f"{INPUT}.eval_tasksets[0].weight_by_step",
        ),
        (
            (f"{INPUT}.eval_tasksets=[{{path: x, task_selector: {{seed: 1}}}}]",),
            f"{INPUT}.eval_tasksets[0].task_selector",
        ),
        ((f"{SELECTOR}.selector_type=sequential", f"{SELECTOR}.seed=1"), f"{SELECTOR}.seed"),
        ((f"{REPLAY}.priority_fn=decay_limit_randomization",), f"{REPLAY}.priority_fn"),
        ((f"{REPLAY}.priority_fn_args.decay=3", f"{REPLAY}.enable=false"), f"{REPLAY}.priority_fn_args"),
        ((f"{REPLAY}.reuse_cooldown_time=9",), f"{REPLAY}.reuse_cooldown_time"),
        ((UPDATES, LOSS + "={clip_range: 0.1, clip_range_low: 0.1, clip_range_high: 0.2}"), f"{LOSS}.clip_range"),
    ],
)
def test_settings_without_effect_get_a_notice(overrides: tuple[str, ...], key: str) -> None:
    assert found(*overrides) == [(key, "no-effect")]


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("dapo", "kl_loss_fn_args.kl_coef=0.01"),
        ("clip_cov", "kl_loss_fn_args.kl_coef=0.001"),
        ("grpo", "kl_penalty_fn_args.kl_coef=0.01"),
        ("raft", "entropy_loss_fn_args.entropy_coef=0.01"),
        ("grpo", "kl_loss_fn_args.target_kl=0.1"),
        ("raft", "advantage_fn_args.threshold=0"),
        ("rec", "policy_loss_fn_args.regularizer_coef=0.1"),
        ("rec", "policy_loss_fn_args.epsilon_low=0.3"),
        ("dr_grpo", "advantage_fn_args.epsilon=0.1"),
        ("dppo", "rollout_correction=icepop"),
        ("topr", "rollout_correction=tis_sequence"),
        ("raft", "rollout_correction=tis_token"),
        ("opmd", "rollout_correction=bypass"),
    ],
)
def test_parts_that_are_off_and_their_arguments_get_a_notice(name: str, override: str) -> None:
    assert found(*with_type(name, override)) == [(f"algorithm.{override.partition('=')[0]}", "no-effect")]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_file_of_a_run_gets_no_notice_of_an_algorithms_own_defaults(name: str) -> None:
    overrides = [*with_type(name), UPDATES]
    if not ALGORITHMS[name].uses_rollouts:
        buffer = "buffer.trainer_input.experience_buffer"
        overrides += ["mode=train", f"{buffer}.path=x", f"{buffer}.storage_type=file"]
    overrides += ["buffer.trainer_input.auxiliary_buffers.expert.path=x"] if name.startswith("mix") else []
    overrides += ["algorithm.advantage_fn_args.weights={a: 1}"] if name == "gdpo" else []
    config = config_from_text(to_yaml(load_config(RECIPES / "gsm8k/gsm8k.yaml", overrides)))
    assert [finding for finding in remarks(config) if finding.key.startswith("algorithm")] == []


def test_what_to_write_instead_is_named() -> None:
    def said(*overrides: str) -> list[str]:
        return notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", overrides))

    assert "buffer.train_batch_size" in said(f"{VERL}.critic.ppo_mini_batch_size=4")[0]
    for key, here in (
        ("trainer.val_only=true", "mode: bench"),
        ("actor_rollout_ref.actor.strategy=megatron", "zero_stage"),
    ):
        with pytest.raises(TrinityError, match=here):
            said(f"{VERL}.{key}")


@pytest.mark.parametrize(("size", "code"), [(100, "info"), (2048, "changed")])
def test_settings_that_others_change_get_a_notice(size: int, code: str) -> None:
    assert found(f"buffer.train_batch_size={size}") == [("buffer.train_batch_size", code)]


def test_keys_without_effect_share_a_sentence() -> None:
    unread = [f"{VERL}.critic.ppo_mini_batch_size", "monitor.detailed_stats"]
    [told] = notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"{key}=4" for key in unread]))
    assert all(key in told for key in unread)


def test_a_stage_has_the_notices_of_its_own_keys_and_of_those_above() -> None:
    text = (RECIPES / "gsm8k/gsm8k.yaml").read_text() + (
        "stages:\n"
        "  - {stage_name: a, buffer: {pad_token_id: 3}, explorer: {max_waiting_steps: 2}}\n"
        "  - {stage_name: b}\n"
    )
    config = config_from_text(text, ["monitor.detailed_stats=true"])
    keys = [{finding.key for finding in remarks(stage)} for stage in stages(config)]
    own = {"buffer.pad_token_id", "explorer.max_waiting_steps"}
    assert keys == [{"monitor.detailed_stats", *own}, {"monitor.detailed_stats"}]
    assert "pad_token_id" not in stages(config)[0].given["buffer"]
