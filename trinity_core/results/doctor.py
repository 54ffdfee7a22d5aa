"""`trinity doctor`: faults of a run, found in what the run has stored.

A check is a pure function over `Evidence`, and yields only signs that a healthy run does not show:
`benchmarks/wrong_runs.py` counts the injected faults that are named and the clean runs that are accused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.data.experience import Experience
from trinity_core.data.session_log import SESSION
from trinity_core.results.audit import stored_runs, stores_of
from trinity_core.results.evidence import Evidence, Steps, gather

RECENT = 5
"""Number of steps at the end of a run that count as its present state."""
SIGMAS = 4.0
"""A difference of more standard errors than this is not noise."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that is wrong with a run."""

    check: str
    """Stable name of the check."""
    evidence: str
    """Steps and numbers that show it."""
    cause: str
    """The most likely cause."""
    next_step: str

    def __str__(self) -> str:
        return f"{self.check}: {self.evidence}. {self.cause}. {self.next_step}."


Sign = tuple[str, str, str]
"""Evidence, cause and next step of a `Diagnosis`."""
Check = Callable[[Evidence], Iterator[Sign]]
CHECKS: dict[str, Check] = {}
"""Name of a check, that of its function, → the check."""


def check(function: Check) -> Check:
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    return [Diagnosis(name, *sign) for name, check in CHECKS.items() for sign in check(evidence)]


def diagnose_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, list[Diagnosis]]:
    """Return folder name → diagnoses for the run in `folder`, or for each stage of the pipeline in it.

    `trinity_core.results.audit.stores_of` finds the stores. Nothing is changed. Raises DataError if the run has stored
    nothing yet.
    """
    runs, folder = stored_runs(folder), folder.resolve()
    stores = stores_of(folder, config, overrides, url)
    names = {*stores, *(run.name for run in runs)}
    found = {name: gather(folder.parent / name, stores.get(name)) for name in sorted(names)}
    if not any(one.trained or one.explored or one.failure is not None for one in found.values()):
        raise DataError(f"{folder} has no step yet: `trinity log` shows what it does", key=str(folder))
    return {name: diagnose(evidence) for name, evidence in found.items()}


def doctor_text(found: Mapping[str, Sequence[Diagnosis]]) -> str:
    lines = []
    for name, diagnoses in found.items():
        lines.append(f"{name}: {len(diagnoses)} finding{'s' if len(diagnoses) != 1 else ''}")
        for diagnosis in diagnoses:
            lines += [f"  {diagnosis.check}", f"    {diagnosis.evidence}", f"    {diagnosis.cause}"]
            lines.append(f"    → {diagnosis.next_step}")
    return "\n".join(lines)


def doctor_json(found: Mapping[str, Sequence[Diagnosis]]) -> dict[str, Any]:
    runs = {name: [*map(asdict, diagnoses)] for name, diagnoses in found.items()}
    return {"healthy": not any(runs.values()), "runs": runs}


@check
def failed(evidence: Evidence) -> Iterator[Sign]:
    """The run ended with an error."""
    if evidence.failure is not None:
        yield (
            f"after train step {max(evidence.trained)}" if evidence.trained else "before its first train step",
            evidence.failure.rstrip(".") or "Its record does not say why",
            f"`trinity log --checkpoint-dir {evidence.folder} --level WARNING` shows what led to it",
        )


@check
def contradiction(evidence: Evidence) -> Iterator[Sign]:
    """Store, checkpoints and archive disagree about a task."""
    for problem in evidence.contradictions:
        yield problem, "The run's own records disagree", f"See `trinity audit --checkpoint-dir {evidence.folder}`"


@check
def repeated_tasks(evidence: Evidence) -> Iterator[Sign]:
    """A task came again before the others of its epoch."""
    times: Counter[str] = Counter()
    epoch: Counter[str] = Counter()
    for number, task in enumerate(evidence.draws):
        taskset = task.rpartition("/")[0]
        times[task] += 1
        if times[task] < epoch[taskset]:
            yield (
                f"draw {number + 1} is task {task} for the {times[task]}. time, after another of its task set was "
                f"drawn {epoch[taskset]} times",
                "Tasks were repeated or left out within an epoch",
                "Compare the run's checkpoints and its log around the last resume",
            )
            return
        epoch[taskset] = max(epoch[taskset], times[task])


