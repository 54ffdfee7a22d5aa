"""Readers of files, one for each format, of the Hugging Face hub, and of database tables (read-only).

A file may be compressed (`.jsonl.gz`). Its reader yields (line, row) with the line where the row begins, or (line,
reason) for a line that cannot be read.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.parse import quote

from sqlalchemy import URL, Engine, MetaData, Table, create_engine, event, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, NoSuchTableError, SQLAlchemyError

from trinity_core.base.errors import DataError
from trinity_core.base.files import expanded
from trinity_core.data.values import UNDECODABLE, json_problem, row_problem, without_absent

if TYPE_CHECKING:
    from pyarrow import RecordBatch


Row = dict[str, Any]
Labels = Mapping[str, Mapping[Any, str]]
Reader = Callable[[Path], Iterator[tuple[int, Row | str]]]
MAX_FIELD = 2**31 - 1
"""Length limit of a CSV field in characters."""
DELIMITERS = (";", "\t", "|", ",")
"""Delimiters of a CSV file whose header would otherwise be one column."""
COMPRESSED = ".gz"
LISTED = 10
"""Number of tables listed in a message, similar names preferred."""


def file_format(file: Path) -> tuple[str, str]:
    """Return a file's name without suffixes, and the suffix of its format: `train`, `.jsonl` for `train.jsonl.gz`."""
    inner = file.with_suffix("") if file.suffix == COMPRESSED else file
    return inner.stem, inner.suffix


def read_lines(file: Path) -> Iterator[tuple[int, Row | str]]:
    """Yield line number and row, or why the row is unreadable. Raises DataError if the file cannot be read."""
    reader = READERS.get(file_format(file)[1])
    if reader is None:
        raise DataError(f"{file} is not a data file; supported types are {', '.join(sorted(READERS))}", key=str(file))
    try:
        _check_encoding(file)
        yield from reader(file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}", key=str(file)) from error


def _check_encoding(file: Path) -> None:
    """Raise DataError for text that begins like UTF-16."""
    with _opened(file) as opened:
        if opened.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE):
            raise DataError(f"{file} is UTF-16, not UTF-8; save it as UTF-8", key=str(file))


def _opened(file: Path) -> IO[bytes]:
    opened: Any = gzip.open(file) if file.suffix == COMPRESSED else file.open("rb")  # noqa: SIM115 - the caller does
    return cast(IO[bytes], opened)


def _text(file: Path, newline: str | None = None) -> IO[str]:
    return io.TextIOWrapper(_opened(file), encoding="utf-8-sig", errors=UNDECODABLE, newline=newline)


def _jsonl(file: Path) -> Iterator[tuple[int, Row | str]]:
    with _text(file) as lines:
        if _begins_list(lines):
            with suppress(DataError):  # no list named .jsonl, but a line that is none of an object
                yield from list(_json(file))
                return
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, f"the line {json_problem(error)}"
                continue
            yield number, row if isinstance(row, dict) else "the line is not a JSON object"


def _begins_list(lines: IO[str]) -> bool:
    """True if the first character other than white space is an opening bracket."""
    begins = next((line for line in lines if line.strip()), "").lstrip().startswith("[")
    lines.seek(0)
    return begins


def _json(file: Path) -> Iterator[tuple[int, Row | str]]:
    with _text(file) as opened:
        text = opened.read()
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON Lines named .json
            yield from _jsonl(file)
            return
        raise DataError(f"{file}:{error.lineno}: the file is not JSON: {error.msg}", key=str(file)) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} {json_problem(error)}", key=str(file)) from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{file} must hold a list of objects", key=str(file))
    for number, row in enumerate(value, 1):
        yield number, row if isinstance(row, dict) else f"item {number} of the list is not an object"


def _csv(file: Path, delimiter: str = ",") -> Iterator[tuple[int, Row | str]]:
    csv.field_size_limit(MAX_FIELD)
    with _text(file, newline="") as lines:
        for separator in (delimiter, *DELIMITERS):
            lines.seek(0)
            reader = csv.reader(lines, delimiter=separator, strict=True)
            header = next(reader, [])
            if len(header) > 1 or not any(other in header[0] for other in DELIMITERS if header):
                break
        if problem := row_problem(header):
            raise DataError(f"{file}:1: the header {problem}", key=str(file))
        if twice := [name for index, name in enumerate(header) if name in header[:index]]:
            raise DataError(f"{file} has two columns '{twice[0]}'; rename one of them", key=twice[0])
        while True:
            first = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                for number in range(first, reader.line_num + 1):  # an unclosed quote takes all lines after it
                    yield number, f"the row that begins in line {first} is not CSV: {error}"
                continue
            if fields is None:
                return
            if fields and len(fields) != len(header):
                yield first, f"the line does not have the header's {len(header)} columns"
            elif fields:
                yield first, dict(zip(header, fields, strict=True))


def _parquet(file: Path) -> Iterator[tuple[int, Row | str]]:
    from pyarrow import ArrowException, parquet

    try:
        with _opened(file) as opened, parquet.ParquetFile(opened) as table:
            rows = (row for batch in table.iter_batches() for row in _batch_rows(batch))
            yield from enumerate(rows, 1)
    except ArrowException as error:
        raise DataError(f"{file} is not a readable parquet file: {error}", key=str(file)) from error


