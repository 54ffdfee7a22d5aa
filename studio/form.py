"""The fields of the configuration page for an algorithm and a mode, by section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.fields import Kind, Setting, sections, settings

BEGINNER = (
    "project",
    "name",
    "mode",
    "checkpoint_root_dir",
    "model.model_path",
    "model.max_prompt_tokens",
    "model.max_response_tokens",
    "buffer.explorer_input.taskset.path",
    "buffer.explorer_input.taskset.split",
    "buffer.explorer_input.taskset.format.prompt_key",
    "buffer.explorer_input.taskset.format.response_key",
    "buffer.explorer_input.taskset.default_reward_fn_type",
    "buffer.explorer_input.eval_tasksets.0.path",
    "buffer.explorer_input.eval_tasksets.0.split",
    "buffer.trainer_input.experience_buffer.path",
    "buffer.total_steps",
    "buffer.total_epochs",
    "buffer.batch_size",
    "buffer.train_batch_size",
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "algorithm.optimizer.lr",
    "explorer.eval_interval",
    "synchronizer.sync_method",
    "synchronizer.sync_interval",
    "trainer.save_interval",
    "cluster.gpu_per_node",
    "monitor.monitor_type",
)
EXPLORING = ("explorer", "algorithm.repeat_times", "buffer.batch_size", "buffer.explorer_input")
TRAINING = ("trainer", "buffer.train_batch_size", "algorithm.optimizer")
SYNC = ("synchronizer",)
FIRST_EVAL_SET = "eval_tasksets[i]"
"""The only list of sections whose first entry has fields."""
LONG_NAME = 40
"""Length above which a label may be broken at its dots."""
NAMED = ("default_workflow_type", "default_reward_fn_type")
"""Settings of task sets that name a part; plugins may add names."""
TOP = "run"


@dataclass(frozen=True, slots=True)
class FormField:
    key: str
    doc: str
    unit: str
    kind: Kind
    default: Any
    choices: tuple[str, ...]
    """All values of a choice; the known names of a named part."""
    open: bool
    """True if other values than the choices are allowed."""

    @property
    def section(self) -> str:
        return self.key.partition(".")[0] if "." in self.key else TOP

    @property
    def label(self) -> str:
        """The rest of its key, with the unit of a number."""
        name = self.key.removeprefix(f"{self.section}.")
        if len(name) > LONG_NAME:
            name = name.replace(".", ".\u200b")
        return f"{name} ({self.unit})" if self.unit else name


def form_fields(algorithm: str, mode: str, expert: bool = False) -> list[FormField]:
    """Return the fields that matter for an algorithm and a mode, in order; the beginner's are a subset of the expert's.

    An algorithm that is not built in is assumed to use rollouts.
    """
    by_key = {field.key: field for field in _all_fields()}
    keys: Iterable[str] = by_key if expert else (key for key in BEGINNER if key in by_key)
    hidden = _hidden(algorithm, mode)
    return [by_key[key] for key in keys if not any(_within(key, prefix) for prefix in hidden)]


def in_sections(fields: Iterable[FormField]) -> dict[str, list[FormField]]:
    by_section: dict[str, list[FormField]] = {}
    for field in fields:
        by_section.setdefault(field.section, []).append(field)
    return by_section


def matching(fields: Iterable[FormField], words: str) -> list[FormField]:
    terms = words.lower().split()
    return [field for field in fields if all(word in f"{field.key} {field.doc}".lower() for word in terms)]


def _all_fields() -> Iterator[FormField]:
    for section_key, cls in sections():
        section = section_key.replace(FIRST_EVAL_SET, f"{FIRST_EVAL_SET[:-3]}.0")
        if "[i]" not in section and ".NAME" not in section and not section.startswith("stages"):
            for setting in settings(cls):
                if setting.section is None:
                    yield _field(f"{section}.{setting.name}".lstrip("."), setting)


def _field(key: str, setting: Setting) -> FormField:
    plain = ("true", "false") if setting.kind == "boolean" else setting.choices
    names = tuple(sorted(registry_of(setting.name))) if setting.name in NAMED else setting.names
    return FormField(key, setting.doc, setting.unit, setting.kind, setting.default, plain or names, open=not plain)


def _hidden(algorithm: str, mode: str) -> tuple[str, ...]:
    algorithm_type = ALGORITHMS.get(algorithm)
    has_no_rollouts = algorithm_type is not None and not algorithm_type.uses_rollouts
    return (
        (EXPLORING if has_no_rollouts or mode == "train" else ())
        + (TRAINING if mode in ("explore", "bench", "serve") else ())
        + (SYNC if has_no_rollouts or mode == "bench" else ())
    )


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