@check
def skipped_tasks(evidence: Evidence) -> Iterator[Sign]:
    """An explorer's position in its task sets moved further than by the tasks that it drew."""
    if evidence.skipped:
        yield (
            f"explore {evidence.skipped[0]}",
            "Tasks, perhaps those of a whole epoch, were left out",
            "Compare the run's log around that step; `trinity audit` accounts for the tasks that were drawn",
        )


@check
def other_template(evidence: Evidence) -> Iterator[Sign]:
    """The model was trained with another chat template than the one that is configured."""
    if evidence.other_template:
        yield (
            f"the chat template of {evidence.other_template}, with which it was trained, differs from model."
            "custom_chat_template (or chat_template_path)",
            "The template drifted between two stages: the model does not know these prompts",
            "Leave the setting out, so that the checkpoint's own template applies, or train both stages with one",
        )


@check
def lost_optimizer(evidence: Evidence) -> Iterator[Sign]:
    """The optimizer counts fewer updates after a step than before it."""
    for step, count in evidence.updates.items():
        before = evidence.updates.get(step - 1, 0)
        if count < before:
            yield (
                f"the optimizer had taken {before} updates after train step {step - 1}, and {count} after step {step}",
                "The run resumed without the optimizer's state: its moments began anew",
                "Resume from a checkpoint with its optim_… files, by a release that restores them",
            )
            return


@check
def schedule_restarted(evidence: Evidence) -> Iterator[Sign]:
    """The learning rates of the first steps came again."""
    rates = _values(evidence.trained, "actor/lr")
    first = [rates.get(step) for step in (1, 2, 3)]
    if None in first or len(set(first)) < 3 or len(set(evidence.totals.values())) > 1:
        return
    for step in rates:
        if step > 3 and [rates.get(step + i) for i in range(3)] == first:
            yield (
                f"the learning rates of train steps {step} to {step + 2} are those of steps 1 to 3",
                "The schedule of the learning rate began anew in the middle of the run",
                "Look for a resume before that step: the schedule must continue at the step of the checkpoint",
            )
            return


@check
def eval_leak(evidence: Evidence) -> Iterator[Sign]:
    """A tenth of the sampled evaluation prompts were trained on."""
    rows = [row for row in evidence.rows if row.info.get("prompt")]
    trained = {str(row.info["prompt"]) for row in rows}
    rendered = {str(row.info["prompt"]) for row in rows if SESSION in row.info}  # with template and earlier messages
    leaked = [
        asked
        for asked in sorted(evidence.eval_prompts)
        if asked and (asked in trained or any(asked in prompt for prompt in rendered))
    ]
    if len(leaked) >= max(3, 0.1 * len(evidence.eval_prompts)):
        yield (
            f"{len(leaked)} of {len(evidence.eval_prompts)} sampled evaluation prompts were trained on, such as "
            f"{leaked[0][:80]!r}",
            "The score is no held-out score",
            "Take an evaluation set without training tasks (`trinity data check` lists duplicates)",
        )


@check
def no_update(evidence: Evidence) -> Iterator[Sign]:
    """The last train steps changed nothing: every gradient, or the learning rate, is 0."""
    steps = {step: metrics for step, metrics in evidence.trained.items() if "actor/grad_norm" in metrics}
    recent = _last(steps)
    still = [step for step in recent if not steps[step]["actor/grad_norm"] or steps[step].get("actor/lr") == 0.0]
    if len(still) == RECENT and not evidence.is_solved:
        norms, rates = ({steps[step].get(f"actor/{name}") for step in recent} for name in ("grad_norm", "lr"))
        cause = "The learning rate is 0" if rates == {0.0} else "The loss of every row is 0"
        zero = fmean(steps[step].get("advantages/zero_rows", 0.0) for step in recent)
        yield (
            f"train steps {_span(recent)} learned nothing (gradient norms {sorted(norms, key=str)}, advantage 0 in "
            f"{zero:.0%} of rows)",
            cause if rates == {0.0} or zero < 1 else "All rollouts of a task have the same reward, in every group",
            "Read rewards and rollouts (`trinity view`), and algorithm.optimizer.lr",
        )


