"""Data sets on the Hugging Face hub."""

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


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
