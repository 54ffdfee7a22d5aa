"""The whole system on its real parts, nothing replaced: Prefect with a worker, Ray, vLLM, DeepSpeed, MLflow.

A pipeline runs as a deployment, each kind of its processes is killed, is started again by `trinity up`, and ends with
the weights of the run that was never killed, to the bit. Its checkpoints are converted. Another run is made and led in
Studio, in a browser.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest
import yaml
from chaos.comparing import first_difference
from chaos.killing import LONGEST_ATTEMPT, ChaosRun, Kill
from chaos.pipeline import SAVE_INTERVAL, STEPS, WARM_UP_STEPS, pipeline
from ports import free_port
from studio_browser import opened, person_at

from trinity_core import QUIET
from trinity_core.base.gate import server_key
from trinity_core.base.waits import poll
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.checkpoints.convert import convert_all
from trinity_core.exchange.checkpoints.huggingface import tensors_sha256
from trinity_core.exchange.checkpoints.resume import latest_whole
from trinity_core.exchange.tracking.metrics_file import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
RECORDER = Path(__file__).parent / "recorder"
KILLED_AT = SAVE_INTERVAL + 1
SETTINGS = ("monitor.monitor_type=mlflow", "explorer.eval_on_startup=false")
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""They try for a minute to tell a Ray that is no more of its end, and then go."""


@dataclass
class Deployed(ChaosRun):
    """A pipeline in a user's folder with deployments: a worker of Prefect starts it, and starts it again."""

    environment: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)
    """Arguments of `trinity up`."""
    run_id: str = ""
    """Of the flow run that is attacked."""
    _look_at: float = 0.0

    def call(self, *command: str, timeout: float = 400) -> str:
        """What a command of the environment prints; it must succeed."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=self.root, env=self.environment, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        end = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{end}"
        return done.stdout

    def bring_up(self) -> str:
        """What `trinity up` prints, behind a proxy that does not answer."""
        away = {"http_proxy": f"http://127.0.0.1:{free_port()}", "no_proxy": "", "NO_PROXY": ""}
        with mock.patch.dict(self.environment, away):
            return self.call("trinity", "up", *self.ports)

    def deployment_run(self, name: str) -> str:
        """Run a deployment with the configuration; what the command prints."""
        parameters = {"config": str(self.root / "run.yaml"), "overrides": list(self.overrides)}
        words = [word for key, value in parameters.items() for word in ("--param", f"{key}={json.dumps(value)}")]
        return self.call("prefect", "deployment", "run", name, *words)

    def up(self) -> dict[str, Any]:
        """What `trinity up` has recorded."""
        recorded: dict[str, Any] = json.loads((self.root / ".trinity/up.json").read_text())
        return recorded

    def recorded(self, name: str) -> dict[str, Any]:
        """The record of the process of that name which has been started last."""
        [process] = [process for process in self.up()["processes"] if process["name"] == name]
        return dict(process)

    def pid(self, name: str) -> int:
        return int(self.recorded(name)["pid"])

    def flow_run(self) -> dict[str, Any]:
        """The attacked flow run, as the UI shows it."""
        flow_run: dict[str, Any] = self.ask("GET", f"flow_runs/{self.run_id}")
        return flow_run

    @property
    def key(self) -> str:
        """Of all servers of the folder."""
        return server_key(self.root)

    def with_key(self, link: str) -> str:
        """A link for a browser that does not know the key yet."""
        return link.replace("://", f"://{self.key}@")

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """What Prefect's API answers."""
        user, password = self.key.split(":")
        url = f"{self.up()['api_url']}/{path}"
        return httpx.request(method, url, auth=(user, password), timeout=60, **options).raise_for_status().json()

    def flows(self) -> list[psutil.Process]:
        """The process in which a flow runs, once it has started Ray."""
        family = psutil.Process(self.pid("worker")).children(recursive=True)
        raylets = [process for process in family if called(process) == "raylet"]
        return [flow for raylet in raylets if (flow := raylet.parent())]

    def _ended(self) -> bool:
        """Asked each second at most, once there is a summary. A run that is killed restarts on its own, and
        nobody else does."""
        now = time.monotonic()
        self._began = self._began or now
        if now < self._look_at:
            return False
        self._look_at = now + 1.0
        assert now < self._began + LONGEST_ATTEMPT, f"the run hangs: {self.flow_run()}"
        return (self.job / "summary.json").exists() and self.flow_run()["state_type"] == "COMPLETED"

    def _victims(self, what: str) -> list[psutil.Process]:
        return self.flows() if what == "flow" else super()._victims(what)

    def _family(self) -> Iterator[psutil.Process]:
        for flow in self.flows():
            with suppress(psutil.NoSuchProcess):
                yield from flow.children(recursive=True)


