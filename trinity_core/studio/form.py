"""What the configuration page shows: fields for an algorithm and a mode, problems by field. No Streamlit here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_core.config import ConfigError, Problem, config_from_text
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.fields import Kind, Setting, sections, settings

BEGINNER = (
    "project",
    "name",
    "mode",
    "checkpoint_root_dir",
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "model.model_path",
    "cluster.gpu_per_node",
    "buffer.batch_size",
    "buffer.train_batch_size",
    "buffer.total_epochs",
    "buffer.total_steps",
    "explorer.eval_interval",
    "trainer.save_interval",
    "synchronizer.sync_method",
    "synchronizer.sync_interval",
    "monitor.monitor_type",
)
"""Keys that the beginner's form has, in order."""
ROLLOUTS = ("explorer", "synchronizer", "algorithm.repeat_times", "buffer.batch_size")
"""Keys and sections that say how experiences are made; none matters where the data is given."""
TRAINING = ("trainer", "synchronizer", "buffer.train_batch_size")
"""Keys and sections that say how the policy is trained; none matters in `explore`, `bench` and `serve`."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One key of the form."""

    key: str
    doc: str
    unit: str
    kind: Kind
    default: Any
    choices: tuple[str, ...]
    """All values of a choice; the known names of a named part."""

    @property
    def help(self) -> str:
        """The doc, with the unit of a number."""
        return f"{self.doc} Unit: {self.unit}." if self.unit else self.doc


def form_fields(algorithm: str, mode: str, expert: bool = False) -> list[FormField]:
    """The fields that matter for an algorithm and a mode, in order; the beginner's are a choice of the expert's.

    An algorithm that is not built in is taken for one that uses rollouts.
    """
    known = {field.key: field for field in _all_fields()}
    keys: Iterable[str] = known if expert else (key for key in BEGINNER if key in known)
    hidden = _hidden(algorithm, mode)
    return [known[key] for key in keys if not any(_within(key, each) for each in hidden)]


def problems_of(text: str) -> list[Problem]:
    """Every problem of a configuration's YAML text; the user's own modules are not loaded."""
    try:
        config_from_text(text)
    except ConfigError as error:
        return error.problems
    return []


def by_field(problems: Iterable[Problem], keys: Iterable[str]) -> dict[str, list[Problem]]:
    """Key → its problems; those of keys that the form does not have are under the empty key."""
    found: dict[str, list[Problem]] = {}
    shown = set(keys)
    for problem in problems:
        found.setdefault(problem.key if problem.key in shown else "", []).append(problem)
    return found


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or None where it is not given."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _all_fields() -> Iterator[FormField]:
    for section, cls in sections():
        if "[i]" not in section and ".NAME" not in section and not section.startswith("stages"):
            for setting in settings(cls):
                if setting.section is None and not setting.same_as and not setting.no_effect:
                    yield _field(f"{section}.{setting.name}".lstrip("."), setting)


def _field(key: str, setting: Setting) -> FormField:
    choices = setting.choices or setting.names
    return FormField(key, setting.doc, setting.unit, setting.kind, setting.default, choices)


def _hidden(algorithm: str, mode: str) -> tuple[str, ...]:
    known = ALGORITHMS.get(algorithm)
    given = mode == "train" or (known is not None and not known.uses_rollouts)
    return (ROLLOUTS if given else ()) + (TRAINING if mode in ("explore", "bench", "serve") else ())


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
