"""Reading data sets: local files and folders, tables of a database, and names on the Hugging Face hub.

Every row keeps its file and line, so that later errors can name them.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.data.tables import read_hub, read_table, shown, table_name
from trinity_core.data.values import UNDECODABLE, json_problem, row_problem, visible, without_absent
from trinity_core.errors import DataError
from trinity_core.local_paths import expanded

if TYPE_CHECKING:
    from pyarrow import RecordBatch

logger = logging.getLogger(__name__)

Row = dict[str, Any]
MAX_FIELD = 2**31 - 1
"""Characters of a CSV field."""
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
    """A row that cannot be used, and why."""

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
"""A row, or the reason why it cannot be read, and where it was found."""


def fingerprint(rows: Iterable[Row]) -> str:
    """Hash of rows in their order: 12 hexadecimal digits."""
    mark = hashlib.blake2b(digest_size=6)
    for row in rows:
        mark.update(json.dumps(row, default=lambda value: type(value).__name__).encode())
    return mark.hexdigest()


def read_rows(
    path: str, split: str = "train", subset: str | None = None, storage: str = "file", table: str | None = None
) -> Rows:
    """Read a split.

    `path` is a file, a folder whose files are named by split (`train.jsonl`, `test-00000-of-00002.parquet`,
    `train/0.json`, all also below a folder named by `subset` or `data`), a hub name, or with `storage="sql"` the URL
    of a database. Raises DataError, with the file and a remedy, if there is nothing to read.
    """
    return _validated(_located(path, split, subset, storage, table))


def first_rows(path: str, split: str, subset: str | None, storage: str, table: str | None, count: int) -> Rows:
    """`read_rows` of the first `count` rows alone; only a `.json` file is read whole."""
    return _validated(islice(_located(path, split, subset, storage, table), count))


def _located(path: str, split: str, subset: str | None, storage: str, table: str | None) -> Iterator[LocatedRow]:
    if not path:
        raise DataError("a data set has no path; set it to a file, a folder or a hub name")
    if storage == "sql":
        name = table_name(subset, table)
        yield from _numbered(f"{shown(path)} {name}", read_table(path, name))
        return
    if storage == "queue":
        raise DataError(f"this data set is read from files or a database, not from a queue: {path}")
    local = expanded(path)
    if local.exists():
        for file in [local] if local.is_file() else find_files(local, split, subset):
            yield from ((RowLocation(str(file), line), row) for line, row in _lines(file))
    elif looks_local(path):
        raise DataError(f"there is no file or folder {path}; check the path and the folder the run was started in")
    else:
        yield from _numbered(f"{path} ({split})", read_hub(path, subset, split))


def data_files(path: str, split: str = "train") -> list[Path]:
    """The local files of a split. Raises DataError if there are none, or the data set is no file or folder."""
    local = expanded(path)
    if local.is_file():
        return [local]
    if local.is_dir():
        return find_files(local, split)
    raise DataError(f"there is no file or folder {path}; this needs a data set in local files")


def stream_rows(path: str, split: str = "train") -> Iterator[tuple[RowLocation, Row | str]]:
    """The rows of local files one by one; in place of a row that cannot be used, the reason.

    Only a `.json` file is read whole. Raises DataError as `data_files` does.
    """
    for file in data_files(path, split):
        for line, row in _lines(file):
            problem = None if isinstance(row, str) else row_problem(row)
            yield RowLocation(str(file), line), f"the row {problem}" if problem else row


def looks_local(path: str) -> bool:
    """True if a missing path was meant as a local path rather than as a hub name (`owner/name` or `name`)."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in READERS


def find_files(folder: Path, split: str, subset: str | None = None) -> list[Path]:
    """The files of a split in name order, by the first of `_NAMINGS` that matches in the folder or its `data`.

    Raises DataError, listing the files found, if none matches or the split exists in several formats.
    """
    base = folder / subset if subset and (folder / subset).is_dir() else folder
    roots = (base, base / "data")
    for naming in _NAMINGS:
        for root in roots:
            if named := naming(root, split):
                _log_unread(folder, split, [file for file in _alike(root, split) if file not in named])
                return _without_duplicates(folder, split, named)
    everything = [file for root in roots for file in _data_files(root)]
    if len(everything) == 1 and _split_of(everything[0]) is None and split == "train":
        return everything
    found = ", ".join(str(file.relative_to(folder)) for file in everything) or "no data files"
    raise DataError(
        f"{folder} has no split '{split}': it holds {found}; name files by split ({split}.jsonl, {split}-….parquet) or "
        f"give one file as the path. Known: {', '.join(sorted(READERS))}"
    )


def _whole(root: Path, split: str) -> list[Path]:
    """`train.jsonl`."""
    return [file for file in _data_files(root) if file.stem == split]


def _shards(root: Path, split: str) -> list[Path]:
    """`train-00000-of-00002.parquet`, `train_0.jsonl`."""
    numbered = re.compile(re.escape(split) + r"[-_.]\d+([-_.].*)?")
    return [file for file in _data_files(root) if numbered.fullmatch(file.stem)]


def _in_folder(root: Path, split: str) -> list[Path]:
    """`train/0.jsonl`."""
    return _data_files(root / split)