def called(process: psutil.Process) -> str:
    """Its name, or an empty string if it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, tiny_folders: TinyFolders) -> Iterator[Deployed]:
    """A folder in which `trinity up` has been called. Nothing of it is left afterwards."""
    root = tmp_path_factory.mktemp("deployed")
    with pipeline(root, tiny_folders, *SETTINGS, kind=Deployed) as here:
        loud = {name for name in os.environ if name.startswith("PREFECT_")} | {*QUIET, "CI", "PYTEST_CURRENT_TEST"}
        here.environment = {name: value for name, value in os.environ.items() if name not in loud}
        here.environment |= {"PYTHONPATH": f"{RECORDER}:{os.environ.get('PYTHONPATH', '')}"}
        here.environment |= {"RECORDED_ADDRESSES": str(root / "addresses")}
        (root / "prefect.yaml").symlink_to(ROOT / "prefect.yaml")
        here.ports = [
            word for name in ("port", "mlflow-port", "studio-port") for word in (f"--{name}", str(free_port()))
        ]
        here.bring_up()
        servers = [psutil.Process(process["pid"]) for process in here.up()["processes"]]
        family = [process for server in servers for process in (server, *server.children(recursive=True))]
        yield here
        here.call("trinity", "down")
        assert not psutil.wait_procs(family, timeout=60)[1]
        assert not [*(root / "checkpoints").glob("*_page.json")], "nobody looks for a page that is not served"
        assert "mark_deployments_ready" not in (root / ".trinity/log/server.log").read_text(), "retries fill the log"


def test_a_schedule_makes_runs(deployed: Deployed) -> None:
    """Of `evaluate/sweep`, whose schedule is off at first."""
    deployment = deployed.ask("GET", "deployments/name/evaluate/sweep")
    schedules = f"deployments/{deployment['id']}/schedules"
    [schedule] = deployed.ask("GET", schedules)
    assert not schedule["active"]
    wanted = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    user, password = deployed.key.split(":")
    switch = partial(httpx.patch, f"{deployed.up()['api_url']}/{schedules}/{schedule['id']}", auth=(user, password))
    switch(json={"active": True}).raise_for_status()
    try:
        for _ in poll(400, 1.0):
            if deployed.ask("POST", "flow_runs/filter", json=wanted):
                return
        raise AssertionError("Prefect's scheduler makes no run")
    finally:
        switch(json={"active": False}).raise_for_status()


def test_prefects_page_works_under_another_name_of_this_machine(deployed: Deployed, tmp_path: Path) -> None:
    """As it does behind a forwarded port: it asks the API of its own address."""
    page = deployed.up()["api_url"].replace("127.0.0.1", "localhost").removesuffix("api") + "deployments"
    asyncio.run(see_deployments(deployed.with_key(page), tmp_path))


async def see_deployments(link: str, folder: Path) -> None:
    async with opened(link, folder, is_ours=False) as page:
        await page.until("document.body?.innerText.includes('quickstart')", "a deployment is listed")


def test_no_process_calls_out(survivor: Deployed) -> None:
    """A server of each kind and all processes of runs, with packages that would report to their makers."""
    recorded = {*(survivor.root / "addresses").read_text().split()}
    ours = {"localhost", "::1", "::", "", "None", socket.gethostname(), *psutil_addresses()}
    assert "127.0.0.1" in recorded
    assert not {address for address in recorded if address not in ours and not address.startswith(("127.", "0.0.0.0"))}


def psutil_addresses() -> set[str]:
    return {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}


def test_every_flow_of_the_project_is_deployed(deployed: Deployed) -> None:
    """A run of it works in the project's folder, where no flow's file is."""
    listed = deployed.ask("POST", "deployments/filter", json={})
    named = yaml.safe_load((deployed.root / "prefect.yaml").read_text())["deployments"]
    assert sorted((one["name"], one["entrypoint"]) for one in listed) == sorted(
        (one["name"], one["entrypoint"]) for one in named
    )
    folders = [arguments for one in listed for [arguments] in [one["pull_steps"][0].values()]]
    assert folders == [{"directory": str(deployed.root)}] * len(named)


def trained_steps(job: Path) -> list[int]:
    return [line.step for line in read_metrics(job) if line.source == "trainer"]


@pytest.fixture(scope="module")
def survivor(deployed: Deployed) -> Deployed:
    """Its pipeline has ended, after kills of a trainer's worker before the first checkpoint; verifiers; the flow's
    process, with which all others go; engine and explorer at once during a sync; and the trainer during
    its last save, when there is nothing left to explore until it is back. Nobody does anything after that.

    The pipeline is slow until the flow is killed.
    """
    slow = deployed.root / "plugins/slow"
    slow.touch()
    started = deployed.deployment_run("pipeline/gsm8k")
    deployed.run_id = next(line.split(":", 1)[1].strip() for line in started.splitlines() if "UUID" in line)
    deployed.kill(Kill("trainer", 1, delay=0.2, stage="sft"))
    deployed.kill(Kill("reward", 1))
    deployed.kill(Kill("reward", 2, delay=0.2))
    wait_until(lambda: KILLED_AT in trained_steps(deployed.job))
    [flow] = deployed.flows()
    family = [flow, *(process for process in flow.children(recursive=True) if called(process) not in {"", *RAY_AGENTS})]
    flow.kill()
    assert not psutil.wait_procs(family, timeout=60)[1], "engines, trainers and Ray go with the flow"
    slow.unlink()
    assert 0 < (latest_whole(deployed.job) or 0) < STEPS
    wait_until(lambda: KILLED_AT not in trained_steps(deployed.job))
    assert deployed.flow_run()["run_count"] == 2
    deployed.kill(Kill("reward", SAVE_INTERVAL))
    deployed.kill(Kill("engine+explorer", KILLED_AT, "syncing", 0.01))
    deployed.kill(Kill("trainer", STEPS - 1, "saving"))
    wait_until(deployed._ended)
    return deployed


def test_kills_of_every_process_lose_nothing_and_change_no_weight(
    survivor: Deployed, request: pytest.FixtureRequest
) -> None:
    assert survivor.kills == 7 and survivor.flow_run()["run_count"] >= 2
    assert survivor.faults() == []
    assert trained_steps(survivor.folder("sft")) == list(range(1, WARM_UP_STEPS + 1))
    assert survivor.steps_of("trainer") == survivor.steps_of("explorer") == list(range(1, STEPS + 1))
    undisturbed = request.getfixturevalue("undisturbed").run  # another process may run it meanwhile
    assert survivor.digest() == undisturbed.digest(), first_difference(undisturbed.job, survivor.job, STEPS)


def test_a_pipeline_goes_its_whole_way(survivor: Deployed) -> None:
    archived = [json.loads(line)["step"] for line in (survivor.job / "buffer/experience_buffer.jsonl").open()]
    assert archived == [step for step in range(1, STEPS + 1) for _ in range(16)]
    rewards = [line.metrics["reward/mean"] for line in read_metrics(survivor.job) if line.source == "trainer"]
    assert all(0 < reward < 1 for reward in rewards), "the plugin's reward"
    # Prefect's page lists no task at all if one has a flow run's result among its arguments (PrefectHQ/prefect 18680).
    tasks = survivor.ask("POST", "task_runs/filter", json={"limit": 200})
    kinds = {one["input_type"] for task in tasks for inputs in task["task_inputs"].values() for one in inputs}
    assert kinds and kinds <= {"parameter", "constant", "task_run"}
    nodes = dict(survivor.ask("GET", f"flow_runs/{survivor.run_id}/graph-v2")["nodes"])
    flows = {key: node["label"].partition(" / ")[0] for key, node in nodes.items()}
    stages = [key for key, flow in flows.items() if flow == "rft"]
    assert stages and all("sft" in {flows[one["id"]] for one in nodes[key]["parents"]} for key in stages)


def test_only_who_has_the_key_reaches_prefect(deployed: Deployed) -> None:
    """A run may be any command: neither other accounts of this machine nor sites in a browser may start one."""
    url = f"{deployed.up()['api_url']}/deployments/filter"
    for headers, status in (({}, 401), ({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 400)):
        assert httpx.post(url, json={}, headers=headers, timeout=60).status_code == status
    assert deployed.ask("POST", "deployments/filter", json={})
    kept = {name: (deployed.root / name).stat().st_mode & 0o777 for name in (".trinity", "prefect.toml")}
    assert kept == {".trinity": 0o700, "prefect.toml": 0o600}
    password = server_key(deployed.root).partition(":")[2]
    logs = {log.name: password in log.read_text(errors="replace") for log in (deployed.root / ".trinity/log").iterdir()}
    assert {"server.log", "mlflow.log", "studio.log"} <= {*logs} and not any(logs.values()), logs


def test_the_converted_model_is_what_was_trained(survivor: Deployed, tiny_model: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = json.loads((survivor.job / "summary.json").read_text())["hf_dir"]
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(5, 40)[None]
    with torch.no_grad():
        gap = (trained(tokens).logits - tiny_model(tokens).logits).abs().max()
    assert torch.isfinite(gap) and gap > 1e-3, "both stages changed it"


def test_mlflow_has_parent_and_stages_with_steps_and_a_best_one(survivor: Deployed, tmp_path: Path) -> None:
    """None of them twice, although the flow was started twice; steps that were taken again have the same numbers.

    The run's link leads a browser that has never been there to its charts.
    """
    from mlflow import MlflowClient

    runs = tracked_runs(survivor)
    assert sorted(run.info.run_name for run in runs) == ["run", "run_rft", "run_sft"]
    (rft,) = [run for run in runs if run.info.run_name == "run_rft"]
    assert {run.info.run_id for run in runs} >= {rft.data.tags["mlflow.parentRunId"]}
    client = MlflowClient(f"sqlite:///{survivor.root / 'checkpoints/mlflow.db'}")
    history = client.get_metric_history(rft.info.run_id, "actor/final_loss")
    points = sorted({(point.step, point.value) for point in history})
    assert [step for step, _ in points] == list(range(1, STEPS + 1))
    (model,) = [model for model in client.search_registered_models() if "rft" in model.name]
    assert client.get_model_version_by_alias(model.name, "best")
    link = json.loads((survivor.job / "summary.json").read_text())["tracking"]
    assert link.startswith(survivor.recorded("mlflow")["url"])
    asyncio.run(see_charts(survivor.with_key(link), tmp_path))


async def see_charts(link: str, folder: Path) -> None:
    async with opened(link, folder, is_ours=False) as page:
        await page.until("!!document.querySelector('.js-plotly-plot')")
        shown = await page.text("body")
        assert all(word in shown for word in ("run_rft", "Model metrics", "reward mean"))
        assert "Model registry" in shown and "Judges" not in shown, "the view of training runs, not that of agents"


def test_all_checkpoints_are_converted(survivor: Deployed) -> None:
    folders = convert_all(survivor.job)
    assert len(folders) == len([*survivor.job.glob("global_step_*")]) and all(map(tensors_sha256, folders))


def test_a_person_makes_starts_and_leads_a_run(deployed: Deployed, tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """In a browser: a configuration from another, a run of it, its curves, *Cancel* and *Retry*, which another
    worker takes. The run continues when that one or Prefect's server is killed, until `down` ends it."""
    recipe = (ROOT / "configs/sft/sft.yaml").read_text()
    (deployed.root / "recipe.yaml").write_text(recipe)
    (deployed.root / "runs/quickstart").mkdir(parents=True)
    for name, folder in (("model", tiny_folders.model), ("data", tiny_folders.data)):
        (deployed.root / "runs/quickstart" / name).symlink_to(folder)
    title, job = "Trinity-Flows/mine", deployed.root / "checkpoints/Trinity-Flows/mine"

    async def visit() -> int:
        async with person_at(deployed.with_key(deployed.recorded("studio")["url"]), tmp_path) as person:
            await person.choose_file("recipe.yaml", recipe.split("\n")[0])
            await person.copy("mine.yaml")
            await person.fill("checkpoint_root_dir", "checkpoints")
            await person.fill("total_steps (steps)", "5000")
            await person.start(title)
            await person.drawn(3)
            await person.press("Cancel")
            await person.state(title, "cancelled")
            saved = latest_whole(job) or 0
            assert saved >= 3 and trained_steps(job)[-1] == saved, "it saves at its next step boundary"
            assert [run.info.status for run in tracked_runs(deployed) if run.info.run_name == "mine"] == ["KILLED"]
            assert states_of(deployed, "mine") == {"CANCELLED", "COMPLETED"}
            start_again(deployed)
            await person.press("Retry")
            await person.state(title, "running")
            return saved

    saved = asyncio.run(visit())
    wait_until(lambda: trained_steps(job)[-1] > saved)
    serve_again(deployed, job)
    end_without_its_worker(deployed, job)
    made = (deployed.root / "mine.yaml").read_text()
    assert made.split("\n")[1:3] == recipe.split("\n")[1:3] and "total_steps: 5000" in made, "comments stay"


