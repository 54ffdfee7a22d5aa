"""The settings of a veRL command line or Hydra file: the program, and the value of every dotted key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trinity_core.config import source
from trinity_core.config.findings import ConfigError, Finding, SourceLocation
from trinity_core.config.yaml_text import parse_value
from trinity_core.import_verl.shell import (
    END,
    UNKNOWN,
    VARIABLE,
    ShellCommand,
    ShellRun,
    UnreadableShell,
    dry_run,
    shown,
    variable,
)  # fmt: skip

PROGRAM = re.compile(r"(?:^|[./])(main_(?!eval|generation)\w+|fully_async_main|\w*sft_trainer\w*)(?:\.py)?$")
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*[A-Za-z_][\w.]*)(?:,([^{}]*))?\}")
_DEEPEST = 20


@dataclass(frozen=True)
class Unread:
    """A value that is not in the file."""

    text: str
    """Placeholder, such as `$(date)`."""


@dataclass(frozen=True)
class VerlSettings:
    program: str
    """The module that is run, such as `verl.trainer.main_ppo`."""
    values: dict[str, Any]
    launcher: dict[str, str] = field(default_factory=dict)
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


def read_verl(path: Path, arguments: Sequence[str] = ()) -> VerlSettings:
    """Read the settings from a shell script or a YAML file.

    `arguments` are the script's arguments, or further overrides of a YAML file. Raises ConfigError if the file cannot
    be read or starts no veRL training.
    """
    if path.suffix in (".yaml", ".yml"):
        return _with_overrides(_from_yaml(path), arguments)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _wrong(path, "there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}.") from None
    try:
        run = dry_run(text, arguments, str(path))
    except UnreadableShell as error:
        raise _wrong(path, f"{shown(str(error))}.", error.line) from None
    launched = [*programs(run)]
    if not launched:
        raise _starts_nothing(path, run)
    if len(launched) > 1:
        lines = ", ".join(str(command.line) for command, _ in launched)
        raise _wrong(path, f"starts {len(launched)} trainings (lines {lines}): leave the one that is to be imported.")
    return _from_command(*launched[0], path, run)


def programs(run: ShellRun) -> Iterator[tuple[ShellCommand, int]]:
    """Yield the commands that start a training, with the index of the program among the words."""
    for command in run.commands:
        for place, word in enumerate(command.words):
            if place and PROGRAM.search(word):
                yield command, place
                break


def _starts_nothing(path: Path, run: ShellRun) -> ConfigError:
    last = run.commands[-1] if run.commands else None
    if last is not None and last.words[0] == "exit":
        asked = dict.fromkeys(f"`{shown(' '.join(command.words))}`" for command in run.commands if command.is_asked)
        failed = f"; {', '.join(asked)} counted as failed, as no program is run" if asked else ""
        message = f"ends here, before it starts a veRL training: give the script's arguments after its name{failed}."
        return _wrong(path, message, last.line)
    for line, reason in run.failures.items():
        return _wrong(path, f"starts no veRL training, and bash says of this line: {reason}.", line)
    return _wrong(
        path, "starts no veRL training: there must be a line such as `python3 -m verl.trainer.main_ppo key=value`."
    )


def _assumptions(run: ShellRun, training: ShellCommand) -> Iterator[str]:
    """Yield the assumptions about the script's machine, as sentences."""
    if run.unset:
        hint = "to import other values, set them in the script"
        yield f"{', '.join(run.unset)}: variables of the environment were taken as not set ({hint})."
    asked = (command for command in run.commands if command.is_asked and command.line != training.line)
    for text in dict.fromkeys(shown(" ".join(command.words)) for command in asked):
        yield f"`{text}` was not run, so what the script makes of it is not known."
    for line, reason in run.failures.items():
        yield f"line {line}: bash says: {shown(reason)}."


def _from_command(command: ShellCommand, place: int, path: Path, run: ShellRun) -> VerlSettings:
    before, after = command.words[:place], command.words[place + 1 :]
    options = re.compile(r"--([\w-]+)(?:=(.*))?")
    launcher = {
        match[1].replace("-", "_"): match[2] if match[2] is not None else following
        for word, following in zip(before, [*before[1:], ""], strict=True)
        if (match := options.fullmatch(word))
    }
    options_given, settings = _split(after)
    base, more = _primary(options_given, path)
    program = command.words[place].removesuffix(".py").strip("./").replace("/", ".")
    return _with_overrides(VerlSettings(program, base, launcher, (*_assumptions(run, command), *more)), settings)


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split words into Hydra's options, `--name=value` or `--name value`, and settings."""
    options: dict[str, str] = {}
    settings: list[str] = []
    awaited = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            options[name], awaited = value, "" if equals else name
        elif awaited:
            options[awaited], awaited = word, ""
        else:
            settings.append(word)
    return options, settings


