"""A small run on real parts whose processes are killed, and which is started again until it ends.

`tests/chaos` and `benchmarks/chaos.py` share it. Nothing helps the run but what a flow's retry or an automation does:
its command is given again after it has failed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from trinity_core.base.files import read_json
from trinity_core.exchange.checkpoints.huggingface import tensors_sha256
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.store.audit import Audit
from trinity_core.exchange.sync.memory import memory_root
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.audit import audit_runs

POLL_SECONDS = 0.005
LONGEST_ATTEMPT = 540.0
"""Seconds without a kill; an attempt that takes longer hangs."""
MOST_ATTEMPTS = 4
"""Attempts without a kill among them: a run that needs more does not get well again."""

PLUGIN = '''
import os, time
from pathlib import Path

import psutil

from trinity_core.workflows import REWARD_FNS, WORKFLOWS
from trinity_core.workflows.builtin import MathWorkflow


@REWARD_FNS.register("even_letters")
def even_letters(*, prompt, response, truth, task, **args):
    """What even an untrained model does more or less of."""
    # So that a verifier is at work now and then when it is killed, or the flow when its test has seen a step.
    time.sleep(0.05 if Path(__file__).with_name("slow").exists() else 0.01)
    return {"even": sum(ord(letter) % 2 == 0 for letter in response) / max(len(response), 1)}


@WORKFLOWS.register("stopping")
class Stopping(MathWorkflow):
    """Once, stops the process of the engine that it is about to ask."""

    async def run(self):
        marker = Path(__file__).with_name("stopped")
        if self.task.group.endswith("/2/0") and not marker.exists():
            marker.touch()
            for process in psutil.Process(os.getppid()).children():
                if process.name().startswith("ray::InProcessEngine"):
                    process.suspend()
        return await super().run()


@WORKFLOWS.register("breaking")
class Breaking(MathWorkflow):
    """Fails from the second explore step on."""

    async def run(self):
        if int(self.task.group.split("/")[1]) > 1:
            raise RuntimeError("the tool is gone")
        return await super().run()
'''

PAGE = (
    "import runpy, sys; sys.modules['prefect'] = None; sys.argv[0] = 'run';"
    "runpy.run_module('trinity_core.run', run_name='__main__', alter_sys=True)"
)
"""`python -m trinity_core.run` in an interpreter that has no Prefect."""

TITLES = {"explorer": "ray::Explorer", "trainer": "ray::Trainer", "engine": "ray::InProcessEngine"}
"""Titles of the actors' processes begin so."""
PROGRAMS = {"reward": "trinity_core.workflows.rewards.pool", "server": "uvicorn"}
"""In the command lines of others."""
VICTIMS = ("flow", "explorer", "trainer", "engine", "reward", "raylet")
MOMENTS = ("any", "saving", "syncing")


@dataclass(frozen=True)
class Kill:
    """`what` is killed `delay` seconds after the run reached trainer step `step`, or next `moment` after it."""

    what: str
    """One of VICTIMS, or several, joined by `+`, that die at once, as when a node's memory is full."""
    step: int
    moment: str = "any"
    delay: float = 0.0
    stage: str = ""
    """Of a pipeline; empty: the one whose weights count."""

    def __str__(self) -> str:
        when = f"{self.delay:.2f} s after step {self.step}{self.stage and f' of {self.stage}'}"
        return f"{self.what} {when}" if self.moment == "any" else f"{self.what} while {self.moment}, {when}"


def draw_kills(rng: random.Random, steps: int, victims: Sequence[str]) -> tuple[Kill, ...]:
    """Kills of these victims, in this order, at random moments before the last of `steps`."""
    kills = []
    for what, step in zip(victims, sorted(rng.choices(range(1, steps), k=len(victims))), strict=True):
        moment = rng.choice(MOMENTS)
        kills.append(Kill(what, step, moment, rng.uniform(0.0, 1.0 if moment == "any" else 0.02)))
    return tuple(kills)


