"""Per-token policy losses against the papers' formulas, written out for one token in float64."""

import math

import pytest
import torch
from raising import raising

from trinity_core.algorithms import POLICY_LOSSES, InputError

# log pi, log pi_old, advantage of each action token; every branch of the clips is met
TOKENS = [
    (-1.0, -1.0, 1.0),
    (-1.0, -1.0, -1.0),
    (-1.0, -1.5, 2.0),  # ratio 1.65, good
    (-1.0, -1.5, -2.0),  # ratio 1.65, bad
    (-2.0, -1.5, 0.5),  # ratio 0.61, good
    (-2.0, -1.5, -0.5),  # ratio 0.61, bad
    (-0.5, -2.0, -1.0),  # ratio 4.48, bad: beyond the dual clip
    (-3.0, -0.5, -1.0),  # ratio 0.08, bad
    (-0.5, -2.0, 1.0),  # ratio 4.48, good
    (-1.2, -1.1, 0.0),
]


def clip(x, low, high):
    return min(max(x, low), high)


def ppo(logp, old, a, low=0.2, high=0.2, dual=3.0):
    """arXiv 1707.06347, eq. 7; dual clip arXiv 1912.09729."""
    r = math.exp(logp - old)
    value = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return min(value, -a * dual) if a < 0 else value


def sapo(logp, old, a, tau_pos=1.0, tau_neg=1.05):
    """arXiv 2511.20347: f(r) = 4 / tau * sigmoid(tau (r - 1))."""
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(logp - old) - 1)))


def rec(mode="none", weight="none", low=0.2, high=0.2, low2=0.6, high2=2.0):
    """arXiv 2509.24203, section 4."""

    def value(logp, old, a):
        r = math.exp(logp - old)
        within = 1 - low <= r <= 1 + high
        kept = {
            "none": True,
            "one-side": (a >= 0 and r <= 1 + high) or (a <= 0 and r >= 1 - low),
            "two-side": within,
            "ring": within or (a >= 0 and r <= 1 - low2) or (a <= 0 and r >= 1 + high2),
        }[mode]
        w = {"none": 1.0, "importance_sampling": r, "advantage": math.exp(a / 0.5)}[weight]
        return -a * w * kept * logp

    return value


def cispo(logp, old, a, low=1.0, high=0.28):
    """arXiv 2506.13585: the clipped weight, without gradient, times log pi."""
    return -a * clip(math.exp(logp - old), 1 - low, 1 + high) * logp


CASES = [
    ("ppo", {}, ppo),
    ("ppo", {"clip_range_high": 0.28}, lambda p, q, a: ppo(p, q, a, high=0.28)),
    ("ppo", {"clip_range": 0.5, "clip_ratio_c": None}, lambda p, q, a: ppo(p, q, a, 0.5, 0.5, math.inf)),
    ("ppo", {"clip_range_low": 0.1, "clip_ratio_c": 10.0}, lambda p, q, a: ppo(p, q, a, 0.1, 0.2, 10.0)),
    ("cispo", {}, cispo),
    ("cispo", {"clip_range_low": 0.3}, lambda p, q, a: cispo(p, q, a, low=0.3)),
    ("sapo", {"loss_agg_mode": "token-mean"}, sapo),
    ("sapo", {"loss_agg_mode": "token-mean", "tau_neg": 2.0}, lambda p, q, a: sapo(p, q, a, tau_neg=2.0)),
    ("sppo", {}, lambda p, q, a: -a * math.log(clip(math.exp(p - q), 1 / 1.3, 1.3))),  # arXiv 2108.05828
    ("importance_sampling", {}, lambda p, q, a: -a * math.exp(p - q)),
    ("reinforce", {}, lambda p, q, a: -a * p),
    ("opmd", {}, lambda p, q, a: -a * p / 2),  # 1 / (1 + tau)
    ("opmd", {"tau": 3.0}, lambda p, q, a: -a * p / 4),
    ("topr", {"level": "token"}, lambda p, q, a: -a * (1 if a > 0 else min(math.exp(p - q), 1)) * p),
    ("rec", {}, rec()),
    ("rec", {"clip_mode": "one-side", "weight": "importance_sampling"}, rec("one-side", "importance_sampling")),
    ("rec", {"clip_mode": "two-side"}, rec("two-side")),
    ("rec", {"clip_mode": "ring"}, rec("ring")),
    ("rec", {"weight": "advantage", "temp": 0.5}, rec(weight="advantage")),
    ("rec", {"regularizer": "k2", "regularizer_coef": 0.3}, lambda p, q, a: -a * p + 0.3 * (p - q) ** 2),
    ("rec", {"regularizer": "forward-kl", "regularizer_coef": 0.3}, lambda p, q, a: -a * p - 0.3 * p),
    ("sft", {}, lambda p, q, a: -p),
    ("sft_weighted", {}, lambda p, q, a: -a * p),
    ("sft_is", {}, lambda p, q, a: -math.exp(p) * p),  # arXiv 2508.05629
    ("sft_phi", {}, lambda p, q, a: -math.exp(p) * (1 - math.exp(p)) * p),  # arXiv 2508.11408
    ("sft_phi", {"cutoff_prob": 0.4}, lambda p, q, a: -math.exp(p) * (1 - math.exp(p)) * min(p, math.log(0.4))),
]


