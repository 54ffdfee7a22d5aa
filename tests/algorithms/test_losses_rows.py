"""Losses whose rows have roles: DPO's pairs and MIX's experts."""

import math

import pytest
import torch
from raising import raising

from trinity_core.algorithms import POLICY_LOSSES, InputError
from trinity_core.algorithms.losses.supervised import mu_at

MASK = torch.tensor([[True, True, False], [True, False, False], [False, True, True], [True, True, True]])
LOGPROBS = torch.tensor([[-1.0, -2.0, 9], [-1.5, 9, 9], [9, -0.5, -0.7], [-3.0, -1.0, -1.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.1, -2.2, 0], [-1.2, 0, 0], [0, -0.6, -0.6], [-2.5, -1.5, -1.5]], dtype=torch.float64)


def softplus(x):
    return math.log1p(math.exp(x))


def margins():
    """log pi / ref of each answer, summed over its action tokens."""
    return (-3.0 + 3.3) - (-1.5 + 1.2), (-1.2 + 1.2) - (-5.0 + 5.5)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (2.0, 0.0), (0.5, 0.1)])
def test_dpo_is_the_mean_over_pairs(beta, smoothing):
    """arXiv 2305.18290, eq. 7, pair by pair: -log sigmoid(x) = softplus(-x)."""
    loss, metrics = POLICY_LOSSES["dpo"](
        logprobs=LOGPROBS, ref_logprobs=REFERENCE, mask=MASK, beta=beta, label_smoothing=smoothing
    )
    losses = [(1 - smoothing) * softplus(-beta * h) + smoothing * softplus(beta * h) for h in margins()]
    assert loss.item() == pytest.approx(sum(losses) / 2, abs=1e-12)
    summed_first = softplus(-beta * sum(margins()))
    assert loss.item() != pytest.approx(summed_first, abs=1e-3)
    assert metrics["dpo_loss"] == pytest.approx(loss.item())
    assert metrics["chosen_reward"] == pytest.approx(beta * (0.3 + 0.0) / 2)
    assert metrics["rejected_reward"] == pytest.approx(beta * (-0.3 + 0.5) / 2)
    assert metrics["accuracy_mean"] == 0.5
    assert metrics["reward_margin"] == pytest.approx(beta * sum(margins()) / 2)


def test_dpo_gradient():
    logprobs = torch.where(MASK, LOGPROBS, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: POLICY_LOSSES["dpo"](logprobs=x, ref_logprobs=REFERENCE, mask=MASK, beta=0.7, label_smoothing=0.2)[0],
        (logprobs,),
    )


def test_dpo_excludes_pairs_with_an_empty_answer():
    mask = MASK.clone()
    mask[2] = False
    loss, _ = POLICY_LOSSES["dpo"](logprobs=LOGPROBS, ref_logprobs=REFERENCE, mask=mask)
    assert loss.item() == pytest.approx(softplus(-0.1 * margins()[0]))
    assert POLICY_LOSSES["dpo"](logprobs=LOGPROBS, ref_logprobs=REFERENCE, mask=MASK & False)[0].item() == 0


def test_dpo_refuses_what_it_cannot_use():
    with raising(InputError, key="mask"):
        POLICY_LOSSES["dpo"](logprobs=LOGPROBS[:3], ref_logprobs=REFERENCE[:3], mask=MASK[:3])
    with raising(InputError, key="ref_logprobs"):
        POLICY_LOSSES["dpo"](logprobs=LOGPROBS, mask=MASK)
    with raising(InputError, key="ref_logprobs"):
        POLICY_LOSSES["dpo"](logprobs=LOGPROBS, ref_logprobs=REFERENCE * float("nan"), mask=MASK)


EXPERT = torch.tensor([False, True, True, False])
OLD = torch.where(EXPERT[:, None], torch.nan, REFERENCE)
ADVANTAGES_BT = torch.where(EXPERT[:, None], torch.nan, torch.tensor([[1.0], [0], [0], [-1.0]]).double()).expand(4, 3)
INPUTS = {"logprobs": LOGPROBS, "old_logprobs": OLD, "advantages": ADVANTAGES_BT, "mask": MASK, "is_expert": EXPERT}


