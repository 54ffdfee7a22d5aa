"""Properties of every policy loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import POLICY_LOSSES, InputError

ON_POLICY = sorted({n for n, loss in POLICY_LOSSES.items() if loss.corrects_rollouts} - {"mix", "mix_chord", "opsd"})
SCALE = {"opmd": 0.5}
"""Gradient at ratio 1 divided by the plain policy gradient."""


def batch(seed, rows=4, length=5, spread=0.3):
    """Random inputs of any loss, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale, shift=0.0):
        return torch.randn(rows, length, generator=generator, dtype=torch.float64) * scale + shift

    logprobs = draw(1.0, -3.0)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + draw(spread),
        "ref_logprobs": logprobs + draw(0.3),
        "rollout_logprobs": logprobs + draw(0.1),
        "advantages": draw(1.0)[:, :1].expand(rows, length),
        "mask": torch.rand(rows, length, generator=generator) > 0.35,
        "is_expert": torch.arange(rows) % 3 == 1,
        "selected": (torch.rand(rows, length, generator=generator) > 0.8).double(),
        "divergences": draw(0.5),
    }


def call(name, inputs, **args):
    """Loss, gradient of log-probs, metrics."""
    loss_fn = POLICY_LOSSES[name]
    taken = {k: v for k, v in inputs.items() if k in loss_fn.inputs | {"logprobs", "mask", "rollout_logprobs"}}
    taken["logprobs"] = taken["logprobs"].clone().requires_grad_()
    if "divergences" in taken and taken["logprobs"].shape == taken["mask"].shape:  # they have the gradient
        taken["divergences"] = taken["divergences"] - taken["logprobs"]
    loss, metrics = loss_fn(**taken, **args)
    loss.backward()
    return loss.detach(), taken["logprobs"].grad, metrics


names = st.sampled_from(sorted(POLICY_LOSSES))
seeds = st.integers(0, 100_000)


@given(seeds, st.sampled_from([n for n in POLICY_LOSSES if POLICY_LOSSES[n].scales_with_advantages]), st.booleans())
def test_rows_without_an_advantage_have_no_gradient(seed, name, has_old):
    inputs = batch(seed)
    inputs["advantages"] = inputs["advantages"] * torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    inputs["mask"] |= True
    _, gradient, _ = call(name, inputs if has_old else inputs | {"old_logprobs": None})
    assert not gradient[1::2].any() and (has_old or gradient[::2].any()), "a clip may take that of the others"


@settings(max_examples=60)
@given(seeds, names)
def test_masked_tokens_never_matter(seed, name):
    inputs = batch(seed)
    loss, grad, metrics = call(name, inputs)
    noise = torch.where(inputs["mask"], 0.0, torch.nan)
    changed = {k: v + noise if v.dtype == torch.float64 else v for k, v in inputs.items()}
    other, other_grad, other_metrics = call(name, changed)
    assert torch.equal(loss, other)
    assert torch.equal(grad, other_grad)
    assert metrics == other_metrics
    assert (grad[~inputs["mask"]] == 0).all()
    assert all(math.isfinite(value) for value in metrics.values())


@settings(max_examples=60)
@given(seeds, names)
def test_the_order_of_rows_does_not_matter(seed, name):
    inputs = batch(seed)
    order = torch.tensor([2, 3, 0, 1]) if name == "dpo" else torch.tensor([3, 1, 0, 2])
    loss, grad, metrics = call(name, inputs)
    other, other_grad, other_metrics = call(name, {k: v[order] for k, v in inputs.items()})
    assert torch.allclose(loss, other, atol=1e-12)
    assert torch.allclose(grad[order], other_grad, atol=1e-12)
    assert metrics == pytest.approx(other_metrics)


