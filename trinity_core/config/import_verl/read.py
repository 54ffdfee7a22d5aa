"""The settings of a veRL command line, script or Hydra file: the program, and the value of every dotted key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from trinity_core.config import source
from trinity_core.config.findings import ConfigError, Finding, SourceLocation
from trinity_core.config.import_verl.script import UnreadableScript, trace
from trinity_core.config.yaml_text import parse_value

_PROGRAM = re.compile(r"(?:^|[./])(main_(?!eval|generation)\w+|fully_async_main|\w*sft_trainer\w*)(?:\.py)?$")
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*[A-Za-z_][\w.]*)(?:,([^{}]*))?\}")
_DEEPEST = 20
_COMMAND = "`python3 -m verl.trainer.main_ppo key=value`"


@dataclass(frozen=True)
class Unread:
    """A value that is not in the file."""

    text: str
    """Placeholder, such as `$(date)`."""


@dataclass(frozen=True)
class VerlRun:
    program: str
    """The module that is run, such as `verl.trainer.main_ppo`."""
    values: dict[str, Any]
    launcher: dict[str, str]
    """Options of torchrun, such as `nproc_per_node`."""
    remarks: tuple[str, ...] = ()

    @property
    def is_sft(self) -> bool:
        """True for supervised fine-tuning, which has other keys."""
        return "sft" in self.program.rpartition(".")[2] or "model.partial_pretrain" in self.values

    @property
    def is_fully_async(self) -> bool:
        """True if the trainer takes batches as they arrive (veRL's docs/advance/fully_async.md)."""
        return "fully_async" in self.program

    @property
    def has_rollout_gpus(self) -> bool:
        """True if rollouts have separate GPUs; `one_step_off`: veRL's docs/advance/one_step_off.md."""
        return self.is_fully_async or "one_step_off" in self.program


def read_verl(path: Path, arguments: Sequence[str] = ()) -> VerlRun:
    """Read a YAML file with overrides, a script with its arguments, or a command: its first word and the others.

    Raises ConfigError if there is no veRL training in it, or if it cannot be read.
    """
    if path.suffix in (".yaml", ".yml"):
        return _with_overrides(_from_yaml(path), arguments)
    if not path.exists():
        if program_at := _program([str(path), *arguments]):
            return _from_command([str(path), *arguments], program_at, Path("command"))
        raise _wrong(path, f"is no file, and no command that starts a veRL training, such as {_COMMAND}.")
    try:
        traced = trace(path, arguments)
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}.") from None
    except UnreadableScript as error:
        raise _wrong(path, f"{error}.", error.line) from None
    launched = [(words, program_at) for words in traced.commands if (program_at := _program(words))]
    if not launched:
        reason = f" ({traced.errors.strip().splitlines()[-1]})" if traced.errors.strip() else ""
        raise _wrong(path, f"starts no veRL training, such as {_COMMAND}, with these arguments{reason}.")
    if len(launched) > 1:
        raise _wrong(path, f"starts {len(launched)} trainings: leave the one that is to be imported.")
    [(words, program_at)] = launched
    return _from_command(words, program_at, path)


def _program(words: Sequence[str]) -> int:
    """Return the place of the training program among the words of a command, 0 if there is none."""
    return next((index for index, word in enumerate(words) if index and _PROGRAM.search(word)), 0)


def _from_command(words: Sequence[str], program_at: int, path: Path) -> VerlRun:
    launcher = {}
    for word, following in pairwise([*words[:program_at], ""]):
        if match := re.fullmatch(r"--([\w-]+)(?:=(.*))?", word):
            launcher[match[1].replace("-", "_")] = following if match[2] is None else match[2]
    options, settings = dict[str, str](), list[str]()
    awaited = ""
    for word in words[program_at + 1 :]:
        if word.startswith("--"):
            awaited, equals, options[awaited] = word[2:].partition("=")
            awaited = "" if equals else awaited
        elif awaited:
            options[awaited], awaited = word, ""
        else:
            settings.append(word)
    values, remarks = _primary(options, path)
    program = words[program_at].removesuffix(".py").strip("./").replace("/", ".")
    return _with_overrides(VerlRun(program, values, launcher, remarks), settings)


