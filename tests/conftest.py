"""Fixtures that many tests share: a small model with its data, made once, and one engine that generates with it."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import inspect
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from trinity_core.base.registry import HOMES, Registry
from trinity_core.data.tiny import TinyFolders

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""The tests start hundreds of processes, and each would compile the project anew."""

settings.register_profile("busy", deadline=None, max_examples=40, print_blob=True)
settings.load_profile("busy")
"""A test that is slow because the machine is busy is no failure; each has pytest's time limit."""


LONGEST = (
    "flows/test_flows_whole.py",
    "run/test_runtime_run.py",
    "test_wheel.py",
    "run/test_runtime_ray_node.py",
    "flows/test_flows_runs.py",
    "chaos/test_chaos.py",
    "run/test_nodes.py",
    "rollout/test_rollout_serving_real.py",
    "run/test_python_call.py",
    "inference/test_openai_frameworks.py",
    "rollout/test_rollout_taught.py",
    "training/test_training_ranks.py",
    "inference/test_inference_families.py",
    "studio/test_studio_page.py",
    "flows/test_flows_signals.py",
    "workflows/test_reward_code.py",
    "tracking/test_tracking_forwarder.py",
    "studio/test_studio_hub.py",
    "test_examples.py",
    "run/test_runtime_asked_models.py",
    "workflows/test_reward_pool.py",
    "workflows/test_reasoning_gym.py",
    "store/test_store_stateful.py",
    "studio/test_studio_app.py",
    "training/test_training_update.py",
    "store/test_store_audit.py",
    "rollout/test_rollout_explorer_real.py",
    "rollout/test_rollout_runner.py",
)
"""Files that take longest (`pytest --durations=0`), the longest first; the second makes the run with which the first
compares its own. `test_nodes.py` comes before what opens Ray in the test's own process, where Ray keeps its first token
for good."""


CAMPAIGN = (
    "algorithms/test_head_kernels.py",
    "chaos/test_chaos.py",
    "flows/test_flows_curate.py",
    "flows/test_flows_doctor.py",
    "flows/test_flows_gate.py",
    "flows/test_flows_improve.py",
    "flows/test_flows_restarts.py",
    "flows/test_flows_retries.py",
    "flows/test_flows_runs.py",
    "flows/test_flows_signals.py",
    "flows/test_flows_verdicts.py",
    "flows/test_flows_whole.py",
    "inference/test_inference_families.py",
    "inference/test_openai_frameworks.py",
    "pipelines/test_pipelines_data_juicer.py",
    "pipelines/test_pipelines_tasks_juiced.py",
    "results/test_report.py",
    "rollout/test_rollout_serving_real.py",
    "run/test_nodes.py",
    "run/test_preflight_pace.py",
    "run/test_runtime_asked_models.py",
    "run/test_runtime_ray_node.py",
    "run/test_runtime_run.py",
    "store/test_store_processes.py",
    "studio/test_mcp.py",
    "studio/test_studio_hub.py",
    "studio/test_studio_page.py",
    "test_benchmark_gpu.py",
    "test_examples.py",
    "test_install.py",
    "test_site.py",
    "test_wheel.py",
    "training/test_training_families.py",
    "view/test_view_real_run.py",
    "workflows/test_environment_adapters.py",
)
"""Files of `make campaign`, which `make test` leaves out."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the campaign its files are not even imported, which takes each process four seconds of a core."""
    leaves_out = "not campaign" in config.option.markexpr
    return True if leaves_out and collection_path in {Path(__file__).parent / name for name in CAMPAIGN} else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the campaign. Begin with the longest files: processes that share the files then end together."""
    tests = Path(__file__).parent
    campaign = {tests / name for name in CAMPAIGN}
    for item in items:
        if item.path in campaign:
            item.add_marker("campaign")
    ranks = {tests / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


gc.disable()
"""Until all tests are collected: what is imported stays, and looking for garbage among it takes a sixth of the time."""


def pytest_collection_finish() -> None:
    """Spare each later collection of garbage the walk over the tests and what they have imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory) -> TinyFolders:
    """A freshly initialised model of 0.9 million parameters and a small data set, as folders. Not to be written to."""
    from trinity_core.data.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"), seed=0, count_train=64, count_test=16, count_sft=16)


