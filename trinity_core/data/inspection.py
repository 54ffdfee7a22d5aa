"""Reports on a configuration's data sets for `trinity data check`, and suggests a `format` that fits.

Writes nothing, and loads only the model's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import Any

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.base.registry import registry_of
from trinity_core.config import Config
from trinity_core.config.resolve import held_out, shares
from trinity_core.config.rules.experiences import AUXILIARY, BUFFER
from trinity_core.config.rules.tasks import eval_tasksets, training_tasksets
from trinity_core.config.schema.buffer import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity_core.data import formats
from trinity_core.data.chat import ChatEncoder, EncodedConversation
from trinity_core.data.files import RejectedRow, RowLocation, read_rows
from trinity_core.data.formats import has_prompt, spare_columns
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.reports import DataSetReport, RowLengths, ShownRow
from trinity_core.data.supervised import Kind, SupervisedRows, has_empty_thought, read_supervised, too_long
from trinity_core.data.task import Task
from trinity_core.data.taskset import (
    CHUNK,
    PromptCheck,
    Taskset,
    may_be_object,
    needs_prompt,
    prompt_too_long,
    reference_kind,
)
from trinity_core.data.tokenizer import policy_encoder

GUESSED_ROWS = 20
ReadAnswers = Callable[[ExperienceBufferConfig, ChatEncoder, Kind], SupervisedRows]
Row = formats.Row
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "goal", "text")
ANSWERS = (
    "response", "answer", "solution", "completion", "output", "target", "ground_truth", "final_answer", "label",
    "reward_model.ground_truth",
)  # fmt: skip
CONVERSATIONS = ("messages", "conversations", "conversation", "prompt", "chat")
PREFERRED = (("chosen", "rejected"), ("preferred", "dispreferred"), ("response_chosen", "response_rejected"))
SYSTEM, TOOLS = ("system_prompt", "system"), ("tools", "functions")
FORMATS: Mapping[str, Callable[[Row, FormatConfig], Any]] = {
    "tasks": formats.prompt_messages,
    "evaluation": formats.prompt_messages,
    "demonstrations": formats.demonstration,
    "preferences": formats.preference,
}
"""Readers of rows, by the use of the data set (`DataSetReport.use`)."""


def inspect(config: Config, examples: int = 2, read: ReadAnswers = read_supervised) -> list[DataSetReport]:
    """Return a report on each data set of a configuration without stages, with `examples` rows as the model sees them.

    `read` reads the trainer's data sets, without a limit of tokens. Queues are left out: their tasks are checked as
    they arrive.
    """
    encoder = None if config.external_model else policy_encoder(config.model)
    reports = [
        _inspect_tasks(config, key, taskset, encoder, use, examples)
        for use, tasksets in (("tasks", training_tasksets(config)), ("evaluation", eval_tasksets(config)))
        for key, taskset in tasksets
        if (encoder is not None or use == "evaluation") and taskset.storage_type != "queue"
    ]
    if encoder is not None:
        reports += [_inspect_answers(config, *source, encoder, examples, read) for source in supervised_inputs(config)]
    for report in reports:
        others = [other for other in reports if (other.use == "evaluation") != (report.use == "evaluation")]
        shared = {other.name: len(report.prompts & other.prompts) for other in others}
        report.shared = {name: count for name, count in shared.items() if count}
    return reports


def supervised_inputs(config: Config) -> Iterator[tuple[str, ExperienceBufferConfig, Kind]]:
    """Yield the trainer's data sets: key, settings, kind of rows."""
    inputs = config.buffer.trainer_input
    kind: Kind = "demonstrations"
    if config.is_supervised:
        loss = registry_of("algorithm.policy_loss_fn")[config.algorithm.policy_loss_fn]
        kind = "preferences" if loss.rows_per_unit == 2 else kind
        yield BUFFER, inputs.experience_buffer, kind
    for name, buffer in inputs.auxiliary_buffers.items():
        if name in {*shares(config), *held_out(config)}:
            yield f"{AUXILIARY}.{name}", buffer, kind


