"""The gate: a candidate becomes the champion of its project if it shows what `gate` requires, on held-out tasks.

Both models answer the same tasks with the same seeds, some tasks at a time, until the evidence suffices
(`trinity_core.run.sequential`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.config import Config
from trinity_core.data.schedule import open_tasksets
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import policy_encoder
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.answers import TaskAnswers
from trinity_core.exchange.tracking.champions import Champion, champion, point_alias, promote
from trinity_core.results.leakage import leaked_tasks
from trinity_core.results.lineage import weights_of
from trinity_core.run.attempt import Frontend, RunAttempt, open_attempt
from trinity_core.run.sequential import Finding, GateTest
from trinity_core.run.stage import Stage
from trinity_core.run.summary import write_summary

log = logging.getLogger(__name__)
CHAMPION, CANDIDATE = 1, 2
"""Versions under which the engines hold the two models."""
PROMOTED = "promoted"
VERDICTS = {Finding.SHOWN: PROMOTED, Finding.RULED_OUT: "no better", Finding.OPEN: "not shown"}


@dataclass(frozen=True)
class Verdict:
    """What the gate found."""

    verdict: str
    """One of `VERDICTS`, `leaked`, `not approved`, or `is the champion`."""
    candidate: str
    champion: str
    leaked: Mapping[str, Sequence[str]]
    """Eval set → file and line of tasks that the candidate was trained on."""
    tasks: Mapping[str, int]
    """Eval set → tasks that both have answered."""
    requirements: Sequence[Mapping[str, Any]] = ()
    approval: str | None = None
    """Reason of the person who approved; None if nobody was asked, or did."""

    @property
    def text(self) -> str:
        lines = [f"{self.verdict}: {self.candidate}", f"  against {self.champion}"]
        lines += [f"  {requirement_text(told)}" for told in self.requirements]
        for name, rows in self.leaked.items():
            lines.append(f"  {len(rows)} tasks of {name} were trained on, such as {rows[0]}")
        return "\n".join(lines)


def requirement_text(told: Mapping[str, Any]) -> str:
    return (
        f"{told['requirement']} on {', '.join(told['tasksets'])}: {told['finding']} after {told['tasks']} tasks, "
        f"mean {told['mean']:.3f}, needed above {told['needed']:.3f}, evidence {told['evidence']:g}"
    )


def run_gate(stage: Stage, frontend: Frontend) -> dict[str, Any]:
    """Run the gate of a stage whose model is the candidate; return its summary. Raises TrinityError if a score lies
    outside 0 and 1."""
    config, began = stage.config, time.monotonic()
    present = champion(config.job_dir.parent)
    before, candidate = to_beat(config, present), weights_of(str(config.model.model_path))
    held_out = frontend.call("held_out", lambda: read_held_out(config, str(candidate)))
    found = "is the champion" if candidate == before else "leaked" if held_out.is_refused else ""
    verdict = Verdict(found, str(candidate), str(before), held_out.leaked, {})
    if not found:
        with frontend.call("cluster", lambda: open_attempt(stage)) as attempt:
            test = frontend.call("compare", lambda: compare(attempt, before, candidate, held_out))
        told = [requirement.told() for requirement in test.requirements]
        verdict = replace(verdict, verdict=VERDICTS[test.finding], tasks=test.tasks, requirements=told)
    if verdict.verdict == PROMOTED and config.gate.needs_approval:
        approval = frontend.approves(config, verdict.text)
        verdict = replace(verdict, verdict="not approved" if approval is None else PROMOTED, approval=approval)
    log.info("%s", verdict.text)
    if candidate == before and present is not None:
        point_alias(config, present)  # unless an earlier attempt was killed before it did
    if verdict.verdict == PROMOTED:
        replaced = None if present is None else present.model
        point_alias(config, promote(config.job_dir.parent, str(candidate), replaced, asdict(verdict)))
    summary: dict[str, Any] = {
        "project": config.project, "name": config.name, "step": 0, "score": None, "scores": {}, "evaluation": {},
        "checkpoint_dir": verdict.candidate, "hf_dir": None, "tracking": str(config.job_dir.parent / "champions.json"),
        "seconds": round(time.monotonic() - began, 2), "made_from": stage.made_from, "gate": asdict(verdict),
    }  # fmt: skip
    if config.gate.enable and not whole_steps(config.job_dir):  # not in the folder of the run whose checkpoint it is
        write_summary(config, summary)
    frontend.show(config, summary)
    return summary


def to_beat(config: Config, present: Champion | None) -> Path:
    """Return the weights that a candidate must beat: of the configured champion, else of the `present` one, else of the
    model that training began with. Raises DataError if they are gone."""
    model = str(config.gate.champion)
    if present is not None and not config.written("gate.champion"):
        model = present.model
    try:
        return weights_of(model)
    except DataError as error:
        remedy = "restore it, go back by `trinity promote --back`, or name another model to beat"
        raise DataError(f"the champion is gone: {error}; {remedy}", key="gate.champion") from None


@dataclass(frozen=True)
class HeldOut:
    """The tasks of the gate, in random order, without those the candidate was trained on."""

    tasks: Mapping[str, Sequence[Task]]
    leaked: Mapping[str, Sequence[str]]
    is_refused: bool


def read_held_out(config: Config, candidate: str) -> HeldOut:
    tasks: dict[str, Sequence[Task]] = {}
    leaked: dict[str, Sequence[str]] = {}
    is_refused = False
    for taskset in open_tasksets(config, policy_encoder(config.model), is_eval=True):  # as the explorer opens them
        name, read = taskset.name, taskset.tasks()
        trained_on = {task.index: task.location for task in leaked_tasks(candidate, read)}
        chosen = [task for task in read if task.index not in trained_on]
        Random(f"{config.seed} {name}").shuffle(chosen)
        tasks[name] = chosen
        if trained_on:
            leaked[name] = list(trained_on.values())
            is_refused |= len(trained_on) > config.gate.max_leaked_share * len(read)
    return HeldOut(tasks, leaked, is_refused)


def compare(attempt: RunAttempt, before: Path, candidate: Path, held_out: HeldOut) -> GateTest:
    """Let both models answer the held-out tasks, until every requirement is decided or no tasks are left."""
    gate = attempt.config.gate
    gains = [name for name in held_out.tasks if name not in gate.no_loss]
    test = GateTest(gains, gate.no_loss, gate.floors, gate.min_gain, gate.max_loss, gate.error_rate)
    for look in _looks(held_out.tasks, gains, gate.tasks_per_look, attempt.config.seed):
        asked = [(name, row) for name, row in look if test.needs(name)]
        rows_of = {name: [row for of_set, row in asked if of_set == name] for name, _ in asked}
        scores = [
            {
                (name, answers.task): _score(answers, name)
                for name, rows in rows_of.items()
                for answers in attempt.answer(version, folder, name, rows)
            }
            for version, folder in ((CHAMPION, before), (CANDIDATE, candidate))
        ]
        for name, row in asked:
            first, second = (of_model.get((name, row)) for of_model in scores)
            if first is not None and second is not None:
                test.add(name, first, second)
        told = (requirement_text(requirement.told()) for requirement in test.requirements)
        log.info("after %d tasks: %s", sum(test.tasks.values()), "; ".join(told))
        if test.finding is not Finding.OPEN:
            break
    return test


def _looks(
    tasks: Mapping[str, Sequence[Task]], gains: Sequence[str], size: int, seed: int
) -> Iterator[list[tuple[str, int]]]:
    """Yield the set and row of the tasks of each look, `size` for each set.

    The sets of the gain are tested together, so their tasks come in one random order: one set after another would show
    a gain on the first that the others take back.
    """
    of_sets = {name: [(name, task.index) for task in of_set] for name, of_set in tasks.items()}
    together = [task for name in gains for task in of_sets.pop(name)]
    Random(f"{seed} gain").shuffle(together)
    pools = [(together, size * len(gains)), *((pool, size) for pool in of_sets.values())]
    for look in range(max((-(-len(pool) // number) for pool, number in pools if pool), default=0)):
        yield [task for pool, number in pools for task in pool[look * number : (look + 1) * number]]


def _score(answers: TaskAnswers, taskset: str) -> float | None:
    """Return the mean score of a task's answers with a verdict; None without any."""
    judged = [score for score in answers.scores if score is not None]
    if judged and not 0 <= min(judged) <= max(judged) <= 1:
        raise TrinityError(
            f"{taskset}: an answer to {answers.location} scores {max(judged, key=abs):g}, and the gate needs scores "
            "from 0 to 1: let the reward function report an `accuracy`",
            key="gate",
        )
    return fmean(judged) if judged else None
