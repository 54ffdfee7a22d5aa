"""Reads data sets: local files and folders, database tables, and names on the Hugging Face hub.

Every row keeps its file and line for later error messages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from trinity_core.base.errors import DataError, closest
from trinity_core.base.files import expanded
from trinity_core.config.types import SEVERAL
from trinity_core.data.readers import READERS, Row, file_format, read_hub, read_lines, read_table, shown
from trinity_core.data.values import row_problem, visible

logger = logging.getLogger(__name__)

DESCRIPTIONS = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files of `datasets.save_to_disk` without rows."""
QUICKSTART = "runs/quickstart"
"""Folder of the quick start's model and data."""
WHOLE = "train"
"""The split of a single file or table, as in `datasets`."""
_NAMES = re.compile(r"(?:^|\+)\s*([\w.-]+)")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, slots=True)
class RowLocation:
    """A file (or table, or hub name) and a line number; the row number from 1 if the source has no lines."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    location: RowLocation
    reason: str

    def __str__(self) -> str:
        return visible(f"{self.location}: {self.reason}")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a split in file order, and the rejected ones."""

    rows: list[Row]
    locations: list[RowLocation]
    rejected: list[RejectedRow]


LocatedRow = tuple[RowLocation, Row | str]
"""A location with its row, or with the reason why the row cannot be read."""


def fingerprint(rows: Iterable[Row]) -> str:
    """Return a hash of rows in order: 12 hexadecimal digits."""
    mark = hashlib.blake2b(digest_size=6)
    for row in rows:
        mark.update(json.dumps(row, default=_value_text).encode())
    return mark.hexdigest()


def _value_text(value: Any) -> str:
    """Return a text for a value of a database or of Arrow that JSON lacks; the type alone if it has no text of its
    own."""
    kind = type(value).__name__
    return f"{kind}:{value!r}" if isinstance(value, Decimal | date | time | timedelta | bytes | UUID) else kind


def read_rows(
    path: str, split: str = "train", subset: str | None = None, storage: str = "file", table: str | None = None,
    limit: int | None = None,
) -> Rows:  # fmt: skip
    """Read a split, or its first `limit` rows; only a `.json` file is read whole then.

    `path` is a file, a folder whose files are named by split (`train.jsonl`, `test-00000-of-00002.parquet`,
    `train/0.json`, all also below a folder named by `subset` or `data`), a hub name, or with `storage="sql"` the URL of
    a database. Raises DataError, with the file and a remedy, if there is nothing to read.
    """
    return _validated(islice(_located(path, split, subset, storage, table), limit))


def _located(path: str, split: str, subset: str | None, storage: str, table: str | None) -> Iterator[LocatedRow]:
    if not path:
        raise DataError("a data set has no path; set it to a file, a folder or a hub name", key="path")
    if is_slice(split) and (storage == "sql" or is_local(path)):
        yield from _sliced(split, lambda name: list(_located(path, name, subset, storage, table)))
        return
    if storage == "sql":
        if split != WHOLE:
            raise DataError(f"a table has no split '{split}', only '{WHOLE}'; name another table", key="split")
        name = subset or table
        yield from _numbered(f"{shown(path)} {name}", read_table(path, name))
        return
    if storage == "queue":
        raise DataError(f"this data set is read from files or a database, not from a queue: {path}", key="storage_type")
    if is_local(path):
        for file in data_files(path, split, subset):
            yield from ((RowLocation(str(file), line), row) for line, row in read_lines(file))
    elif looks_local(path):
        absent = next(part for part in path.split(SEVERAL) if not is_local(part))
        raise DataError(f"there is no file or folder {absent}; {remedy_of_missing(absent)}", key=absent)
    else:
        yield from _numbered(f"{path} ({split})", read_hub(path, subset, split))


def data_files(path: str, split: str = "train", subset: str | None = None) -> list[Path]:
    """Return the local files of a split. Raises DataError if there are none, or the data set is not a file or
    folder."""
    if is_slice(split):
        return [file for name in dict.fromkeys(_NAMES.findall(split)) for file in data_files(path, name, subset)]
    if SEVERAL in path:
        return [file for part in path.split(SEVERAL) for file in data_files(part, split, subset)]
    local = expanded(path)
    if local.is_dir():
        return find_files(local, split, subset)
    if not local.is_file() and not is_pattern(path):
        raise DataError(f"there is no file or folder {path}; this needs a data set in local files", key=path)
    files = [local] if local.is_file() else _matching(local)
    if split != WHOLE and not all(split in re.split(r"[-_.]", file_format(file)[0]) for file in files):
        raise DataError(
            f"{path} has no split '{split}': files that are named are the split '{WHOLE}', unless their names hold "
            f"another; give the file of that split, or a slice such as '{WHOLE}[:100]'",
            key="split",
        )
    return files