def _primary(options: dict[str, str], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the file named by `--config-path` and `--config-name`, or a remark if it is missing."""
    name = options.get("config-name", "")
    if not name or "ppo_trainer" in name or UNKNOWN in name:
        return {}, []
    folder, file = options.get("config-path", ""), name.removesuffix(".yaml") + ".yaml"
    for place in (path.parent / folder / file, Path(folder) / file):
        if VARIABLE not in str(place) and place.is_file():
            return _from_yaml(place).values, []
    megatron = " (veRL's file for Megatron, which is not here: DeepSpeed trains)" if "megatron" in name else ""
    return {}, [f"--config-name={shown(name)}{megatron}: this file was not found, so veRL's defaults were taken."]


def _from_yaml(path: Path) -> VerlSettings:
    tree = source.read(path, None).valid_tree()
    remarks = []
    if tree.get("defaults"):
        remarks.append("defaults: veRL's own defaults were taken; other files of the list were not read.")
    values = dict(_flat({name: value for name, value in tree.items() if name not in ("defaults", "hydra")}))
    if not any(key.startswith(("actor_rollout_ref.", "data.", "critic.")) for key in values):
        raise _wrong(path, "is no veRL configuration: it has neither of the sections data and actor_rollout_ref.")
    reinforces = any(key.startswith("actor_rollout_ref.") for key in values)
    program = "verl.trainer.main_ppo" if reinforces else "verl.trainer.sft_trainer"
    return VerlSettings(program, _resolved(values), remarks=tuple(remarks))


def _flat(tree: dict[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a section, with its dotted key; `_target_` is Hydra's."""
    for name, value in tree.items():
        path = f"{key}.{name}" if key else str(name)
        if isinstance(value, dict) and value:
            yield from _flat(value, path)
        elif name != "_target_":
            yield path, value


def _with_overrides(settings: VerlSettings, words: Sequence[str]) -> VerlSettings:
    """Apply Hydra's overrides: `key=value`, `+key=value`, `++key=value`, `~key`."""
    values, remarks = dict(settings.values), list(settings.remarks)
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if not match or (match[3] is None and match[1] != "~"):
            remarks.append(f"'{shown(word)}' is no setting (key=value), so it was left out.")
            continue
        mark, key, raw = match.groups()
        values = {name: old for name, old in values.items() if name != key and not name.startswith(f"{key}.")}
        if mark != "~":
            read = _read(raw)
            values |= dict(_flat(read, key)) if isinstance(read, dict) and read else {key: read}
    return VerlSettings(settings.program, _resolved(values), settings.launcher, tuple(remarks))


def _read(raw: str) -> Any:
    """Parse the value of an override in Hydra's grammar (equal to YAML's for such lines)."""
    if UNKNOWN in raw or not raw:
        return Unread(shown(raw))
    try:
        return _plain(parse_value(raw))
    except (yaml.YAMLError, RecursionError):
        return _plain(raw)


def _plain(value: Any) -> Any:
    """Return the value with environment variables in OmegaConf's notation."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    value = re.sub(r"^~(?=/|$)", variable("HOME"), value)
    return re.sub(f"{VARIABLE}(.*?){END}", r"${oc.env:\1}", value)


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
        name = _absolute(match[1], key)
        if name in values:
            return _followed(values[name], name, values, depth + 1)
        return Unread(match[0]) if match[2] is None else _read(match[2])

    if whole := _REFERENCE.fullmatch(value):
        return target(whole)
    pieces = [target(match) for match in _REFERENCE.finditer(value)]
    if any(isinstance(piece, Unread) for piece in pieces):
        return Unread(value)
    return _plain(_REFERENCE.sub(lambda _: str(pieces.pop(0)), value))


def _absolute(name: str, key: str) -> str:
    """Return the absolute key of a reference such as `..n` within `key`."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    return ".".join([*key.split(".")[:-dots], name[dots:]])


def _wrong(path: Path, message: str, line: int | None = None) -> ConfigError:
    return ConfigError([Finding("", None, "unreadable", message).at(SourceLocation(str(path), line))])
