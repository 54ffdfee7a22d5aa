"""Light actors in place of explorer and trainer: they write metrics and checkpoints, and fail on demand."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from trinity_core.base.layout import JobLayout
from trinity_core.config import Config
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.exchange.checkpoints.resume import latest_whole
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.exchange.tracking.scores import score_fingerprint

STEPS = 6


class Explorer:
    """One called `patient` works until the trainer has finished."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stopped = False

    async def prepare(self) -> None: ...

    async def progress(self) -> dict[str, Any]:
        return {"total_steps": STEPS, "waits": ""}

    async def run(self, loop: Callable[..., Any]) -> dict[str, Any]:
        metrics = MetricsFile(self.config.job_dir, "explorer")
        for step in range(1, 10_000 if self.config.explorer.name == "patient" else STEPS + 1):
            await asyncio.sleep(0.05)
            metrics.write(step, {"reward/mean": step / STEPS})
            save_rollouts(self.config.job_dir, "explorer", step, [SampledRollout("1+1?", "2", 1.0)])
            if self.stopped or (self.config.explorer.name == "patient" and latest_whole(self.config.job_dir) == STEPS):
                break
        return {"step": step}

    async def evaluate(self, version: int, path: str | None = None) -> dict[str, float]:
        numbers = {"eval/test/accuracy": 0.5 + version / 100}
        made_with = score_fingerprint(self.config, version)
        MetricsFile(self.config.job_dir, "eval").write(version, numbers, made_with=made_with)
        return numbers

    async def stop(self) -> None:
        self.stopped = True


class Trainer:
    """Saves each second step (a slow one only when told to stop).

    With the fault `die, then head` it dies in step 3, and in step 5 the head of Ray is killed, once each.
    """

    def __init__(self, config: Config, fault: str) -> None:
        self.config = config
        self.fault = fault
        self.stopped = False

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def start(self, address: str, port: int) -> dict[str, Any]:
        return {"total_steps": STEPS}

    def progress(self) -> dict[str, Any]:
        return {"waits": ""}

    def stop(self) -> None:
        self.stopped = True

    def run(self, loop: Callable[..., Any]) -> dict[str, Any]:
        from trinity_core.exchange.store.run_store import (
            open_run_store,  # no explorer needs it: a third of an actor's start
        )

        job_dir = self.config.job_dir
        layout = JobLayout(job_dir).create()
        step = latest_whole(job_dir) or 0
        with (job_dir / "attempts.jsonl").open("a") as file:
            file.write(json.dumps({"from": step}) + "\n")
        while step < STEPS and not self.stopped:
            step += 1
            self._break(step)
            time.sleep(1.0 if self.fault == "slow" else 0.05)
            if not self.config.is_supervised:
                with open_run_store(self.config) as store:  # else a resume finds no batch of the checkpoint's step
                    store.lease(step, 1, step - 1, final=True)
            MetricsFile(job_dir, "trainer").write(step, {"actor/final_loss": 1 / step})
            if self.stopped or (step % 2 == 0 and self.fault != "slow"):
                save(layout, step)
        return {"step": step, "total_steps": STEPS, "ended": "stopped" if self.stopped else "finished"}

    def convert(self, step: int, merge: bool = True) -> str:
        folder = JobLayout(self.config.job_dir).step(step) / "actor" / "huggingface"
        shutil.copytree(self.config.model.model_path, folder, dirs_exist_ok=True)
        return str(folder)

    def _break(self, step: int) -> None:
        marker = self.config.job_dir / f"broken_{step}"
        if self.fault != "die, then head" or step not in (3, 5) or marker.exists():
            return
        marker.touch()
        if step == 3:
            os._exit(1)
        flow = psutil.Process(os.getppid()).parent()
        [head] = [process for process in flow.children() if process.name() == "gcs_server"]
        head.kill()
        time.sleep(60)


def save(layout: JobLayout, step: int) -> None:
    folder = begin(layout, step)
    (folder / "actor" / "huggingface").mkdir(parents=True)
    (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"weights")
    commit(layout, step, folder)


def convert(path: Path, base: Path | None = None) -> list[Path]:
    return [path / "actor" / "huggingface"]