@settings(max_examples=40)
@given(seeds, st.sampled_from(ON_POLICY))
def test_ratio_one_gives_the_plain_policy_gradient(seed, name):
    """-A grad log pi, weighted by the aggregation; the same with and without old log-probs."""
    inputs = batch(seed) | {"rollout_logprobs": None}
    expected = call("reinforce", inputs, loss_agg_mode="token-mean")[1] * SCALE.get(name, 1.0)
    same = inputs | {"old_logprobs": inputs["logprobs"]}
    given_loss, given_grad, _ = call(name, same, loss_agg_mode="token-mean")
    left_out_loss, left_out_grad, _ = call(name, inputs | {"old_logprobs": None}, loss_agg_mode="token-mean")
    assert torch.allclose(given_grad, expected, atol=1e-12)
    assert torch.allclose(left_out_grad, expected, atol=1e-12)
    assert torch.allclose(given_loss, left_out_loss, atol=1e-12)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_degenerate_batches(name):
    inputs = batch(0)
    loss, grad, metrics = call(name, inputs | {"mask": inputs["mask"] & False})
    assert loss == 0
    assert (grad == 0).all()
    assert all(math.isfinite(value) for value in metrics.values())
    single = {k: v[:2, :1] if v.dim() == 2 else v[:2] for k, v in inputs.items()} | {"mask": torch.ones(2, 1).bool()}
    assert call(name, single)[0].isfinite()
    if name != "dpo":
        rows = {k: v[:1] for k, v in single.items()}
        assert call(name, rows)[0].isfinite()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("bad", ["logprobs", "old_logprobs", "advantages", "ref_logprobs"])
def test_nan_and_wrong_shapes_are_refused(name, bad):
    if bad not in POLICY_LOSSES[name].inputs | {"logprobs"}:
        return
    inputs = batch(1) | {"mask": torch.ones(4, 5, dtype=torch.bool)}
    with raising(InputError, key=bad):
        call(name, inputs | {bad: inputs[bad] + torch.tensor([0, math.nan, 0, 0, 0])})
    with raising(InputError, key=bad):
        call(name, inputs | {bad: inputs[bad][:, :3]})


@pytest.mark.parametrize("name", sorted({n for n, loss in POLICY_LOSSES.items() if loss.ratio_to_rollout}))
def test_off_policy_losses_use_ratio_to_rollout_policy(name):
    inputs = batch(2)
    from_rollout, grad, metrics = call(name, inputs)
    behaviour = inputs | {"old_logprobs": inputs["rollout_logprobs"], "rollout_logprobs": None}
    expected, expected_grad, _ = call(name, behaviour)
    assert torch.equal(from_rollout, expected)
    assert torch.equal(grad, expected_grad)
    assert metrics["rollout_gap/mean"] > 0


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo", "mix"])
def test_bypass_takes_the_ratio_to_the_rollout_policy(name):
    """veRL's bypass mode: the rollouts' log-probs are the old ones, except in expert rows, which have none."""
    inputs = batch(2)
    expert = inputs["is_expert"][:, None] if "is_expert" in POLICY_LOSSES[name].inputs else torch.tensor(False)
    behaviour = torch.where(expert, inputs["logprobs"].detach(), inputs["rollout_logprobs"])
    loss, grad, metrics = call(name, inputs, rollout_correction="bypass")
    expected, expected_grad, _ = call(name, inputs | {"old_logprobs": behaviour, "rollout_logprobs": None})
    assert torch.equal(loss, expected) and torch.equal(grad, expected_grad)
    assert metrics["rollout_gap/mean"] > 0 and "rollout_gap/weight" not in metrics


def test_truncated_importance_sampling_scales_the_loss():
    inputs = batch(3) | {"mask": torch.ones(4, 5, dtype=torch.bool)}
    plain = call("ppo", inputs | {"rollout_logprobs": None})[0]
    shifted = inputs | {"rollout_logprobs": inputs["old_logprobs"] + math.log(2)}
    assert torch.allclose(call("ppo", shifted)[0], plain / 2)
    assert torch.allclose(call("ppo", shifted, rollout_correction="none")[0], plain)
    capped = inputs | {"rollout_logprobs": inputs["old_logprobs"] - math.log(8)}
    assert torch.allclose(call("ppo", capped, rollout_correction_args={"cap": 3.0})[0], plain * 3)


def test_extreme_ratios_stay_finite():
    inputs = batch(4) | {"mask": torch.ones(4, 5, dtype=torch.bool)}
    inputs = {k: v.float() if v.dtype == torch.float64 else v for k, v in inputs.items()}
    for shift in (-500.0, 500.0):
        for name in sorted(set(POLICY_LOSSES) - {"dpo"}):
            loss, grad, _ = call(name, inputs | {"old_logprobs": inputs["logprobs"] + shift, "rollout_logprobs": None})
            assert loss.isfinite(), name
            assert grad.isfinite().all(), name
