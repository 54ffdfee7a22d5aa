"""Pauses a run by `monitor.pause`: it saves and waits for a person, who continues, changes settings, or stops it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trinity_core.base.errors import Paused, TrinityError
from trinity_core.config import Config, stages
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.metrics_file import read_metrics, series
from trinity_core.exchange.tracking.pauses import (
    AFTER_STEPS,
    CONTINUE,
    STOP,
    Decision,
    Pause,
    pause_at,
    read_pauses,
    record_pause,
)
from trinity_core.exchange.tracking.scores import valid_scores
from trinity_core.results.doctor import Diagnosis
from trinity_core.run.stage import Stage

log = logging.getLogger(__name__)
PAUSED = "paused"
"""Why the trainer ended at a step of `monitor.pause.after_steps`."""
Ask = Callable[[Config, str], Decision | None]
"""Asks a person, given a text on the run, and returns the decision; None if nobody decides."""
REST = (
    "The run in %s has saved step %d and waits for a person (%s). Give the same command again on a terminal, or with "
    "`--decide continue`, `--decide 'continue key=value …'` or `--decide stop`."
)


class PauseWatch:
    """Decides when one attempt has to save and wait for a person."""

    def __init__(self, config: Config) -> None:
        self._job_dir, self._rules = config.job_dir, config.monitor.pause
        self._paused_before = {check for pause in read_pauses(config.job_dir) for check in pause.checks}
        self._findings: dict[str, str] = {}
        self._is_at_step = False

    def note_findings(self, diagnosis: Diagnosis) -> None:
        """Note what the doctor finds while the run trains."""
        if self._rules.at_findings and diagnosis.check not in self._paused_before:
            self._findings[diagnosis.check] = diagnosis.evidence

    def note_end(self, trained: Mapping[str, Any]) -> None:
        """Note the trainer's summary at its end."""
        self._is_at_step = trained["ended"] == PAUSED

    def is_due(self) -> bool:
        return self._is_at_step or bool(self._findings)

    def pause(self, trained: Mapping[str, Any]) -> Pause | None:
        """Return the pause that begins, given the trainer's summary at its end; None if the run has ended instead.

        At a step of `after_steps` the findings until then are asked about too: a person is asked once a step.
        """
        findings = dict(self._findings)  # another thread may add to it
        if trained["ended"] != PAUSED and not (findings and trained["ended"] == "stopped"):
            return None
        is_at_step = trained["ended"] == PAUSED or trained["step"] in self._rules.after_steps
        causes = [f"{check}: {evidence}" for check, evidence in findings.items()]
        return Pause(trained["step"], "; ".join([AFTER_STEPS, *causes] if is_at_step else causes), tuple(findings))


def stopped_by_person(config: Config, step: int) -> str:
    """Return why a run at this step is over, if a person has stopped it there; else ""."""
    here = pause_at(config.job_dir, step)
    return here.text if here is not None and here.decided.decision == STOP else ""


def decided(stage: Stage, given: Decision | None, ask: Ask, resolve: Callable[[Decision], Stage]) -> Stage:
    """Return the stage as it resumes from the pause at which it waits, if it does, and record the decision.

    `given` is a decision made beforehand; it also continues a run that a person has stopped. Else a person is asked,
    again if the settings are refused. `resolve` returns the stage with the decision's settings. Raises Paused if nobody
    decides.
    """
    config, step = stage.config, stage.resumed_step
    pause, refusal = pause_at(config.job_dir, step), ""
    if pause is None or pause.decided.decision == CONTINUE:
        return stage
    if pause.decided.decision == STOP and (given is None or given.decision == STOP):
        return stage
    while True:
        decision = given or ask(config, pause_text(config, pause) + refusal)
        if decision is None:
            raise Paused(REST % (config.job_dir, pause.step, pause.cause))
        try:
            stage = resolve(decision) if decision.settings or refusal else stage
        except TrinityError as error:
            if given:
                raise
            refusal = f"\n\nRefused: {error}"
            continue
        pause = replace(pause, decided=decision)
        record_pause(config.job_dir, pause)
        log.info("pause %s", pause.text)
        return stage


def pause_text(config: Config, pause: Pause) -> str:
    """Describe a run that waits: where, why, its latest rewards and scores."""
    lines = [f"{config.project}/{config.name} has saved step {pause.step} and waits.", f"Cause: {pause.cause}"]
    rewards = [*series(read_metrics(config.job_dir), "reward/mean", "trainer").items()][-5:]
    if rewards:
        lines.append(f"Reward: {', '.join(f'{value:.3g} (step {step})' for step, value in rewards)}")
    if scores := valid_scores(config):
        lines.append(f"Score: {', '.join(f'{value:.3g} (step {step})' for step, value in scores.items())}")
    return "\n".join(lines)


def has_terminal() -> bool:
    """True if a person can type at this process's input, which is None if it was closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def ask_at_terminal(text: str) -> Decision | None:
    """Ask the person at this process's terminal; None if there is none."""
    if not has_terminal():
        return None
    print(text)
    while True:
        try:
            decision = Decision.parse(input("continue, continue key=value …, or stop? "))
            return replace(decision, reason=input("Reason, kept with the run: ").strip())
        except TrinityError as error:
            print(error)
        except EOFError:
            return None


def require_waiting(config: Config) -> None:
    """Raise TrinityError if no stage of this configuration waits for a decision, or was stopped by one. A stopped stage
    of a pipeline is done once it has a summary."""
    for stage in stages(config):
        step = max(whole_steps(stage.job_dir), default=0)
        is_done = bool(config.stages) and (stage.job_dir / "summary.json").exists()
        if (pause := pause_at(stage.job_dir, step)) and pause.decided.decision in ("", *(() if is_done else (STOP,))):
            return
    raise TrinityError(f"{config.job_dir}: this run waits for no decision", key="decide")
