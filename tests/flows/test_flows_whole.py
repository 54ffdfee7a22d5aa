"""The whole system on its real parts, nothing replaced: Prefect with a worker, Ray, vLLM, DeepSpeed, MLflow.

A pipeline runs as a deployment, is killed amid its second stage, is started again by `trinity up`, and ends with the
weights of the run that was never killed, to the bit. Its checkpoints are converted, a sweep scores those that have no
score, and `trinity run` finds it finished. Another run is made and led in Studio, in a browser.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from chaos.killing import ChaosRun
from chaos.pipeline import SAVE_INTERVAL, STEPS, pipeline
from studio_browser import person_at

from trinity_core.checkpoints.huggingface import weights_digest
from trinity_core.checkpoints.resume import latest_whole
from trinity_core.data.tiny import TinyFolders
from trinity_core.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
KILLED_AT = SAVE_INTERVAL + 1

RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""They try for a minute to tell a Ray that is no more of its end, and then go."""


@dataclass(frozen=True)
class Place:
    """A user's folder: deployments, a configuration, a plugin; and where the runs go."""

    run: ChaosRun
    environment: dict[str, str]

    @property
    def root(self) -> Path:
        return self.run.root

    @property
    def job(self) -> Path:
        return self.run.job

    def call(self, *command: str, timeout: float = 400) -> str:
        """What a command of the environment prints; it must succeed."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=self.root, env=self.environment, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        end = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{end}"
        return done.stdout

    def deployment_run(self, name: str, *options: str, **parameters: Any) -> str:
        """Run a deployment with the configuration; what the command prints."""
        given = {"config": str(self.root / "run.yaml"), "overrides": list(self.run.overrides)} | parameters
        words = [word for key, value in given.items() for word in ("--param", f"{key}={json.dumps(value)}")]
        return self.call("prefect", "deployment", "run", name, *words, *options)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, tiny_folders: TinyFolders) -> Iterator[Place]:
    """A folder in which `trinity up` has been called. Nothing of it is left afterwards."""
    from ports import free_port

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with pipeline(tmp_path_factory.mktemp("deployed"), tiny_folders, "monitor.monitor_type=mlflow") as run:
        here = Place(run, environment)
    for name in ("flows", "prefect.yaml"):
        (here.root / name).symlink_to(ROOT / name)
    ports = {name: str(free_port()) for name in ("--port", "--mlflow-port", "--studio-port")}
    here.call("trinity", "up", *(word for pair in ports.items() for word in pair))
    recorded = json.loads((here.root / ".trinity/up.json").read_text())
    family = [
        each
        for process in recorded["processes"]
        for each in [psutil.Process(process["pid"]), *psutil.Process(process["pid"]).children(recursive=True)]
    ]
    yield here
    here.call("trinity", "down")
    assert not psutil.wait_procs(family, timeout=10)[1]


def trained_steps(job: Path) -> list[int]:
    return [line.step for line in read_metrics(job) if line.source == "trainer"]


def test_a_killed_flow_runs_again_to_the_same_weights(deployed: Place, request: pytest.FixtureRequest) -> None:
    """SIGKILL of the flow's process amid a stage, which is slow until then; after that nobody does anything."""
    slow = deployed.root / "plugins/slow"
    slow.touch()
    started = deployed.deployment_run("pipeline/gsm8k")
    run_id = next(line.split(":", 1)[1].strip() for line in started.splitlines() if "UUID" in line)
    wait_until(lambda: deployed.job.exists() and KILLED_AT in trained_steps(deployed.job))
    flow, family = flow_process(deployed)
    flow.kill()
    left = psutil.wait_procs(family, timeout=20)[1]
    assert not left, "engines, trainers and Ray go with the flow"
    slow.unlink()
    assert 0 < (latest_whole(deployed.job) or 0) < STEPS
    wait_until(lambda: flow_run(deployed, run_id)["run_count"] == 2, 120)
    wait_until(lambda: flow_run(deployed, run_id)["state_type"] in ("COMPLETED", "FAILED", "CRASHED"))
    assert flow_run(deployed, run_id)["state_type"] == "COMPLETED"
    assert trained_steps(deployed.job) == list(range(1, STEPS + 1))
    undisturbed = request.getfixturevalue("undisturbed")  # another process may run it meanwhile
    assert deployed.run.digest() == undisturbed.run.digest()


def test_a_pipeline_goes_its_whole_way(deployed: Place) -> None:
    archived = [json.loads(line)["step"] for line in (deployed.job / "buffer/experience_buffer.jsonl").open()]
    assert archived == [step for step in range(1, STEPS + 1) for _ in range(16)]
    rewards = [line.metrics["reward/mean"] for line in read_metrics(deployed.job) if line.source == "trainer"]
    assert all(0 < reward < 1 for reward in rewards), "the plugin's reward"


