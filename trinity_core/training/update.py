"""One optimiser step: advantages and weights of the whole batch, then losses of micro-batches that sum to its loss.

The result does not depend on the division into micro-batches and ranks: advantages (the first rank's) and aggregation
weights are computed from the whole batch, and everything else is a sum over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_core.algorithms import MetricAccumulator
from trinity_core.algorithms.divergence import Taught
from trinity_core.algorithms.objective import Objective
from trinity_core.base.errors import InputError, TrinityError
from trinity_core.data.experience import STEP_REWARD, Experience, rollouts_of
from trinity_core.exchange.store.archive import RowAdvantage
from trinity_core.training.batch import Batch
from trinity_core.training.batching import LARGEST_MASK, pairs_of, plan, units_of
from trinity_core.training.distributed import Ranks, from_first, sum_over_ranks
from trinity_core.training.engine import TrainingEngine
from trinity_core.training.micro import Micro, Micros, build_micro

Teacher = Callable[[Micro], Taught]
"""Returns the teacher's side of a micro-batch."""

ENLARGERS = (
    "the learning rate is too high for this model (algorithm.optimizer.lr, now {lr:g}); gradients are not clipped "
    "(trainer.grad_clip, now {clip:g}); values overflow {dtype} (trainer.dtype)"
)


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    max_tokens: int
    rows: int | None = None
    """Rows of a micro-batch; None for as many as `max_tokens` allows."""
    rows_per_unit: int = 1
    """Adjacent rows that must stay together."""
    packing: bool = True
    largest_mask: int | None = LARGEST_MASK
    """Beyond this mask size rows do not share prompts; None if no mask is needed."""

    def micro(self, batch: Batch, rows: Sequence[int]) -> Micro:
        return build_micro(batch.experiences, rows, batch.width, self.packing, self.largest_mask)


