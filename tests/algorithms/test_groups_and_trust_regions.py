"""DPPO, DRO, MaxRL, GDPO, REINFORCE++ with a baseline, Clip-Cov and the high-entropy tokens, against their formulas."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import ADVANTAGES, POLICY_LOSSES, InputError

MASK = torch.ones(1, 1, dtype=torch.bool)
probabilities = st.floats(0.001, 0.999)


def value_and_slope(name: str, logp: float, old: float, a: float, **args) -> tuple[float, float]:
    """The loss of one token and its derivative by log pi."""
    logprobs = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    others = {"old_logprobs": torch.tensor([[old]], dtype=torch.float64)}
    loss, _ = POLICY_LOSSES[name](
        logprobs=logprobs, mask=MASK, advantages=torch.tensor([[a]], dtype=torch.float64), **others, **args
    )
    loss.backward()
    return loss.item(), logprobs.grad.item()


@given(probabilities, probabilities, st.floats(-2, 2), st.sampled_from(["tv", "kl"]), st.floats(0, 0.5))
def test_dppo_masks_tokens_that_leave_the_trust_region(pi, mu, a, divergence, delta):
    """arXiv 2602.04879, eq. 12 to 14."""
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    distance = abs(pi - mu) if divergence == "tv" else kl
    if abs(distance - delta) < 1e-9:
        return
    away = (a > 0 and pi > mu) or (a < 0 and pi < mu)
    expected = 0.0 if away and distance > delta else -a * pi / mu
    value, slope = value_and_slope(
        "dppo", math.log(pi), math.log(mu), a, divergence=divergence, delta_low=delta, delta_high=delta
    )
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12) and slope == pytest.approx(value, abs=1e-12)


def test_dppo_bounds_each_direction_by_its_own_delta():
    up = value_and_slope("dppo", math.log(0.5), math.log(0.2), 1.0, delta_low=0.0, delta_high=0.31)
    down = value_and_slope("dppo", math.log(0.2), math.log(0.5), -1.0, delta_low=0.31, delta_high=0.0)
    assert up[0] == pytest.approx(-2.5) and down[0] == pytest.approx(0.4)
    assert value_and_slope("dppo", math.log(0.5), math.log(0.2), 1.0, delta_high=0.29)[0] == 0
    assert value_and_slope("dppo", math.log(0.2), math.log(0.5), -1.0, delta_low=0.29)[0] == 0


@pytest.mark.parametrize(("pi", "mu", "a"), [(1.0, 0.5, 1.0), (0.5, 1.0, -1.0), (1.0, 1.0, 1.0)])
def test_dppo_is_finite_at_certainty(pi, mu, a):
    value, slope = value_and_slope("dppo", math.log(pi), math.log(mu), a, divergence="kl")
    assert (value, slope) == ((0.0, 0.0) if pi != mu else (-1.0, -1.0))


@given(st.floats(-5, 0), st.floats(-5, 0), st.floats(-2, 2), st.floats(0, 2))
def test_dro_is_the_policy_gradient_with_a_quadratic_leash(logp, old, a, beta):
    """arXiv 2405.19107: -(A log pi - beta / 2 (log pi / mu)^2)."""
    value, slope = value_and_slope("dro", logp, old, a, beta=beta)
    assert value == pytest.approx(-(a * logp - beta / 2 * (logp - old) ** 2), abs=1e-9)
    assert slope == pytest.approx(-a + beta * (logp - old), abs=1e-9)


@pytest.mark.parametrize("name", ["dppo", "dro"])
def test_ratio_is_to_the_rollouts_policy(name):
    """Old log-probs of the trainer do not matter if the rollout's are recorded; no correction is applied."""
    inputs = {"logprobs": torch.tensor([[-1.0]]), "mask": MASK, "advantages": torch.tensor([[2.0]])}
    rollout = torch.tensor([[-1.1]])
    expected, _ = POLICY_LOSSES[name](**inputs, old_logprobs=rollout)
    loss, metrics = POLICY_LOSSES[name](**inputs, old_logprobs=torch.tensor([[-3.0]]), rollout_logprobs=rollout)
    assert torch.equal(loss, expected) and "rollout_gap/weight" not in metrics


def test_maxrl_divides_by_the_mean():
    """arXiv 2602.02710: with 1 of 4 right, the right answer gets (1 - 1/4) / (1/4) = 3, the others -1."""
    mask = torch.tensor([[True, False]] * 10)
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 1, -1, 0.5])
    groups = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    advantages, metrics = ADVANTAGES["maxrl"](rewards=rewards, group_ids=groups, mask=mask)
    assert advantages[:, 0].tolist() == [3, -1, -1, -1, 0, 0, 0, 0, 0, 0] and not advantages[:, 1].any()
    assert metrics["group_advantages/zero_variance_groups"] == 0.5


parts = st.lists(st.tuples(st.floats(0, 1), st.floats(-10, 10)), min_size=6, max_size=6)