def tensors(tokens=TOKENS):
    """One token a row, next to a masked one."""
    columns = [
        torch.tensor([[value, math.nan] for value in column], dtype=torch.float64)
        for column in zip(*tokens, strict=True)
    ]
    return dict(zip(("logprobs", "old_logprobs", "advantages"), columns, strict=True), mask=~columns[0].isnan())


@pytest.mark.parametrize(("name", "args", "formula"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_formula(name, args, formula):
    inputs = tensors()
    values, _ = POLICY_LOSSES[name].tokens(**inputs, args={k: v for k, v in args.items() if k != "loss_agg_mode"})
    expected = [formula(*token) for token in TOKENS]
    assert values[:, 0].tolist() == pytest.approx(expected, abs=1e-12)
    assert (values[:, 1] == 0).all()
    loss, metrics = POLICY_LOSSES[name](**inputs, **args)
    assert loss.item() == pytest.approx(sum(expected) / len(expected), abs=1e-12)
    assert metrics["pg_loss"] == pytest.approx(loss.item())
    assert all(isinstance(value, float) for value in metrics.values())


def test_ppo_metrics_by_hand():
    _, metrics = POLICY_LOSSES["ppo"](**tensors())
    # the clip binds where the limited loss exceeds the plain one: tokens 2, 5, 7, 8; the dual clip at token 6
    assert metrics["pg_clipfrac"] == pytest.approx(4 / 10)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(1 / 10)
    assert metrics["ppo_kl"] == pytest.approx(sum(old - logp for logp, old, _ in TOKENS) / 10)


def test_cispo_can_drop_what_ppo_would():
    values, stats = POLICY_LOSSES["cispo"].tokens(**tensors(), args={"mask_clipped": True, "clip_range_low": 0.2})
    assert [i for i, value in enumerate(values[:, 0].tolist()) if value == 0] == [2, 5, 7, 8, 9]
    assert stats["masked_frac"][0][:, 0].sum() == 4


def test_gspo_by_hand():
    """arXiv 2507.18071, eq. 5 to 7: s_i = exp(mean_t log r_t), min(s A, clip(s) A), mean over sequences."""
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -1.9, 0.0], [-1.1, -1.2, -0.9]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    s = [math.exp((0.2 - 0.1) / 2), math.exp((0.1 + 0.2 - 0.1) / 3)]
    loss, metrics = POLICY_LOSSES["gspo"](
        logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask, clip_range_low=0.01, clip_range_high=0.01
    )
    assert loss.item() == pytest.approx((-2 * 1.01 + s[1]) / 2)
    assert metrics["ppo_kl_seq"] == pytest.approx(-(0.05 + 0.2 / 3) / 2)
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 5)
    loss.backward()
    # the first sequence is clipped; the second has d s / d log pi_t = s / 3 each
    expected = [0, 0, 0] + [s[1] / 3 / 2] * 3
    assert logprobs.grad.flatten().tolist() == pytest.approx(expected)


def test_gmpo_by_hand():
    """arXiv 2507.20673, eq. 4: exp(mean_t log r_t) of individually clipped ratios, in the log."""
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.9, -1.2, 0.0], [-1.9, -0.2, -1.3]], dtype=torch.float64)  # log r 0.9 -0.8 | 0.9 -0.8 0.3
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    good, bad = math.exp((0.5 - 0.8) / 2), math.exp((0.9 - 0.4 + 0.3) / 3)
    loss, metrics = POLICY_LOSSES["gmpo"](
        logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask, clip_range=0.4, clip_range_high=0.5
    )
    assert loss.item() == pytest.approx((-2 * good + bad) / 2)
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 5)
    assert metrics["ppo_kl_seq"] == pytest.approx(-(0.05 + 0.4 / 3) / 2)  # of the ratios as they are
    loss.backward()
    # clipped tokens have no gradient; of the others d exp(mean) / d log pi_t = exp(mean) / T
    expected = [0, -2 * good / 2 / 2, 0, bad / 3 / 2, 0, bad / 3 / 2]
    assert logprobs.grad.flatten().tolist() == pytest.approx(expected)


