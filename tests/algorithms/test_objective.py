"""The objective as the trainer uses it: any division of a batch, over micro-batches or ranks, gives the same sum."""

import dataclasses
import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    KL_FNS,
    POLICY_LOSSES,
    InputError,
    MetricAccumulator,
    Objective,
)
from trinity_core.algorithms.losses.policy_loss import PolicyLoss

ROWS, LENGTH = 8, 5
WHOLE = ("rewards", "numbers", "values", "teacher_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
"""Inputs that an advantage may take."""
NO_KL = {"kl_loss_fn": "none", "kl_loss_fn_args": {}}
IS_EXPERT = torch.tensor([False, False, True, True, False, False, True, False])


def batch(seed, experts):
    """All inputs of a whole batch of two groups, float32 as in training."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(ROWS, LENGTH, generator=generator) - 3

    def near(scale):
        return logprobs + torch.randn(ROWS, LENGTH, generator=generator) * scale

    return {
        "logprobs": logprobs,
        "mask": torch.rand(ROWS, LENGTH, generator=generator) > 0.3,
        "old_logprobs": near(0.2),
        "rollout_logprobs": near(0.2),
        "ref_logprobs": near(0.3),
        "entropy": torch.rand(ROWS, LENGTH, generator=generator),
        "is_expert": IS_EXPERT if experts else None,
        "rewards": torch.rand(ROWS, generator=generator),
        "numbers": [{"right": i % 3 / 2, "brief": i / 7, "greedy_reward": 0.4} for i in range(ROWS)],
        "values": torch.randn(ROWS, LENGTH, generator=generator),
        "teacher_logprobs": near(0.5),
        "selected": (torch.rand(ROWS, LENGTH, generator=generator) > 0.8).float(),
        "divergences": torch.rand(ROWS, LENGTH, generator=generator),
    }


def spec_of(name, **changes):
    own = {"gdpo": {"advantage_fn_args": {"weights": {"right": 1.0, "brief": 0.5}}}}
    return dataclasses.replace(ALGORITHMS[name], **own.get(name, {}) | changes)


def _rows(values, rows):
    return values[rows] if isinstance(values, torch.Tensor) else [values[i] for i in rows.nonzero()[:, 0]]


def train(spec, inputs, cuts, ranks=1, step=3):
    """Gradient of the log-probs and metrics of a batch cut into `cuts` (row indices), distributed over ranks."""
    objective = Objective(spec)
    mask, is_expert = inputs["mask"], inputs["is_expert"]
    whole = {k: inputs[k] for k in WHOLE}
    advantages, _, _, selected = objective.advantages(
        mask, is_expert, group_ids=["a"] * 4 + ["b"] * 4, run_ids=[*range(8)], **whole
    )
    weights = objective.weights(mask, is_expert, step)
    logprobs = inputs["logprobs"].clone().requires_grad_()
    entropy = inputs["entropy"].clone().requires_grad_()
    tallies = [MetricAccumulator() for _ in range(ranks)]
    for i, cut in enumerate(cuts):
        part = {k: inputs[k][cut] for k in ("mask", "old_logprobs", "rollout_logprobs", "ref_logprobs")}
        loss = objective.loss(
            tallies[i % ranks], weights.rows(cut), logprobs=logprobs[cut], entropy=entropy[cut],
            advantages=advantages[cut], is_expert=None if is_expert is None else is_expert[cut], step=step,
            selected=None if selected is None else selected[cut],
            divergences=(inputs["divergences"] - logprobs)[cut] / 8, **part,
        )  # fmt: skip
        loss.backward()
    return (logprobs.grad, entropy.grad), all_reduced(tallies)


def all_reduced(tallies):
    """Every rank's metrics after its accumulator is reduced with the others'."""
    packed = {"sum": [], "max": []}
    for accumulator in tallies:
        accumulator.reduce(lambda tensor, op: packed[op].append(tensor))
    for op, tensors in packed.items():
        if not tensors:
            continue
        combined = torch.stack(tensors)
        combined = combined.sum(0) if op == "sum" else combined.amax(0)
        for tensor in tensors:
            tensor.copy_(combined)
    metrics = [accumulator.metrics() for accumulator in tallies]
    assert all(m == metrics[0] for m in metrics)
    return metrics[0]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_cuts_and_ranks_do_not_matter(name, mode):
    spec = spec_of(name, loss_agg_mode=mode, entropy_loss_fn_args={"entropy_coef": 0.1})
    inputs = batch(7, experts=name.startswith("mix"))
    (grad, entropy_grad), metrics = train(spec, inputs, [torch.arange(8)])
    pairs = torch.arange(8).view(4, 2)
    for cuts, ranks in (([*pairs], 1), ([*pairs[[2, 0, 3, 1]]], 2), ([torch.arange(6), torch.arange(6, 8)], 2)):
        (other, other_entropy), other_metrics = train(spec, inputs, cuts, ranks)
        assert torch.allclose(grad, other, atol=1e-7)
        if entropy_grad is not None:
            assert torch.allclose(entropy_grad, other_entropy, atol=1e-7)
        assert metrics == pytest.approx(other_metrics, abs=1e-6)


@settings(max_examples=30)
@given(
    st.integers(0, 100_000),
    st.sampled_from(sorted(set(ALGORITHMS) - {"dpo"})),
    st.lists(st.integers(1, 7), max_size=4, unique=True),
)
def test_any_cut(seed, name, bounds):
    inputs = batch(seed, experts=name.startswith("mix"))
    (grad, _), metrics = train(spec_of(name), inputs, [torch.arange(8)])
    edges = [0, *sorted(bounds), 8]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    cuts = [order[a:b] for a, b in itertools.pairwise(edges)]
    (other, _), other_metrics = train(spec_of(name), inputs, cuts, ranks=min(2, len(cuts)))
    assert torch.allclose(grad, other, atol=1e-6)
    assert metrics == pytest.approx(other_metrics, abs=1e-5)


def test_the_parts_add_up():
    inputs = batch(0, experts=False)
    spec = spec_of("grpo", entropy_loss_fn_args={"entropy_coef": 0.1}, kl_loss_fn_args={"kl_coef": 0.5})
    _, metrics = train(spec, inputs, [torch.arange(8)])
    mask = inputs["mask"]
    advantages, _ = ADVANTAGES["grpo"](rewards=inputs["rewards"], group_ids=["a"] * 4 + ["b"] * 4, mask=mask)
    taken = {k: inputs[k] for k in ("logprobs", "mask", "old_logprobs", "rollout_logprobs")}
    loss, of_loss = POLICY_LOSSES["ppo"](advantages=advantages, **taken)
    kl = AGGREGATIONS["token-mean"](KL_FNS["k2"](inputs["logprobs"], inputs["ref_logprobs"], mask), mask).item()
    entropy = AGGREGATIONS["token-mean"](inputs["entropy"], mask).item()
    assert {name: metrics[name] for name in of_loss} == pytest.approx(of_loss, abs=1e-6)
    assert metrics["kl_loss"] == pytest.approx(kl, abs=1e-6)
    assert metrics["entropy_loss"] == pytest.approx(entropy, abs=1e-6)
    assert metrics["final_loss"] == pytest.approx(loss.item() + 0.5 * kl - 0.1 * entropy, abs=1e-6)


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_entropy_per_token_is_measured_under_any_aggregation(rule):
    inputs = batch(0, experts=False)
    args = {"normalizer": 1024} if rule == "seq-mean-token-sum-norm" else {}
    _, metrics = train(spec_of("grpo", loss_agg_mode=rule, loss_agg_mode_args=args), inputs, [torch.arange(8)])
    assert metrics["entropy_mean"] == pytest.approx(float(inputs["entropy"][inputs["mask"]].mean()), rel=1e-5)


def test_stop_gradient_stands_for_old_logprobs():
    """With one update a batch, leaving out the old log-probs gives the same gradient as passing equal ones."""
    inputs = batch(1, experts=False)
    inputs["old_logprobs"] = inputs["logprobs"].clone()
    (given_grad, _), given_metrics = train(spec_of("grpo"), inputs, [torch.arange(8)])
    objective = Objective(spec_of("grpo"))
    advantages = objective.advantages(inputs["mask"], rewards=inputs["rewards"], group_ids=["a"] * 4 + ["b"] * 4)
    logprobs, accumulator = inputs["logprobs"].clone().requires_grad_(), MetricAccumulator()
    part = {k: inputs[k] for k in ("mask", "rollout_logprobs", "ref_logprobs", "entropy")}
    weights = objective.weights(inputs["mask"])
    objective.loss(accumulator, weights, logprobs=logprobs, advantages=advantages.advantages, **part).backward()
    assert torch.allclose(logprobs.grad, given_grad, atol=1e-7)
    assert accumulator.metrics() == pytest.approx(given_metrics, abs=1e-6)


def test_experts_take_no_part_in_groups():
    objective = Objective(ALGORITHMS["mix"])
    rewards = torch.where(IS_EXPERT, torch.nan, torch.arange(8.0))
    ids = ["a"] * 4 + ["b"] * 4
    result = objective.advantages(torch.ones(8, 2, dtype=torch.bool), IS_EXPERT, rewards=rewards, group_ids=ids)
    assert (result.advantages[IS_EXPERT] == 0).all()
    deviation = math.sqrt(0.5)
    assert result.advantages[:2, 0].tolist() == pytest.approx([-0.5 / deviation, 0.5 / deviation], abs=1e-5)


@pytest.mark.parametrize("name", sorted(n for n, spec in ALGORITHMS.items() if (spec.advantage_fn or "none") != "none"))
def test_excluded_rows_do_not_affect_the_others(name):
    objective = Objective(spec_of(name))
    inputs = batch(5, experts=False)
    rest, ids = ~IS_EXPERT, [0, 0, 0, 0, 1, 1, 1, 1]
    whole = {k: inputs[k] for k in WHOLE}
    whole |= {"group_ids": torch.tensor(ids), "run_ids": torch.arange(8)}
    with_them = objective.advantages(inputs["mask"], IS_EXPERT, **whole)
    alone = objective.advantages(inputs["mask"][rest], **{k: _rows(v, rest) for k, v in whole.items()})
    assert torch.equal(with_them.advantages[rest], alone.advantages) and alone.advantages.any()
    assert not with_them.advantages[IS_EXPERT].any() and with_them.metrics == alone.metrics
    nobody = objective.advantages(inputs["mask"], torch.ones(8, dtype=torch.bool), **whole)
    assert not nobody.advantages.any()


def test_kl_in_the_reward_by_hand():
    """r_t = score at the last token - coef * k1_t; rewards are their sums, and the coefficient adapts."""
    penalty = {"kl_coef": 0.5, "adaptive": True, "target_kl": 0.1, "horizon": 10.0}
    spec = spec_of(
        "grpo", kl_penalty_fn="k1", kl_penalty_fn_args=penalty, kl_loss_fn="none", kl_loss_fn_args={},
        advantage_fn_args={"std_normalize": False},
    )  # fmt: skip
    objective = Objective(spec)
    assert objective.needs_reference
    mask = torch.tensor([[True, True], [True, False]])
    old, reference = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]]), torch.tensor([[-1.2, -1.4], [-1.0, 9.0]])
    result = objective.advantages(
        mask, rewards=torch.tensor([1.0, 0.0]), group_ids=[0, 0], old_logprobs=old, ref_logprobs=reference
    )
    # sums of token rewards: 1 - 0.5 * 0.6 = 0.7 and 0
    assert result.advantages.flatten().tolist() == pytest.approx([0.35, 0.35, -0.35, 0])
    assert result.metrics["kl"] == pytest.approx(0.2)
    assert result.metrics["kl_coef"] == 0.5
    assert objective.state()["kl_penalty_coef"] == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    with raising(InputError, key="ref_logprobs"):
        objective.advantages(mask, rewards=torch.tensor([1.0, 0.0]), group_ids=[0, 0])


def test_adaptive_coefficient_of_the_loss_is_kept_and_restored():
    args = {"kl_coef": 0.1, "adaptive": True, "target_kl": 0.1, "horizon": 10.0}
    objective = Objective(spec_of("grpo", kl_loss_fn_args=args))
    assert objective.after_batch({"kl_loss": 0.01, "kl_mean": 9.0}, 5)["kl_coef"] == 0.1
    assert objective.kl_loss.kl_coef == pytest.approx(0.1 * 1.1)
    resumed = Objective(spec_of("grpo", kl_loss_fn_args=args))
    resumed.load_state(objective.state())
    assert resumed.kl_loss.kl_coef == objective.kl_loss.kl_coef
    fixed = Objective(ALGORITHMS["grpo"])
    fixed.load_state({"kl_loss_coef": 7.0})
    assert fixed.kl_loss.kl_coef == 0.001


def kl_of(objective, is_expert):
    """The metrics of two rows of three tokens and one, with log-probs 0.4 and 0.8 away from the reference."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    gap = torch.tensor([[0.4, 0.4, 0.4], [0.8, 9.0, 9.0]])
    accumulator, logprobs = MetricAccumulator(), torch.full((2, 3), -1.0)
    objective.loss(
        accumulator, objective.weights(mask, is_expert), logprobs=logprobs, mask=mask, ref_logprobs=logprobs - gap,
        advantages=torch.zeros(2, 3), is_expert=is_expert,
    )  # fmt: skip
    return accumulator.metrics()


def test_adaptive_kl_follows_kl_per_token_for_any_aggregation():
    spec = spec_of("grpo", kl_loss_fn="k2", loss_agg_mode="seq-mean-token-sum")
    metrics = kl_of(Objective(spec), None)
    assert metrics["kl_loss"] == pytest.approx((3 * 0.08 + 0.32) / 2)
    assert metrics["kl_mean"] == pytest.approx((3 * 0.08 + 0.32) / 4)


def test_empty_micro_batch_adds_nothing_to_kl_per_token():
    """A rank with fewer micro-batches than others processes rows whose mask is false."""
    objective, accumulator = Objective(spec_of("grpo", kl_loss_fn="k2")), MetricAccumulator()
    mask, logprobs = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), -1.0)
    weights = objective.weights(mask)
    for present in (mask, mask & False):
        objective.loss(
            accumulator,
            weights,
            logprobs=logprobs,
            mask=present,
            ref_logprobs=logprobs - 0.4,
            advantages=torch.zeros(1, 2),
        )
    assert accumulator.metrics()["kl_mean"] == pytest.approx(0.08)


