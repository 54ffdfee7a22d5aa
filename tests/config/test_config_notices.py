"""Settings without effect, and settings that others change: a notice with key and code."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_core.base.errors import TrinityError
from trinity_core.config import config_from_text, load_config, notices, stages
from trinity_core.config.notices import remarks

RECIPES = Path(__file__).parents[2] / "configs"
VERL = "trainer.trainer_config"
ACTOR = f"{VERL}.actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction=bypass"
LOSS = "algorithm.policy_loss_fn_args"
CLIP = f"{LOSS}.clip_range=0.1"
CHORD = ("algorithm.algorithm_type=mix_chord", "buffer.trainer_input.auxiliary_buffers.expert.path=x")
MODEL = "explorer.auxiliary_models"
CPU, ON_POLICY = "cluster.gpu_per_node=0", "synchronizer.sync_offset=0"


def found(*overrides: str) -> list[tuple[str, str]]:
    return [(finding.key, finding.code) for finding in remarks(load_config(RECIPES / "gsm8k/gsm8k.yaml", overrides))]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (CLIP, f"{ACTOR}.ppo_epochs=2"),
        (CLIP, BYPASS),
        (*CHORD, f"{LOSS}.mu_peak=0.5", f"{LOSS}.mu_valley=0.5"),
        (*CHORD, f"{LOSS}.mu_peak=0.5", f"{LOSS}.mu_decay_steps=10"),
        ("synchronizer.sync_style=explorer_driven", ON_POLICY),
        ("synchronizer.sync_style=dynamic_by_explorer", ON_POLICY),
        (CPU, f"{MODEL}=[{{model_path: x}}]"),
    ],
)
def test_settings_with_effect_get_no_notice(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((f"{VERL}.critic.ppo_mini_batch_size=4",), [f"{VERL}.critic.ppo_mini_batch_size"]),
        ((f"{VERL}.critic.of_a_later_release=4",), [f"{VERL}.critic.of_a_later_release"]),
        ((CLIP,), ["algorithm.policy_loss_fn_args.clip_range"]),
        ((*CHORD, f"{LOSS}.mu_peak=0.5"), [f"{LOSS}.mu_peak"]),
    ],
)
def test_settings_without_effect_get_a_notice(overrides: tuple[str, ...], keys: list[str]) -> None:
    assert found(*overrides) == [(key, "no-effect") for key in keys]


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


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        (("buffer.train_batch_size=100",), "buffer.train_batch_size", "info"),
        (("buffer.train_batch_size=2048",), "buffer.train_batch_size", "changed"),
    ],
)
def test_settings_that_others_change_get_a_notice(overrides: tuple[str, ...], key: str, code: str) -> None:
    assert found(*overrides) == [(key, code)]


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
