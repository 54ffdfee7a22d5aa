"""Data sets of the Hugging Face hub, and in tables of the user's database, which is only read."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, MetaData, Table, create_engine, event, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, NoSuchTableError, SQLAlchemyError

from trinity_core.data.values import UNDECODABLE, without_absent
from trinity_core.errors import DataError
from trinity_core.local_paths import expanded

LISTED = 10
"""Tables that a message names, those of a similar name if there are any."""


def read_hub(name: str, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a hub data set, downloaded or from the local cache. Raises DataError if it cannot be loaded."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_dataset(name, subset, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        where = f"data set '{name}'" + (f", subset '{subset}'" if subset else "") + f", split '{split}'"
        raise DataError(
            f"{where} is no local path and cannot be had from the hub: {_first_line(error)}. Check the name and the "
            "network, or give the path of a local folder of jsonl or parquet files"
        ) from error
    yield from (without_absent(dict(row)) for row in loaded)


def table_name(subset: str | None, name: str | None) -> str | None:
    """The table of a data set: its `subset_name`, else its name; `schema.table` for one of another schema."""
    return subset or name


def shown(url: str) -> str:
    """The URL of a database without its password."""
    return make_url(url).render_as_string(hide_password=True) if "://" in url else url


def read_table(url: str, table: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a table or view in the order of its primary key, else as the database gives them.

    Raises DataError if there is no such database or table.
    """
    if not table:
        raise DataError(f"which table of {shown(url)} holds the data set? Set its name or subset_name to the table's")
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
            found = inspect(connection)
            there = [*found.get_table_names(), *found.get_view_names()]
            there = get_close_matches(table, there) or there
            listed = ", ".join(there[:LISTED]) + (", …" if len(there) > LISTED else "")
            raise DataError(f"{shown(url)} has no table '{table}'; it has {listed or 'none'}") from error
        query = select(source).order_by(*source.primary_key)
        for row in connection.execution_options(yield_per=1000).execute(query).mappings():
            yield dict(row)


def _engine(url: str) -> Engine:
    """Connections that cannot write. Raises DataError for a URL of no database, or of a file that is not there."""
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
        raise DataError(f"{shown(url)} is no database that can be read: {type(error).__name__}: {error}") from error


def _decode_all_text(connection: Any, _: Any) -> None:
    connection.text_factory = partial(str, encoding="utf-8", errors=UNDECODABLE)


def _read_only_file(url: URL) -> URL:
    path = Path(url.database or "").absolute()
    if not path.is_file():
        raise DataError(f"there is no database {path}; check the path and the folder the run was started in")
    return url.set(drivername="sqlite", database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"})