def _primary(options: dict[str, str], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of the file named by `--config-path` and `--config-name`, or a remark if it is missing."""
    name = options.get("config-name", "")
    if not name or "ppo_trainer" in name:
        return {}, ()
    folder, file = options.get("config-path", ""), name.removesuffix(".yaml") + ".yaml"
    for candidate in (path.parent / folder / file, Path(folder) / file):
        if candidate.is_file():
            return _from_yaml(candidate).values, ()
    return {}, (f"--config-name={name}: this file was not found, so veRL's defaults were taken",)


def _from_yaml(path: Path) -> VerlRun:
    tree = source.read(path, None).valid_tree()
    listed = ("defaults: veRL's own defaults were taken; other files of the list were not read",)
    values = dict(_flat({name: value for name, value in tree.items() if name not in ("defaults", "hydra")}))
    if not any(key.startswith(("actor_rollout_ref.", "data.", "critic.")) for key in values):
        raise _wrong(path, "is no veRL configuration: it has neither of the sections data and actor_rollout_ref.")
    reinforces = any(key.startswith("actor_rollout_ref.") for key in values)
    program = "verl.trainer.main_ppo" if reinforces else "verl.trainer.sft_trainer"
    return VerlRun(program, _resolved(values), {}, listed if tree.get("defaults") else ())


def _flat(tree: dict[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a section, with its dotted key; `_target_` is Hydra's."""
    for name, value in tree.items():
        path = f"{key}.{name}" if key else str(name)
        if isinstance(value, dict) and value:
            yield from _flat(value, path)
        elif name != "_target_":
            yield path, value


def _with_overrides(run: VerlRun, words: Sequence[str]) -> VerlRun:
    """Apply Hydra's overrides: `key=value`, `+key=value`, `++key=value`, `~key`."""
    values, remarks = dict(run.values), list(run.remarks)
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if not match or (match[3] is None and match[1] != "~"):
            remarks.append(f"'{word}' is no setting (key=value), so it was left out")
            continue
        mark, key, raw = match.groups()
        values = {name: old for name, old in values.items() if name != key and not name.startswith(f"{key}.")}
        if mark != "~":
            read = _parsed(raw)
            values |= dict(_flat(read, key)) if isinstance(read, dict) and read else {key: read}
    return replace(run, values=_resolved(values), remarks=tuple(remarks))


def _parsed(raw: str) -> Any:
    """Parse the value of an override in Hydra's grammar (equal to YAML's for such lines)."""
    if not raw:
        return Unread(raw)
    try:
        return _plain(parse_value(raw))
    except (yaml.YAMLError, RecursionError):
        return _plain(raw)


def _plain(value: Any) -> Any:
    """Return the value with texts as keys, and with the home folder in OmegaConf's notation."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return re.sub(r"^~(?=/|$)", "${oc.env:HOME}", value) if isinstance(value, str) else value


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Replace `${other.key}` and `${oc.select:other.key,default}`; environment variables stay."""
    return {key: _followed(value, key, values, 0) for key, value in values.items()}


def _followed(value: Any, key: str, values: dict[str, Any], depth: int) -> Any:
    if isinstance(value, list):
        return [_followed(item, key, values, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return _plain(value)
    if depth > _DEEPEST:
        return Unread(value)

    def target(match: re.Match[str]) -> Any:
        name = match[1].lstrip(".")
        if dots := len(match[1]) - len(name):
            name = ".".join([*key.split(".")[:-dots], name])
        if name in values:
            return _followed(values[name], name, values, depth + 1)
        return Unread(match[0]) if match[2] is None else _parsed(match[2])

    if whole := _REFERENCE.fullmatch(value):
        return target(whole)
    pieces = [target(match) for match in _REFERENCE.finditer(value)]
    if any(isinstance(piece, Unread) for piece in pieces):
        return Unread(value)
    return _plain(_REFERENCE.sub(lambda _: str(pieces.pop(0)), value))


def _wrong(path: Path, message: str, line: int | None = None) -> ConfigError:
    return ConfigError([Finding("", None, "unreadable", message).at(SourceLocation(str(path), line))])