def test_kl_with_sft_covers_expert_tokens():
    """In a batch with rollouts it covers only their tokens."""
    spec = spec_of("sft", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.1}, loss_agg_mode="token-mean")
    assert kl_of(Objective(spec), torch.tensor([True, True]))["kl_loss"] == pytest.approx((3 * 0.08 + 0.32) / 4)
    assert kl_of(Objective(spec), torch.tensor([True, False]))["kl_loss"] == pytest.approx(0.32)


def test_what_a_run_needs():
    assert Objective(ALGORITHMS["grpo"]).needs_reference
    assert not Objective(spec_of("grpo", kl_loss_fn_args={"kl_coef": 0.0})).needs_reference
    assert Objective(ALGORITHMS["grpo"]).entropy_use == "metric"
    assert Objective(spec_of("grpo", entropy_loss_fn_args={"entropy_coef": 0.1})).entropy_use == "loss"
    assert not Objective(ALGORITHMS["sft"]).needs_old_logprobs
    assert Objective(ALGORITHMS["sft"]).advantages(torch.ones(2, 3).bool()).advantages.shape == (2, 3)


def test_critic_target_is_returned():
    mask = torch.ones(2, 3, dtype=torch.bool)
    result = Objective(ALGORITHMS["ppo"]).advantages(mask, rewards=torch.tensor([1.0, 0.0]), values=torch.zeros(2, 3))
    assert result.returns.tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("value", ["nonsense", {"nonsense": 1}], ids=["name", "argument"])