@check
def unmoved(evidence: Evidence) -> Iterator[Sign]:
    """With gradients and a learning rate that does not rise any more, the policy answers as the reference."""
    distances, recent = evidence.distances, _last(evidence.distances)
    steps = [evidence.trained[step] for step in recent]
    rates = [metrics.get("actor/lr", 0.0) for metrics in steps]
    if len(distances) < 2 * RECENT or evidence.is_solved or not 0 < rates[-1] <= rates[0]:
        return
    learns = all(m.get("actor/grad_norm") and m.get("advantages/zero_rows", 0.0) < 0.9 for m in steps)
    if learns and (farthest := max(distances[step] for step in recent)) < 0.01:
        yield (
            f"by the KL of steps {_span(recent)}, the mean of a reward between 0 and 1 differs by at most "
            f"{farthest:.1g} from that of the reference",
            f"The learning rate, {rates[-1]:.2g}, is too small to change the answers",
            "Raise algorithm.optimizer.lr tenfold, and compare the curves",
        )


@check
def constant_reward(evidence: Evidence) -> Iterator[Sign]:
    """Every recent answer got the same reward, and the mean reward jumped to that value."""
    for source, steps in evidence.explored.items():
        rewarded = {step: metrics for step, metrics in steps.items() if "reward/std" in metrics}
        recent = _last(rewarded)
        values = {rewarded[step]["reward/mean"] for step in recent}
        if len(recent) < RECENT or len(values) > 1 or any(rewarded[step]["reward/std"] for step in recent):
            continue
        [value] = values
        same = [
            step for step in rewarded if not rewarded[step]["reward/std"] and rewarded[step]["reward/mean"] == value
        ]
        since = next(step for step in sorted(same) if all(other in same for other in rewarded if other >= step))
        earlier = [step for step in rewarded if step < since]
        if evidence.is_solved or (earlier and not _is_jump(rewarded[max(earlier)], value)):
            continue
        began = f"since step {since}" if earlier else "from the first step on"
        yield (
            f"{source}: every answer has the reward {value:g} {began} ({len(rewarded)} steps)",
            "The reward function gives one verdict to everything, or no answer succeeds",
            f"Look at answers beside their rewards: `trinity view --checkpoint-dir {evidence.folder}`",
        )


@check
def reward_fell(evidence: Evidence) -> Iterator[Sign]:
    """The last quarter of the steps has a lower reward than the first, beyond noise, and no score rose."""
    for source, steps in evidence.explored.items():
        means = [*_values(steps, "reward/mean").values()]
        quarter = len(means) // 4
        if quarter < 2:
            continue
        first, last = means[:quarter], means[-quarter:]
        error = ((variance(first) + variance(last)) / quarter) ** 0.5
        risen = any(scores[-1].accuracy > scores[0].accuracy for scores in evidence.scores.values())
        if fmean(last) < fmean(first) - SIGMAS * max(error, 1e-9) and fmean(last) < 0.9 * fmean(first) and not risen:
            yield (
                f"{source}: reward {fmean(first):.3g} in the first {quarter} steps, {fmean(last):.3g} in the last",
                "The policy got worse at what it is rewarded for",
                "Lower algorithm.optimizer.lr, and begin again from an earlier checkpoint",
            )


@check
def score_fell(evidence: Evidence) -> Iterator[Sign]:
    """A held-out score is below the first one, with disjoint intervals."""
    for taskset, scores in evidence.scores.items():
        first, last = scores[0], scores[-1]
        if len(scores) > 1 and last.high < first.low:
            rewards = [mean for steps in evidence.explored.values() for mean in _values(steps, "reward/mean").values()]
            rose = len(rewards) > 1 and rewards[-1] > rewards[0]
            yield (
                f"{taskset}: {first.accuracy:.3f} ({first.low:.3f} to {first.high:.3f}) at step {first.step}, "
                f"{last.accuracy:.3f} ({last.low:.3f} to {last.high:.3f}) at step {last.step}",
                "The reward rose meanwhile: the policy exploits it" if rose else "Training made the model worse",
                "Read answers with a high reward, and keep the checkpoint with the best score",
            )


