"""Settings without effect, and settings that others change: a notice says so, by key and code."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_core.config import config_from_text, load_config, notices, stages
from trinity_core.config.notices import remarks

RECIPES = Path(__file__).parents[2] / "configs"
VERL = "trainer.trainer_config"
ACTOR = f"{VERL}.actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction=bypass"
CLIP = "algorithm.policy_loss_fn_args.clip_range=0.1"
WARMUP, TASKSET = "algorithm.optimizer.lr_warmup_steps", "buffer.explorer_input.taskset"
MODEL = "explorer.auxiliary_models"
CPU, ON_POLICY = "cluster.gpu_per_node=0", "synchronizer.sync_offset=0"


def found(recipe: str, *overrides: str) -> list[tuple[str, str]]:
    return [(finding.key, finding.code) for finding in remarks(load_config(RECIPES / f"{recipe}.yaml", overrides))]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("gsm8k/gsm8k", ()),
        ("gsm8k/gsm8k", (CLIP, f"{ACTOR}.ppo_epochs=2")),
        ("gsm8k/gsm8k", (CLIP, BYPASS)),
        ("gsm8k/gsm8k", ("synchronizer.sync_style=explorer_driven", ON_POLICY)),
        ("gsm8k/gsm8k", ("synchronizer.sync_style=dynamic_by_explorer", ON_POLICY)),
        ("gsm8k/gsm8k", (CPU, f"{MODEL}=[{{model_path: x}}]")),
    ],
)
def test_settings_with_effect_get_no_notice(recipe: str, overrides: tuple[str, ...]) -> None:
    assert found(recipe, *overrides) == []


@pytest.mark.parametrize(
    ("recipe", "overrides", "keys"),
    [
        ("gsm8k/gsm8k", (f"{VERL}.critic.ppo_mini_batch_size=4",), [f"{VERL}.critic.ppo_mini_batch_size"]),
        ("gsm8k/gsm8k", (f"{VERL}.critic.of_a_later_release=4",), [f"{VERL}.critic.of_a_later_release"]),
        ("gsm8k/gsm8k", (CLIP,), ["algorithm.policy_loss_fn_args.clip_range"]),
    ],
)
def test_settings_without_effect_get_a_notice(recipe: str, overrides: tuple[str, ...], keys: list[str]) -> None:
    assert found(recipe, *overrides) == [(key, "no-effect") for key in keys]


@pytest.mark.parametrize(
    ("recipe", "overrides", "key", "code"),
    [
        ("gsm8k/gsm8k", ("buffer.train_batch_size=100",), "buffer.train_batch_size", "info"),
        ("gsm8k/gsm8k", ("buffer.train_batch_size=2048",), "buffer.train_batch_size", "changed"),
        ("gsm8k/gsm8k", (f"{WARMUP}=20", "buffer.total_steps=10"), WARMUP, "info"),
        ("gsm8k/gsm8k", (f"{TASKSET}.rollout_args.temperature=0",), f"{TASKSET}.rollout_args.temperature", "info"),
    ],
)
def test_settings_that_others_change_get_a_notice(recipe: str, overrides: tuple[str, ...], key: str, code: str) -> None:
    assert found(recipe, *overrides) == [(key, code)]


def test_the_highest_rate_of_a_long_warm_up_is_told() -> None:
    steps = ["buffer.total_steps=10", f"{WARMUP}=20", "algorithm.optimizer.lr=1e-6"]
    [told] = notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", steps))
    assert "5e-07" in told
    for enough in ("20", "40"):
        assert not notices(load_config(RECIPES / "gsm8k/gsm8k.yaml", [f"buffer.total_steps={enough}", *steps[1:]]))


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
