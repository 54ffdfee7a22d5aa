"""What Streamlit's tests leave behind."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def main_module_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is run by AppTest becomes `__main__`, which processes that a later test spawns would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
