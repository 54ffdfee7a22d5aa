"""A trial of each data set's first rows: what template, model and reward function will do with them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from trinity_core.base.errors import DataError, RewardError, TransientFault
from trinity_core.config import Config
from trinity_core.config.findings import Finding, Severity
from trinity_core.config.paths import PIPELINE, reads_output, uses_pipeline
from trinity_core.config.rules.tasks import JOINED_INPUTS, eval_tasksets, training_tasksets
from trinity_core.config.schema import ExperienceInputConfig
from trinity_core.config.schema.buffer import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity_core.data import formats
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.files import RejectedRow, Row, Rows, data_files, is_local, looks_local, read_rows
from trinity_core.data.inspection import FORMATS, supervised_inputs
from trinity_core.data.joined import input_row, inputs_of
from trinity_core.data.supervised import Kind, read_supervised
from trinity_core.data.task import Task
from trinity_core.data.taskset import PromptCheck, Taskset
from trinity_core.exchange.store.earlier_rollouts import find_rollouts
from trinity_core.pipelines.named_parts import reward_of
from trinity_core.run.preflight.models import hub_error
from trinity_core.workflows.rewards import RewardItem, RewardPool
from trinity_core.workflows.rewards.functions import NO_LIST
from trinity_core.workflows.rewards.models import MODEL_REWARDS
from trinity_core.workflows.rewards.pool import NO_NUMBER

ROWS = 16
"""Rows read from each data set. Some bad rows are no problem, because a run rejects them."""
JUDGED = 4
"""Rows of which a reward function judges an answer, until one can be judged. Each may start a process."""
MORE_ROWS = 1000
"""Rows read if none of the first can be used, before a data set is refused."""
MAX_PROMPT = "model.max_prompt_tokens"
ANSWER = "1"
IN_ALL_FORMS = "<think>1</think> <answer>\\boxed{1}</answer>\n```python\n1\n```\n#### 1"
"""Another answer, for reward functions that fail without the form they look for."""
LACKS = ("ImportError", "ModuleNotFoundError", "NameError")
"""Errors of a reward function that lacks a name or module."""
BROKEN = ("AttributeError", "KeyError", "TypeError")
"""Errors that a reward function hardly means to raise: with the same one for each row and answer, it never works."""
Read = Callable[..., Any]
"""Reads the first `limit` rows: those that can be used, and those that are rejected."""


def trial_of_rows(
    config: Config, is_first: bool, encoder: ChatEncoder | None, judges: bool = True
) -> Iterator[Finding]:
    """Yield the data sets that cannot be used: their first rows are read, rendered and tokenised with the policy's
    `encoder` (None: its tokenizer is not here), and a reward function `judges` an answer.

    Rollouts of an earlier run are skipped unless the stage `is_first`: the previous stage may be that run.
    """
    pipeline = config.data_processor.task_pipeline
    if pipeline is not None and uses_pipeline(config):
        for index, path in enumerate(pipeline.inputs):
            yield from _missing(f"{PIPELINE}.inputs[{index}]", path, partial(data_files, split=pipeline.split))
    if config.mode != "train":
        training = training_tasksets(config) if config.explores else []
        with closing(RewardPool(1, plugin_dir=config.plugin_dir)) as pool:
            for key, taskset in (*training, *eval_tasksets(config)):
                if taskset.storage_type != "queue" and not reads_output(config, taskset):
                    yield from _unusable_tasks(config, key, taskset, encoder, pool if judges else None)
    for name, joined in inputs_of(config):
        read = partial(_converted, joined, name, partial(input_row, name, joined))
        yield from _usable(f"{JOINED_INPUTS}.{name}", joined, read, "join_key")
    if config.mode != "explore":
        for key, buffer, kind in supervised_inputs(config):
            if buffer.storage_type == "rollouts":
                read_first = partial(_first_rollout, subset=buffer.subset_name)
                yield from _missing(f"{key}.path", buffer.path or "", read_first) if is_first else ()
            else:
                yield from _unusable_answers(config, key, buffer, kind, encoder)


def _unusable_tasks(
    config: Config, key: str, taskset: TasksetConfig, encoder: ChatEncoder | None, pool: RewardPool | None
) -> Iterator[Finding]:
    is_eval = any(taskset is eval_set for eval_set in config.buffer.explorer_input.eval_tasksets)
    check = None if encoder is None else PromptCheck(encoder, sys.maxsize)  # tokenised, and of any length
    read_first = partial(Taskset.read, taskset, config.seed, is_eval, check)
    read = yield from _usable(key, taskset, read_first)
    if read is None:
        return
    longest = config.model.max_prompt_tokens  # None if what was written is refused
    has_limit = longest is not None and not config.explorer.rollout_model.enable_openai_api  # else the context is it
    if encoder is not None and has_limit:
        yield from _too_long(longest, read, encoder, read_first)
    if pool:
        yield from [*_unread_answers(key, taskset, read.rows)] or _unjudged(key, read, pool)


def _unread_answers(key: str, taskset: TasksetConfig, rows: list[Row]) -> Iterator[Finding]:
    """Yield a column of reference answers that was named and is in no row."""
    column = taskset.format.response_key
    if column != FormatConfig().response_key and not any(formats.has_column(row, column) for row in rows):
        columns = ", ".join(map(str, rows[0]))
        message = f"is in none of the first rows of {taskset.path}, whose columns are {columns}."
        severity: Severity = "error" if reward_of(taskset) else "warning"  # a workflow may need none
        yield Finding(f"{key}.format.response_key", column, "unavailable", message, severity=severity)


def _unjudged(key: str, tasks: Taskset, pool: RewardPool) -> Iterator[Finding]:
    """Yield a reward function that can judge no answer to these rows. Those that ask models are not tried."""
    where, count = f"{key}.default_reward_fn_type", min(len(tasks), ROWS)
    tried = [tasks[number] for number in sorted({part * count // JUDGED for part in range(JUDGED)})]
    faults: list[Finding] = []
    breaks: list[str | None] = []
    for task in tried:
        name = task.reward_fn or reward_of(tasks.config)
        if name is None or name in MODEL_REWARDS:
            return
        try:
            error = _error_of(name, task, pool, ANSWER)
            is_broken = error is not None and error.startswith(BROKEN) and _error_of(name, task, pool, IN_ALL_FORMS)
        except DataError as fault:
            part = f"{key}.format.response_key" if fault.key else where
            faults.append(Finding(part, name, "unavailable", f"{fault}."))
        except RewardError as fault:
            faults.append(Finding(where, name, "unavailable", f"{fault}."))
        except TransientFault as fault:  # a process died or timed out, as it may for each of the others
            faults.append(Finding(where, name, "unavailable", f"{fault}.", severity="warning"))
            break
        else:
            if error is None:
                return
            breaks.append(error if is_broken else None)
            severity: Severity = "error" if _never_works(error, task.raw) else "warning"
            message = f"'{name}' judges the answer '{ANSWER}' to none of the first rows: {error}."
            faults.append(Finding(where, name, "unavailable", message, severity=severity))
            if error.startswith("the verifier"):
                break
    if breaks[:1] != [None] and breaks == breaks[:1] * len(tried):
        faults[0] = replace(faults[0], severity="error")
    yield from faults[:1]


def _error_of(name: str, task: Task, pool: RewardPool, answer: str) -> str | None:
    """Return why a reward function does not judge an answer to a task; None if it does."""
    messages = task.messages if formats.has_prompt(task.raw, task.format) else []
    prompt = str(messages[-1].get("content", "")) if messages else ""
    item = RewardItem(answer, task.truth, prompt, task.raw, task.reward_fn_args, 1, messages)
    [reward] = pool.score_sync(name, [item])
    return reward.error


def _never_works(error: str, row: Row) -> bool:
    """True for a name or module that the reward function itself lacks, rather than the tests in a row, and for a result
    of a type that is never a number, such as a list."""
    if re.match(rf"{NO_NUMBER}: \S+ is (?!None\b|-?inf\b|nan\b)", error) or NO_LIST in error:
        return True
    names = re.findall(r"'([\w.]+)'", error)
    return error.startswith(LACKS) and not any(name in str(row) for name in names)


def _unusable_answers(
    config: Config, key: str, buffer: ExperienceBufferConfig, kind: Kind, encoder: ChatEncoder | None
) -> Iterator[Finding]:
    if encoder is None:
        read: Read = partial(_converted, buffer, buffer.name, lambda row: FORMATS[kind](row, buffer.format))
    else:
        read = partial(read_supervised, buffer, encoder, kind, config.model.max_model_len)
    yield from _usable(key, buffer, read)


def _too_long(longest: int, tasks: Taskset, encoder: ChatEncoder, read: Read) -> Iterator[Finding]:
    """Yield prompts that nothing is sampled for: an error if it is all, also of `MORE_ROWS`."""

    def lengths_over(tasks: Taskset) -> list[int]:
        asked = [(task.messages, task.tools) for task in tasks.tasks() if formats.has_prompt(task.raw, task.format)]
        prompts = encoder.with_template(tasks.format.chat_template).prompts(asked)
        return [len(tokens) for tokens in prompts if not isinstance(tokens, DataError) and len(tokens) > longest]

    over = lengths_over(tasks)
    if len(over) == len(tasks):
        tasks = read(limit=MORE_ROWS)
        over = lengths_over(tasks)
    if over:
        message = (
            f"{len(over)} of the first {len(tasks)} prompts of {tasks.name} ({tasks.config.path}) are longer, such as "
            f"{over[0]} tokens, and nothing is sampled for them. Raise it, or leave such rows out "
            "(`model.enable_prompt_truncation: false`)."
        )
        severity: Severity = "error" if len(over) == len(tasks) else "warning"
        yield Finding(MAX_PROMPT, longest, "conflict", message, severity=severity)


def _usable(
    key: str, data_set: TasksetConfig | ExperienceBufferConfig | ExperienceInputConfig, read: Read,
    columns: str = "format",
) -> Generator[Finding, None, Any]:  # fmt: skip
    """Return what `read` returns of the first rows if one of them is usable, else yield why not and return None.
    `columns` is the setting that defines a row's columns."""
    path = data_set.path or ""
    if (data_set.storage_type or "file") == "file" and path and not looks_local(path) and not is_local(path):
        if error := hub_error(f"{key}.path", path, "dataset"):
            yield error
        return None
    try:
        for count in (ROWS, MORE_ROWS):
            rows = read(limit=count)
            if rows.rows:
                return rows
            if len(rows.rejected) < count:
                break
    except DataError as error:
        at = error.key if error.key in ("split", "subset_name") and getattr(data_set, error.key) else "path"
        yield Finding(f"{key}.{at}", getattr(data_set, at), "unavailable", str(error))
        return None
    if not rows.rejected:
        yield Finding(f"{key}.path", path, "unavailable", f"{path} has no rows in split '{data_set.split}'.")
    else:
        message = f"of the first {len(rows.rejected)} rows none can be used; {rows.rejected[0]}."
        yield Finding(f"{key}.{columns}", None, "unavailable", message)
    return None


def _converted(
    data_set: ExperienceBufferConfig | ExperienceInputConfig, name: str | None, convert: Callable[[Row], object],
    limit: int,
) -> Rows:  # fmt: skip
    """Read the first rows that can be converted."""
    storage = data_set.storage_type or "file"
    read = read_rows(data_set.path or "", data_set.split, data_set.subset_name, storage, name, limit)
    usable = Rows([], [], read.rejected)
    for row, location in zip(read.rows, read.locations, strict=True):
        try:
            convert(row)
            usable.rows.append(row)
        except DataError as error:
            usable.rejected.append(RejectedRow(location, str(error)))
    return usable


def _first_rollout(path: str, subset: str | None) -> object:
    return next(iter(find_rollouts(path, subset)), None)


def _missing(key: str, path: str, opened: Callable[[str], object]) -> Iterator[Finding]:
    try:
        opened(path)
    except DataError as error:
        yield Finding(key, path, "unavailable", f"{error}.")