@check
def reward_without_score(evidence: Evidence) -> Iterator[Sign]:
    """The training reward rose by most of its spread between answers, and no held-out score rose with it."""
    pairs = [(scores[0], scores[-1]) for scores in evidence.scores.values() if len(scores) > 1]
    for source, steps in evidence.explored.items():
        means, spread = [*_values(steps, "reward/mean").values()], [*_values(steps, "reward/std").values()]
        if not pairs or len(means) < 2 * RECENT or not spread:
            continue
        first, last = fmean(means[:2]), fmean(means[-RECENT:])
        risen = last - first > 0.75 * max(*spread[:2], 1e-9) and min(means[-RECENT:]) > max(means[:2])
        unmoved = all(late.accuracy - early.accuracy < 0.1 and late.low <= early.high for early, late in pairs)
        if risen and unmoved:
            yield (
                f"{source}: reward {first:.3g} in the first steps, {last:.3g} in the last {RECENT}; "
                + ", ".join(f"held-out score {early.accuracy:.3f}, then {late.accuracy:.3f}" for early, late in pairs),
                "What is rewarded is not what the held-out score measures: a reward that the policy exploits or writes",
                "Read answers with a high reward (`trinity view`), and who can write what the reward reads",
            )


@check
def rollout_gap(evidence: Evidence) -> Iterator[Sign]:
    """Engines and trainer disagree about sampled tokens more and more."""
    gaps = _values(evidence.trained, "rollout_gap/mean")
    fresh = [step for step in gaps if evidence.trained[step].get("staleness/max", 0.0) == 0.0]
    if len(fresh) >= 2 * RECENT:
        first, last = (median(gaps[step] for step in part) for part in (fresh[:RECENT], fresh[-RECENT:]))
        if last > 0.02 and last > 3 * first:
            yield (
                f"mean gap {first:.2g} nats a token at first, {last:.2g} in steps {_span(fresh[-RECENT:])}, with rows "
                "of the newest version",
                "An engine does not compute what the trainer computes: weights, template or temperature differ",
                "Compare explorer/weight_sync/check_gap and the engines' logs",
            )


@check
def other_groups(evidence: Evidence) -> Iterator[Sign]:
    """The trainer compared rollouts in other groups than those that were stored."""
    for step, rows in evidence.batches.items():
        stored, trained = len({row.group for row in rows}), evidence.trained[step].get("experience/groups")
        if trained is not None and trained < stored:
            yield (
                f"train step {step} was given {stored} groups and computed advantages in {trained:.0f}",
                "Rollouts of different tasks were compared with each other",
                "Compare the group names that the workflow returns with those in `trinity view`",
            )
            return


@check
def unsampled_tokens(evidence: Evidence) -> Iterator[Sign]:
    """Tokens have a loss that no policy sampled."""
    wrong = [(step, row) for step, rows in evidence.batches.items() for row in rows if len(_unsampled(row))]
    if wrong:
        step, row = wrong[0]
        index = int(_unsampled(row)[0])
        yield (
            f"{len(wrong)} of {len(evidence.rows)} rows train on tokens that no policy sampled; the first: train step "
            f"{step}, group {row.group}, run {row.run}, token {index} of the response",
            "A workflow's mask covers prompts or tool output, or is shifted",
            "Return the experiences of the model's own calls, unchanged",
        )


@check
def reward_by_length(evidence: Evidence) -> Iterator[Sign]:
    """Within nearly every group the rewards are in the order of the lengths."""
    longer = shorter = groups = 0
    for rows in evidence.groups():
        lengths = np.array([row.action_mask.sum() for row in rows], float)
        rewards = np.array([row.reward for row in rows], float)
        if len(rows) < 4 or not lengths.std() or len(set(rewards.tolist())) < 3:
            continue
        groups += 1
        correlation = _rank_correlation(lengths, rewards)
        longer, shorter = longer + (correlation > 0.9), shorter + (correlation < -0.9)
    count = max(longer, shorter)
    if groups >= 12 and count >= 0.8 * groups:
        yield (
            f"in {count} of {groups} groups the {'longer' if longer > shorter else 'shorter'} answer has the higher "
            "reward",
            "The reward follows the number of tokens, whatever they say",
            "Read a few rollouts beside their rewards (`trinity view`) before training on",
        )


