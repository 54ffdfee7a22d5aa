"""Which held-out tasks a model was trained on: tasks whose prompt stands among those of the rows that its runs, and the
runs it descends from, have trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trinity_core.base.errors import DataError
from trinity_core.base.layout import JobLayout
from trinity_core.config.schema import FormatConfig
from trinity_core.data import formats
from trinity_core.data.files import read_rows
from trinity_core.data.session_log import SESSION
from trinity_core.data.task import Task
from trinity_core.exchange.store.archive import line_header
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, find_rollouts
from trinity_core.results.data_rows import supervised_sets
from trinity_core.results.lineage import ancestry


def leaked_tasks(model: str, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks whose prompt the model, or one it descends from, was trained on.

    Prompts are compared without case and spacing. In sessions of the OpenAI API and rollouts of earlier runs, which are
    stored as they were rendered, a task's prompt is searched for. Of runs whose folders are gone, nothing is known.
    """
    asked: dict[str, list[Task]] = {}
    for task in tasks:
        if prompt := _prompt(task.raw, task.format):
            asked.setdefault(_plain(prompt), []).append(task)
    leaked: dict[int, Task] = {}
    for ancestor in ancestry(model):
        for text, is_conversation in _trained_texts(ancestor.folder, ancestor.step) if ancestor.folder else ():
            plain = _plain(text)
            prompts = [prompt for prompt in asked if prompt in plain] if is_conversation else [plain]
            leaked |= {task.index: task for prompt in prompts for task in asked.get(prompt, ())}
    return [leaked[index] for index in sorted(leaked)]


def _trained_texts(folder: Path, step: int) -> Iterator[tuple[str, bool]]:
    """Yield what a run trained on up to `step`: the last message of a prompt, or a whole conversation (True).

    Raises DataError if the files of a supervised data set are gone.
    """
    archive = JobLayout(folder).archive
    if archive.exists():
        with archive.open("rb") as lines:
            for raw in lines:
                header = line_header(raw)
                if header is None or header[0] > step:
                    break
                line = json.loads(raw)
                in_session = SESSION in line
                yield _conversation(line) if in_session else str(line.get("prompt") or ""), in_session
    for data in supervised_sets(folder):
        try:
            form = FormatConfig.model_validate(data.settings.get("format") or {})
        except ValidationError:
            form = FormatConfig()  # of another release
        rows = read_rows(data.path, *data.split, data.settings["storage_type"], data.name).rows
        yield from ((prompt, False) for row in rows if (prompt := _prompt(row, form)))
    for data in supervised_sets(folder, ["rollouts"]):
        for rollout in find_rollouts(data.path, data.settings.get("subset_name")):
            if isinstance(rollout, EarlierRollout):
                yield _conversation(rollout.experience.info), True


def _conversation(info: Mapping[str, Any]) -> str:
    return f"{info.get('prompt')} {info.get('response')}"


def _prompt(row: formats.Row, form: FormatConfig) -> str:
    """Return the last message of a row's prompt; "" if a workflow makes the prompt."""
    try:
        messages = formats.prompt_messages(row, form)
    except DataError:
        return ""
    return str(messages[-1].get("content", ""))


def _plain(prompt: str) -> str:
    return " ".join(prompt.casefold().split())