@given(parts, st.floats(-2, 2))
def test_gdpo_normalises_each_part_in_its_group_and_the_sum_over_the_batch(rows, weight):
    """arXiv 2601.05242, eq. 4 to 6, by statistics' own mean and sample deviation."""
    rows = [(round(right, 2), round(form, 2)) for right, form in rows]
    total = [0.0] * 6
    for k, w in ((0, 1.0), (1, weight)):
        for start in (0, 3):
            group = [row[k] for row in rows[start : start + 3]]
            mean, std = statistics.fmean(group), statistics.stdev(group)
            for i in range(3):
                total[start + i] += w * (group[i] - mean) / (std + 1e-6)
    mean, std = statistics.fmean(total), statistics.stdev(total)
    advantages, _ = ADVANTAGES["gdpo"](
        rewards=torch.tensor([sum(row) for row in rows]),
        group_ids=[0, 0, 0, 1, 1, 1],
        mask=torch.ones(6, 2, dtype=torch.bool),
        numbers=[{"accuracy": right, "form": form, "other": 7.0} for right, form in rows],
        weights={"accuracy": 1.0, "form": weight},
    )
    expected = [(value - mean) / (std + 1e-6) for value in total]
    if (
        std > 1e-3
        and all(  # equal rewards of a group differ in the last bit for statistics
            statistics.pstdev([row[k] for row in rows[s : s + 3]]) > 1e-3
            or len({row[k] for row in rows[s : s + 3]}) == 1
            for k in (0, 1)
            for s in (0, 3)
        )
    ):
        assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(advantages[:, 0], advantages[:, 1])


@pytest.mark.parametrize("penalties", [None, torch.zeros(12)])
def test_gdpo_gives_groups_of_equal_parts_exactly_0(penalties):
    numbers = [{"a": 0.3, "b": 0.1}] * 3 + [{"a": i % 3 / 7, "b": i**0.5} for i in range(9)]
    advantages, _ = ADVANTAGES["gdpo"](
        rewards=torch.zeros(12), group_ids=[i // 3 for i in range(12)], mask=torch.ones(12, 1, dtype=torch.bool),
        numbers=numbers, weights={"a": 1.0, "b": 0.5}, penalties=penalties,
    )  # fmt: skip
    assert not advantages[:3].any() and advantages[3:].all(-1).sum() > 6


def test_gdpo_takes_a_rollouts_parts_from_the_turns_that_have_them():
    """Two rollouts of two turns; only the last turn is judged. Of two values, each is 1 / sqrt(2) deviations away."""
    advantages, _ = ADVANTAGES["gdpo"](
        rewards=torch.tensor([1.0, 1.0, 0.0, 0.0]),
        group_ids=[0] * 4,
        rollout_ids=[0, 0, 1, 1],
        mask=torch.ones(4, 1),
        numbers=[{"turns": 2.0}, {"accuracy": 1.0}, {}, {"accuracy": 0.0}],
        weights={"accuracy": 1.0},
        epsilon=0.0,
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.5**0.5] * 2 + [-(0.5**0.5)] * 2)


def test_gdpo_subtracts_a_kl_penalty_from_the_sum_of_the_parts():
    """Of two values, S is +-1 / sqrt(2); alone in its group, 0."""
    inputs = {"rewards": torch.tensor([1.0, 0.0, 0.0]), "group_ids": [0, 0, 1], "mask": torch.ones(3, 1)}
    numbers = [{"right": 1.0}, {"right": 0.0}, {"right": 0.0}]
    penalties = torch.tensor([0.5**0.5, -(0.5**0.5), 1.0], dtype=torch.float64)
    advantages, _ = ADVANTAGES["gdpo"](
        **inputs, numbers=numbers, weights={"right": 1.0}, penalties=penalties, epsilon=0.0
    )
    # S = 0, 0, -1: mean -1/3, sample deviation 1/sqrt(3)
    assert advantages[:, 0].tolist() == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5])


def test_gdpo_names_the_part_that_a_row_lacks():
    inputs = {"rewards": torch.zeros(2), "group_ids": [0, 0], "mask": torch.ones(2, 1)}
    numbers = [{"accuracy": 1.0}, {"form": 0.0}]
    with raising(InputError, key="weights"):
        ADVANTAGES["gdpo"](**inputs, numbers=numbers, weights={"accuracy": 1.0})
    with raising(InputError, key="weights"):
        ADVANTAGES["gdpo"](**inputs, numbers=numbers, weights={})