def _inspect_tasks(
    config: Config, key: str, source: TasksetConfig, encoder: ChatEncoder | None, use: str, examples: int
) -> DataSetReport:
    report = DataSetReport(key, str(source.name), source.path, source.split, use)
    try:
        taskset = Taskset.read(source, config.seed, use == "evaluation", PromptCheck(encoder) if encoder else None)
    except DataError as error:
        report.problem = str(error)
        return report
    _describe(report, source)
    report.rejected, locations = taskset.rejected, taskset.locations
    tasks = [taskset[index] for index in range(len(taskset))]
    asked = all(has_prompt(task.raw, source.format) for task in tasks)  # else a workflow makes the prompts
    prompt_encoder = encoder.with_template(source.format.chat_template) if encoder and asked else None
    prompts = list(_prompts(tasks, prompt_encoder))
    # A system prompt that the workflow adds must not hide that two sets ask the same.
    plain = [replace(task, format=source.format) for task in tasks] if taskset.format != source.format else None
    digests = [digest for _, digest in (_prompts(plain, prompt_encoder) if plain else prompts)]
    if prompt_encoder is not None and prompts:
        model, counts = config.model, [count for count, _ in prompts]
        longest, cuts = model.max_prompt_tokens, model.enable_prompt_truncation
        beyond = "cut, and nothing is sampled for them" if cuts else "rejected"
        report.lengths = [RowLengths("prompt", np.array(counts), longest, "model.max_prompt_tokens", beyond)]
        if longest is not None and not cuts:
            fits = _set_aside(report, [prompt_too_long(count, longest) for count in counts], locations)
            tasks, locations = list(compress(tasks, fits)), list(compress(locations, fits))
            digests = list(compress(digests, fits))
        report.examples = [
            _prompt_example(tasks[i], locations[i], prompt_encoder, longest) for i in _spread(len(tasks), examples)
        ]
    if kind := reference_kind(source):
        truths = [(task.truth, at) for task, at in zip(tasks, locations, strict=True) if not may_be_object(task.truth)]
        report.worded = [location for truth, location in truths if truth is not None and kind(truth) == "text"]
    return _with_counts(config, report, digests, digests, locations)


def _prompts(tasks: Sequence[Task], encoder: ChatEncoder | None) -> Iterator[tuple[int, bytes]]:
    """Yield the number of tokens of each prompt and a digest of them; without an encoder 0 and a digest of its
    messages."""
    for start in range(0, len(tasks), CHUNK):
        some = tasks[start : start + CHUNK]
        if not all(has_prompt(task.raw, task.format) for task in some):
            yield from ((0, _digest(task.raw)) for task in some)
            continue
        prompts = [(task.messages, task.tools) for task in some]
        if encoder is None:
            yield from ((0, _digest(prompt)) for prompt in prompts)
        else:
            for tokens in encoder.prompts(prompts):
                assert not isinstance(tokens, DataError), "the task set was read with a check of its prompts"
                yield len(tokens), _digest(tokens)


def _inspect_answers(
    config: Config, key: str, buffer: ExperienceBufferConfig, kind: Kind, encoder: ChatEncoder, examples: int,
    read_rows: ReadAnswers,
) -> DataSetReport:  # fmt: skip
    report = DataSetReport(key, str(buffer.name), str(buffer.path or ""), buffer.split, kind)
    try:
        read = read_rows(buffer, encoder, kind)
    except DataError as error:
        report.problem = str(error)
        return report
    _describe(report, buffer)
    report.rejected, longest = read.rejected, config.model.max_model_len
    is_text = buffer.format.prompt_type == "text"
    if read.rows:
        whole = np.array([max(len(sequence.tokens) for sequence in row) for row in read.rows])
        answers = np.array([max(int(sequence.answer.sum()) for sequence in row) for row in read.rows])
        report.lengths = [
            RowLengths("prompt and answer", whole, longest, "model.max_model_len", "rejected"),
            RowLengths("answer", answers, None, "", ""),
        ]
        if is_text:
            report.lengths = [RowLengths("text", whole, longest, "model.max_model_len", "cut into pieces")]
    problems = [
        None if is_text else next(filter(None, (too_long(conversation, longest) for conversation in row)), None)
        for row in read.rows
    ]
    fits = _set_aside(report, problems, read.locations)
    rows, locations = list(compress(read.rows, fits)), list(compress(read.locations, fits))
    report.thoughtless = sum(any(has_empty_thought(conversation, encoder) for conversation in row) for row in rows)
    report.examples = [
        _example(encoder, locations[i], conversation) for i in _spread(len(rows), examples) for conversation in rows[i]
    ]
    digests = [_digest([conversation.tokens.tolist() for conversation in row]) for row in rows]
    prompts = [_digest(row[0].tokens[: row[0].prompt_length].tolist()) for row in rows]
    return _with_counts(config, report, digests, prompts, locations)


def _describe(report: DataSetReport, data_set: TasksetConfig | ExperienceBufferConfig) -> None:
    """Suggest a fitting format if none is configured, and note columns that nothing reads."""
    storage = data_set.storage_type or "file"
    if storage not in ("file", "sql"):
        return
    path, split = str(data_set.path), data_set.split
    rows = read_rows(path, split, data_set.subset_name, storage, data_set.name, GUESSED_ROWS).rows
    if data_set.format == FormatConfig() and not _are_told_whole(data_set):
        report.guess = guessed_format(rows, report.use)
    if report.use in ("demonstrations", "preferences"):
        form = FormatConfig.model_validate(report.guess) if report.guess else data_set.format
        report.spare = spare_columns(rows, form, report.use == "preferences")
    if report.use == "demonstrations":
        report.unlearned = any(_has_unlearned_answers(row, form) for row in rows)


def _has_unlearned_answers(row: Row, form: FormatConfig) -> bool:
    """True if a conversation has answers before its last one, which alone carries loss."""
    try:
        conversation = formats.demonstration(row, form)
    except DataError:
        return False  # a rejected row, which the report lists
    roles = [message["role"] for message in conversation.messages]
    return not conversation.every_turn and roles.count("assistant") > 1


