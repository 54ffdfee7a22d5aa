"""The disk that a run fills, and what is free for it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_core.base.layout import JobLayout
from trinity_core.config import Config, store_url, train_settings
from trinity_core.data.lengths import rollouts_taken
from trinity_core.exchange.store.database import databases_in
from trinity_core.exchange.store.run_store import is_own_file
from trinity_core.run.preflight.model_shape import ModelShape, adapter_parameters
from trinity_core.run.preflight.needs import Need, size
from trinity_core.run.preflight.steps import kept_checkpoints, stored_steps

ROW_BYTES = 13
"""Bytes per token in the experience store: token, log-prob and version with 4 bytes each, and a mask of 1 byte."""
TEXT_BYTES = 5
"""Bytes of a token's text, in the store and again in the archive: 4 in English, 4.5 in Chinese, plus each row's numbers
(`pytest tests/run/test_preflight_plan.py -k full_answers`)."""


def free_disk(job_dir: Path) -> int:
    """Return the bytes that the run in `job_dir`, which need not exist, may fill: those free on this machine and those
    it has written."""
    there = next(folder for folder in (job_dir, *job_dir.parents) if folder.exists())
    layout = JobLayout(job_dir)
    files = [*job_dir.glob("global_step_*/**/*"), *databases_in(layout.buffer), layout.archive]  # what `disk_of` counts
    written = sum(file.stat().st_size for file in files if file.is_file())
    usage = shutil.disk_usage(there)
    free = usage.free if usage.total else sys.maxsize  # a file system without a size, such as /proc, has no limit
    return free + written


def disk_of(config: Config, steps: int, trained: Sequence[ModelShape], weight_bytes: int) -> tuple[Need, ...]:
    """Return the maximum bytes below the run's folder at the end of `steps` steps.

    `trained` are the policy and, if there is one, the critic; empty if nothing is trained. `weight_bytes` is the size
    of one weight.
    """
    needs: list[Need] = []
    longest = config.model.max_model_len
    if trained:
        kept = kept_checkpoints(config, steps)
        # Weights and Adam's two moments; in half precision also the float32 weights.
        each_weight = weight_bytes + 8 + (0 if weight_bytes == 4 else 4)
        parameters = [shape.parameters for shape in trained]
        adapter = adapter_parameters(trained[0], config.model.lora)
        state = each_weight * (sum(parameters[1:]) + (adapter or parameters[0]))
        models = kept if train_settings(config).save_huggingface == "always" else 1
        model = parameters[0] * weight_bytes
        needs = [
            Need("checkpoints", kept * state, f"{kept} × {size(state)}: weights and optimizer state; for replays too"),
            Need("models", models * model, f"{models} in Hugging Face format × {size(model)}"),
        ]
    if config.explores and not config.is_supervised and is_own_file(store_url(config), config.job_dir):
        rows = stored_steps(config, steps) * config.buffer.batch_size * config.algorithm.repeat_times
        each = ROW_BYTES + TEXT_BYTES
        why = f"{rows:,} rollouts × {longest:,} tokens × {each} bytes; for replays too"
        needs.append(Need("experiences", rows * longest * each, why))
    if trained and not config.is_supervised:
        rows = steps * rollouts_taken(config)
        why = f"texts of {rows:,} rollouts × {longest:,} tokens × {TEXT_BYTES} bytes"
        needs.append(Need("archive", rows * longest * TEXT_BYTES, why))
    return tuple(need for need in needs if need.bytes)
