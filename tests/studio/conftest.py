"""One Studio with the form and the runs of these tests, and what Streamlit's own tests leave behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from studio_served import IDLE, Served, serve

FIRST_SECONDS = 240.0
sys.path.append(str(Path(__file__).parent.parent / "view"))


@pytest.fixture(autouse=True)
def main_module_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is run by AppTest becomes `__main__`, which processes that a later test spawns would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Shared by all tests in a browser: each has files and runs of its own names.

    Its first page is drawn here: on a busy machine the start of a browser and of Streamlit takes as
    long as a test waits.
    """
    from browser import opened

    async def first_page(address: str) -> None:
        async with opened(address, tmp_path_factory.mktemp("first page")) as page:
            await page.until(IDLE, "the first page is drawn", FIRST_SECONDS)

    with serve(tmp_path_factory.mktemp("studio")) as served:
        asyncio.run(first_page(served.page))
        yield served
