"""The problems of a configuration, each with its file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trinity_core.errors import TrinityError

LONGEST = 200
"""Characters of a value that a message repeats."""


@dataclass(frozen=True)
class SourceLocation:
    """Where a key was written: a line of a file (from 1), an override (`line` is None), or no file at all."""

    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file or ""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    key: str
    """Dotted key path, such as `buffer.explorer_input.eval_tasksets[0].path`."""
    value: Any
    """The offending value; None where a key is missing or unknown."""
    message: str
    """What is wrong and what would be right."""
    file: str | None = None
    """File (or override) in which the key was given."""
    line: int | None = None
    """Line of that file, from 1."""
    suggestion: str = ""
    """The key or choice that was probably meant."""

    def __str__(self) -> str:
        place = f"{SourceLocation(self.file, self.line)}: " if self.file else ""
        hint = f" Did you mean '{self.suggestion}'?" if self.suggestion else ""
        text = f"{place}{self.key}: {self.message}{hint}" if self.key else f"{place}{self.message}{hint}"
        return text.encode(errors="backslashreplace").decode()  # an argument's bytes may be no UTF-8


class ConfigError(TrinityError):
    """A configuration cannot be used; `problems` lists every reason found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(list(problems))
        self.problems = list(problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"The configuration has {count} problem{'s' if count != 1 else ''}:"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])


class Report:
    """Collects problems and finds the line of each."""

    def __init__(self, places: Mapping[str, SourceLocation] | None = None, stage: str | None = None) -> None:
        """`places` maps keys to where they were written; `stage` is the key of the stage being checked, if any."""
        self.places = dict(places or {})
        self.stage = stage
        self.problems: list[Problem] = []

    def add(self, key: str, value: Any, message: str, suggestion: str = "") -> None:
        """Note a problem at `key`."""
        shown, place = self._locate(key)
        file, line = (place.file, place.line) if place else (None, None)
        if isinstance(value, str) and len(value) > LONGEST:
            message = message.replace(value, f"{value[:LONGEST]}…")
        problem = Problem(shown, value, message, file, line, suggestion)
        if problem not in self.problems:
            self.problems.append(problem)

    def touched(self, keys: Iterable[str]) -> bool:
        """True if one of these keys already has a problem; problems that follow from it are not reported."""
        told = {problem.key for problem in self.problems}
        return any(self._locate(key)[0] in told for key in keys)

    def check(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(sorted(self.problems, key=lambda problem: (problem.file or "", problem.line or 0)))

    def _locate(self, key: str) -> tuple[str, SourceLocation | None]:
        """The key as written (within its stage where it was given there), and its place or its nearest parent's."""
        candidates = [f"{self.stage}.{key}", key] if self.stage else [key]
        for candidate in candidates:
            if candidate in self.places:
                return candidate, self.places[candidate]
        parent = key
        while parent := _parent(parent):
            if self.stage and f"{self.stage}.{parent}" in self.places:
                return f"{self.stage}.{key}", self.places[f"{self.stage}.{parent}"]
            if parent in self.places:
                return key, self.places[parent]
        return key, self.places.get(self.stage or "") or self.places.get("")


def _parent(key: str) -> str:
    """`a.b[0]` → `a.b` → `a` → nothing."""
    return key[: max(key.rfind("."), key.rfind("["), 0)]


class Finding(NamedTuple):
    """What a rule found."""

    key: str
    value: Any
    message: str
    rests_on: tuple[str, ...] = ()
    """Other settings the rule read."""
    suggestion: str = ""


def repeated_names(what: str, named: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """A finding for every name that was seen before."""
    seen: set[str] = set()
    for key, name in named:
        if name in seen:
            yield Finding(key, name, f"two {what} are called '{name}'; names must differ.")
        seen.add(name)
