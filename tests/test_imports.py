"""Light modules stay light; `lean_imports` holds garbage collection off; `lazy.torch` stands for torch."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trinity_core.base.lazy import HIDDEN, lean_imports
from trinity_core.base.lazy import torch as lazy
from trinity_core.data.tiny import make_tokenizer

ROOT = Path(__file__).parent.parent


def test_garbage_waits_while_libraries_are_imported() -> None:
    with lean_imports():
        assert not gc.isenabled()
        with lean_imports():
            pass
        assert not gc.isenabled(), "the inner block has ended, the outer one has not"
    assert gc.isenabled()


@pytest.mark.parametrize("name", HIDDEN)
def test_what_libraries_can_do_without_is_not_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is there again afterwards."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    with lean_imports():
        with lean_imports():
            pass
        with pytest.raises(ImportError):
            importlib.import_module(name)
    assert importlib.util.find_spec(name) is not None


HEAVY = {"torch", "vllm", "deepspeed", "ray", "mlflow", "prefect", "transformers", "datasets", "omegaconf"}
HTTP = {"aiohttp", "httpx"}
ACTORS = """
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.explorer import Explorer
from trinity_core.training.worker import TrainerActor
"""
TOKENIZER = """
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tokenizer import load_tokenizer, stop_tokens
stop_tokens(folder, ChatEncoder(load_tokenizer(folder)))
"""
TRACKING = """
from pathlib import Path
from trinity_core.exchange.tracking.forwarder import open_writer
from trinity_core.exchange.tracking.writers import RunInfo
open_writer("tensorboard", RunInfo("p", "n", Path(folder)), Path(folder))
"""
LIGHT = (
    ("import flows.cli", {"pydantic", "trinity_core.config"}),
    ("import flows.local.connection, trinity_core.algorithms, trinity_core.cli, trinity_core.config", HEAVY | HTTP),
    ("import trinity_core.workflows.rewards.pool", HEAVY | HTTP),
    ("import trinity_core.run.preflight.checks, flows.pipeline", {"torch", "vllm"}),
    ("import trinity_core.rollout.explorer, trinity_core.exchange.sync.versions", {"torch", "ray", "vllm"}),
    (f"import trinity_core.exchange.checkpoints.convert{ACTORS}{TOKENIZER}{TRACKING}", {"torch"}),
)
"""Statements of a process, one after the other, with modules that are not imported after each."""


def test_light_modules_import_nothing_heavy(tmp_path: Path) -> None:
    """The command line answers at once; a flow starts its actors and tracking, and counts tokens, without torch."""
    make_tokenizer().save_pretrained(tmp_path)
    code = f"import sys\nfolder = {str(tmp_path)!r}\n"
    for statements, modules in LIGHT:
        code += f"{statements}\nassert not {modules} & {{*sys.modules}}, {modules} & {{*sys.modules}}\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


def test_studio_imports_its_pages_before_it_serves_one() -> None:
    """They import Prefect, for which the first page would wait."""
    code = "import sys, studio.__main__\nassert {'prefect', 'studio.config_page', 'studio.runs'} <= {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


def test_lazy_torch_is_pickled_as_torch() -> None:
    assert pickle.loads(pickle.dumps(lazy)) is torch