def _arrow(file: Path) -> Iterator[tuple[int, Row | str]]:
    """Read a stream, as `datasets` saves it, or a file with a footer (Feather)."""
    from pyarrow import ArrowException, ipc

    try:
        with _opened(file) as opened:
            has_footer = opened.read(6) == b"ARROW1"
            opened.seek(0)
            batches: Iterable[RecordBatch]
            if has_footer:
                table = ipc.open_file(opened)
                batches = (table.get_batch(number) for number in range(table.num_record_batches))
            else:
                batches = ipc.open_stream(opened)
            yield from enumerate((row for batch in batches for row in _batch_rows(batch)), 1)
    except ArrowException as error:
        raise DataError(f"{file} is not a readable Arrow file: {error}", key=str(file)) from error


def _batch_rows(batch: RecordBatch) -> Iterator[Row | str]:
    try:
        rows: list[Row | str] = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_decoded(batch.slice(index, 1)) for index in range(batch.num_rows)]
    labels = _labels(json.loads((batch.schema.metadata or {}).get(b"huggingface", "{}")).get("info") or {})
    return (row if isinstance(row, str) else _present(row, labels) for row in rows)


def _labels(info: Mapping[str, Any]) -> Labels:
    """Return the class names of each column that `datasets` stores as class numbers, from the data set's `info`."""
    features = (info.get("features") or {}).items()
    return {
        name: dict(enumerate(kind["names"]))
        for name, kind in features
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
    }


def _present(row: Row, labels: Labels) -> Row:
    """Return a row of Arrow as its author wrote it: with class names (of -1, for unknown, none) and without nulls that
    stand for absent keys."""
    class_names = {name: names.get(row[name]) for name, names in labels.items() if isinstance(row.get(name), int)}
    return {name: without_absent(value) for name, value in (row | class_names).items()}


def _decoded(batch: RecordBatch) -> Row | str:
    """Return the row of a batch of one, or why its text cannot be decoded."""
    try:
        [row] = batch.to_pylist()
    except UnicodeDecodeError as error:
        return f"the row holds the byte {error.object[error.start]:#04x}, which is not UTF-8"
    return dict(row)


READERS: dict[str, Reader] = {
    ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": partial(_csv, delimiter="\t"), ".parquet": _parquet,
    ".arrow": _arrow, ".feather": _arrow,
}  # fmt: skip


def read_hub(name: str, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a hub data set, downloaded or cached. Raises DataError if it cannot be loaded."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(name, subset, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        where = f"data set '{name}'" + (f", subset '{subset}'" if subset else "") + f", split '{split}'"
        raise DataError(
            f"{where} is not a local path and cannot be loaded from the hub: {_first_line(error)}. Check the name and "
            "the network, or give the path of a local folder of jsonl or parquet files",
            key=name,
        ) from error
    labels = _labels({"features": loaded.features.to_dict()})
    yield from (_present(row, labels) for row in loaded)


def shown(url: str) -> str:
    return make_url(url).render_as_string(hide_password=True) if "://" in url else url


def read_table(url: str, table: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table or view (`schema.table` of another schema) in the order of its primary key, else in the
    database's order.

    Raises DataError if there is no such database or table.
    """
    if not table:
        raise DataError(f"which table of {shown(url)} holds the data set? Set subset_name to it", key="subset_name")
    engine = _engine(url)
    try:
        yield from _rows(engine, url, table)
    except SQLAlchemyError as error:
        raise DataError(f"table '{table}' of {shown(url)} cannot be read: {_first_line(error)}") from error
    finally:
        engine.dispose()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _rows(engine: Engine, url: str, table: str) -> Iterator[dict[str, Any]]:
    schema, _, name = table.rpartition(".")
    with engine.connect() as connection:
        try:
            source = Table(name, MetaData(), schema=schema or None, autoload_with=connection)
        except NoSuchTableError as error:
            inspector = inspect(connection)
            tables = [*inspector.get_table_names(), *inspector.get_view_names()]
            tables = get_close_matches(table, tables) or tables
            listed = ", ".join(tables[:LISTED]) + (", …" if len(tables) > LISTED else "")
            raise DataError(f"{shown(url)} has no table '{table}'; it has {listed or 'none'}", key=table) from error
        query = select(source).order_by(*source.primary_key)
        for row in connection.execution_options(yield_per=1000).execute(query).mappings():
            yield dict(row)


def _engine(url: str) -> Engine:
    """Open read-only connections. Raises DataError for an invalid URL, or a missing file."""
    try:
        parsed = make_url(url if "://" in url else f"sqlite:///{expanded(url)}")
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(_read_only_file(parsed))
            event.listen(engine, "connect", _decode_all_text)
            return engine
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        is_postgresql = parsed.get_backend_name() == "postgresql"
        return create_engine(parsed, execution_options={"postgresql_readonly": True} if is_postgresql else {})
    except (ArgumentError, SQLAlchemyError, ImportError) as error:
        raise DataError(f"{shown(url)} is not a readable database: {type(error).__name__}: {error}") from error


def _decode_all_text(connection: Any, _: Any) -> None:
    connection.text_factory = partial(str, encoding="utf-8", errors=UNDECODABLE)


def _read_only_file(url: URL) -> URL:
    path = Path(url.database or "").absolute()
    if not path.is_file():
        raise DataError(
            f"there is no database {path}; check the path and the folder the run was started in", key=str(path)
        )
    return url.set(drivername="sqlite", database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"})