def states_of(here: Deployed, name: str) -> set[str]:
    """The states of a run's flows and of all their tasks."""
    runs = {"flow_runs": {"tags": {"all_": [f"name:{name}"]}}}
    flows, tasks = (here.ask("POST", f"{kind}/filter", json=runs) for kind in ("flow_runs", "task_runs"))
    assert flows and tasks
    return {one["state_type"] for one in (*flows, *tasks)}


def start_again(here: Deployed) -> None:
    """Kill supervisor and worker; `trinity up` starts these two."""
    for name in ("supervisor", "worker"):
        (process := psutil.Process(here.pid(name))).kill()
        psutil.wait_procs([process], timeout=60)
    said = here.bring_up()
    assert [line.split()[2] for line in said.splitlines() if line.startswith("Starting")] == ["worker", "supervisor"]


def serve_again(here: Deployed, job: Path) -> None:
    """Kill Prefect's server under a run: `trinity up` starts another; worker and run stay, and go on with it."""
    (server := psutil.Process(here.pid("server"))).kill()
    psutil.wait_procs([server], timeout=60)
    flows, worker, before = here.flows(), here.pid("worker"), trained_steps(job)[-1]
    said = here.bring_up()
    assert [line.split()[2] for line in said.splitlines() if line.startswith("Starting")] == ["Prefect", "supervisor"]
    assert (here.flows(), here.pid("worker")) == (flows, worker)
    wait_until(lambda: trained_steps(job)[-1] > before)
    assert here.flows() == flows


def end_without_its_worker(here: Deployed, job: Path) -> None:
    """Kill the worker under a run, in whose place the supervisor starts another; then end everything."""
    psutil.Process(worker := here.pid("worker")).kill()
    wait_until(lambda: here.pid("worker") != worker)
    before = trained_steps(job)[-1]
    wait_until(lambda: trained_steps(job)[-1] > before)
    said = here.call("trinity", "down")
    ended = [line.replace(" the ", " ").split()[1] for line in said.splitlines() if line.endswith("…")]
    assert ended == ["supervisor", "run", "worker", "Studio", "MLflow", "server"]
    steps = trained_steps(job)
    assert steps == list(range(1, len(steps) + 1)) and latest_whole(job) == steps[-1]


def tracked_runs(here: Deployed) -> list[Any]:
    """MLflow's runs of a place."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here.root / 'checkpoints/mlflow.db'}")
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


def wait_until(true: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
