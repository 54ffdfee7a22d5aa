"""Two explorers and a trainer, each a run of its own with its own Ray, that share a store on a PostgreSQL server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_core.data.tiny import TinyFolders
from trinity_core.store.store import ExperienceStore
from trinity_core.tracking import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
STEPS, TASKS, REPEATS = 3, 4, 4
ROWS = 2 * STEPS * TASKS * REPEATS
"""Experiences of both explorers."""


def write_config(root: Path, tiny: TinyFolders, store: str) -> Path:
    config = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": REPEATS},
        "model": {"model_path": str(tiny.model), "max_prompt_tokens": 88, "max_response_tokens": 12},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": TASKS,
            "total_steps": STEPS,
            "explorer_input": {
                "taskset": {"path": str(tiny.data), "format": {"prompt_key": "question", "response_key": "answer"}}
            },
            "trainer_input": {"experience_buffer": {"path": store}},
        },
        "explorer": {"rollout_model": {"enforce_eager": True, "kv_cache_gib": 0.5}},
        "synchronizer": {"sync_method": "checkpoint"},
        "monitor": {"monitor_type": "tensorboard"},
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config: Path, *settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trinity_core.runtime.run", "--config", str(config), *settings]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_explorers_feed_one_trainer_by_postgresql(
    tmp_path: Path, tiny_folders: TinyFolders, postgresql_url: str
) -> None:
    config = write_config(tmp_path, tiny_folders, postgresql_url)
    runs: list[Any] = [
        start(config, "mode=explore", "explorer.name=first"),
        start(config, "mode=explore", "explorer.name=second"),
        start(config, "mode=train", f"buffer.total_steps={2 * STEPS}", f"buffer.train_batch_size={TASKS * REPEATS}"),
    ]
    try:
        for run in runs:
            _, errors = run.communicate(timeout=400)
            assert run.returncode == 0, errors[-3000:]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    job = tmp_path / "p/n"
    with ExperienceStore.open(postgresql_url, str(job)) as store:
        stats = store.stats()
    assert (stats.trained, stats.leased, stats.ready, stats.stale) == (ROWS, 0, 0, 0)
    assert stats.committed == 2 * STEPS
    assert {name: (known["step"], known["finished"]) for name, known in stats.explorers.items()} == {
        "first": (STEPS, True), "second": (STEPS, True),
    }  # fmt: skip
    assert sorted({line.source for line in read_metrics(job)}) == ["explorer_first", "explorer_second", "trainer"]
