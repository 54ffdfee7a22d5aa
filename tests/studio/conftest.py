"""One Studio with the form and the runs of these tests, and what Streamlit's own tests leave behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from studio_served import Served, serve

sys.path.append(str(Path(__file__).parent.parent / "view"))


@pytest.fixture(autouse=True)
def main_module_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is run by AppTest becomes `__main__`, which processes that a later test spawns would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Shared by all tests in a browser: each has files and runs of its own names."""
    with serve(tmp_path_factory.mktemp("studio")) as served:
        yield served