def _alike(root: Path, split: str) -> list[Path]:
    """`train_easy.jsonl`, `train_hard.jsonl`."""
    return [file for file in _data_files(root) if _split_of(file) == split]


_NAMINGS = (_whole, _shards, _in_folder, _alike)


def _log_unread(folder: Path, split: str, files: list[Path]) -> None:
    if files:
        unread = ", ".join(str(file.relative_to(folder)) for file in files)
        logger.warning("%s: %s not read as split '%s', which others are named after exactly", folder, unread, split)


def _without_duplicates(folder: Path, split: str, files: list[Path]) -> list[Path]:
    """The files. Raises DataError if two differ only in their format."""
    if len({file.stem for file in files}) < len(files):
        found = ", ".join(str(file.relative_to(folder)) for file in files)
        raise DataError(
            f"{folder} holds split '{split}' in several formats: {found}; leave one, or give one file as the path"
        )
    return files


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if file.suffix in READERS)


def _split_of(file: Path) -> str | None:
    """The split that a file name starts with, up to the first `.`, `-` or `_` (`train-00000-of-00001.parquet`)."""
    first = file.name.replace("-", ".").replace("_", ".").split(".")[0]
    return first if first in SPLITS or first == file.stem else None


def _lines(file: Path) -> Iterator[tuple[int, Row | str]]:
    reader = READERS.get(file.suffix)
    if reader is None:
        raise DataError(f"{file} is no data file that can be read; known are {', '.join(sorted(READERS))}")
    try:
        _check_encoding(file)
        yield from reader(file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _check_encoding(file: Path) -> None:
    """Raise DataError for text that begins as UTF-16 does."""
    with file.open("rb") as opened:
        if opened.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE):
            raise DataError(f"{file} is UTF-16, not UTF-8; save it as UTF-8")


def _numbered(source: str, rows: Iterable[Row]) -> Iterator[LocatedRow]:
    return ((RowLocation(source, number), row) for number, row in enumerate(rows, 1))


def _validated(read: Iterable[LocatedRow]) -> Rows:
    """Split rows into usable and rejected ones. A string in place of a row is the reason why it could not be read."""
    rows, locations, rejected = [], [], []
    for location, row in read:
        if isinstance(row, str):
            rejected.append(RejectedRow(location, row))
        elif reason := row_problem(row):
            rejected.append(RejectedRow(location, f"the row {reason}"))
        else:
            rows.append(row)
            locations.append(location)
    return Rows(rows, locations, rejected)


# A reader yields (line, row), or (line, reason) for a line that cannot be read.
Reader = Callable[[Path], Iterator[tuple[int, Row | str]]]


def _jsonl(file: Path) -> Iterator[tuple[int, Row | str]]:
    with file.open(encoding="utf-8-sig", errors=UNDECODABLE) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, f"the line {json_problem(error)}"
                continue
            yield number, row if isinstance(row, dict) else "the line is no JSON object"


def _json(file: Path) -> Iterator[tuple[int, Row | str]]:
    text = file.read_text(encoding="utf-8-sig", errors=UNDECODABLE)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON Lines named .json
            yield from _jsonl(file)
            return
        raise DataError(f"{file}:{error.lineno}: the file is no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} {json_problem(error)}") from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{file} must hold a list of objects")
    for number, row in enumerate(value, 1):
        yield number, row if isinstance(row, dict) else f"item {number} of the list is no object"


def _csv(file: Path) -> Iterator[tuple[int, Row | str]]:
    csv.field_size_limit(MAX_FIELD)
    with file.open(encoding="utf-8-sig", errors=UNDECODABLE, newline="") as lines:
        reader = csv.reader(lines, strict=True)  # else an unclosed quote silently swallows all lines after it
        header = next(reader, [])
        if problem := row_problem(header):
            raise DataError(f"{file}:1: the header {problem}")
        if twice := [name for place, name in enumerate(header) if name in header[:place]]:
            raise DataError(f"{file} has two columns '{twice[0]}'; rename one of them")
        while True:
            first = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                yield reader.line_num, f"the row that begins in line {first} is no CSV: {error}"
                continue
            if fields is None:
                return
            if fields and len(fields) != len(header):
                yield reader.line_num, f"the line does not have the header's {len(header)} columns"
            elif fields:
                yield reader.line_num, dict(zip(header, fields, strict=True))


def _parquet(file: Path) -> Iterator[tuple[int, Row | str]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches() for row in _batch_rows(batch))
            yield from enumerate(rows, 1)
    except ArrowException as error:
        raise DataError(f"{file} is no parquet file that can be read: {error}") from error


def _batch_rows(batch: RecordBatch) -> Iterator[Row | str]:
    try:
        rows: list[Row | str] = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_decoded(batch.slice(place, 1)) for place in range(batch.num_rows)]
    return (row if isinstance(row, str) else without_absent(row) for row in rows)


def _decoded(batch: RecordBatch) -> Row | str:
    """The row of a batch of one, or why its text cannot be read."""
    try:
        [row] = batch.to_pylist()
    except UnicodeDecodeError as error:
        return f"the row holds the byte {error.object[error.start]:#04x}, which is not UTF-8"
    return dict(row)


READERS: dict[str, Reader] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