@check
def short_answers(evidence: Evidence) -> Iterator[Sign]:
    """What is trained on is much shorter than what is sampled."""
    explored, length = evidence.explored.values(), "response_length/mean"
    sampled = [value for steps in explored for value in _values(steps, length).values()]
    trained = [*_values(evidence.trained, length).values()]
    dropped = any(
        name.startswith("experiences/dropped/") and count
        for steps in explored
        for metrics in steps.values()
        for name, count in metrics.items()
    )
    if not dropped or min(len(sampled), len(trained)) < RECENT:
        return
    longest = median([*_values(evidence.trained, "response_length/max").values()] or [np.inf])
    if median(trained) < 0.7 * median(sampled) or longest < median(sampled):
        yield (
            f"answers have {median(sampled):.3g} tokens when sampled, {median(trained):.3g} when trained on, at most "
            f"{longest:.3g}",
            "An operator, or explorer.over_rollout, drops the long ones",
            "See experiences/dropped/… in the explorer's metrics",
        )


@check
def cut_off(evidence: Evidence) -> Iterator[Sign]:
    """Most recent answers end at the limit of their length."""
    for source, steps in evidence.explored.items():
        truncated = _values(steps, "truncated/mean")
        recent = _last(truncated)
        if len(recent) == RECENT and (share := fmean(truncated[step] for step in recent)) > 0.9:
            yield (
                f"{source}: {share:.0%} of the answers of steps {_span(recent)} end at their length limit",
                "The model does not end its answers, or model.max_response_tokens is too small",
                "Compare the chat template's end of a turn with what the model was trained on",
            )


@check
def verifier_errors(evidence: Evidence) -> Iterator[Sign]:
    """A tenth of the recent answers got no verdict."""
    return _lost(evidence, "verifier_errors", "experiences", 0.1)


@check
def failed_tasks(evidence: Evidence) -> Iterator[Sign]:
    """A fifth of the recent tasks failed."""
    return _lost(evidence, "failed_tasks", "tasks", 0.2)


def _lost(evidence: Evidence, name: str, total: str, most: float) -> Iterator[Sign]:
    for source, steps in evidence.explored.items():
        recent = _last([step for step, metrics in steps.items() if metrics.get(total)])
        lost, count = (sum(steps[step].get(key, 0.0) for step in recent) for key in (name, total))
        if count and lost > most * count:
            yield (
                f"{source}: {lost:.0f} of {count:.0f} in steps {_span(recent)}",
                "A verifier, judge or workflow fails for reasons of its own",
                f"`trinity log --checkpoint-dir {evidence.folder} --level WARNING` names the first failures",
            )


@check
def other_reference(evidence: Evidence) -> Iterator[Sign]:
    """The policy is far from its reference before the first update.

    A step of several updates has the KL before its last one.
    """
    if not evidence.trained or min(evidence.trained) != 1 or evidence.starts_from_adapter:
        return
    if evidence.updates.get(1, 1) > 1:
        return
    kl = evidence.trained[1].get("actor/kl_mean")
    if kl is not None and evidence.trained[1].get("staleness/max", 0.0) == 0.0 and abs(kl) > 0.02:
        yield (
            f"the KL to the reference is {kl:.3g} nats a token in train step 1, where both are the same model",
            "The reference is not the model that the run began with",
            "Compare model.model_path with the reference's folder",
        )


def _unsampled(row: Experience) -> np.ndarray:
    """Return the places of response tokens that have a loss although no policy sampled them."""
    if row.versions is None or row.is_expert:
        return np.empty(0, int)
    return np.flatnonzero(row.action_mask & (row.versions < 0))


def _is_jump(last_step: Mapping[str, float], value: float) -> bool:
    """True if `value` is too far from a step's rewards to be the next step's mean by chance."""
    error = last_step.get("reward/std", 0.0) / max(last_step.get("experiences", 1.0), 1.0) ** 0.5
    return abs(last_step["reward/mean"] - value) > SIGMAS * error


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's, with mean ranks for ties."""
    first, second = (np.array([np.mean(np.flatnonzero(np.sort(v) == value)) for value in v]) for v in (x, y))
    return float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else 0.0


def _values(steps: Steps, name: str) -> dict[int, float]:
    """Return step → value of a metric, in the order of steps, without the steps that lack it."""
    return {step: metrics[name] for step, metrics in sorted(steps.items()) if name in metrics}


def _last(steps: Iterable[int]) -> list[int]:
    return sorted(steps)[-RECENT:]


def _span(steps: Sequence[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if len(steps) > 1 else str(steps[0])
