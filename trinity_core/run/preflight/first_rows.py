"""A trial of each data set's first rows: what template, model and reward function will do with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
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
from trinity_core.data.files import Row, RowLocation, data_files, first_rows, is_local, looks_local
from trinity_core.data.inspection import supervised_inputs
from trinity_core.data.joined import input_row, inputs_of
from trinity_core.data.supervised import Kind, encode_rows
from trinity_core.data.taskset import PromptCheck, Taskset, needs_prompt, row_problems, task_format
from trinity_core.exchange.store.earlier_rollouts import find_rollouts
from trinity_core.pipelines.named_parts import reward_of
from trinity_core.run.preflight.models import hub_error
from trinity_core.workflows.rewards import RewardItem, RewardPool
from trinity_core.workflows.rewards.models import MODEL_REWARDS

ROWS = 16
"""Rows read from each data set. Some bad rows are no problem, because a run rejects them."""
JUDGED = 4
"""Rows of which a reward function judges an answer, until one can be judged. Each may start a process."""
MORE_ROWS = 1000
"""Rows read if none of the first can be used, before a data set is refused."""
MAX_PROMPT, TRUNCATION = "model.max_prompt_tokens", "model.enable_prompt_truncation"
ANSWER = "1"
LACKS = ("ImportError", "ModuleNotFoundError", "NameError")
"""Errors of a reward function that lacks a name or module."""
Problem = DataError | None


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
        read = partial(_each, partial(input_row, name, joined))
        yield from _unusable(f"{JOINED_INPUTS}.{name}", joined, read, name, "join_key")
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
    check = None if encoder is None else PromptCheck(encoder, config.model.max_prompt_tokens)
    rows: list[Row] = []
    problems: list[Problem] = []

    def problems_of(read: list[Row]) -> list[Problem]:
        form = task_format(taskset)
        answered = any(formats.has_column(row, form.response_key) for row in read)
        features = () if is_eval else taskset.task_selector.feature_keys
        problems[:] = row_problems(read, form, answered, features, check, needs_prompt(taskset))
        others = [None if problem is not None and problem.key == MAX_PROMPT else problem for problem in problems]
        rows[:] = [row for row, problem in zip(read, others, strict=True) if problem is None]
        return others

    yield from (unusable := [*_unusable(key, taskset, problems_of, taskset.name)])
    too_long = [problem for problem in problems if problem is not None and problem.key == MAX_PROMPT]
    if too_long and not is_eval and not config.explorer.rollout_model.enable_openai_api:
        yield _too_long(config, taskset, too_long, len(problems))  # else the only limit is the context
    if rows and pool and not unusable:
        yield from [*_unread_answers(key, taskset, rows)] or _unjudged(key, taskset, rows[:ROWS], pool)


def _unread_answers(key: str, taskset: TasksetConfig, rows: list[Row]) -> Iterator[Finding]:
    """Yield a column of reference answers that was named and is in no row."""
    column = taskset.format.response_key
    if column != FormatConfig().response_key and not any(formats.has_column(row, column) for row in rows):
        columns = ", ".join(map(str, rows[0]))
        message = f"is in none of the first rows of {taskset.path}, whose columns are {columns}."
        severity: Severity = "error" if reward_of(taskset) else "warning"  # a workflow may need none
        yield Finding(f"{key}.format.response_key", column, "unavailable", message, severity=severity)


def _unjudged(key: str, taskset: TasksetConfig, rows: list[Row], pool: RewardPool) -> Iterator[Finding]:
    """Yield a reward function that can judge no answer to these rows. Those that ask models are not tried."""
    faults: list[Finding] = []
    tasks = Taskset(taskset, rows, [RowLocation(taskset.path, 0)] * len(rows))
    where = f"{key}.default_reward_fn_type"
    for number in sorted({part * len(rows) // JUDGED for part in range(JUDGED)}):
        task = tasks[number]
        name = task.reward_fn or reward_of(taskset)
        if name is None or name in MODEL_REWARDS:
            return
        messages = task.messages if formats.has_prompt(task.raw, task.format) else []
        prompt = str(messages[-1].get("content", "")) if messages else ""
        item = RewardItem(ANSWER, task.truth, prompt, task.raw, task.reward_fn_args, 1, messages)
        try:
            [reward] = pool.score_sync(name, [item])
        except DataError as error:
            part = f"{key}.format.response_key" if error.key else where
            faults.append(Finding(part, name, "unavailable", f"{error}."))
        except RewardError as error:
            faults.append(Finding(where, name, "unavailable", f"{error}."))
        except TransientFault as error:  # a process died or timed out, as it may for each of the others
            faults.append(Finding(where, name, "unavailable", f"{error}.", severity="warning"))
            break
        else:
            if reward.error is None:
                return
            severity: Severity = "error" if _never_works(reward.error, task.raw) else "warning"
            message = f"'{name}' judges the answer '{ANSWER}' to none of the first rows: {reward.error}."
            faults.append(Finding(where, name, "unavailable", message, severity=severity))
            if reward.error.startswith("the verifier"):
                break
    yield from faults[:1]


def _never_works(error: str, row: Row) -> bool:
    """True for a name or module that the reward function itself lacks, rather than the tests in a row."""
    names = re.findall(r"'([\w.]+)'", error)
    return error.startswith(LACKS) and not any(name in str(row) for name in names)


def _unusable_answers(
    config: Config, key: str, buffer: ExperienceBufferConfig, kind: Kind, encoder: ChatEncoder | None
) -> Iterator[Finding]:
    def problems_of(rows: list[Row]) -> list[Problem]:
        if encoder is None:
            read: Callable[..., Any] = formats.preference if kind == "preferences" else formats.demonstration
            return _each(lambda row: read(row, buffer.format), rows)
        row_encoder = encoder.with_template(buffer.format.chat_template)
        try:
            encoded = encode_rows(rows, buffer.format, row_encoder, kind, config.model.max_model_len)
        except DataError as error:  # of the tokenizer
            return [error] * len(rows)
        return [row if isinstance(row, DataError) else None for row in encoded]

    return _unusable(key, buffer, problems_of, buffer.name)


def _too_long(config: Config, taskset: TasksetConfig, too_long: list[DataError], read: int) -> Finding:
    asked = config.model.enable_prompt_truncation and config.written(TRUNCATION) is not None
    message = (
        f"{len(too_long)} of the first {read} rows of {taskset.path} have longer prompts, which are not sampled from: "
        f"{too_long[0]}. Raise it, leave such rows out, or write `{TRUNCATION}: true` if that is meant."
    )
    severity: Severity = "error" if len(too_long) == read < ROWS and not asked else "warning"
    return Finding(MAX_PROMPT, config.model.max_prompt_tokens, "conflict", message, severity=severity)


def _unusable(
    key: str,
    data_set: TasksetConfig | ExperienceBufferConfig | ExperienceInputConfig,
    problems_of: Callable[[list[Row]], list[Problem]],
    name: str | None,
    columns: str = "format",
) -> Iterator[Finding]:
    """Yield a finding if no row is usable. `columns` is the setting that defines a row's columns."""
    path, storage = data_set.path or "", data_set.storage_type or "file"
    if storage == "file" and path and not looks_local(path) and not is_local(path):
        if error := hub_error(f"{key}.path", path, "dataset"):
            yield error
        return
    try:
        for count in (ROWS, MORE_ROWS):
            read = first_rows(path, data_set.split, data_set.subset_name, storage, name, count)
            problems = problems_of(read.rows)
            if None in problems:
                return
            if len(problems) + len(read.rejected) < count:
                break
    except DataError as error:
        at = error.key if error.key in ("split", "subset_name") and getattr(data_set, error.key) else "path"
        yield Finding(f"{key}.{at}", getattr(data_set, at), "unavailable", str(error))
        return
    refused = [f"{location}: {why}" for location, why in zip(read.locations, problems, strict=True)]
    refused += [str(row) for row in read.rejected]
    if not refused:
        yield Finding(f"{key}.path", path, "unavailable", f"{path} has no rows in split '{data_set.split}'.")
    else:
        message = f"of the first {len(refused)} rows none can be used; {refused[0]}."
        yield Finding(f"{key}.{columns}", None, "unavailable", message)


def _each(read: Callable[[Row], object], rows: list[Row]) -> list[Problem]:
    problems: list[Problem] = []
    for row in rows:
        try:
            read(row)
            problems.append(None)
        except DataError as error:
            problems.append(error)
    return problems


def _first_rollout(path: str, subset: str | None) -> object:
    return next(iter(find_rollouts(path, subset)), None)


def _missing(key: str, path: str, opened: Callable[[str], object]) -> Iterator[Finding]:
    try:
        opened(path)
    except DataError as error:
        yield Finding(key, path, "unavailable", f"{error}.")
