"""Task sets: rows are read and checked before engines or trainer start."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from pydantic import ValidationError

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.registry import registry_of
from trinity_core.config.schema.buffer import FormatConfig, TasksetConfig
from trinity_core.data import formats
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.files import RejectedRow, Row, RowLocation, fingerprint, read_rows
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.selectors import feature_values
from trinity_core.data.task import Task

log = logging.getLogger(__name__)

CHUNK = 2048
"""Number of rows checked together: their rendered prompts are held in memory."""
OWN_PARTS = {"workflow_key": "default_workflow_type", "reward_fn_key": "default_reward_fn_type"}
"""Key of the format → the key of what a row names in its column."""
Prompt = tuple[list[formats.Message], list[formats.Tool] | None]


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """Finds prompts that the model cannot take."""

    encoder: ChatEncoder
    max_tokens: int | None = None
    """The longest prompt; None: any length, since prompts are truncated."""

    def problems(self, prompts: Sequence[Prompt], template: str | None) -> list[DataError | None]:
        """Return why each prompt cannot be used, rendered with the task set's own template if it has one."""
        encoder = self.encoder.with_template(template)
        if self.max_tokens is None:
            return [text if isinstance(text, DataError) else None for text in encoder.rendered(prompts)]
        return [
            tokens if isinstance(tokens, DataError) else prompt_too_long(len(tokens), self.max_tokens)
            for tokens in encoder.prompts(prompts)
        ]


@dataclass(slots=True)
class Taskset:
    """The tasks of one `TasksetConfig`. `taskset[i]` is the task of row i; rejected rows are not counted."""

    config: TasksetConfig
    rows: list[Row]
    locations: list[RowLocation]
    rejected: list[RejectedRow] = field(default_factory=list)
    is_eval: bool = False
    seed: int = 0
    _fingerprint: str = field(init=False, default="", repr=False)
    _format: FormatConfig | None = field(init=False, default=None, repr=False)

    @classmethod
    def open(
        cls,
        config: TasksetConfig,
        seed: int,
        is_eval: bool = False,
        prompts: PromptCheck | None = None,
        rejected_rows: RejectedRows | None = None,
    ) -> Taskset:
        """`read`. Raises DataError if no row is usable, or more are rejected than `rejected_rows` allows."""
        opened = cls.read(config, seed, is_eval, prompts)
        name = f"eval_{opened.name}" if is_eval else opened.name  # a training set may have the same name
        (rejected_rows or RejectedRows()).settle(name, opened.rejected, len(opened))
        return opened

    @classmethod
    def read(
        cls, config: TasksetConfig, seed: int, is_eval: bool = False, prompts: PromptCheck | None = None,
        limit: int | None = None,
    ) -> Taskset:  # fmt: skip
        """Read and check the rows, or the first `limit`; with `prompts` also as the model would get them.

        Raises DataError if they cannot be read.
        """
        read = read_rows(config.path, config.split, config.subset_name, config.storage_type, config.name, limit)
        answered = any(formats.has_column(row, config.format.response_key) for row in read.rows)
        features = () if is_eval else config.task_selector.feature_keys
        opened = cls(config, [], [], list(read.rejected), is_eval, seed)
        for notice in formats.unread_columns(read.rows, config.format) if limit is None else ():
            log.warning("data set '%s': %s", opened.name, notice)
        for start in range(0, len(read.rows), CHUNK):
            rows, locations = read.rows[start : start + CHUNK], read.locations[start : start + CHUNK]
            problems = row_problems(
                rows, opened.format, answered, features, prompts, needs_prompt(config), reference_checks(config)
            )
            for row, location, problem in zip(rows, locations, problems, strict=True):
                if problem is not None:
                    opened.rejected.append(RejectedRow(location, str(problem)))
                else:
                    opened.rows.append(row)
                    opened.locations.append(location)
        return opened

    @property
    def name(self) -> str:
        return self.config.name or "taskset"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        config, row = self.config, self.rows[index]
        return Task(
            index=index,
            raw=row,
            taskset=self.name,
            workflow=own_part(row, self.format, "workflow_key") or config.default_workflow_type or "math_workflow",
            repeat_times=config.repeat_times or 1,
            reward_fn=own_part(row, self.format, "reward_fn_key") or config.default_reward_fn_type,
            rollout_args=config.rollout_args,
            format=self.format,
            workflow_args=dict(config.workflow_args),
            reward_fn_args=dict(config.reward_fn_args),
            is_eval=self.is_eval,
            seed=self.seed,
            location=str(self.locations[index]),
            group=f"eval/{self.name}/{index}" if self.is_eval else "",
        )

    @property
    def format(self) -> FormatConfig:
        """The format of its tasks."""
        self._format = self._format or task_format(self.config)
        return self._format

    @property
    def fingerprint(self) -> str:
        """Hash of the usable rows as read, in order; it does not depend on the path. Computed once."""
        self._fingerprint = self._fingerprint or fingerprint(self.rows)
        return self._fingerprint

    def features(self) -> np.ndarray:
        """float64 [tasks, K]: the columns that its task selector reads (`feature_keys`)."""
        keys = self.config.task_selector.feature_keys
        return np.array([feature_values(row, keys) for row in self.rows], dtype=np.float64).reshape(
            len(self.rows), len(keys)
        )

    def tasks(self, limit: int | None = None) -> list[Task]:
        """Return the tasks of an evaluation in file order: all, or the first `limit`."""
        return [self[index] for index in range(len(self) if limit is None else min(limit, len(self)))]


