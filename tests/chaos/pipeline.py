"""The pipeline that tests run once undisturbed, and once with everything in it killed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from chaos.killing import ChaosRun

from trinity_core.data.tiny import TinyFolders

Run = TypeVar("Run", bound=ChaosRun)

STEPS, SAVE_INTERVAL, WARM_UP_STEPS = 6, 3, 12
SELECTOR = {"selector_type": "difficulty_based", "kwargs": {"m": 8, "tau": 0.05, "do_sample": True}}
"""What it draws depends on all rewards before, so that a run that forgot or repeated one would draw other tasks."""

FAILING = {
    "stage_name": "failing",
    "synchronizer": {"sync_method": "memory", "sync_style": "dynamic_by_explorer"},
    "explorer": {"max_retry_times": 0, "eval_on_startup": False},
    "buffer": {"default_workflow_type": "breaking"},
}
"""An asynchronous stage."""


def pipeline(root: Path, tiny: TinyFolders, *overrides: str, fails: bool = False, kind: type[Run] = ChaosRun) -> Run:
    """SFT, then GRPO from its model with a learning selector and an explorer a step ahead; the trainer has two workers.

    With `fails` comes a last stage that fails. `kind`: who starts it.
    """
    data = {"path": str(tiny.data), "format": {"prompt_key": "question", "response_key": "answer"}}
    buffer = {
        "train_batch_size": 8,
        "total_steps": WARM_UP_STEPS,
        "trainer_input": {"experience_buffer": {"split": "sft", **data}},
    }
    sft = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}
    taskset = {"name": "train", "default_reward_fn_type": "even_letters", "task_selector": SELECTOR, **data}
    rft = {
        "stage_name": "rft",
        "synchronizer": {"sync_method": "memory", "sync_offset": 1},
        "buffer": {
            "explorer_input": {"taskset": taskset, "eval_tasksets": [{"name": "test", "split": "test", **data}]}
        },
    }
    stages = (sft, rft, FAILING) if fails else (sft, rft)
    common = ("trainer.worker_num=2", f"trainer.save_interval={SAVE_INTERVAL}")
    return kind(root, tiny.model, tiny.data, STEPS, stages=stages, stage="rft", overrides=(*common, *overrides))


@dataclass(frozen=True)
class Undisturbed:
    """The pipeline with its failing stage, run once without Prefect."""

    run: ChaosRun
    done: subprocess.CompletedProcess[str]


def run_undisturbed(root: Path, tiny: TinyFolders) -> Undisturbed:
    """Run it, with a timeline of its actors."""
    with pipeline(root, tiny, "monitor.enable_ray_timeline=true", fails=True) as run:
        done = subprocess.run(run.command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    return Undisturbed(run, done)
