"""`lean_imports` holds garbage collection off; `lazy.torch` stands for torch."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers.utils

from trinity_core.imports import COMPILER, HIDDEN, lean_imports
from trinity_core.lazy import torch as lazy


def test_garbage_waits_while_libraries_are_imported() -> None:
    with lean_imports():
        assert not gc.isenabled()
        with lean_imports():
            pass
        assert not gc.isenabled(), "the inner block has ended, the outer one has not"
    assert gc.isenabled()


def test_garbage_is_collected_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), lean_imports():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_transformers_is_told_to_do_without_scipy() -> None:
    with lean_imports():
        assert not transformers.utils.is_scipy_available() and not transformers.utils.is_sklearn_available()


@pytest.mark.parametrize("name", (*HIDDEN, *COMPILER))
def test_what_libraries_can_do_without_is_not_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is there again afterwards."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    with lean_imports(*COMPILER):
        with lean_imports():
            pass
        with pytest.raises(ImportError):
            importlib.import_module(name)
    assert importlib.util.find_spec(name) is not None


FLOW = """
import sys
from pathlib import Path

from trinity_core.inference.in_process import InProcessEngine
from trinity_core.rollout.explorer import Explorer
from trinity_core.tracking.forwarder import open_writer
from trinity_core.tracking.writers import RunInfo
from trinity_core.training.worker import TrainerActor

open_writer("tensorboard", RunInfo("p", "n", Path(sys.argv[1])), Path(sys.argv[1]))
assert "torch" not in sys.modules
"""


def test_a_flow_starts_its_actors_and_tracking_without_torch(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FLOW, str(tmp_path)], check=True, timeout=300)


def test_lazy_torch_is_pickled_as_torch() -> None:
    assert pickle.loads(pickle.dumps(lazy)) is torch
