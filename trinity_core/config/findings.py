"""Findings about a configuration: errors, warnings and notices, each with a code, a file and a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel

from trinity_core.base.errors import TrinityError

Severity = Literal["error", "warning", "notice"]
"""An error prevents a run from starting, a warning does not, and a notice is only information."""
Code = Literal[
    "unreadable",  # a file is missing, cannot be opened, or is not YAML
    "duplicate-key",
    "bad-override",
    "unresolved",  # an interpolation whose variable or key does not exist
    "unknown-key",
    "unsupported-key",  # another system's setting that is not supported here
    "wrong-type",
    "out-of-range",
    "missing",
    "unknown-choice",
    "unknown-name",  # neither built in nor from a plugin
    "unknown-argument",
    "invalid",  # right type, but unusable: an address, a folder's name, a database
    "duplicate-name",
    "two-spellings",  # one setting given in two places
    "conflict",  # incompatible with another setting
    "unavailable",  # missing on this machine: a model, data, a port, GPUs, memory, disk
    "busy",  # unavailable for now: a port in use, a hub that does not answer
    "no-effect",
    "changed",  # a setting that another one overrides
    "info",
]
"""Stable codes of findings. Programs and tests use key and code; messages may be reworded."""


@dataclass(frozen=True)
class SourceLocation:
    """Where a key was written: a line of a file (from 1), an override (`line` is None), or no file at all."""

    file: str | None = None
    line: int | None = None
    key: str = ""
    """The key as written, if that is another spelling of the setting."""
    text: str = ""
    """A number, true or false as it is written, such as `1.10`, in case it turns out to be the value of a text."""
    variable: str = ""
    """The environment variable that sets the value, if it is written as `${oc.env:…}`."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file or ""


@dataclass(frozen=True)
class Finding:
    """One error, warning or notice about a configuration."""

    key: str
    """Dotted key path, such as `buffer.explorer_input.eval_tasksets[0].path`; empty for the whole file."""
    value: Any
    """The offending value; None if the key is missing or unknown, or the value may be a secret."""
    code: Code
    message: str
    """What is wrong and what would be right."""
    rests_on: tuple[str, ...] = ()
    """Other settings that the finding depends on. If one of them is wrong itself, the finding is not reported."""
    suggestion: str = ""
    """The key or choice that was probably meant."""
    severity: Severity = "error"
    file: str | None = None
    """File (or override) that contains the key."""
    line: int | None = None

    @property
    def place(self) -> SourceLocation:
        return SourceLocation(self.file, self.line)

    def at(self, location: SourceLocation | None, key: str | None = None) -> Finding:
        """Return the finding with the location of its key, which may be a stage's key."""
        location = location or SourceLocation()
        return replace(self, key=self.key if key is None else key, file=location.file, line=location.line)

    @property
    def advice(self) -> str:
        return f"{self.message} Did you mean '{self.suggestion}'?" if self.suggestion else self.message

    def __str__(self) -> str:
        where = f"{self.place}: " if self.file else ""
        text = f"{where}{self.key}: {self.advice}" if self.key else f"{where}{self.advice}"
        return text.encode(errors="backslashreplace").decode()  # an argument's bytes may be no UTF-8