def micro_batches(batch: Batch, limits: MicroBatchLimits, ranks: Ranks, chosen: Sequence[int] | None = None) -> Micros:
    """Return this rank's micro-batches of the `chosen` rows (None: all), on its device. All ranks have the same number.

    A row counts with the longer of its prompt and its teacher's.
    A rank without work gets real rows with no loss, so that all ranks run the same collectives.
    """
    places = range(len(batch)) if chosen is None else chosen
    rows = [batch.experiences[row] for row in places]
    read_by_teacher = [np.empty(0) if e.teacher_prompt is None else e.teacher_prompt for e in rows]
    if limits.rows is None:
        prompts = [max(e.prompt_length, taught.size) for e, taught in zip(rows, read_by_teacher, strict=True)]
        responses = [e.response_length for e in rows]
        budget, largest_mask = limits.max_tokens, limits.largest_mask if limits.packing else 0
    else:  # counted in rows: a row costs 1, whatever its prompt
        prompts, responses = [0] * len(rows), [1] * len(rows)
        budget, largest_mask = limits.rows, None
    if limits.rows_per_unit == 2:
        units = pairs_of(prompts, responses)
    else:
        keys = [
            (e.tokens[: e.prompt_length].tobytes(), taught.tobytes())
            for e, taught in zip(rows, read_by_teacher, strict=True)
        ]
        units = units_of(keys if limits.packing else range(len(rows)), prompts, responses, budget, largest_mask)
    shares = plan(units, budget, ranks.world_size // ranks.sharing, largest_mask)[ranks.rank // ranks.sharing]

    def build(share: Sequence[int]) -> Micro:
        rows = [places[index] for index in share]
        return limits.micro(batch, rows) if rows else limits.micro(batch, range(limits.rows_per_unit)).emptied()

    return Micros(shares, build, ranks.device)


@torch.no_grad()
def forward_batch(batch: Batch, micros: Micros, forward: Callable[[Micro], Tensor], ranks: Ranks) -> Tensor:
    """Run `forward` (float32 [..., K]) on each micro-batch; return the results as [..., B, T], the same on every
    rank."""
    grid = torch.zeros(0)
    for i, micro in enumerate(micros):
        values = micro.grid(forward(micro))
        if i == 0:
            grid = values.new_zeros(*values.shape[:-2], *batch.mask.shape)
        grid.index_add_(-2, micro.rows, values)
    return sum_over_ranks(grid, ranks)


def needs_old_logprobs_first(objective: Objective, batch: Batch, updates: int) -> bool:
    """True if old log-probs must be computed before the update; otherwise they are the stop-gradient of the new
    ones.

    From the second update on, the rollout gap and its correction need them too, whatever the loss.
    """
    in_advantage = not objective.advantage_inputs.isdisjoint({"old_logprobs", "rollout_logprobs"})
    in_loss = objective.needs_old_logprobs or batch.rollout_logprobs is not None
    return objective.kl_in_reward or in_advantage or (updates > 1 and in_loss)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with the tensors of its update, [B, T] each."""

    batch: Batch
    advantages: Tensor
    returns: Tensor | None
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    selected: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """Loss inputs other than the policy's log-probs, keyed by their label in error messages."""
        return {
            "the reference model's log-probs": self.ref_logprobs,
            "the old log-probs": self.old_logprobs,
            "the advantages": self.advantages,
        }

    def of_first(self, ranks: Ranks) -> Prepared:
        """Return the batch with the first rank's advantages on every rank. Collective.

        Ranks plan their micro-batches by the advantages, and CUDA adds in any order: where one rank's is 0, another's
        may be 1e-16.
        """
        returns, selected = (
            None if values is None else from_first(values, ranks) for values in (self.returns, self.selected)
        )
        return replace(self, advantages=from_first(self.advantages, ranks), returns=returns, selected=selected)


def prepare(
    objective: Objective,
    batch: Batch,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    values: Tensor | None,
    entropies: Tensor | None = None,
    expected_signals: Tensor | None = None,
) -> tuple[Prepared, dict[str, float]]:
    """Return the batch with its advantages, and their metrics.

    Raises InputError if a row and its teacher's log-probs have different temperatures.
    """
    rows = batch.experiences
    if "teacher_logprobs" in objective.needs_of_rows:
        _require_teachers_temperature(rows)
    token_rewards = None
    if batch.token_rewards is not None:
        token_rewards = at_actions(batch.token_rewards, batch.mask)
        last = (batch.mask * torch.arange(1, batch.width + 1, device=batch.mask.device)).argmax(-1, keepdim=True)
        alone = torch.tensor([e.reward or 0.0 for e in rows], device=batch.mask.device)
        token_rewards.scatter_add_(1, last, alone[:, None])
    rewards = batch.rewards
    if "states" in objective.advantage_inputs:  # advantages by state add up the rewards of turns
        pairs = zip(rows, rewards.tolist(), strict=True)
        rewards = rewards.new_tensor([e.metrics.get(STEP_REWARD, reward) for e, reward in pairs])
    result = objective.advantages(
        batch.mask,
        batch.excluded,
        rewards=rewards,
        group_ids=batch.groups,
        rollout_ids=rollouts_of(rows),
        run_ids=[f"{e.group}/{e.run}" for e in rows],
        turns=torch.tensor([e.turn for e in rows], device=batch.mask.device),
        states=[e.state for e in rows],
        token_rewards=token_rewards,
        values=values,
        teacher_logprobs=batch.teacher_logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=_sampler_logprobs(batch, old_logprobs),
        ref_logprobs=ref_logprobs,
        entropies=entropies,
        expected_signals=expected_signals,
        numbers=[e.metrics for e in rows],
        lengths=torch.tensor([int(e.sampled.sum()) for e in rows], device=batch.mask.device),
    )
    prepared = Prepared(batch, result.advantages, result.returns, old_logprobs, ref_logprobs, values, result.selected)
    return prepared, result.metrics


def row_advantages(prepared: Prepared) -> list[RowAdvantage]:
    """Return the advantage of each row: one number if its tokens in the loss share it, else float16 for each of these
    tokens; None for a row without such tokens or without an advantage."""
    rows: list[RowAdvantage] = []
    excluded = prepared.batch.excluded.tolist()
    grids = prepared.advantages.float().cpu(), prepared.batch.mask.cpu()
    for advantages, mask, is_excluded in zip(*grids, excluded, strict=True):
        values = advantages[mask]
        if is_excluded or not len(values):
            rows.append(None)
        else:
            rows.append(float(values[0]) if bool((values == values[0]).all()) else values.half().numpy())
    return rows


def _sampler_logprobs(batch: Batch, old_logprobs: Tensor | None) -> Tensor | None:
    """[B, T]: log-probs under the policy that sampled; the old ones in rows without any."""
    if batch.rollout_logprobs is None or old_logprobs is None:
        return old_logprobs
    return torch.where(batch.has_rollout_logprobs[:, None], batch.rollout_logprobs, old_logprobs)


def at_actions(token_rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: move each token reward to the latest action token up to it, or to the first action if there is none
    before.

    Advantages by token then add up the same rewards as those by sequence. Sums of rows are unchanged.
    """
    columns = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    first = mask_BT.int().argmax(-1, keepdim=True)
    action = torch.maximum((mask_BT * columns).cummax(-1).values, first)
    return torch.zeros_like(token_rewards_BT).scatter_add_(1, action, token_rewards_BT)


def _require_teachers_temperature(rows: Sequence[Experience]) -> None:
    for row in rows:
        sampled = np.asarray(1.0 if row.temperature is None else row.temperature)
        if row.teacher_logprobs is not None and not np.isin(sampled[~np.isnan(sampled)], 1.0).all():
            raise InputError(
                f"run {row.run} of group '{row.group}' was sampled at temperature {sampled.max():g}, but its teacher's "
                "log-probs are at 1: the student would be trained away from its teacher; set the task set's "
                "rollout_args.temperature to 1, and give the run another `name` if such rows wait in its store",
                key="rollout_args.temperature",
            )


def spare_backward(
    objective: Objective, prepared: Prepared, micros: Micros, limits: MicroBatchLimits, ranks: Ranks
) -> tuple[Micros, Micros | None]:
    """Return micro-batches for the backward pass, and those that only count in metrics (None: there are none): rows
    without a gradient, because of zero advantages and no other loss term. The device is read once.

    `micros` are all rows. If none has a gradient, all get a backward pass: the optimizer takes its step.
    """
    learns = objective.learns_from(prepared.batch.mask, prepared.advantages).tolist()
    if limits.rows_per_unit > 1 or all(learns) or not any(learns):
        return micros, None
    learning, idle = ([row for row, flag in enumerate(learns) if flag is value] for value in (True, False))
    return micro_batches(prepared.batch, limits, ranks, learning), micro_batches(prepared.batch, limits, ranks, idle)


def update(
    engine: TrainingEngine,
    objective: Objective,
    prepared: Prepared,
    micros: Micros,
    temperature: float,
    step: int,
    lr: float,
    idle: Micros | None = None,
    teacher: Teacher | None = None,
) -> dict[str, float]:
    """Take one optimiser step on the whole batch; return metrics that are exact over micro-batches and ranks.

    `idle` are rows without a gradient (`spare_backward`), which are not in `micros`.
    Raises TrinityError for a loss or gradient that is not finite.
    """
    accumulator = MetricAccumulator()
    with torch.no_grad():
        for _ in _losses(engine, objective, prepared, idle or (), temperature, step, accumulator, teacher):
            pass
    losses = _losses(engine, objective, prepared, micros, temperature, step, accumulator, teacher)
    for i, loss in enumerate(losses):
        engine.backward(loss, last=i == len(micros) - 1)
    norm = engine.step(lr)
    accumulator.reduce(all_reduce(engine.ranks))
    accumulator.total("grad_norm", norm)  # the same on every rank, and read together with the others
    metrics = accumulator.metrics()
    check_finite("policy", step, metrics["final_loss"], metrics["grad_norm"], engine, lr, prepared.inputs)
    return metrics | {"lr": lr}


@torch.no_grad()
def measure(
    engine: TrainingEngine, objective: Objective, prepared: Prepared, micros: Micros, temperature: float, step: int,
    teacher: Teacher | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics of `update` that the loss gives, without learning and without dropout."""
    accumulator = MetricAccumulator()
    engine.module.eval()
    for _ in _losses(engine, objective, prepared, micros, temperature, step, accumulator, teacher):
        pass
    engine.module.train()
    accumulator.reduce(all_reduce(engine.ranks))
    return accumulator.metrics()


def _losses(
    engine: TrainingEngine, objective: Objective, prepared: Prepared, micros: Iterable[Micro], temperature: float,
    step: int, accumulator: MetricAccumulator, teacher: Teacher | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the loss of each micro-batch; their metrics are added to `accumulator`."""
    batch = prepared.batch
    weights = objective.weights(batch.mask, batch.is_expert, step)
    for micro in micros:
        taught = None if teacher is None else teacher(micro)
        logprobs, entropy, *divergences = engine(micro, temperature, objective.entropy_use, taught)
        yield objective.loss(
            accumulator,
            weights.rows(micro.rows),
            logprobs=micro.grid(logprobs),
            entropy=micro.grid(entropy),
            mask=_present(batch.mask, micro),
            rollout_logprobs=_take(batch.rollout_logprobs, micro),
            has_rollout_logprobs=_take(batch.has_rollout_logprobs, micro),
            ref_logprobs=_take(prepared.ref_logprobs, micro),
            old_logprobs=_take(prepared.old_logprobs, micro),
            advantages=_take(prepared.advantages, micro),
            selected=_take(prepared.selected, micro),
            divergences=micro.grid(divergences[0]) if divergences else None,
            is_expert=_take(batch.is_expert, micro),
            step=step,
        )


def all_reduce(ranks: Ranks) -> Callable[[Tensor, str], None]:
    """Return the collective for `MetricAccumulator.reduce`: (tensor, "sum" or "max"), in place."""

    def reduce(values: Tensor, op: str) -> None:
        if ranks.world_size > 1:
            ops: dict[str, Any] = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
            torch.distributed.all_reduce(values, ops[op], group=ranks.data_group)

    return reduce


def _present(mask: Tensor, micro: Micro) -> Tensor:
    return mask[micro.rows] if len(micro.cells) else mask[micro.rows] & False


def _take(values: Tensor | None, micro: Micro) -> Any:
    return None if values is None else values[micro.rows]


@contextmanager
def step_in_error(step: int) -> Iterator[None]:
    """Prefix an InputError (a number that is not finite) with the train step."""
    try:
        yield
    except InputError as error:
        raise InputError(f"train step {step}: {error}", key=error.key) from error


def check_finite(
    what: str,
    step: int,
    loss: float,
    norm: float,
    engine: TrainingEngine,
    lr: float,
    inputs: Mapping[str, Tensor | None],
) -> None:
    """Raise TrinityError if the loss of `what` ("policy", "critic") or its gradient norm is not finite.

    The error names those of `inputs` (of the whole batch, the same on every rank) that were not finite before the
    update; if all were finite, it lists the settings that most often cause overflow. A gradient that overflows under
    float16 is not an error: the loss scale is lowered and the update skipped.
    """
    overflow = engine.settings.dtype == torch.float16
    if math.isfinite(loss) and (math.isfinite(norm) or overflow):
        return
    raise TrinityError(
        f"train step {step}: the loss of the {what} is {loss:g} and the norm of its gradient {norm:g}, so it cannot be "
        f"updated. {_causes(engine, lr, inputs)} The latest checkpoint is as it was before this step; a run with the "
        "cause removed resumes from there."
    )


def _causes(engine: TrainingEngine, lr: float, inputs: Mapping[str, Tensor | None]) -> str:
    broken = [
        f"{name} ({int((~values.isfinite()).sum())} of {values.numel()} numbers)"
        for name, values in inputs.items()
        if values is not None and not bool(values.isfinite().all())
    ]
    if broken:
        return f"Not finite before the update: {', '.join(broken)}; the cause is there."
    settings = engine.settings
    listed = ENLARGERS.format(lr=lr, clip=settings.grad_clip, dtype=str(settings.dtype).removeprefix("torch."))
    return f"All inputs were finite. Likely causes: {listed}."
