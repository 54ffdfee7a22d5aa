"""Which held-out tasks a model was trained on: tasks whose prompt is answered in the rows that its runs, and the runs
it descends from, have trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.base.layout import JobLayout
from trinity_core.config.findings import Report
from trinity_core.config.schema import FormatConfig
from trinity_core.config.validation import typed_section
from trinity_core.data import formats
from trinity_core.data.files import read_rows
from trinity_core.data.session_log import SESSION
from trinity_core.data.task import Task
from trinity_core.exchange.store.archive import whole_lines
from trinity_core.results.data_rows import supervised_sets
from trinity_core.results.lineage import ancestry

SHORT = 8
"""Characters below which a prompt, such as `Hi`, is too common to be searched for within other text."""


def leaked_tasks(model: str, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks whose prompt the model, or one it descends from, was trained on.

    Prompts are compared without case and spacing. A task's prompt is searched for in texts without roles, and in
    sessions of the OpenAI API and rollouts of earlier runs, which are stored as they were rendered; it must stand there
    between whole words, a short one alone on its lines or between marks. Of runs whose folders are gone, nothing is
    known.
    """
    asked: dict[str, list[Task]] = {}
    for task in tasks:
        if prompt := _plain(_prompt(task)):
            asked.setdefault(prompt, []).append(task)
    inner = {prompt: frozenset(prompt.split()[1:-1]) for prompt in asked}
    leaked: dict[int, Task] = {}
    for ancestor in ancestry(model):
        for text, is_whole in _trained_texts(ancestor.folder, ancestor.step) if ancestor.folder else ():
            prompts = _held(text, inner) if is_whole else [_plain(text)]
            leaked |= {task.index: task for prompt in prompts for task in asked.get(prompt, ())}
    return [leaked[index] for index in sorted(leaked)]


def _held(text: str, inner: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the prompts in a text. `inner`: each prompt's words without the first and the last, which may touch marks
    of the text; a prompt is only searched for if all of these stand in it, because searching is slow."""
    plain, text = _plain(text), text.casefold()
    words = frozenset(plain.split())
    held = (prompt for prompt, between in inner.items() if between <= words and prompt in plain)
    return [prompt for prompt in held if re.search(_pattern(prompt), text)]


def _pattern(prompt: str) -> str:
    words = r"\s+".join(map(re.escape, prompt.split()))
    if len(prompt) < SHORT:
        return rf"(?:^|[\n>\]:])\s*{words}\s*(?:$|[\n<\[])"
    return rf"(?<![a-z0-9]){words}(?![a-z0-9])"


def _trained_texts(folder: Path, step: int) -> Iterator[tuple[str, bool]]:
    """Yield what a run trained on up to `step`: a message that was answered, or a whole conversation or text (True).

    Raises DataError if the files of a supervised data set are gone.
    """
    for _, _, raw in whole_lines(JobLayout(folder).archive, last=step):
        line = json.loads(raw)
        in_session = SESSION in line
        yield _conversation(line) if in_session else str(line.get("prompt") or ""), in_session
    for data in supervised_sets(folder):
        form = typed_section(FormatConfig, data.settings.get("format") or {}, Report())
        for row in read_rows(data.path, *data.split, data.settings["storage_type"], data.name).rows:
            yield from _texts_of_row(row, form)
    for data in supervised_sets(folder, ["rollouts"]):
        for rollout, *_ in data.chosen:
            yield _conversation(rollout.experience.info), True


def _conversation(info: Mapping[str, Any]) -> str:
    return f"{info.get('prompt')} {info.get('response')}"


def _texts_of_row(row: formats.Row, form: FormatConfig) -> Iterator[tuple[str, bool]]:
    """Yield what a demonstration or a preference pair trains on: its whole text, or what each answer with a loss
    replies to. That is the message before it and, if tools were called in between, the user's last one."""
    conversations = []
    with suppress(DataError):
        conversations.append(formats.demonstration(row, form))
    with suppress(DataError):
        conversations.append(formats.preference(row, form)[0])
    for conversation in conversations:
        if conversation.text is not None:
            yield conversation.text, True
        for turn in conversation.learned_turns:
            before = conversation.messages[:turn]
            users = [message for message in before if message["role"] == "user"]
            yield from ((str(message.get("content") or ""), False) for message in (*before[-1:], *users[-1:]))


def _prompt(task: Task) -> str:
    """Return the last message of a task's prompt; "" if its workflow makes the prompt."""
    try:
        return str(task.messages[-1].get("content", ""))
    except DataError:
        return ""


def _plain(prompt: str) -> str:
    return " ".join(prompt.casefold().split())