@dataclass
class Killed:
    """A kill that happened."""

    kill: Kill
    processes: int
    at: float
    """Unix seconds."""
    checkpoint: int
    """The newest whole checkpoint then; 0: none."""
    audit: Audit | None
    """Right after it; None: there was no store yet."""


@dataclass
class ChaosRun:
    """One run in a folder of its own. Use it as a context: its processes end with the block."""

    root: Path
    model: Path
    data: Path
    steps: int
    through: str = "page"
    """`page`: `python -m trinity_core.run`; `flow`: `trinity run`, whose flow retries and has a server."""
    stages: Sequence[Mapping[str, Any]] = ()
    """Of a pipeline."""
    stage: str = ""
    """The one that is attacked, and whose weights count."""
    overrides: Sequence[str] = ()
    """Further settings, `key=value`."""
    killed: list[Killed] = field(default_factory=list)
    attempts: int = 0
    process: psutil.Popen | None = None
    _tries: int = 0
    """Attempts since the last kill."""
    _began: float = 0.0
    """When the attempt began, or the last kill after that."""

    @property
    def job(self) -> Path:
        """The folder of the run whose weights count."""
        return self.folder()

    def folder(self, stage: str = "") -> Path:
        """The folder of a stage; without a name, of the one whose weights count."""
        name = f"run_{stage or self.stage}" if self.stages else "run"
        return self.root / "checkpoints/chaos" / name

    @property
    def command(self) -> list[str]:
        """The command of an attempt."""
        page = [sys.executable, "-c", PAGE]
        command = page if self.through == "page" else [str(Path(sys.executable).parent / "trinity"), "run"]
        return [*command, "--config", str(self.root / "run.yaml"), *self.overrides]

    @property
    def log(self) -> Path:
        """What the attempts print."""
        return self.root / "run.log"

    def __enter__(self) -> Self:
        (self.root / "plugins").mkdir(parents=True, exist_ok=True)
        (self.root / "plugins/letters.py").write_text(PLUGIN)
        (self.root / "run.yaml").write_text(yaml.safe_dump(self._config()))
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            family = [self.process, *self.process.children(recursive=True)]
            self.process.terminate()
            for left in psutil.wait_procs(family, timeout=30)[1]:
                left.kill()

    @property
    def kills(self) -> int:
        """Processes that were killed."""
        return sum(killed.processes for killed in self.killed)

    def go(self, kills: Sequence[Kill] = ()) -> None:
        """Run to the end, with these kills in their order. Raises AssertionError if the run does not get there."""
        for kill in kills:
            self.kill(kill)
        while not self._ended():
            time.sleep(0.1)

    def steps_of(self, source: str, stage: str = "") -> list[int]:
        """The steps whose metrics a source (trainer or explorer) has written, in order."""
        return [line.step for line in read_metrics(self.folder(stage)) if line.source == source]

    def digest(self) -> str:
        """The digest of the final weights."""
        summary = read_json(self.job / "summary.json")
        assert summary is not None and summary["step"] == self.steps, f"the run did not end: {summary}"
        return tensors_sha256(Path(summary["hf_dir"]))

    def audit(self) -> Audit:
        """What `trinity audit` finds now."""
        [audit] = audit_runs(self.job).values()
        return audit

    def faults(self) -> list[str]:
        """What an ended run did wrong: an audit that was not clean, work that was lost beyond the last checkpoint."""
        audits = [(killed.kill, killed.audit) for killed in self.killed if killed.audit is not None]
        faults = [f"audit after {kill}: {'; '.join(audit.problems)}" for kill, audit in audits if not audit.clean]
        audit = self.audit()
        if not audit.clean or audit.trained != audit.tasks_drawn:
            faults.append(f"audit at the end: {audit}")
        for killed in self.killed:
            lines = read_metrics(self.folder(killed.kill.stage))
            later = [line.step for line in lines if line.source == "trainer" and line.time > killed.at + 1]
            if later and later[0] <= killed.checkpoint:
                faults.append(f"{killed.kill}: checkpoint {killed.checkpoint}, but step {later[0]} was done again")
        return faults

    # ---- inside ----

    def _ended(self) -> bool:
        """True once an attempt has succeeded; one that failed is followed by the next."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                assert time.monotonic() < self._began + LONGEST_ATTEMPT, f"the run hangs:\n{self._end_of_log()}"
                return False
            if code == 0:
                return True
        assert self._tries < MOST_ATTEMPTS, f"the run does not get well again:\n{self._end_of_log()}"
        self._start()
        return False

    def _start(self) -> None:
        self.attempts, self._tries, self._began = self.attempts + 1, self._tries + 1, time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        with self.log.open("ab") as log:
            log.write(f"---- attempt {self.attempts}\n".encode())
            self.process = psutil.Popen(self.command, cwd=self.root, env=environment, stdout=log, stderr=log)

    def kill(self, kill: Kill) -> None:
        """Kill at the kill's moment; nothing if the run ends before it, or while there is no such process."""
        while max(self.steps_of("trainer", kill.stage), default=0) < min(kill.step, self.steps - 1):
            if self._ended():
                return
            time.sleep(0.05)
        folder = self.folder(kill.stage)
        before = _mark(folder, kill.moment)
        victims = self._find(kill)
        while kill.moment != "any" and _mark(folder, kill.moment) <= before and not self._ended():
            time.sleep(POLL_SECONDS)
        time.sleep(kill.delay)
        if not all(process.is_running() for process in victims):
            victims = self._find(kill)
        checkpoint, now = max(whole_steps(folder), default=0), time.time()
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if victims:
            audit = self.audit() if any((self.job / "buffer").glob("*.db")) else None
            self.killed.append(Killed(kill, len(victims), now, checkpoint, audit))
            self._tries, self._began = 0, time.monotonic()

    def _find(self, kill: Kill) -> list[psutil.Process]:
        """One process of each kind, the last one started; waits until there is one. None of them if the run ends."""
        wanted = kill.what.split("+")
        while len(victims := [process for what in wanted for process in self._victims(what)[-1:]]) < len(wanted):
            if self._ended():
                return []
            time.sleep(0.05)
        return victims

    def _victims(self, what: str) -> list[psutil.Process]:
        if what == "flow":
            return [self.process] if self.process is not None and self.process.poll() is None else []
        return [process for process in self._family() if _is(process, what)]

    def _family(self) -> Iterator[psutil.Process]:
        if self.process is None:
            return
        try:
            yield from self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def _config(self) -> dict[str, Any]:
        data = {"path": str(self.data), "format": {"prompt_key": "question", "response_key": "answer"}}
        taskset = {"name": "train", "split": "train", "default_reward_fn_type": "even_letters", **data}
        return {
            "project": "chaos",
            "name": "run",
            "checkpoint_root_dir": str(self.root / "checkpoints"),
            "plugin_dir": str(self.root / "plugins"),
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-3}},
            "model": {"model_path": str(self.model), "max_prompt_tokens": 88, "max_response_tokens": 12},
            "cluster": {"gpu_per_node": 0},
            "buffer": {"batch_size": 4, "total_steps": self.steps, "explorer_input": {"taskset": taskset}},
            "explorer": {"eval_interval": 0, "rollout_model": {"enforce_eager": True, "kv_cache_gib": 1}},
            "synchronizer": {"sync_method": "memory"},
            "trainer": {"save_interval": 2},
            "monitor": {"monitor_type": "tensorboard"},
            "stages": [dict(stage) for stage in self.stages],
        }


def _mark(folder: Path, moment: str) -> float:
    """A number that grows when the moment comes."""
    if moment == "saving":
        return max(map(_changed, folder.glob(".global_step_*")), default=0.0)
    return _changed(memory_root(folder))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is(process: psutil.Process, what: str) -> bool:
    try:
        command = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return False
    if not command:
        return False
    if what in PROGRAMS:
        return any(PROGRAMS[what] in part for part in command)
    if what == "raylet":
        return Path(command[0]).name == "raylet"
    return command[0].startswith(TITLES[what])