def _are_told_whole(data_set: TasksetConfig | ExperienceBufferConfig) -> bool:
    """True for tasks whose rows go to a workflow unchanged: it makes the prompts and scores the answers itself."""
    return isinstance(data_set, TasksetConfig) and not (needs_prompt(data_set) or data_set.default_reward_fn_type)


def _set_aside(
    report: DataSetReport, problems: Sequence[DataError | None], locations: Sequence[RowLocation]
) -> list[bool]:
    """Add the rows with a problem to the rejected ones; return True for each of the others."""
    rejected = [RejectedRow(at, str(wrong)) for at, wrong in zip(locations, problems, strict=True) if wrong]
    report.rejected = [*report.rejected, *rejected]
    return [wrong is None for wrong in problems]


def _with_counts(
    config: Config, report: DataSetReport, digests: Sequence[bytes], prompts: Sequence[bytes],
    locations: Sequence[RowLocation],
) -> DataSetReport:  # fmt: skip
    report.rows, report.prompts, report.duplicates = len(digests), set(prompts), _duplicates(digests, locations)
    report.problem = RejectedRows(config.buffer.max_rejected_share).problem(report.name, report.rejected, report.rows)
    return report


def _prompt_example(task: Task, location: RowLocation, encoder: ChatEncoder, longest: int | None) -> ShownRow:
    tokens = encoder.prompt(task.messages, task.tools, longest).tokens
    return _example(encoder, location, EncodedConversation(np.asarray(tokens), np.zeros(len(tokens), dtype=np.bool_)))


def _example(encoder: ChatEncoder, location: RowLocation, row: EncodedConversation) -> ShownRow:
    tokens, mask = row.tokens.tolist(), row.answer.tolist()
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    spans = [
        (encoder.tokenizer.decode(tokens[start:end]), mask[start]) for start, end in pairwise(edges) if end > start
    ]
    return ShownRow(location, tokens, encoder.tokenizer.convert_ids_to_tokens(tokens), spans, mask)


def _spread(count: int, number: int) -> Iterable[int]:
    """Return `number` evenly spaced rows, the first included."""
    return sorted({index * count // max(number, 1) for index in range(min(number, count))})


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).digest()


def _duplicates(digests: Sequence[bytes], locations: Sequence[RowLocation]) -> list[tuple[RowLocation, RowLocation]]:
    first: dict[bytes, RowLocation] = {}
    pairs = []
    for digest, location in zip(digests, locations, strict=True):
        if first.setdefault(digest, location) is not location:
            pairs.append((location, first[digest]))
    return pairs


def guessed_format(rows: Sequence[Row], use: str) -> dict[str, str]:
    """Return the keys of the `format` that can read most of these rows; empty if none reads more than half, or none is
    needed."""
    best, most = {}, len(rows) / 2
    for keys in _candidates(rows, use):
        form = FormatConfig.model_validate(keys)
        if (count := sum(is_readable(row, form, use) for row in rows)) > most:
            best, most = keys, count
    return best


def is_readable(row: Row, form: FormatConfig, use: str) -> bool:
    """True if a row has what a data set of this use (`FORMATS`) needs."""
    try:
        FORMATS[use](row, form)
    except DataError:
        return False
    return True


def _candidates(rows: Sequence[Row], use: str) -> Iterator[dict[str, str]]:
    """Yield formats that the rows' columns suggest, most likely first."""
    default = FormatConfig()
    more = _first_named(rows, "system_prompt_key", SYSTEM) | _first_named(rows, "tools_key", TOOLS)
    if use == "preferences":
        for preferred_key, rejected_key in PREFERRED[::-1]:
            more |= (
                {"chosen_key": preferred_key, "rejected_key": rejected_key}
                if any({preferred_key, rejected_key} <= row.keys() for row in rows)
                else {}
            )
    asked = [key for key in PROMPTS if any(isinstance(value, str) for value in _values(rows, key))]
    talks = [key for key in CONVERSATIONS if any(isinstance(row.get(key), list) for row in rows)]
    for kind, key, prompt in (
        *(("messages", key, {"messages_key": key}) for key in talks),
        *(("plaintext", key, {"prompt_key": key}) for key in asked),
        *((("messages", "", {}),) if use == "preferences" else ()),
    ):
        answers = (
            {} if kind == "messages" and use == "demonstrations" else _first_named(rows, "response_key", ANSWERS, key)
        )
        keys = {"prompt_type": kind, **prompt, **more, **(answers if use != "preferences" else {})}
        yield {name: column for name, column in keys.items() if column != getattr(default, name)}


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the values of a column that are not empty; 0 and false count as values."""
    values = (formats.column(row, key) for row in rows if formats.has_column(row, key))
    return [value for value in values if value is not None and value not in ("", [])]


def _first_named(rows: Sequence[Row], setting: str, names: Sequence[str], used: str = "") -> dict[str, str]:
    """Return, as this setting, the first of these columns with a value in any row."""
    name = next((name for name in names if name != used and _values(rows, name)), None)
    return {} if name is None else {setting: name}
