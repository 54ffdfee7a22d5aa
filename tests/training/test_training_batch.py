"""Rows that lack a field, next to rows that have it: a missing value is never 0."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import make_batch as make_rows

from trinity_core.algorithms.metric_accumulator import MetricAccumulator
from trinity_core.algorithms.objective import Objective
from trinity_core.base.errors import InputError
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.training.batch import batch_metrics, make_batch
from trinity_core.training.update import prepare, row_advantages

CPU = torch.device("cpu")


def lay_out(rows, objective):
    return make_batch(rows, CPU, objective.needs_of_rows)


def loss(objective, batch, advantages, old=None):
    """The gradient of the loss at log-probs of -1 everywhere, [B, T], and the metrics."""
    logprobs = torch.full(batch.mask.shape, -1.0, requires_grad=True)
    accumulator = MetricAccumulator()
    total = objective.loss(
        accumulator, objective.weights(batch.mask, batch.is_expert, 1), logprobs=logprobs, mask=batch.mask,
        rollout_logprobs=batch.rollout_logprobs, has_rollout_logprobs=batch.has_rollout_logprobs,
        advantages=advantages, is_expert=batch.is_expert, old_logprobs=old, step=1,
    )  # fmt: skip
    return torch.autograd.grad(total, logprobs)[0], accumulator.metrics()


@pytest.mark.parametrize("correction", ["tis_token", "tis_sequence", "mis", "icepop", "geometric"])
def test_row_without_logprobs_keeps_weight_one(make_config, correction):
    """The other row has a gap of log 2: only that one is weighted and measured."""
    config = make_config(
        algorithm__rollout_correction=correction, algorithm__kl_loss_fn="none", algorithm__rollout_correction_args="{}"
    )
    objective = Objective(config.algorithm)
    rows = make_rows(1)[:2]
    for row in rows:
        row.logprobs = np.where(row.action_mask, -1 - np.log(2), 0.0)
    rows[1].logprobs = None
    batch = lay_out(rows, objective)
    gradient, metrics = loss(objective, batch, torch.where(batch.mask, 1.0, 0.0))
    weights = -gradient * batch.mask.sum()
    assert weights[1][batch.mask[1]].tolist() == pytest.approx([1.0] * int(batch.mask[1].sum()))
    assert metrics["rollout_gap/mean"] == pytest.approx(np.log(2), rel=1e-5)
    assert metrics["rollout_gap/max"] == pytest.approx(np.log(2), rel=1e-5)
    assert batch_metrics(batch, 0)["experience/rows_without_logprobs"] == 1.0


@pytest.mark.parametrize("given_old", [False, True])
def test_row_without_logprobs_takes_its_ratio_to_old_policy(make_config, given_old):
    """With `bypass` the other rows use the ratio to the sampling policy, here 2, beyond the clip."""
    objective = Objective(make_config(algorithm__rollout_correction="bypass", algorithm__kl_loss_fn="none").algorithm)
    rows = make_rows(1)[:2]
    rows[0].logprobs = np.where(rows[0].action_mask, -1 - np.log(2), 0.0)
    rows[1].logprobs = None
    batch = lay_out(rows, objective)
    old = torch.where(batch.mask, -1.0 - np.log(1.1), 0.0) if given_old else None
    gradient, _ = loss(objective, batch, torch.where(batch.mask, 1.0, 0.0), old)
    ratios = -gradient * batch.mask.sum()
    assert (ratios[0] == 0).all(), "the clip holds a ratio of 2 with a positive advantage"
    expected = 1.1 if given_old else 1.0
    assert ratios[1][batch.mask[1]].tolist() == pytest.approx([expected] * int(batch.mask[1].sum()))


def test_truncated_prompts_are_not_samples(make_config):
    """Nothing was sampled for them; their reward of 0 must not count."""
    config = make_config(algorithm__advantage_fn_args="{std_cal_level: batch}")
    objective, rows = Objective(config.algorithm), make_rows(1)
    none = {"action_mask": np.zeros(1, bool), "versions": np.array([-1]), "logprobs": None}
    cut = [replace(row, tokens=row.tokens[: row.prompt_length + 1], group="cut", reward=0.0, **none) for row in rows]
    batches = [lay_out(rows, objective), lay_out(rows + cut, objective)]
    advantages = [prepare(objective, batch, None, None, None)[0].advantages[: len(rows)] for batch in batches]
    assert torch.equal(*advantages)
    numbers = [batch_metrics(batch, 0) for batch in batches]
    for name in ("experience/rollouts", "reward/mean", "reward/min", "reward/max"):
        assert numbers[0][name] == numbers[1][name]
    beside = [replace(one, group=rows[0].group, run=9) for one in cut[:1]]  # an agent's that got no answer
    assert not lay_out(rows + beside, objective).excluded.any()


def test_masked_answer_counts_in_its_group(make_config):
    """As masked by `mask_response_truncated`."""
    objective, rows = Objective(make_config().algorithm), make_rows(1)[:4]
    rows[0] = replace(rows[0], action_mask=rows[0].action_mask & False, versions=np.zeros(rows[0].response_length))
    assert not lay_out(rows, objective).excluded.any()
    assert batch_metrics(lay_out(rows, objective), 0)["experience/rollouts"] == 4.0


def test_advantages_of_a_row_are_one_number_or_one_for_each_token_in_the_loss(make_config):
    """GRPO: rewards 1, 0, 0, 1 less their mean 0.5, by their deviation 1 / sqrt(3). None for a row without a reward."""
    rows = [replace(row, reward=reward) for row, reward in zip(make_rows(1)[:4], (1.0, 0.0, 0.0, 1.0), strict=True)]
    objective = Objective(make_config().algorithm)
    prepared, _ = prepare(objective, lay_out([*rows, replace(rows[0], reward=None)], objective), None, None, None)
    *judged, unjudged = row_advantages(prepared)
    assert judged == pytest.approx([0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5], rel=1e-4) and unjudged is None
    by_token = torch.arange(prepared.advantages.numel()).view_as(prepared.advantages) / 3
    tokens = row_advantages(replace(prepared, advantages=by_token))[1]
    assert tokens.dtype == np.float16 and len(tokens) > 1
    assert tokens == pytest.approx(by_token[1][prepared.batch.mask[1]].numpy(), rel=1e-3)


def taught(rows):
    return [replace(row, teacher_logprobs=np.full(row.response_length, -5.0), reward=None) for row in rows]


def test_row_without_teacher_is_not_judged(make_config, caplog):
    """It would get minus its own log-prob as the advantage of every token."""
    objective = Objective(make_config("on_policy_distill").algorithm)
    rows = [*taught(make_rows(1)[:3]), make_rows(1)[3]]
    batch = lay_out(rows, objective)
    assert not batch.mask[3].any() and batch.mask[:3].any(-1).all()
    old = torch.where(batch.mask, -6.0, 0.0)
    prepared, _ = prepare(objective, batch, old, None, None)
    assert (prepared.advantages[3] == 0).all()
    assert torch.equal(prepared.advantages[:3], torch.where(batch.mask[:3], 1.0, 0.0))
    assert batch_metrics(batch, 0)["experience/unscored_rows"] == 1.0
    [record] = caplog.records
    assert record.levelname == "WARNING" and "teacher_logprobs" in record.getMessage()
    assert rows[3].action_mask.any(), "the caller's row is as it was"


@pytest.mark.parametrize("algorithm", ["grpo", "reinforceplusplus"])
def test_row_without_reward_is_not_judged(make_config, algorithm):
    """Its rollout is not a 0 in its group and carries no loss; token rewards count as a reward."""
    objective = Objective(make_config(algorithm).algorithm)
    rows = make_rows(1)[:4]
    for row, reward in zip(rows, (1.0, 0.0, 1.0, None), strict=True):
        row.reward = reward
    batch = lay_out(rows, objective)
    alone = lay_out(rows[:3], objective)
    kl = torch.zeros(batch.mask.shape)
    got, _ = prepare(objective, batch, kl, kl, None)
    expected, _ = prepare(objective, alone, kl[:3, : alone.width], kl[:3, : alone.width], None)
    torch.testing.assert_close(got.advantages[:3, : alone.width], expected.advantages)
    assert (got.advantages[3] == 0).all() and not batch.mask[3].any()
    rows[3].token_rewards = np.ones(rows[3].response_length)
    assert lay_out(rows, objective).mask[3].any()


def test_batch_without_any_verdict_is_refused(make_config):
    grpo, distill = (Objective(make_config(name).algorithm) for name in ("grpo", "on_policy_distill"))
    with pytest.raises(InputError):
        lay_out(make_rows(1), distill)
    with pytest.raises(InputError):
        lay_out(taught(make_rows(1)), grpo)
    masked = [replace(row, reward=None, action_mask=np.zeros(row.response_length)) for row in make_rows(1)]
    assert not lay_out(masked, grpo).mask.any(), "answers that no verifier judged are no error"


def test_expert_answers_need_no_reward(make_config):
    objective = Objective(make_config("mix", buffer__trainer_input__auxiliary_buffers__expert__path="x").algorithm)
    rows = make_rows(1)
    for row in rows[:4]:
        row.reward, row.logprobs, row.is_expert = None, None, True
    batch = lay_out(rows, objective)
    assert batch.mask[:4].any(-1).all() and batch.excluded.tolist() == [True] * 4 + [False] * 12


@pytest.mark.parametrize("algorithm", [name for name, known in ALGORITHMS.items() if known.uses_rollouts])
def test_unscored_batch_has_no_advantage(make_config, algorithm):
    experts = {"buffer__trainer_input__auxiliary_buffers__sft__path": "x"} if algorithm.startswith("mix") else {}
    parts = {"algorithm__advantage_fn_args": "{weights: {accuracy: 1.0}}"} if algorithm == "gdpo" else {}
    objective = Objective(make_config(algorithm, **experts, **parts).algorithm)
    rows = [
        replace(row, reward=None, action_mask=np.zeros(row.response_length, dtype=bool)) for row in make_rows(1)[:4]
    ]
    batch = lay_out(rows, objective)
    zeros = torch.zeros(batch.mask.shape)
    prepared, _ = prepare(objective, batch, zeros, zeros, zeros, zeros)
    assert not prepared.advantages.any()


def test_rollout_logprob_that_is_not_finite_is_refused_with_its_row_and_token():
    """Also by losses that only measure the gap to it; at other tokens it has no effect."""
    rows = make_rows(1)
    for token, is_action in enumerate(rows[3].action_mask):
        broken = [*rows[:3], replace(rows[3], logprobs=rows[3].logprobs.copy()), *rows[4:]]
        broken[3].logprobs[token] = np.nan
        if not is_action:
            make_batch(broken, CPU)
            continue
        with pytest.raises(InputError, match=f"row 3 .* token {token}, is nan"):
            make_batch(broken, CPU)