def test_reinforceplusplus_baseline_has_one_scale_for_the_batch():
    """arXiv 2501.03262 v2: (r - mean of its group), then the batch's tokens to mean 0 and sample variance 1."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool()
    advantages, _ = ADVANTAGES["reinforceplusplus_baseline"](
        rewards=torch.tensor([1.0, 0.0, 4.0, 2.0]), group_ids=[0, 0, 1, 1], mask=mask
    )
    tokens = [0.5, 0.5, 0.5, -0.5, 1.0, 1.0, -1.0]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    assert advantages[mask].tolist() == pytest.approx([(t - mean) / std for t in tokens], rel=1e-5)
    assert not advantages[~mask].any()


def test_remax_subtracts_the_greedy_answers_reward():
    """arXiv 2310.10505, algorithm 1."""
    inputs = {"rewards": torch.tensor([1.0, 0.0, 0.5]), "group_ids": [0, 0, 1], "mask": torch.ones(3, 2)}
    numbers = [{"greedy_reward": 1.0}, {"greedy_reward": 1.0}, {"greedy_reward": 0.25}]
    assert ADVANTAGES["remax"](**inputs, numbers=numbers)[0][:, 1].tolist() == [0.0, -1.0, 0.25]
    with raising(InputError, key="default_workflow_type"):
        ADVANTAGES["remax"](**inputs, numbers=[{}, *numbers[1:]])


GROUPS = {"rewards": torch.tensor([1.0, 0.0, 0.0, 1.0]), "group_ids": [0, 0, 1, 1]}


@given(st.integers(0, 1000), st.floats(0.01, 1.0))
def test_clip_cov_drops_a_share_of_the_tokens_of_high_covariance(seed, share):
    """arXiv 2505.22617, eq. 10 to 12."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) > 0.2
    mask[0, 0] = True
    plain = ADVANTAGES["grpo"](**GROUPS, mask=mask)[0]
    places = [tuple(place) for place in mask.nonzero().tolist()]
    a, p = {i: float(plain[i]) for i in places}, {i: float(old[i]) for i in places}
    means = statistics.fmean(a.values()), statistics.fmean(p.values())
    inside = {i for i in places if 0.1 < (a[i] - means[0]) * (p[i] - means[1]) < 0.5}
    given_args = {"share": share, "cov_low": 0.1, "cov_high": 0.5, "seed": seed}
    advantages, metrics = ADVANTAGES["clip_cov"](**GROUPS, mask=mask, old_logprobs=old, **given_args)
    dropped = {tuple(i) for i in ((advantages != plain) & mask).nonzero().tolist()}
    assert dropped <= inside and len(dropped) == min(len(inside), max(int(share * len(places)), 1))
    assert not advantages[tuple(zip(*dropped, strict=True))].any() if dropped else True
    assert metrics["clip_cov/masked"] == pytest.approx(len(dropped) / len(places))


@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_kl_cov_selects_the_tokens_of_highest_covariance(seed, share):
    """arXiv 2505.22617, eq. 10 and 13: of N tokens, int(share N) and at least one."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) > 0.2
    mask[0, 0] = True
    advantages, metrics, returns, selected = ADVANTAGES["kl_cov"](**GROUPS, mask=mask, old_logprobs=old, share=share)
    assert torch.equal(advantages, ADVANTAGES["grpo"](**GROUPS, mask=mask)[0]) and returns is None
    places = [tuple(place) for place in mask.nonzero().tolist()]
    a, p = {i: float(advantages[i]) for i in places}, {i: float(old[i]) for i in places}
    means = statistics.fmean(a.values()), statistics.fmean(p.values())
    ordered = sorted(places, key=lambda i: (a[i] - means[0]) * (p[i] - means[1]))
    count = max(int(share * len(places)), 1)
    assert {tuple(i) for i in selected.nonzero().tolist()} == {*ordered[-count:]}
    assert metrics["kl_cov/selected"] == pytest.approx(count / len(places))


def test_kl_cov_penalises_the_ratio_of_the_selected_tokens_alone():
    """-A r + kl_coef |log r| with r = 2 and r = 1/2; eq. 14 of the paper, as veRL computes it."""
    logprobs = torch.tensor([[-1.0, -2.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - math.log(2), -2.0 + math.log(2), -1.0 - math.log(2)]])
    loss, metrics = POLICY_LOSSES["kl_cov"](
        logprobs=logprobs, mask=torch.ones(1, 3), advantages=torch.tensor([[1.0, 1.0, -1.0]]), old_logprobs=old,
        selected=torch.tensor([[1.0, 1.0, 0.0]]), kl_coef=0.5,
    )  # fmt: skip
    assert float(loss) == pytest.approx((-2 + 0.5 * math.log(2) - 0.5 + 0.5 * math.log(2) + 2) / 3)
    loss.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([(-2 + 0.5) / 3, (-0.5 - 0.5) / 3, 2 / 3])
    assert metrics["ppo_kl"] == pytest.approx(-math.log(2) / 3)


def test_high_entropy_keeps_a_fifth_of_the_tokens():
    """arXiv 2506.01939: of ten tokens the two with the highest entropy keep their advantage; a masked one is none."""
    entropies = torch.tensor([[0.1, 0.9, 0.3], [0.2, 0.8, 9.0], [0.4, 0.5, 0.6], [0.7, 0.05, 9.0]])
    mask = entropies < 9
    advantages, metrics = ADVANTAGES["high_entropy"](**GROUPS, mask=mask, entropies=entropies)
    plain = ADVANTAGES["grpo"](**GROUPS, mask=mask)[0]
    kept = torch.zeros_like(mask)
    kept[0, 1] = kept[1, 1] = True
    assert torch.equal(advantages, torch.where(kept, plain, 0.0))
    assert metrics["high_entropy/least"] == pytest.approx(0.8)