def own_part(row: Row, form: FormatConfig, key: str) -> str | None:
    """Return the name in the row's column that `key` of the format names; None if it has none. A dotted path is
    imported by the rollout.

    Raises DataError for a value that is no text and a name that nothing is registered under.
    """
    column: str | None = getattr(form, key)
    if column is None or not formats.has_column(row, column):
        return None
    name = formats.column(row, column)
    if name is None or name == "":
        return None
    if not isinstance(name, str):
        raise DataError(f"column '{column}' (format.{key}) is {name!r}, not a name", key=column)
    if "." not in name and name not in registry_of(OWN_PARTS[key]):
        available = ", ".join(sorted(registry_of(OWN_PARTS[key])))
        raise DataError(f"column '{column}' (format.{key}) names '{name}'; there are {available}", key=column)
    return name


def prompt_too_long(count: int, max_tokens: int) -> DataError | None:
    """Return the error for a prompt of `count` tokens; None if it fits."""
    if count <= max_tokens:
        return None
    return DataError(
        f"the prompt has {count} tokens, more than the {max_tokens} allowed (model.max_prompt_tokens)",
        key="model.max_prompt_tokens",
    )


def needs_prompt(config: TasksetConfig) -> bool:
    """False if the tasks' workflow makes prompts itself, so that rows need none."""
    return bool(getattr(_workflow(config), "needs_prompt", True))


def task_format(config: TasksetConfig) -> FormatConfig:
    """The format of a task set, with the system prompt that its workflow adds to tasks without one."""
    form = config.format
    own_prompt = getattr(_workflow(config), "own_system_prompt", None)
    if not callable(own_prompt) or form.system_prompt is not None:
        return form
    with suppress(ValidationError):  # wrong arguments: validation reports them
        return form.with_values({"system_prompt": own_prompt(config.workflow_args)})
    return form


Kind = Callable[[Any], str]
"""How a reward function reads a reference answer, such as `number` or `text`."""
Kinds = Callable[[str | None], Kind | None]
"""A row's own reward function, if any -> `Kind` of the function that scores the row."""


def reference_kind(config: TasksetConfig, own: str | None = None) -> Kind | None:
    """How the tasks' reward function, or a row's `own`, reads a reference answer; None if it does not say."""
    own_reward = getattr(_workflow(config), "own_reward", lambda _: None)
    try:
        reward = registry_of("default_reward_fn_type").resolve(
            own or config.default_reward_fn_type or own_reward(config.workflow_args) or ""
        )
    except TrinityError:
        return None
    return getattr(reward, "reference_kind", None)


def reference_checks(config: TasksetConfig) -> Kinds | None:
    """Return `reference_kind` by a row's own reward function; None where the workflow may change the reference."""
    passes = getattr(_workflow(config), "passes_reference", lambda: False)
    return partial(reference_kind, config) if passes() else None


def _workflow(config: TasksetConfig) -> Any:
    """The workflow class of the tasks; None if there is no such workflow, which validation reports."""
    try:
        return registry_of("default_workflow_type").resolve(config.default_workflow_type or "math_workflow")
    except TrinityError:
        return None


def row_problems(
    rows: Sequence[Row], form: FormatConfig, answered: bool, features: Sequence[str], check: PromptCheck | None,
    asks: bool = True, kinds: Kinds | None = None,
) -> list[DataError | None]:  # fmt: skip
    """Return why each row cannot be used; None for those that can. `asks`: a row needs a prompt; `kinds`: see
    `reference_checks`."""
    read = [_prompt(row, form, answered, features, asks, kinds) for row in rows]
    rejected = [result if isinstance(result, DataError) else None for result in read]
    if check is None:
        return rejected
    prompts = [result for result in read if isinstance(result, tuple)]
    refused = iter(check.problems(prompts, form.chat_template))
    return [next(refused) if isinstance(result, tuple) else result for result in read]


def _prompt(
    row: Row, form: FormatConfig, answered: bool, features: Sequence[str], asks: bool,
    kinds: Kinds | None,
) -> Prompt | DataError | None:  # fmt: skip
    """Return the prompt of a row (None: it has and needs none), or why it cannot be used.

    With `answered` each row needs a reference answer, as the set has some, and each needs the `features` of its
    selector.
    """
    try:
        feature_values(row, features)
        for key in OWN_PARTS:
            own_part(row, form, key)
        if not (asks or formats.has_prompt(row, form)):
            return None
        prompt, tools = formats.prompt_messages(row, form), formats.tools(row, form)
        answer = formats.truth(row, form)
        if kinds and may_be_object(answer) and (kind := kinds(own_part(row, form, "reward_fn_key"))):
            kind(answer)
    except DataError as error:
        return error
    is_number = not isinstance(answer, float) or math.isfinite(answer)
    if not is_number or (answered and (answer is None or (isinstance(answer, str) and not answer.strip()))):
        missing = (
            "is empty" if formats.has_column(row, form.response_key) else "is missing here, while other rows have it"
        )
        wrong = missing if is_number else f"is {answer}"
        return DataError(f"column '{form.response_key}' (format.response_key) {wrong}", key=form.response_key)
    return prompt, tools


def may_be_object(answer: Any) -> bool:
    """True for an object, a list and text that may be one, which `kind` refuses if it is; cheap, for every row."""
    return answer.lstrip().startswith("{") if isinstance(answer, str) else isinstance(answer, Mapping | list | tuple)
