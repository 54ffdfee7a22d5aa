"""Which held-out tasks a model was trained on: tasks whose prompt stands among those of the rows that its runs, and the
runs it descends from, have trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from trinity_core.base.errors import DataError
from trinity_core.base.layout import JobLayout
from trinity_core.config.schema import FormatConfig
from trinity_core.data import formats
from trinity_core.data.files import read_rows
from trinity_core.data.task import Task
from trinity_core.exchange.store.archive import line_header
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, find_rollouts
from trinity_core.results.data_rows import supervised_sets
from trinity_core.results.lineage import ancestry


def leaked_tasks(model: str, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks whose prompt the model, or one it descends from, was trained on.

    Prompts are compared without case and spacing. In rollouts of earlier runs, whose prompts are whole conversations,
    a task's prompt is searched for. Of runs whose folders are gone, nothing is known.
    """
    asked: dict[str, list[Task]] = {}
    for task in tasks:
        if prompt := _prompt(task.raw, task.format):
            asked.setdefault(_plain(prompt), []).append(task)
    leaked: dict[int, Task] = {}
    for ancestor in ancestry(model):
        if ancestor.folder is not None:
            for prompt in _trained_prompts(ancestor.folder, ancestor.step):
                leaked |= {task.index: task for task in asked.get(_plain(prompt), ())}
            for conversation in map(_plain, _conversations(ancestor.folder)):
                found = (same for prompt, same in asked.items() if prompt in conversation)
                leaked |= {task.index: task for same in found for task in same}
    return [leaked[index] for index in sorted(leaked)]


def _trained_prompts(folder: Path, step: int) -> Iterator[str]:
    """Yield the last message of each prompt that a run trained on up to `step`. Raises DataError if the files of a
    supervised data set are gone."""
    archive = JobLayout(folder).archive
    if archive.exists():
        with archive.open("rb") as lines:
            for raw in lines:
                header = line_header(raw)
                if header is None or header[0] > step:
                    break
                yield str(json.loads(raw).get("prompt") or "")
    for data in supervised_sets(folder):
        try:
            form = FormatConfig.model_validate(data.settings.get("format") or {})
        except ValidationError:
            form = FormatConfig()  # of another release
        rows = read_rows(data.path, *data.split, data.settings["storage_type"], data.name).rows
        yield from (prompt for row in rows if (prompt := _prompt(row, form)))


def _conversations(folder: Path) -> Iterator[str]:
    """Yield the earlier rollouts that a supervised run learned from, as they were rendered."""
    for data in supervised_sets(folder, ["rollouts"]):
        for rollout in find_rollouts(data.path, data.settings.get("subset_name")):
            if isinstance(rollout, EarlierRollout):
                info = rollout.experience.info
                yield f"{info.get('prompt')} {info.get('response')}"


def _prompt(row: formats.Row, form: FormatConfig) -> str:
    """Return the last message of a row's prompt; "" if a workflow makes the prompt."""
    try:
        messages = formats.prompt_messages(row, form)
    except DataError:
        return ""
    return str(messages[-1].get("content", ""))


def _plain(prompt: str) -> str:
    return " ".join(prompt.casefold().split())
