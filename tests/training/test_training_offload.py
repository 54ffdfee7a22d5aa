"""Where an engine shares the trainer's GPU: states move to the machine's memory and back, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from saving_helpers import save

from trinity_core.training.distributed import join, meeting_point

pytestmark = pytest.mark.slow

OPTIMIZER_OFFLOAD = {"trainer__trainer_config__actor_rollout_ref__actor__fsdp_config__optimizer_offload": True}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"trainer__zero_stage": 2},
        {"trainer__zero_stage": 2, "trainer__dtype": "bfloat16"},
        {"trainer__zero_stage": 2, "trainer__dtype": "bfloat16", **OPTIMIZER_OFFLOAD},
        {"algorithm": "ppo"},
        {"trainer__zero_stage": 2, "trainer__dtype": "bfloat16", "model__lora_configs": "[{name: a, lora_rank: 4}]"},
    ],
)
def test_steps_between_moves_are_the_same_steps(make_config, tmp_path, overrides):
    """Moved before and after the first step, and saved while its states are away: bit for bit the same."""
    from trinity_core.training.checkpoint import load
    from trinity_core.training.learner import Learner
    from trinity_core.training.state import optimizer_state, weights

    ranks = join(0, 1, *meeting_point(), use_gpu=False)

    def learner():
        torch.manual_seed(0)
        return Learner(make_config(**overrides), 4, ranks)

    def state(of):
        return {name: tensor.clone() for name, tensor in (*weights(of.engine), *optimizer_state(of.engine))}

    plain, moved = learner(), learner()
    for step in (1, 2):
        moved.offload()
        if step == 2:
            (tmp_path / "saved").mkdir()
            save(moved, 1, tmp_path / "saved")
        moved.reload()
        batch = make_batch(step)
        here, there = plain.step(batch, step), moved.step(batch, step)
        for name in here:
            assert name.startswith("timing_s/") or here[name] == there[name], name
    before, after = state(plain), state(moved)
    assert before.keys() == after.keys() and any(name.startswith("exp_avg") for name in before)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name

    resumed = learner()
    assert load(resumed, tmp_path / "saved").step == 1
    resumed.step(make_batch(2), 2)
    for name, tensor in state(resumed).items():
        assert torch.equal(tensor, before[name]), name