@pytest.fixture(scope="session")
def tiny_folder(tiny_folders) -> Path:
    """The small model's Hugging Face folder."""
    return tiny_folders.model


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    """The small model in `transformers`, float32, in evaluation mode. Tests leave its weights as they are."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def reward_folder(tiny_folder, tmp_path_factory) -> Path:
    """A freshly initialised sequence classifier with the small model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory) -> Path:
    """The database of an MLflow store in which nothing is: to make it takes seconds of a core. For copies."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}", f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def kept_engines():
    """Engines of this process, which live until the session ends: one that stops takes the process groups away from the
    other engines and the trainers of the process."""
    engines: list[Any] = []
    yield engines
    with mock.patch("gc.collect"):  # vLLM's walks over all that the session has made, for memory that nobody wants
        for engine in engines:
            asyncio.run(engine.stop())


@pytest.fixture(scope="session")
def engine_of(kept_engines):
    """Starts a CPU engine with some settings in this process."""
    from trinity_core.rollout.inference.in_process import InProcessEngine
    from trinity_core.rollout.inference.settings import EngineSettings

    def start(*settings, **more):
        settings = EngineSettings(*settings, **more)
        kept_engines.append(InProcessEngine(settings))
        with mock.patch.dict(os.environ, settings.environment()):
            asyncio.run(kept_engines[-1].start())
        return kept_engines[-1]

    return start


@pytest.fixture(scope="session")
def tiny_engine(engine_of, tiny_folder):
    """A started CPU engine of the small model in this process. Tests that load other weights put its own back."""
    return engine_of(str(tiny_folder), max_model_len=256, max_num_seqs=64, grammars=True)


def _registries() -> Iterator[Registry[Any]]:
    """Those that are imported."""
    for home in HOMES.values():
        module, name = home.split(":")
        if module in sys.modules:
            yield getattr(sys.modules[module], name)


@pytest.fixture(autouse=True)
def names_of_a_test_end_with_it() -> Iterator[None]:
    """What a test registers would be in the schema that later tests read."""
    before = {registry.kind: set(registry) for registry in _registries()}
    yield
    for registry in _registries():
        for name in set(registry) - before.get(registry.kind, set(registry)):
            del registry[name]


@pytest.fixture(autouse=True)
def environments_of_a_test_end_with_it() -> Iterator[None]:
    """Their processes would wait for a rollout of a later test, which counts its own."""
    yield
    if known := sys.modules.get("trinity_core.workflows.environments.process"):
        known.HOSTS.close()


@pytest.fixture
def toy_games() -> None:
    """The plugin of gymnasium's games, for one test: `names_of_a_test_end_with_it` takes its names away again."""
    from trinity_core.base.plugins import load_plugins
    from trinity_core.workflows import WORKFLOWS

    load_plugins(Path(__file__).parent.parent / "configs" / "toy_text")
    WORKFLOWS.setdefault("frozen_lake_workflow", sys.modules["games"].FrozenLakeWorkflow)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, tiny_folders):
    """A pipeline on real parts, run once from its first stage to its end: see `chaos/pipeline.py`.

    Processes that share the tests also share the run, which takes minutes.
    """
    from chaos.pipeline import run_undisturbed

    own = tmp_path_factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    kept = common / "undisturbed.pickle"
    with (common / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(run_undisturbed(common / "undisturbed", tiny_folders)))
    return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A server of our own on a socket in a temporary folder; skipped without PostgreSQL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = programs[-1] if programs else shutil.which("initdb")
    if not initdb:
        pytest.skip("no PostgreSQL server is installed (Debian's package: postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    as_user: dict[str, Any] = {}
    if os.getuid() == 0:  # the server refuses to run as root
        as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(folder, "nobody", "nogroup")
    common: dict[str, Any] = {
        **as_user,
        "cwd": folder,
        "stdout": subprocess.DEVNULL,
        "env": {"LC_ALL": "C", "PATH": os.environ["PATH"]},
    }
    bin_folder = Path(initdb).parent
    try:
        subprocess.run(
            [initdb, "-D", folder / "data", "-U", "tester", "-A", "trust", "-N", "-E", "UTF8"], check=True, **common
        )
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"a PostgreSQL server cannot be started here: {error}")
    options = f"-c listen_addresses='' -k {folder} -c fsync=off"
    control = [bin_folder / "pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log"]
    subprocess.run([*control, "-o", options, "start"], check=True, **common)
    try:
        yield f"postgresql://tester@/postgres?host={folder}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=False, **common)
        shutil.rmtree(folder, ignore_errors=True)