def is_slice(split: str) -> bool:
    """True for a part of a split, or several (`train[:100]`, `train[10%:]+test`), as `datasets` writes them."""
    return any(sign in split for sign in "[+(")


def _sliced(split: str, rows_of: Callable[[str], list[LocatedRow]]) -> Iterator[LocatedRow]:
    """Yield the rows of a slice, as `datasets` takes it. Raises DataError if it cannot be understood."""
    from datasets import ReadInstruction

    try:
        instruction = ReadInstruction.from_spec(split)
        rows = {name: rows_of(name) for name in _NAMES.findall(split)}
        parts = instruction.to_absolute({name: len(some) for name, some in rows.items()})
    except (AssertionError, ValueError) as error:
        raise DataError(f"the split '{split}' cannot be read: {error}", key="split") from error
    for part in parts:
        yield from rows[part.splitname][part.from_ : part.to]


def stream_rows(path: str, split: str = "train") -> Iterator[tuple[RowLocation, Row | str]]:
    """Yield the rows of local files one by one; for a row that cannot be used, the reason.

    Only a `.json` file is read whole, and the split of a slice. Raises DataError like `data_files`.
    """
    data_files(path, split)
    return ((location, _checked(row)) for location, row in _located(path, split, None, "file", None))


def remedy_of_missing(path: str | Path) -> str:
    """Return what to do about a path at which there is nothing."""
    if QUICKSTART in str(path):
        return f"`trinity quickstart` makes it, or `trinity tiny --out {QUICKSTART}`, which runs nothing"
    return "check the path, and the folder that the run is started in"


def looks_local(path: str) -> bool:
    """True if a missing path was meant as a local path rather than as a hub name (`owner/name` or `name`)."""
    is_file = SEVERAL in path or file_format(Path(path))[1] in READERS
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or is_file or is_pattern(path)


def is_local(path: str) -> bool:
    """True if `path` is an existing file or folder, a file pattern, or a list of such."""
    if SEVERAL in path:
        return all(map(is_local, path.split(SEVERAL)))
    return expanded(path).exists() or is_pattern(path)


def is_pattern(path: str) -> bool:
    """True for a path with wildcards, whose files form one data set (`parts/*.jsonl`)."""
    return any(sign in path for sign in "*?[")


def _matching(pattern: Path) -> list[Path]:
    """Return the files that match. Raises DataError if no data file does."""
    anchor = Path(pattern.anchor)
    files = sorted(anchor.glob(str(pattern.relative_to(anchor))))
    if not (matching := [file for file in files if file.is_file() and file_format(file)[1] in READERS]):
        raise DataError(
            f"no data file matches {pattern}; supported types are {', '.join(sorted(READERS))}", key=str(pattern)
        )
    return matching


def find_files(folder: Path, split: str, subset: str | None = None) -> list[Path]:
    """Return the files of a split in name order, by the first of `_NAMINGS` that matches in the folder or its `data`.

    Raises DataError, listing the files found, if none matches or the split exists in several formats.
    """
    base = _of_subset(folder, split, subset) if subset else folder
    roots = (base, base / "data")
    for naming in _NAMINGS:
        for root in roots:
            if found := naming(root, split):
                _log_unread(folder, split, [file for file in _with_suffixes(root, split) if file not in found])
                return _without_duplicates(folder, split, found)
    everything = next(filter(None, map(_data_files, roots)), [])
    if split == "train" and everything and _name_no_split(everything):
        return everything
    names = ", ".join(str(file.relative_to(folder)) for file in everything) or "no data files"
    raise DataError(
        f"{folder} has no split '{split}': it holds {names}; name files by split ({split}.jsonl, {split}-….parquet) or "
        f"give one file as the path. Known file types: {', '.join(sorted(READERS))}{_suggestion(split, everything)}",
        key="split",
    )


