"""Data sets that are not local files: Hugging Face hub names and database tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trinity_core.errors import DataError


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
    yield from (dict(row) for row in loaded)


def read_table(url: str, table: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a database table in the order of its primary key (else as stored). Raises DataError."""
    from sqlalchemy import MetaData, Table, create_engine, select
    from sqlalchemy.exc import SQLAlchemyError

    if not table:
        raise DataError(f"which table of {_safe(url)} holds the data set? Set its name or subset_name to the table's")
    engine = create_engine(url if "://" in url else f"sqlite:///{url}")
    try:
        source = Table(table, MetaData(), autoload_with=engine)
        with engine.connect() as connection:
            rows = [dict(row) for row in connection.execute(select(source).order_by(*source.primary_key)).mappings()]
    except SQLAlchemyError as error:
        raise DataError(f"table '{table}' of {_safe(url)} cannot be read: {_first_line(error)}") from error
    finally:
        engine.dispose()
    yield from rows


def _safe(url: str) -> str:
    from sqlalchemy import make_url

    return make_url(url).render_as_string(hide_password=True) if "://" in url else url


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
