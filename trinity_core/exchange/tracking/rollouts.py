"""A few rollouts per step, kept for people: `<job_dir>/monitor/rollouts/<source>_step_<n>.jsonl`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.files import private_folder, write_atomically
from trinity_core.base.layout import stages_of
from trinity_core.data.experience import as_json

if TYPE_CHECKING:
    from trinity_core.data.experience import Experience

log = logging.getLogger(__name__)

_FAULTS = re.compile(r"truncated$|_errors(/|$)")
"""Names of rare faults, which `says` in the view's `dom.js` recognises too."""
SHOWN, WIDTH = 16, 400
"""Rollouts in a text for people, and characters of each part."""
_NAME = re.compile(r"(?P<source>.+)_step_(?P<step>\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout in readable form."""

    prompt: str
    response: str
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    truth: str = ""
    task_index: int = -1
    run: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Messages with `role` and `content`, if the conversation has several turns."""
    span: tuple[float, float] | None = None
    """Unix seconds at which its task's workflow began and ended, if known."""
    task: str = ""
    """Task set and index of a task of the training, as in the store's groups."""

    @classmethod
    def of(cls, experience: Experience, span: tuple[float, float] | None = None) -> SampledRollout:
        """Create it from an experience whose `info` holds the texts (`prompt`, `response`, `truth`, `turns`)."""
        info = experience.info
        turns = info.get("turns")  # in a user's workflow this may be the number of turns
        truth = info.get("truth", info.get("answer"))
        return cls(
            prompt=str(info.get("prompt", "")),
            response=str(info.get("response", "")),
            reward=experience.total_reward,
            parts=dict(experience.metrics),
            truth="" if truth is None else str(truth),
            task_index=experience.task_index,
            run=experience.run,
            turns=[dict(turn) for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else [],
            span=span,
        )


def rollouts_dir(job_dir: Path | str) -> Path:
    return Path(job_dir) / "monitor" / "rollouts"


def traces_dir(job_dir: Path | str) -> Path:
    """Return the folder of rollouts waiting to be sent as traces; they are removed afterwards."""
    return Path(job_dir) / "monitor" / "traces"


def save_rollouts(
    job_dir: Path | str, source: str, step: int, rollouts: Iterable[SampledRollout], folder: Path | None = None
) -> Path:
    """Write the file of one step atomically, replacing an earlier one. Half of a surrogate pair becomes `?`.

    `folder` defaults to `rollouts_dir`.
    """
    path = (folder or rollouts_dir(job_dir)) / f"{source.replace('/', '-')}_step_{step}.jsonl"
    write_rows(path, map(asdict, rollouts))
    return path


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], durable: bool = False) -> None:
    """Write a file with one row of JSON per line; `durable` as in `write_atomically`."""
    private_folder(path.parent)
    lines = (json.dumps(row, ensure_ascii=False, default=as_json) for row in rows)
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode(errors="replace"), durable)


def read_stored_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; damaged ones are left out with a warning, as the file is not synced to the disk."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            if line:
                yield json.loads(line)
        except ValueError:
            log.warning("%s:%d is damaged and is left out", path, number)


def read_rollouts(path: Path) -> list[SampledRollout]:
    names = SampledRollout.__dataclass_fields__
    rows = ({name: value for name, value in row.items() if name in names} for row in read_stored_rows(path))
    rollouts = (SampledRollout(**row) for row in rows)
    return [replace(rollout, span=(*rollout.span,)) if rollout.span else rollout for rollout in rollouts]


def rollout_files(job_dir: Path | str, folder: Path | None = None) -> list[tuple[str, int, Path]]:
    """Return (source, step, file) of all sampled rollouts (or of those in `folder`), by step."""
    files = [
        (match, path)
        for path in (folder or rollouts_dir(job_dir)).glob("*.jsonl")
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(((match["source"], int(match["step"]), path) for match, path in files), key=lambda entry: entry[1:])


def run_with_rollouts(folder: Path) -> Path:
    """Return the folder of the last stage that has sampled rollouts, of the pipeline in `folder`; else `folder`."""
    return next((stage for stage in reversed(stages_of(folder).values()) if rollout_files(stage)), folder)


def newest_rollouts(job_dir: Path | str) -> tuple[str, int, list[SampledRollout]] | None:
    """Return source, step and rollouts of the newest sample, preferably an evaluation's."""
    newest = max(rollout_files(job_dir), key=lambda file: (file[0].startswith("eval"), file[1]), default=None)
    return None if newest is None else (*newest[:2], read_rollouts(newest[2]))


def source_text(source: str) -> str:
    """Return `eval set test` for the source `eval_test`, others as they are."""
    return f"eval set {source.removeprefix('eval_')}" if source.startswith("eval_") else source


def rollouts_text(rollouts: list[SampledRollout]) -> str:
    """Return Markdown with a paragraph per rollout: prompt, response, reward, reference answer. Beside the reward
    are the parts that it and the response do not tell already, and faults if there are any.

    Not a table, in which Prefect's page wraps no text.
    """
    parts = []
    for number, rollout in enumerate(rollouts[:SHOWN], 1):
        prompt, response, truth = (
            markdown_text(text, WIDTH) for text in (rollout.prompt, rollout.response, rollout.truth)
        )
        known = {"response_length": rollout.parts.get("response_length"), "accuracy": rollout.reward}
        facts = {name: value for name, value in rollout.parts.items() if value or not _FAULTS.search(name)}
        numbers = [f"{name} {value:.3g}" for name, value in sorted(facts.items()) if known.get(name) != value]
        reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
        reference = f" · reference: {truth}" if truth else ""
        parts.append(f"**{number}.** {prompt}\n\n> {response}\n\n**{', '.join([reward, *numbers])}**{reference}\n")
    return "\n".join(parts)


def markdown_text(text: str, width: int) -> str:
    """Escape text for one line of Markdown, as in a table: no HTML; the middle of a long text is cut out."""
    if len(text) > width:
        text = f"{text[: width // 2]} … {text[-width // 2 :]}"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([|`*_~\\\[\]])", r"\\\1", text.lstrip(" \t"))
    text = re.sub(r"^(\d+(?=[.)])|(?=[#+=-]))", r"\1\\", text)  # a list or heading at the beginning of a line
    return text.replace("\r", "").replace("\n", "<br>")
