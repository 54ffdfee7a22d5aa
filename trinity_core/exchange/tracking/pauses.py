"""The pauses of a run, in `monitor/pauses.json`: after which step it waited for a person, and what was decided."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError, InputError
from trinity_core.base.files import from_record, private_folder, write_json
from trinity_core.config import Config
from trinity_core.config.secrets import without_secrets
from trinity_core.config.source import nested

CONTINUE, STOP = "continue", "stop"
AFTER_STEPS = "monitor.pause.after_steps"


@dataclass(frozen=True, slots=True)
class Decision:
    """A person's decision at a pause."""

    decision: str = ""
    """`continue` or `stop`; "" while the run waits."""
    settings: Sequence[str] = ()
    """Settings that apply from this step on, as `key=value`."""
    by: str = ""
    reason: str = ""

    @classmethod
    def parse(cls, text: str, by: str = "", reason: str = "") -> Decision:
        """Read `stop`, or `continue` with any number of `key=value`, quoted as in a shell.

        By default it is made by this process's user. Raises InputError for any other text, and for a secret.
        """
        try:
            decision, *settings = shlex.split(text) or [""]
        except ValueError as error:
            raise InputError(f"{text!r} cannot be read: {error}", key="decision") from None
        if decision not in (CONTINUE, STOP) or not all("=" in setting[1:] for setting in settings):
            raise InputError(f"{text!r} is no decision: write stop, continue or continue key=value …", key="decision")
        if decision == STOP and settings:
            raise InputError(f"{text!r} changes settings of a run that stops", key="decision")
        if secret := next(filter(_holds_secret, settings), ""):
            key = secret.partition("=")[0]
            raise InputError(
                f"{key} holds a secret, and decisions are recorded: set it where the run is configured", key=key
            )
        user = f"{os.environ.get('USER') or f'user {os.getuid()}'} on {socket.gethostname()}"
        return cls(decision, settings, by.strip() or user, reason.strip())


def _holds_secret(setting: str) -> bool:
    key, _, value = setting.partition("=")
    section = nested(key, value)
    return bool(without_secrets(section) != section)


@dataclass(frozen=True, slots=True)
class Pause:
    """A run that waits, or waited, with the checkpoint of `step`."""

    step: int
    cause: str
    """The setting that asks for it (`AFTER_STEPS`, first), findings of the doctor, or both."""
    checks: Sequence[str] = ()
    """Checks of the doctor that caused it. They cause no further pause."""
    decided: Decision = Decision()

    @property
    def text(self) -> str:
        decided = self.decided
        what = f"{shlex.join([decided.decision, *decided.settings])}, by {decided.by}"
        reason = f": {decided.reason}" if decided.reason else ""
        return f"after step {self.step} ({self.cause}): {what if decided.decision else 'waits for a person'}{reason}"


def pauses_file(job_dir: Path) -> Path:
    return job_dir / "monitor" / "pauses.json"


def read_pauses(job_dir: Path) -> list[Pause]:
    """Return all pauses in the order of steps. Raises DataError if the file is damaged: decided settings are in it."""
    path = pauses_file(job_dir)
    if not path.exists():
        return []
    try:
        return [recorded_pause(entry, path) for entry in json.loads(path.read_text())["pauses"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged: restore it, or remove it to be asked again", key=str(path)) from None


def recorded_pause(entry: Mapping[str, Any], source: Path | str) -> Pause:
    """Return the pause that `asdict` made this entry of; `source` is its file."""
    return from_record(Pause, {**entry, "decided": from_record(Decision, entry["decided"], source)}, source)


def record_pause(job_dir: Path, pause: Pause) -> None:
    """Add a pause, or the decision at a pause that waits."""
    kept = read_pauses(job_dir)
    if kept and kept[-1].step == pause.step and not kept[-1].decided.decision:
        kept.pop()
    private_folder(pauses_file(job_dir).parent)
    _write(job_dir, [*kept, pause])


def undo_pauses(job_dir: Path, step: int) -> None:
    """Forget the pauses after `step`, to which the run goes back, with what was decided there."""
    pauses = read_pauses(job_dir)
    kept = [pause for pause in pauses if pause.step <= step]
    if kept != pauses:
        _write(job_dir, kept)


def _write(job_dir: Path, pauses: Sequence[Pause]) -> None:
    write_json(pauses_file(job_dir), {"pauses": [asdict(pause) for pause in pauses]})


def decided_settings(job_dir: Path, step: int) -> list[str]:
    """Return the settings that people changed at pauses up to `step`, in order."""
    return [setting for pause in read_pauses(job_dir) if pause.step <= step for setting in pause.decided.settings]


def pause_at(job_dir: Path, step: int) -> Pause | None:
    """Return the latest pause of a run that resumes from `step`, if it is one at this step."""
    here = [pause for pause in read_pauses(job_dir) if pause.step == step]
    return here[-1] if here else None


def pause_steps(config: Config, step: int) -> frozenset[int]:
    """Return the steps after which a run that resumes from `step` pauses: this one only if a kill came before it."""
    decided = {pause.step for pause in read_pauses(config.job_dir) if pause.cause.startswith(AFTER_STEPS)}
    return frozenset(config.monitor.pause.after_steps) - (decided & {step})