class ConfigError(TrinityError):
    """An invalid configuration; `problems` lists every reason, and `key` is the key of the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Finding]) -> None:
        super().__init__(list(problems), key=problems[0].key if problems else "")
        self.problems = list(problems)

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self}"  # as Prefect logs it

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"The configuration has {count} problem{'s' if count != 1 else ''}:"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])


class Report:
    """Collects findings and looks up the line of each."""

    def __init__(self, places: Mapping[str, SourceLocation] | None = None, stage: str | None = None) -> None:
        """`places` maps keys to their locations; `stage` is the key of the stage being checked, if any."""
        self.places = dict(places or {})
        self.stage = stage
        self.problems: list[Finding] = []
        self.added = 0
        """Number of findings added, including duplicates of an earlier stage's: it grows whenever a check fails."""

    def add(self, finding: Finding) -> None:
        self.added += 1
        key, location = self._locate(finding.key)
        located = finding.at(location, key)
        is_missing = finding.code in ("unavailable", "busy") and finding.key.endswith("path")
        if is_missing and location is not None and location.variable:
            message = f"{finding.message.rstrip('.')}; or set {location.variable} to a local folder."
            located = replace(located, message=message)
        if located not in self.problems:
            self.problems.append(located)

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add findings that do not follow from problems already reported."""
        for finding in findings:
            if not self.touched((finding.key, *finding.rests_on)):
                self.add(finding)

    def touched(self, keys: Iterable[str]) -> bool:
        """True if one of these keys already has a problem; problems that follow from it are not reported."""
        reported = {problem.key for problem in self.problems}
        return any(self._locate(key)[0] in reported for key in keys)

    def forget(self, key: str) -> None:
        """Drop the problems of a key without effect and of the keys below it, except keys given twice."""
        self.problems = without(self.problems, key)

    def as_text(self, key: str, value: Any) -> Any:
        """Return the value of a text setting as it is written: `1.10` and not `1.1`."""
        location = self._locate(key)[1]
        return location.text if location is not None and location.text and isinstance(value, int | float) else value

    def check(self) -> None:
        if self.problems:
            raise ConfigError(sorted(self.problems, key=lambda problem: (problem.file or "", problem.line or 0)))

    def _locate(self, key: str) -> tuple[str, SourceLocation | None]:
        """Return the key as written (within its stage if given there), and its location: else that of a key below it,
        as an override's whose sections are nowhere else, or of its nearest parent."""
        part = key
        while part:
            names = (f"{self.stage}.{part}", part) if self.stage else (part,)
            for name in names:
                if (location := self.places.get(name)) is not None:
                    return f"{location.key or name}{key[len(part) :]}", location
            if part == key:
                below = ((name, place) for name in names for at, place in self.places.items() if is_below(at, name))
                if first := next(below, None):
                    return first
            part = _parent(part)
        return key, self.places.get(self.stage or "") or self.places.get("")


def parts_of(key: str) -> list[str]:
    """`a.b[0].c` → `a`, `b`, `0`, `c`."""
    return key.replace("[", ".").replace("]", "").split(".")


def value_at(tree: Any, path: str | Sequence[str | int]) -> Any:
    """Return the value at a path, or at a key such as `a.b`, `a[0].b` or `a.0.b`; None if there is none."""
    for part in parts_of(path) if isinstance(path, str) else path:
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, BaseModel):
            tree = getattr(tree, str(part), None)
        elif isinstance(tree, list | tuple) and str(part).isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def conflict(config: Any, key: str, message: str, *rests_on: str, code: Code = "conflict", meant: str = "") -> Finding:
    """Return a finding about the value at a key of `config`; `meant` is the suggestion."""
    return Finding(key, value_at(config, key), code, message, rests_on, meant)


def without(problems: Iterable[Finding], key: str) -> list[Finding]:
    """Return the problems of other keys than this one and those below it, and all keys given twice."""
    return [problem for problem in problems if problem.code == "duplicate-key" or not is_within(problem.key, key)]


def is_below(key: str, path: str) -> bool:
    return key.startswith((f"{path}.", f"{path}["))


def is_within(key: str, path: str) -> bool:
    return key == path or is_below(key, path)


def _parent(key: str) -> str:
    """`a.b[0]` → `a.b` → `a` → ""."""
    return key[: max(key.rfind("."), key.rfind("["), 0)]


def repeated_names(what: str, entries: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    seen: set[str] = set()
    for key, name in entries:
        if name in seen:
            message = f"two {what} are called '{name}'; names must differ."
            yield Finding(key, name, "duplicate-name", message)
        seen.add(name)


def unusable_name(name: str) -> str:
    """Return why a name cannot be a folder's name, or ""."""
    if not name or name != name.strip():
        return "must be given, without blanks around it."
    if "/" in name or "\0" in name or name in (".", ".."):
        return f"names a folder, so it cannot be {name!r}: give a name without /, that is not . or .."
    return ""
