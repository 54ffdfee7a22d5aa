"""The data sets of a run as it recorded them, and their rows: number ↔ file and line.

Rows are numbered without those that the run's readers rejected. JSON lines are counted without parsing them, so that a
row among a million is found within a second. A data set whose files are gone has no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import islice, repeat, takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trinity_core.base.errors import DataError
from trinity_core.base.files import expanded, read_json
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Report, value_at
from trinity_core.config.resolve import shares
from trinity_core.config.schema.buffer import ExperienceBufferConfig
from trinity_core.config.validation import typed_section
from trinity_core.data.files import data_files, is_local, read_rows
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, chosen_rollouts
from trinity_core.exchange.tracking.run_record import read_config


@dataclass(frozen=True)
class DataSet:
    run: Path
    name: str
    settings: Mapping[str, Any]
    """Its section of the recorded configuration."""
    has_pairs: bool = False
    """True if it is trained on as preference pairs."""

    @cached_property
    def path(self) -> str:
        return str(self.settings.get("path") or "")

    @cached_property
    def split(self) -> tuple[str, str | None]:
        """Its split and subset."""
        return self.settings.get("split") or "train", self.settings.get("subset_name")

    @cached_property
    def files(self) -> list[Path]:
        try:
            return data_files(self.path, *self.split) if self.path and is_local(self.path) else []
        except DataError:
            return []

    @cached_property
    def chosen(self) -> list[list[EarlierRollout]]:
        """The rollouts of an earlier run that it trains on. Raises DataError if they are gone."""
        settings = typed_section(ExperienceBufferConfig, self.settings, Report())
        chosen = chosen_rollouts(settings, "preferences" if self.has_pairs else "demonstrations")
        return [rollouts for rollouts in chosen if astuple(rollouts[0].location) not in self.rejected]

    @cached_property
    def rejected(self) -> set[tuple[str, int]]:
        """File and line of the rows that a reader rejected."""
        files = JobLayout(self.run).rejected_rows.glob(f"*/{quote(self.name, safe='')}.jsonl")
        return {(row["source"], row["line"]) for file in files for row in read_rows(str(file)).rows}

    def rows(self) -> Iterator[tuple[str, int]]:
        """Yield file and line of each row, in order; of rollouts in a file, of those that it trains on."""
        if self.settings.get("storage_type") == "rollouts":
            chosen = self.chosen if self.files else ()
            yield from sorted({astuple(rollout.location) for rollouts in chosen for rollout in rollouts})
            return
        for file in self.files:
            places = zip(repeat(str(file)), _lines(file), strict=False)
            yield from (place for place in places if place not in self.rejected) if self.rejected else places

    def places(self, numbers: Sequence[int]) -> list[str]:
        """Return `file:line` of these rows, in ascending order; `<data set>/<number>` for those that are gone."""
        rows, places, position = self.rows(), [], 0
        for number in numbers:
            at = next(islice(rows, number - position, None), None)
            position = number + 1
            places.append(f"{self.name}/{number}" if at is None else f"{at[0]}:{at[1]}")
        return places

    def number_of(self, file: Path, line: int) -> int | None:
        """Return the number of a row of a resolved file; None if it is no row of this data set."""
        if not self.path or not file.is_relative_to(expanded(self.path).resolve()):
            return None
        if self.settings.get("storage_type") == "rollouts":
            places = [(Path(source).resolve(), at) for source, at in self.rows()]
            return places.index((file, line)) if (file, line) in places else None
        number = 0
        for one in self.files:
            is_it, name = one.resolve() == file, str(one)
            number += sum(1 for _ in (takewhile(line.__gt__, _lines(one)) if is_it else _lines(one)))
            number -= sum(other == name and (not is_it or at < line) for other, at in self.rejected)
            if is_it:
                is_row = next((at for at in _lines(one) if at >= line), None) == line
                return number if is_row and (name, line) not in self.rejected else None
        return None


def input_digests(run: Path) -> dict[str, str]:
    """Return data file or plugin → digest, as the run recorded them at its end; empty before."""
    made_from = read_json(run / "summary.json").get("made_from") or {}
    return {name: digest for name, digest in made_from.get("inputs", {}).items() if name.startswith("/")}


def task_sets(run: Path) -> dict[str, DataSet]:
    """Return the training task sets of a run by name, as its ledger calls them."""
    tasksets = value_at(read_config(run), "buffer.explorer_input.tasksets") or ()
    sets = (DataSet(run, str(taskset.get("name")), taskset) for taskset in tasksets)
    return {data.name: data for data in sets}


def supervised_sets(run: Path, storage_types: Collection[str] = ("file", "sql")) -> list[DataSet]:
    """Return the data sets of these types that a run trains on: none that are only measured, or that its sample
    strategy does not draw from. Of an algorithm that a plugin brings, all that are not held out count."""
    recorded = read_config(run)
    inputs = value_at(recorded, "buffer.trainer_input") or {}
    buffers = {"": inputs.get("experience_buffer") or {}, **(inputs.get("auxiliary_buffers") or {})}
    algorithm = recorded.get("algorithm") or {}
    if algorithm.get("algorithm_type") in ALGORITHMS:
        settings = {"algorithm": algorithm, "buffer": {"trainer_input": inputs}}
        trained = {key: buffers[key] for key in shares(typed_section(Config, settings, Report()))}
    else:
        trained = {key: buffer for key, buffer in buffers.items() if not buffer.get("held_out")}
    read = [one for one in trained.values() if one.get("storage_type") in storage_types and one.get("path")]
    has_pairs = algorithm.get("algorithm_type") == "dpo"
    return [DataSet(run, str(one.get("name") or one["path"]), one, has_pairs) for one in read]


def _lines(file: Path) -> Iterable[int]:
    """Yield the lines on which the rows of a file begin."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            if not next((raw for raw in lines if raw.strip()), b"").lstrip().startswith(b"["):
                lines.seek(0)
                yield from (number for number, blank in enumerate(map(bytes.isspace, lines), 1) if not blank)
                return
    yield from (location.line for location in read_rows(str(file)).locations)