def test_topr_tapers_the_whole_sequence():
    """arXiv 2503.14286: negatives weigh min(prod_t pi / mu, 1), positives 1."""
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]], dtype=torch.float64)
    old = torch.tensor([[-0.5, -1.5], [-0.5, -1.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    values, stats = POLICY_LOSSES["topr"].tokens(
        logprobs, torch.ones(2, 2, dtype=torch.bool), old_logprobs=old, advantages=advantages
    )
    assert stats["topr/weight"][0].flatten().tolist() == pytest.approx([1, 1, math.exp(-1), math.exp(-1)])
    assert values.flatten().tolist() == pytest.approx([1, 2, -math.exp(-1), -2 * math.exp(-1)])


def test_rec_on_sequences():
    """`gspo-one-side` clips by the geometric mean of the ratios."""
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    old = torch.tensor([[-1.5, -1.0], [-1.2, -1.0]], dtype=torch.float64)
    values, stats = POLICY_LOSSES["rec"].tokens(
        logprobs, torch.ones(2, 2, dtype=torch.bool), old_logprobs=old, advantages=torch.ones(2, 2).double(),
        args={"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
    )  # fmt: skip
    assert values.flatten().tolist() == pytest.approx([0, 0, math.exp(0.1), math.exp(0.1)])
    assert stats["pg_clipfrac"][0].float().mean() == 0.5


SMOOTH = [
    (name, args)
    for name, args, _ in CASES
    if name in ("ppo", "sapo", "sppo", "importance_sampling", "reinforce", "opmd", "sft", "sft_weighted", "topr", "rec")
    and args.get("weight") != "importance_sampling"
]


@pytest.mark.parametrize(("name", "args"), SMOOTH, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SMOOTH)])
def test_gradcheck(name, args):
    """Without stop-gradients, autograd agrees with finite differences."""
    inputs = tensors([token for token in TOKENS if token[2] != 0])
    inputs["logprobs"] = torch.where(inputs["mask"], inputs["logprobs"], -1.0).requires_grad_()
    detached = name == "topr"
    if detached:  # the weight is constant only for positives
        inputs["advantages"] = inputs["advantages"].abs()

    def loss(logprobs):
        return POLICY_LOSSES[name](**{**inputs, "logprobs": logprobs}, **args)[0]

    assert torch.autograd.gradcheck(loss, (inputs["logprobs"],), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("cispo", lambda p, q, a: -a * clip(math.exp(p - q), 0, 1.28)),
        ("sft_is", lambda p, q, a: -math.exp(p)),
        ("sft_phi", lambda p, q, a: -math.exp(p) * (1 - math.exp(p))),
        ("topr", lambda p, q, a: -a * (1 if a > 0 else min(math.exp(p - q), 1))),
    ],
)
def test_stopped_gradients(name, factor):
    """With a stopped weight, the gradient is the weight times that of log pi."""
    inputs = tensors()
    inputs["logprobs"] = inputs["logprobs"].requires_grad_()
    args = {"level": "token"} if name == "topr" else {}
    POLICY_LOSSES[name](**inputs, **args)[0].backward()
    expected = [factor(*token) / len(TOKENS) for token in TOKENS]
    assert inputs["logprobs"].grad[:, 0].tolist() == pytest.approx(expected)
    assert (inputs["logprobs"].grad[:, 1] == 0).all()


def test_unknown_aggregation_is_refused():
    with raising(InputError, key="mean"):
        POLICY_LOSSES["ppo"](**tensors(), loss_agg_mode="mean")


def test_negative_sequences_far_from_their_sampler_are_dropped():
    """DeepSeek-V3.2, arXiv 2512.02556, eq. 9: A < 0 and mean log mu / pi above the threshold."""
    logprobs = torch.tensor([[-1.0, -3.0], [-1.0, -3.0], [-1.0, -3.0], [-1.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    rollout = torch.tensor([[-0.5, -2.0], [-0.5, -2.0], [-0.5, -2.6], [-0.3, 0.0]])  # means 0.75, 0.75, 0.45, 0.7
    inputs = {"logprobs": logprobs, "mask": mask, "rollout_logprobs": rollout, "rollout_correction": "none"}
    advantages = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 2)
    loss, metrics = POLICY_LOSSES["ppo"](
        **inputs, advantages=advantages, off_policy_mask_threshold=0.5, loss_agg_mode="seq-mean-token-sum"
    )
    loss.backward()
    assert loss.item() == pytest.approx((0 - 2 + 2 + 0) / 4)
    assert logprobs.grad.tolist() == [[0, 0], [-0.25, -0.25], [0.25, 0.25], [0, 0]]
    assert metrics["off_policy_masked"] == pytest.approx(3 / 7)