def parts(mode):
    """PPO on the rollouts' rows and SFT on the expert's, separately."""
    rows = ~EXPERT
    usual, _ = POLICY_LOSSES["ppo"](
        logprobs=LOGPROBS[rows],
        old_logprobs=OLD[rows],
        advantages=ADVANTAGES_BT[rows],
        mask=MASK[rows],
        loss_agg_mode=mode,
    )
    return usual.item(), lambda name: POLICY_LOSSES[name](
        logprobs=LOGPROBS[EXPERT], mask=MASK[EXPERT], loss_agg_mode=mode
    )[0].item()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_mix_is_the_weighted_sum_of_its_parts(mode):
    usual, expert = parts(mode)
    loss, metrics = POLICY_LOSSES["mix"](**INPUTS, mu=0.3, loss_agg_mode=mode)
    assert loss.item() == pytest.approx(0.7 * usual + 0.3 * expert("sft"), abs=1e-12)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics["expert/sft_loss"] == pytest.approx((1.5 + 0.5 + 0.7) / 3)
    assert "usual/pg_clipfrac" in metrics


def test_chord_weighs_by_phi_and_by_the_step():
    usual, expert = parts("token-mean")
    schedule = {"mu_warmup_steps": 10, "mu_decay_steps": 20, "mu_peak": 0.5, "mu_valley": 0.1}
    loss, metrics = POLICY_LOSSES["mix_chord"](**INPUTS, **schedule, step=5)
    assert loss.item() == pytest.approx(0.75 * usual + 0.25 * expert("sft_phi"), abs=1e-12)
    assert metrics["mu"] == pytest.approx(0.25)
    loss, _ = POLICY_LOSSES["mix_chord"](**INPUTS, enable_phi_function=False)
    assert loss.item() == pytest.approx(0.9 * usual + 0.1 * expert("sft"), abs=1e-12)


def test_chord_schedule_by_hand():
    """arXiv 2508.11408: linear up, half a cosine down."""
    steps = {0: 0.0, 5: 0.25, 10: 0.5, 20: 0.3, 30: 0.1, 99: 0.1}
    assert {step: mu_at(step, 10, 20, 0.5, 0.1) for step in steps} == pytest.approx(steps)
    assert mu_at(0, 0, 0, 0.9, 0.1) == 0.1


def test_mix_without_experts_or_without_rollouts():
    none, all_of_them = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    finite = {**INPUTS, "old_logprobs": REFERENCE, "advantages": torch.ones(4, 3).double()}
    usual, _ = POLICY_LOSSES["ppo"](**{k: v for k, v in finite.items() if k != "is_expert"})
    assert POLICY_LOSSES["mix"](**{**finite, "is_expert": none})[0].item() == pytest.approx(0.9 * usual.item())
    sft, _ = POLICY_LOSSES["sft"](logprobs=LOGPROBS, mask=MASK)
    loss, metrics = POLICY_LOSSES["mix"](**{**INPUTS, "is_expert": all_of_them})
    assert loss.item() == pytest.approx(0.1 * sft.item())
    assert "usual/pg_loss" not in metrics, "an average over no token"


def test_rollout_corrections_leave_experts_alone():
    rollout = torch.where(EXPERT[:, None], torch.nan, OLD)
    plain, _ = POLICY_LOSSES["mix"](**INPUTS)
    loss, metrics = POLICY_LOSSES["mix"](**INPUTS, rollout_logprobs=rollout)
    assert loss.item() == pytest.approx(plain.item())
    assert metrics["rollout_gap/mean"] == 0
    half, _ = POLICY_LOSSES["mix"](**INPUTS, rollout_logprobs=rollout + math.log(2), mu=0.0)
    assert half.item() == pytest.approx(parts("token-mean")[0] / 2)


def test_mix_refuses_what_it_cannot_use():
    with raising(InputError, key="is_expert"):
        POLICY_LOSSES["mix"](**{k: v for k, v in INPUTS.items() if k != "is_expert"})
    with raising(InputError, key="is_expert"):
        POLICY_LOSSES["mix"](**{**INPUTS, "is_expert": EXPERT[:2]})
    with raising(InputError, key="old_logprobs"):
        POLICY_LOSSES["mix"](**{**INPUTS, "is_expert": EXPERT & False})


def test_gspo_without_a_clip_range_has_the_papers():
    old = torch.zeros(1, 2)
    taken = {"mask": torch.ones(1, 2, dtype=torch.bool), "old_logprobs": old, "advantages": torch.ones(1, 2)}
    clipped = [
        POLICY_LOSSES["gspo"](logprobs=old + 0.05, **taken, **args)[1]["pg_clipfrac"]
        for args in ({}, {"clip_range": 0.1}, {"clip_range": 0.01}, {"clip_range": 0.01, "clip_range_high": 0.1})
    ]
    assert clipped == [1, 0, 1, 0]
