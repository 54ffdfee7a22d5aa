"""Hints beside a run's curves: metrics that are not normal, and where the time goes, by the tables of
docs/troubleshooting.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

RECENT = 5
"""Steps whose mean is looked at, and of whose first ones it may be a multiple."""
WAITS, IS_LARGE = 0.3, 0.2
"""Shares of a step: a side that waits, and a part that is large."""


@dataclass(frozen=True, slots=True)
class Normal:
    """A metric, by the end of its name, with what is normal: bounds, and the largest multiple of its first steps."""

    metric: str
    meaning: str
    otherwise: str
    most: float = inf
    least: float = -inf
    growth: float = inf
    unless: str = ""
    """Metric of the runs for which these bounds do not hold."""

    def fault(self, first: float, value: float) -> str:
        """Return what a value would normally be; "" if it is normal."""
        if value > self.most:
            return f"at most {self.most:g}" if self.most else "0"
        if value < self.least:
            return f"at least {self.least:g}"
        grew = 0 < self.growth * first < value
        return f"less than {self.growth:g} times the {first:.3g} of its first steps" if grew else ""


LOG = "`trinity log --level WARNING` names the first"
FEWER = "Try fewer updates a batch, or a lower learning rate"
NORMAL = (
    Normal("reward/zero_variance_groups", "share of groups whose rewards are all equal", "The tasks are too easy or "
           "too hard: try a curriculum, dapo's dynamic sampling, or a larger `repeat_times`", most=0.8),
    Normal("advantages/zero_rows", "share of rows with advantage 0", "Hardly any row changes the policy", most=0.95),
    Normal("truncated/mean", "share of answers cut off at `max_response_tokens`", "Raise the limit, or shorten answers "
           "by a penalty", most=0.1),
    Normal("verifier_errors", "number of answers without a verdict", LOG, most=0),
    Normal("failed_tasks", "number of tasks of which every attempt failed", LOG, most=0),
    Normal("failed_rollouts", "number of rollouts of which every attempt failed", LOG, most=0),
    Normal("actor/grad_norm", "gradient norm before clipping", "Lower `algorithm.optimizer.lr`, or "
           "`trainer.grad_clip`", growth=10),
    Normal("actor/ppo_kl", "mean of log π_old − log π", FEWER, most=0.05),
    Normal("actor/pg_clipfrac", "share of clipped tokens", FEWER, most=0.2,
           unless="actor/ppo_kl_seq"),
    Normal("actor/kl_mean", "KL to the reference, in nats a token,", "If it rises fast: a larger `kl_coef`, or a lower "
           "learning rate", most=0.1),
    Normal("actor/entropy_mean", "mean entropy of the sampled positions", "Early in a run: a lower learning rate, an "
           "entropy bonus, a higher upper clip, or temperature 1", least=0.01),
    Normal("critic/vf_loss", "error of the values", "Train the critic alone first: "
           "`trainer.trainer_config.trainer.critic_warmup`", growth=2),
    Normal("rollout_gap/mean", "gap between log-probs of engine and trainer, in nats a token,", "Compare chat "
           "template, temperature and model folder", most=0.05),
    Normal("rollout_gap/ess", "effective sample size, as a share,", "Set `rollout_correction`, or a smaller "
           "`max_staleness`", least=0.9),
)  # fmt: skip
TIMES = {
    "both sides wait": "`sync_offset: 1` lets the explorer sample a step with the version before",
    "trainer waits, explorer generates": "More engines (`explorer.rollout_model.engine_num`), or asynchronous training",
    "explorer waits": "The trainer is slower: more trainer GPUs, or a larger `trainer.max_token_len_per_gpu`",
    "`timing_s/reward` is large": "More `explorer.reward_workers`; for a judge, more engines of it",
    "`timing_s/weight_sync` is large": "`sync_method: memory` or `nccl` in place of `checkpoint`, or a larger "
    "`sync_interval`",
}
"""Where the time goes → what to do."""


def hints(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a sentence or two, in Markdown, for each metric (full name → values by step) that is not normal in the
    latest steps, and for where their time goes."""
    enough = {name: values for name, values in curves.items() if len(values) >= RECENT}
    recent = {name: fmean(values[-RECENT:]) for name, values in enough.items()}
    first = {name: fmean(values[:RECENT]) for name, values in enough.items()}
    unusual = [
        f"The {normal.meaning} is {value:.3g}, normally {fault} (`{name}`, mean of the last {RECENT} steps). "
        f"{normal.otherwise}."
        for normal in NORMAL if normal.unless not in curves for name, value in recent.items()
        if name.endswith(normal.metric) and (fault := normal.fault(first[name], value))
    ]  # fmt: skip
    times = (f"{sign[0].upper()}{sign[1:]}: {share} of a step. {TIMES[sign]}." for sign, share in _times(recent))
    return [*unusual, *times]


def _times(recent: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield each entry of `TIMES` that applies, and the shares of a step."""
    shares = {
        name: value / step
        for name, value in recent.items()
        if "timing_s/" in name and (step := recent.get(f"{name.partition('timing_s/')[0]}timing_s/step"))
    }
    trainer = shares.get("timing_s/wait", 0.0)
    explorer = max((share for name, share in shares.items() if name.endswith("/timing_s/wait")), default=0.0)
    if min(trainer, explorer) > WAITS:
        yield "both sides wait", f"trainer {trainer:.0%}, explorer {explorer:.0%}"
    elif trainer > WAITS:
        yield "trainer waits, explorer generates", f"{trainer:.0%}"
    elif explorer > WAITS:
        yield "explorer waits", f"{explorer:.0%}"
    for part in ("reward", "weight_sync"):
        large = max((share for name, share in shares.items() if name.endswith(f"timing_s/{part}")), default=0.0)
        if large > IS_LARGE:
            yield f"`timing_s/{part}` is large", f"{large:.0%}"
