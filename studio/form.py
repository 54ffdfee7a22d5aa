"""The fields of the configuration page for an algorithm and a mode, by section."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.fields import Setting, plain_settings
from trinity_core.config.findings import is_within

BEGINNER = (
    "project", "name", "mode", "checkpoint_root_dir", "model.model_path", "model.max_prompt_tokens",
    "model.max_response_tokens", "buffer.explorer_input.taskset.path", "buffer.explorer_input.taskset.split",
    "buffer.explorer_input.taskset.format.prompt_key", "buffer.explorer_input.taskset.format.response_key",
    "buffer.explorer_input.taskset.default_reward_fn_type", "buffer.explorer_input.eval_tasksets.0.path",
    "buffer.explorer_input.eval_tasksets.0.split", "buffer.trainer_input.experience_buffer.path",
    "buffer.total_steps", "buffer.total_epochs", "buffer.batch_size", "buffer.train_batch_size",
    "algorithm.algorithm_type", "algorithm.repeat_times", "algorithm.optimizer.lr", "explorer.eval_interval",
    "synchronizer.sync_method", "synchronizer.sync_interval", "trainer.save_interval", "cluster.gpu_per_node",
    "monitor.monitor_type",
)  # fmt: skip
EXPLORING = ("explorer", "algorithm.repeat_times", "buffer.batch_size", "buffer.explorer_input")
TRAINING = ("trainer", "buffer.train_batch_size", "algorithm.optimizer")
SYNC = ("synchronizer",)
LONG_NAME = 40
"""Length above which a label may be broken at its dots."""
NAMED = ("default_workflow_type", "default_reward_fn_type")
"""Settings of task sets that name a part; plugins may add names."""


@dataclass(frozen=True, slots=True)
class FormField:
    key: str
    setting: Setting

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of a choice; the known names of a named part, which is `open`."""
        if self.setting.kind == "boolean":
            return "true", "false"
        names = sorted(registry_of(self.setting.name)) if self.setting.name in NAMED else self.setting.names
        return self.setting.choices or tuple(names)

    @property
    def open(self) -> bool:
        """True if other values than the choices are allowed."""
        return self.setting.kind != "boolean" and not self.setting.choices

    @property
    def section(self) -> str:
        return self.key.partition(".")[0] if "." in self.key else "run"

    @property
    def label(self) -> str:
        """The rest of its key, with the unit of a number."""
        name = self.key.removeprefix(f"{self.section}.")
        if len(name) > LONG_NAME:
            name = name.replace(".", ".\u200b")
        return f"{name} ({self.setting.unit})" if self.setting.unit else name


def form_fields(algorithm: str, mode: str, expert: bool = False) -> list[FormField]:
    """Return the fields that matter for an algorithm and a mode, in order; the beginner's are a subset of the expert's.
    An algorithm that is not built in is assumed to use rollouts."""
    # Of lists of sections only the first eval set has fields.
    by_key = {key.replace("eval_tasksets[i]", "eval_tasksets.0"): setting for key, setting in plain_settings()}
    plain = (key for key in by_key if "[i]" not in key and ".NAME" not in key and not key.startswith("stages"))
    hidden = _hidden(algorithm, mode)
    keys = plain if expert else BEGINNER
    return [FormField(key, by_key[key]) for key in keys if not any(is_within(key, section) for section in hidden)]


def in_sections(fields: Iterable[FormField]) -> dict[str, list[FormField]]:
    return {section: [*of_section] for section, of_section in groupby(fields, lambda field: field.section)}


def matching(fields: Iterable[FormField], words: str) -> list[FormField]:
    terms = words.lower().split()
    return [field for field in fields if all(word in f"{field.key} {field.setting.doc}".lower() for word in terms)]


def _hidden(algorithm: str, mode: str) -> tuple[str, ...]:
    algorithm_type = ALGORITHMS.get(algorithm)
    has_no_rollouts = algorithm_type is not None and not algorithm_type.uses_rollouts
    return (
        (EXPLORING if has_no_rollouts or mode == "train" else ())
        + (TRAINING if mode in ("explore", "bench", "serve") else ())
        + (SYNC if has_no_rollouts or mode == "bench" else ())
    )