def _of_subset(folder: Path, split: str, subset: str) -> Path:
    """Return the folder of a subset; the whole folder, with a warning, if there is none.

    Raises DataError if other folders in it have the split: the name is then a mistake.
    """
    if (folder / subset).is_dir():
        return folder / subset
    inner = sorted(
        inner_folder
        for inner_folder in folder.iterdir()
        if inner_folder.is_dir() and inner_folder.name not in ("data", split)
    )
    others = [inner_folder.name for inner_folder in inner if any(naming(inner_folder, split) for naming in _NAMINGS)]
    if others:
        meant = closest(subset, others)
        raise DataError(
            f"{folder} has no folder '{subset}' (subset_name), and split '{split}' in {', '.join(others)}"
            + (f"; did you mean '{meant}'?" if meant else ""),
            key="subset_name",
        )
    _say_once(f"{folder} has no folder '{subset}' (subset_name): its own files are read")
    return folder


@cache
def _say_once(warning: str) -> None:
    logger.warning(warning)


def _suggestion(split: str, files: list[Path]) -> str:
    meant = closest(split, filter(None, map(_split_of, files)))
    return f"; did you mean '{meant}'?" if meant else ""


def _whole(root: Path, split: str) -> list[Path]:
    """`train.jsonl`."""
    return [file for file in _data_files(root) if file_format(file)[0] == split]


def _shards(root: Path, split: str) -> list[Path]:
    """`train-00000-of-00002.parquet`, `train_0.jsonl`."""
    numbered = re.compile(re.escape(split) + r"[-_.]\d+([-_.].*)?")
    return [file for file in _data_files(root) if numbered.fullmatch(file_format(file)[0])]


def _in_folder(root: Path, split: str) -> list[Path]:
    """`train/0.jsonl`."""
    return _data_files(root / split)


def _with_suffixes(root: Path, split: str) -> list[Path]:
    """`train_easy.jsonl`, `train_hard.jsonl`."""
    return [file for file in _data_files(root) if _split_of(file) == split]


_PART = re.compile(r"(?:part|shard|chunk|data|file)?[-_.]?(?:\d+|[0-9a-f]{8,})(?:[-_.].*)?")
"""Matches `part-00000`, `data-00000-of-00002`, `1f9a80c3…`."""
_NAMINGS = (_whole, _shards, _in_folder, _with_suffixes)


def _log_unread(folder: Path, split: str, files: list[Path]) -> None:
    if files:
        unread = ", ".join(str(file.relative_to(folder)) for file in files)
        logger.warning("%s: %s not read as split '%s', which others are named after exactly", folder, unread, split)


def _without_duplicates(folder: Path, split: str, files: list[Path]) -> list[Path]:
    """Return the files. Raises DataError if two differ only in their format."""
    if len({file_format(file)[0] for file in files}) < len(files):
        names = ", ".join(str(file.relative_to(folder)) for file in files)
        raise DataError(
            f"{folder} holds split '{split}' in several formats: {names}; leave one, or give one file as the path",
            key="split",
        )
    return files


def _name_no_split(files: list[Path]) -> bool:
    """True for one file of any other name, or parts of one format with numbers or hashes as names."""
    if len(files) == 1:
        return _split_of(files[0]) is None
    names, formats = zip(*map(file_format, files), strict=True)
    words = {word for name in names for word in re.split(r"[-_.]", name)}
    return len(set(formats)) == 1 and all(map(_PART.fullmatch, names)) and not words & set(SPLITS)


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    try:
        files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    except PermissionError as error:
        raise DataError(f"{folder} cannot be read: {error}", key=str(folder)) from error
    return sorted(file for file in files if file_format(file)[1] in READERS and file.name not in DESCRIPTIONS)


def _split_of(file: Path) -> str | None:
    """Return the split at the start of a file name, up to the first `.`, `-` or `_`
    (`train-00000-of-00001.parquet`)."""
    name = file_format(file)[0]
    first = re.split(r"[-_.]", name)[0]
    return first if first in SPLITS or first == name else None


def _numbered(source: str, rows: Iterable[Row]) -> Iterator[LocatedRow]:
    return ((RowLocation(source, number), row) for number, row in enumerate(rows, 1))


def _validated(read: Iterable[LocatedRow]) -> Rows:
    """Split rows into usable and rejected ones. A string instead of a row is the reason why it could not be read."""
    rows, locations, rejected = [], [], []
    for location, row in read:
        if isinstance(checked := _checked(row), str):
            rejected.append(RejectedRow(location, checked))
        else:
            rows.append(checked)
            locations.append(location)
    return Rows(rows, locations, rejected)


def _checked(row: Row | str) -> Row | str:
    """Return a row, or why it cannot be used."""
    problem = None if isinstance(row, str) else row_problem(row)
    return f"the row {problem}" if problem else row