def test_the_converted_model_is_what_was_trained(deployed: Place, tiny_model: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = json.loads((deployed.job / "summary.json").read_text())["hf_dir"]
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(5, 40)[None]
    with torch.no_grad():
        gap = (trained(tokens).logits - tiny_model(tokens).logits).abs().max()
    assert torch.isfinite(gap) and gap > 1e-3, "both stages changed it"


def test_mlflow_has_parent_and_stages_with_steps_and_a_champion(deployed: Place) -> None:
    """None of them twice, although the flow was started twice."""
    from mlflow import MlflowClient

    runs = tracked_runs(deployed)
    assert sorted(run.info.run_name for run in runs) == ["run", "run_rft", "run_sft"]
    (rft,) = [run for run in runs if run.info.run_name == "run_rft"]
    assert {run.info.run_id for run in runs} >= {rft.data.tags["mlflow.parentRunId"]}
    client = MlflowClient(f"sqlite:///{deployed.root / 'checkpoints/mlflow.db'}")
    history = client.get_metric_history(rft.info.run_id, "actor/final_loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1))
    (model,) = [each for each in client.search_registered_models() if "rft" in each.name]
    assert client.get_model_version_by_alias(model.name, "champion")


def test_a_finished_pipeline_is_not_run_again(deployed: Place) -> None:
    digest = deployed.run.digest()
    deployed.call("trinity", "run", "--config", "run.yaml", *deployed.run.overrides)
    assert trained_steps(deployed.job) == list(range(1, STEPS + 1)) and deployed.run.digest() == digest


def test_a_flow_converts_all_checkpoints(deployed: Place) -> None:
    deployed.deployment_run("convert/gsm8k", "--watch", checkpoint_dir=str(deployed.job))
    folders = [folder / "actor/huggingface" for folder in deployed.job.glob("global_step_*")]
    assert folders and all(weights_digest(folder) for folder in folders)


def test_a_sweep_scores_what_has_no_score(deployed: Place) -> None:
    deployed.deployment_run("evaluate/sweep", "--watch", stage="rft")
    scored = {line.step for line in read_metrics(deployed.job) if line.source == "eval"}
    kept = {int(folder.name.removeprefix("global_step_")) for folder in deployed.job.glob("global_step_*")}
    assert kept and kept <= scored


def test_a_person_makes_starts_and_leads_a_run(deployed: Place, tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """In a browser: a configuration from a recipe, a run of it, its curves, *Cancel* and *Retry*. `down` ends it."""
    recipe = (ROOT / "configs/sft/sft.yaml").read_text()
    (deployed.root / "recipe.yaml").write_text(recipe)
    (deployed.root / "runs/quickstart").mkdir(parents=True)
    for name, folder in (("model", tiny_folders.model), ("data", tiny_folders.data)):
        (deployed.root / "runs/quickstart" / name).symlink_to(folder)
    title, job = "Trinity-Flows/mine", deployed.root / "checkpoints/Trinity-Flows/mine"

    async def visit() -> None:
        async with person_at(studio_address(deployed), tmp_path) as person:
            await person.choose_file("recipe.yaml", recipe.split("\n")[0])
            await person.fill("name", "mine")
            await person.fill("checkpoint_root_dir", "checkpoints")
            await person.fill("total_steps (steps)", "5000")
            await person.save_as("mine.yaml")
            await person.start(title)
            await person.drawn(3)
            await person.press("Cancel")
            await person.state(title, "cancelled")
            saved = latest_whole(job) or 0
            assert saved >= 3 and trained_steps(job)[-1] == saved, "it saves at its next step boundary"
            assert [run.info.status for run in tracked_runs(deployed) if run.info.run_name == "mine"] == ["KILLED"]
            await person.press("Retry")
            await person.state(title, "running")
            await person.drawn(saved + 2)

    asyncio.run(visit())
    assert trained_steps(job)[:5] == [1, 2, 3, 4, 5]
    made = (deployed.root / "mine.yaml").read_text()
    assert made.split("\n")[:3] == recipe.split("\n")[:3] and "total_steps: 5000" in made, "comments of the recipe stay"


def tracked_runs(here: Place) -> list[Any]:
    """MLflow's runs of a place."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here.root / 'checkpoints/mlflow.db'}")
    return client.search_runs([each.experiment_id for each in client.search_experiments()])


def studio_address(here: Place) -> str:
    return json.loads((here.root / ".trinity/up.json").read_text())["pages"]["studio"]


def wait_until(true: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def flow_run(here: Place, run_id: str) -> dict[str, Any]:
    """A flow run, as the UI is told of it."""
    api_url = json.loads((here.root / ".trinity/up.json").read_text())["api_url"]
    with urlopen(f"{api_url}/flow_runs/{run_id}") as answer:
        return json.load(answer)


def flow_process(here: Place) -> tuple[psutil.Process, list[psutil.Process]]:
    """The process in which the flow runs, which is the one that has started Ray; and what goes when it does."""
    processes = json.loads((here.root / ".trinity/up.json").read_text())["processes"]
    (worker,) = [each["pid"] for each in processes if each["name"] == "worker"]
    (raylet,) = [each for each in psutil.Process(worker).children(recursive=True) if each.name() == "raylet"]
    flow = raylet.parent()
    assert flow is not None
    return flow, [flow, *(each for each in flow.children(recursive=True) if lasts(each))]


def lasts(process: psutil.Process) -> bool:
    """Whether a process is neither gone already nor one that outlives its Ray for a while."""
    try:
        return process.name() not in RAY_AGENTS
    except psutil.NoSuchProcess:
        return False
