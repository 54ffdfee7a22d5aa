"""Checks that data sets exist, and that their first rows match the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trinity_core.config import Config
from trinity_core.config.findings import Finding, Severity
from trinity_core.config.paths import PIPELINE, reads_output, uses_pipeline
from trinity_core.config.rules.tasks import JOINED_INPUTS, eval_tasksets, training_tasksets
from trinity_core.config.schema import ExperienceInputConfig
from trinity_core.config.schema.buffer import ExperienceBufferConfig, TasksetConfig
from trinity_core.data import formats
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.files import Row, data_files, first_rows, is_local, looks_local
from trinity_core.data.inspection import supervised_inputs
from trinity_core.data.joined import input_row, inputs_of
from trinity_core.data.reports import EMPTY_THOUGHTS
from trinity_core.data.supervised import encode_rows, has_empty_thought
from trinity_core.data.taskset import PromptCheck, needs_prompt, row_problems, task_format
from trinity_core.errors import DataError
from trinity_core.runtime.preflight.models import hub_error
from trinity_core.store.earlier_rollouts import find_rollouts

ROWS = 16
"""Rows read from each data set. Some bad rows are no problem, because a run rejects them."""
MAX_PROMPT, TRUNCATION = "model.max_prompt_tokens", "model.enable_prompt_truncation"
Problem = str | None


def unusable_data(config: Config, is_first: bool) -> Iterator[Finding]:
    """Yield the data sets whose first rows are all unusable.

    Rollouts of an earlier run are skipped unless the stage `is_first`: the previous stage may be that run.
    """
    pipeline = config.data_processor.task_pipeline
    if pipeline is not None and uses_pipeline(config):
        for place, path in enumerate(pipeline.inputs):
            yield from _missing(f"{PIPELINE}.inputs[{place}]", path, partial(data_files, split=pipeline.split))
    if config.mode != "train":
        training = training_tasksets(config) if config.explores else []
        for key, taskset in (*training, *eval_tasksets(config)):
            if taskset.storage_type != "queue" and not reads_output(config, taskset):
                yield from _unusable(key, taskset, partial(_task_problems, taskset, config), taskset.name)
    for name, joined in inputs_of(config):
        yield from _unusable(
            f"{JOINED_INPUTS}.{name}", joined, partial(_input_problems, name, joined), name, "join_key"
        )
    if config.mode != "explore":
        for key, buffer, kind in supervised_inputs(config):
            if buffer.storage_type == "rollouts":
                read_first = partial(_first_rollout, subset=buffer.subset_name)
                yield from _missing(f"{key}.path", buffer.path or "", read_first) if is_first else ()
            else:
                read = formats.preference if kind == "preferences" else formats.demonstration
                yield from _unusable(key, buffer, partial(_answers, buffer, read), buffer.name)


def long_prompts(config: Config, encoder: Callable[[], ChatEncoder]) -> Iterator[Finding]:
    """Yield the training task sets whose first rows include a prompt that is too long.

    It is an error if the set has no other rows and truncation was not requested. Checked only for local data and a
    policy in a local folder, whose `encoder` is loaded on demand. Skipped where workflows may use the OpenAI API, whose
    only limit is the context.
    """
    model = config.model
    if config.mode == "train" or not config.explores or config.external_model or not Path(model.model_path).is_dir():
        return
    if config.explorer.rollout_model.enable_openai_api:
        return
    try:
        check = PromptCheck(encoder(), model.max_prompt_tokens)
    except (DataError, OSError, ValueError):
        return  # missing template or tokenizer: reported elsewhere
    for _, taskset in training_tasksets(config):
        storage = taskset.storage_type or "file"
        if reads_output(config, taskset) or not needs_prompt(taskset) or (storage == "file" and not taskset.path):
            continue
        if storage == "queue" or (storage == "file" and not is_local(taskset.path)):
            continue
        try:
            rows = first_rows(taskset.path, taskset.split, taskset.subset_name, storage, taskset.name, ROWS).rows
        except DataError:
            continue  # reported by `unusable_data`
        problems = row_problems(rows, task_format(taskset), False, (), check)
        too_long = [problem for problem in problems if problem is not None and problem.key == MAX_PROMPT]
        if too_long:
            yield _too_long(config, taskset, too_long, len(rows))


def empty_thoughts(config: Config, encoder: Callable[[], ChatEncoder]) -> Iterator[Finding]:
    """Yield the trainer's local data sets in whose first rows the chat template writes an empty thought with loss."""
    local = [source for source in supervised_inputs(config) if source[1].path and is_local(source[1].path)]
    if config.mode == "explore" or not local or not Path(config.model.model_path).is_dir():
        return
    for _, buffer, kind in local:
        try:
            own = encoder().with_template(buffer.format.chat_template)
            rows = first_rows(buffer.path or "", buffer.split, buffer.subset_name, "file", buffer.name, ROWS).rows
        except (DataError, OSError, ValueError):
            continue  # reported elsewhere
        encoded = [row for row in encode_rows(rows, buffer.format, own, kind) if not isinstance(row, DataError)]
        if count := sum(any(has_empty_thought(one, own) for one in row) for row in encoded):
            message = f"{count} of the first {len(rows)} answers of {buffer.path} begin with an empty thought, which "
            message += f"carries loss: {EMPTY_THOUGHTS}."
            thinking = config.model.enable_thinking
            yield Finding("model.enable_thinking", thinking, "conflict", message, severity="warning")