@pytest.mark.parametrize(
    "part",
    ["policy_loss_fn", "advantage_fn", "kl_loss_fn", "kl_penalty_fn", "entropy_loss_fn", "loss_agg_mode",
     "rollout_correction"],
)  # fmt: skip
def test_unknown_names_and_arguments_are_refused_at_once(part, value):
    with raising(InputError, key="nonsense"):
        Objective(spec_of("grpo", **{part if value == "nonsense" else f"{part}_args": value}))


def test_rank_without_rows_reports_the_same_metrics():
    inputs = batch(2, experts=False)
    _, metrics = train(spec_of("grpo"), inputs, [torch.arange(8)])
    _, shared = train(spec_of("grpo"), inputs, [torch.arange(8), torch.arange(0)], ranks=2)
    assert metrics == pytest.approx(shared)


def test_corrected_k3_is_unbiased_for_stale_tokens():
    """Value and gradient of the exact expectation over the sampling policy, compared with KL(policy || reference)."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64)
    reference = torch.tensor([0.0, 0.5, 0.0, 1.0], dtype=torch.float64).log_softmax(-1)
    sampler = torch.tensor([-0.5, 1.0, 0.5, 0.0], dtype=torch.float64).log_softmax(-1)
    exact = logits.clone().requires_grad_()
    policy = exact.log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    kl.backward()
    args = {"kl_coef": 1.0, "ratio_cap": None}
    objective = Objective(dataclasses.replace(ALGORITHMS["grpo"], kl_loss_fn="corrected_k3", kl_loss_fn_args=args))
    own = logits.clone().requires_grad_()
    zero = torch.zeros(4, 1, dtype=torch.float64)
    weights = objective.weights(torch.ones(4, 1, dtype=torch.bool))._replace(
        policy=zero, kl=sampler.exp()[:, None], entropy=zero
    )
    loss = objective.loss(
        MetricAccumulator(),
        weights,
        logprobs=own.log_softmax(-1)[:, None],
        mask=torch.ones(4, 1, dtype=torch.bool),
        rollout_logprobs=sampler[:, None],
        ref_logprobs=reference[:, None],
        advantages=zero,
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), kl.detach())
    torch.testing.assert_close(own.grad, exact.grad)


def test_kl_of_rows_without_rollout_logprobs_is_uncorrected():
    """Expert rows, and rows without rollout log-probs: the ratio of `corrected_k3` is 1."""
    data = batch(0, True)
    args = {"kl_coef": 1.0, "ratio_cap": None}
    objective = Objective(dataclasses.replace(ALGORITHMS["grpo"], kl_loss_fn="corrected_k3", kl_loss_fn_args=args))
    has = torch.tensor([True, False] * 4)
    is_expert = torch.tensor([False] * 6 + [True] * 2)
    mask, logprobs, reference = (data[name] for name in ("mask", "logprobs", "ref_logprobs"))
    accumulator = MetricAccumulator()
    objective.loss(
        accumulator, objective.weights(mask, is_expert), logprobs=logprobs, mask=mask, is_expert=is_expert,
        rollout_logprobs=data["rollout_logprobs"], has_rollout_logprobs=has, ref_logprobs=reference,
        advantages=torch.zeros(ROWS, LENGTH),
    )  # fmt: skip
    ratio = torch.where((has & ~is_expert)[:, None], (logprobs - data["rollout_logprobs"]).exp(), 1.0)
    k3 = ratio * (torch.expm1(reference - logprobs) - (reference - logprobs))
    expected = float(k3.double()[mask & ~is_expert[:, None]].mean())
    assert accumulator.metrics()["kl_mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("place", ["loss", "penalty"])
def test_batch_without_tokens_leaves_the_adaptive_coefficient(place):
    args = {"kl_coef": 0.1, "adaptive": True, "target_kl": 0.05, "horizon": 1000}
    parts = {"loss": {"kl_loss_fn": "k2", "kl_loss_fn_args": args}}.get(
        place, {"kl_loss_fn": "none", "kl_penalty_fn": "k2", "kl_penalty_fn_args": args}
    )
    objective = Objective(dataclasses.replace(ALGORITHMS["grpo"], **parts))
    mask, zero = torch.zeros(128, 4, dtype=torch.bool), torch.zeros(128, 4)
    accumulator = MetricAccumulator()
    if place == "loss":
        objective.loss(
            accumulator, objective.weights(mask), logprobs=zero, mask=mask, ref_logprobs=zero, advantages=zero
        )
        metrics = objective.after_batch(accumulator.metrics(), 128)
    else:
        groups = torch.arange(128) // 8
        metrics = objective.advantages(
            mask, rewards=torch.zeros(128), group_ids=groups, old_logprobs=zero, ref_logprobs=zero
        ).metrics
    assert metrics["kl_coef"] == 0.1 and "kl_mean" not in metrics and "kl" not in metrics
    assert set(objective.state().values()) >= {0.1}


def taking(name, returns, first=()):
    """A function with required parameters `first` and `name`, and a list of the values it got."""
    got = []

    def part(**inputs):
        got.append(inputs[name])
        return returns(inputs)

    names = dict.fromkeys((*first, name))
    part.__signature__ = inspect.Signature([inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in names])
    return part, got


def registered(monkeypatch, registry, part):
    monkeypatch.setitem(registry, "taking", part)
    return "taking"


def test_advantage_may_need_the_reference(monkeypatch):
    function, _ = taking("ref_logprobs", lambda data: (data["ref_logprobs"], {}), first=("mask",))
    advantage = registered(monkeypatch, ADVANTAGES, function)
    assert Objective(spec_of("grpo", **NO_KL, advantage_fn=advantage, advantage_fn_args={})).needs_reference
    assert not Objective(spec_of("grpo", **NO_KL)).needs_reference


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.inputs))
@pytest.mark.parametrize("with_rollouts", [True, False])
def test_a_loss_gets_every_input_that_the_registry_lists(name, with_rollouts, monkeypatch):
    """With and without old log-probs and rollout log-probs, as in the trainer."""
    inputs = batch(0, experts=True)
    function, got = taking(name, lambda data: (-data["logprobs"], {}), first=("logprobs",))
    loss = registered(monkeypatch, POLICY_LOSSES, PolicyLoss("taking", function))
    objective = Objective(spec_of("grpo", policy_loss_fn=loss, policy_loss_fn_args={}))
    assert name in {*objective.policy_loss.inputs, "logprobs", "mask"}
    known = {k: inputs[k] for k in ("logprobs", "mask", "ref_logprobs", "is_expert", "selected", "divergences")}
    if with_rollouts:
        known |= {"rollout_logprobs": inputs["rollout_logprobs"], "has_rollout_logprobs": torch.arange(ROWS) > 0}
    if with_rollouts or name == "old_logprobs":
        known |= {"old_logprobs": inputs["old_logprobs"]}
    weights = objective.weights(inputs["mask"], IS_EXPERT, 3)
    objective.loss(MetricAccumulator(), weights, advantages=inputs["values"], step=3, **known)
    assert len(got) == 1 and got[0] is not None
    if name == "rollout_logprobs":
        sampled = (torch.arange(ROWS) > 0) & ~IS_EXPERT if with_rollouts else torch.zeros(ROWS, dtype=torch.bool)
        others = inputs["old_logprobs"] if with_rollouts else inputs["logprobs"]
        expected = torch.where(sampled[:, None], inputs["rollout_logprobs"], others)
        torch.testing.assert_close(got[0][inputs["mask"]], expected[inputs["mask"]])


def test_entropy_coefficient_follows_its_target_and_is_restored():
    """Skywork-OR1: it grows below the target and acts only there; a resumed run keeps both."""
    args = {"entropy_coef": 0.01, "target_entropy": 0.5, "entropy_coef_step": 0.004}
    spec = spec_of("grpo", entropy_loss_fn_args=args, **NO_KL)
    objective = Objective(spec)
    assert objective.entropy_use == "loss"
    entropies = (0.4, 0.3, 0.6, 0.6, 0.6, 0.6, 0.5)
    used = [objective.after_batch({"entropy_mean": entropy}, 8)["entropy_coef"] for entropy in entropies]
    assert used == pytest.approx([0, 0.014, 0.018, 0, 0, 0, 0])
    resumed = Objective(spec)
    resumed.load_state(objective.state())
    for one in (objective, resumed):
        assert one.after_batch({"entropy_mean": 0.2}, 8)["entropy_coef"] == pytest.approx(0.002)
    assert resumed.state() == objective.state()


def test_bonus_of_an_adaptive_coefficient_is_in_the_loss_once_it_acts():
    args = {"entropy_coef": 0.1, "target_entropy": 9.0}
    inputs = batch(3, experts=False)
    objective = Objective(spec_of("grpo", entropy_loss_fn_args=args, **NO_KL))
    losses = []
    for _ in range(2):
        accumulator = MetricAccumulator()
        weights = objective.weights(inputs["mask"])
        taken = {name: inputs[name] for name in ("logprobs", "mask", "entropy")}
        losses.append(float(objective.loss(accumulator, weights, advantages=torch.zeros(ROWS, LENGTH), **taken)))
        metrics = objective.after_batch(accumulator.metrics(), ROWS)
    mean = float(inputs["entropy"][inputs["mask"]].mean())
    assert metrics["entropy_mean"] == pytest.approx(mean, rel=1e-5)
    assert losses[0] == 0 and losses[1] == pytest.approx(-0.105 * mean, rel=1e-5)