def _too_long(config: Config, taskset: TasksetConfig, too_long: list[DataError], read: int) -> Finding:
    cuts = config.model.enable_prompt_truncation
    asked = cuts and config.written(TRUNCATION) is not None
    then = f"are cut, and nothing is sampled for them ({TRUNCATION})" if cuts else "are rejected"
    message = (
        f"{len(too_long)} of the first {read} rows of {taskset.path} have longer prompts, which {then}. "
        f"First: {too_long[0]}. Raise it, leave such rows out, or write `{TRUNCATION}: true` if that is meant."
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
        read = first_rows(path, data_set.split, data_set.subset_name, storage, name, ROWS)
    except DataError as error:
        at = error.key if error.key in ("split", "subset_name") and getattr(data_set, error.key) else "path"
        end = "" if str(error).endswith("?") else "."
        yield Finding(f"{key}.{at}", getattr(data_set, at), "unavailable", f"{error}{end}")
        return
    problems = problems_of(read.rows)
    if None in problems:
        return
    refused = [f"{location}: {why}" for location, why in zip(read.locations, problems, strict=True)]
    refused += [str(row) for row in read.rejected]
    if not refused:
        yield Finding(f"{key}.path", path, "unavailable", f"{path} has no rows in split '{data_set.split}'.")
    else:
        count = f"none of the first {len(refused)} rows" if len(refused) > 1 else "the first row"
        verb = "can" if len(refused) > 1 else "cannot"
        yield Finding(f"{key}.{columns}", None, "unavailable", f"{count} {verb} be used; {refused[0]}.")


def _task_problems(taskset: TasksetConfig, config: Config, rows: list[Row]) -> list[Problem]:
    answered = any(formats.has_column(row, taskset.format.response_key) for row in rows)
    is_eval = any(taskset is eval_set for eval_set in config.buffer.explorer_input.eval_tasksets)
    features = () if is_eval else taskset.task_selector.feature_keys
    problems = row_problems(rows, taskset.format, answered, features, None, needs_prompt(taskset))
    return [str(problem) if problem else None for problem in problems]


def _input_problems(name: str, joined: ExperienceInputConfig, rows: list[Row]) -> list[Problem]:
    return [_raised(partial(input_row, name, joined, row)) for row in rows]


def _answers(buffer: ExperienceBufferConfig, read: Callable[..., Any], rows: list[Row]) -> list[Problem]:
    return [_raised(partial(read, row, buffer.format)) for row in rows]


def _raised(read: Callable[[], object]) -> Problem:
    try:
        read()
    except DataError as error:
        return str(error)
    return None


def _first_rollout(path: str, subset: str | None) -> object:
    return next(iter(find_rollouts(path, subset)), None)


def _missing(key: str, path: str, opened: Callable[[str], object]) -> Iterator[Finding]:
    try:
        opened(path)
    except DataError as error:
        yield Finding(key, path, "unavailable", f"{error}.")
