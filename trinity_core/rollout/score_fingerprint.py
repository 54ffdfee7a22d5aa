"""What a score was made with: a score of other eval sets, sampling, workflow, reward or model is another score."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from trinity_core.config import Config, to_dict
from trinity_core.config.schema.buffer import TasksetConfig
from trinity_core.data.files import find_files
from trinity_core.errors import DataError
from trinity_core.tracking.forwarder import eval_scores
from trinity_core.tracking.metrics_file import MetricLine, read_evaluations

WEIGHTS = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")
"""Files of a model folder that decide what it answers."""
EDGE_BYTES = 1 << 20
"""Bytes at both ends of a weight file that are read: training changes every tensor, and 15 GB take too long to read."""
ASIDE = ("name", "engine_num", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "max_num_seqs")
"""Settings of an auxiliary model that do not change its answers."""


def score_fingerprint(config: Config, step: int) -> str:
    """SHA-256 of everything that a score of `step` was made with, except the trained weights themselves.

    Those belong to the run and the step. Step 0 is `model.model_path`, whose files are part of the fingerprint, or the
    external model: its address, name and `request_args`.
    """
    given, model = to_dict(config), to_dict(config)["model"]
    prompts = {name: value for name, value in model.items() if name not in ("model_path", "critic_model_path")}
    template = model["chat_template_path"]
    made_with = {
        "seed": given["seed"],
        "model": _model_digest(config.model.model_path) if step == 0 and not config.external_model else "",
        "prompts and sampling": prompts,
        "chat template": _files_digest([Path(template).expanduser()]) if template else "",
        "eval sets": given["buffer"]["explorer_input"]["eval_tasksets"],
        "data": [_data_digest(taskset) for taskset in config.buffer.explorer_input.eval_tasksets],
        "auxiliary models": [
            {name: value for name, value in each.items() if name not in ASIDE}
            for each in given["explorer"]["auxiliary_models"]
        ],
        "plugins": _plugins_digest(config.plugin_dir),
    }
    if external := config.external_model:
        names = ("base_url", "model_name", "request_args")
        made_with["external model"] = {name: getattr(external, name) for name in names}
    return sha256(json.dumps(made_with, sort_keys=True, default=str).encode()).hexdigest()[:16]


def valid_scores(config: Config) -> dict[int, float]:
    """step -> score of the run's weights; only scores that were made with what the configuration says now.

    A configuration without eval sets, such as that of a trainer whose explorer is a run of its own, takes all scores.
    """
    return eval_scores(_valid_lines(config))


def valid_metrics(config: Config, step: int) -> dict[str, float]:
    """All metrics of the latest evaluation of `step` that counts as in `valid_scores`; empty if there is none."""
    found = [line.metrics for line in _valid_lines(config) if line.step == step]
    return found[-1] if found else {}


def _valid_lines(config: Config) -> list[MetricLine]:
    lines = read_evaluations(config.job_dir)
    if not config.buffer.explorer_input.eval_tasksets:
        return lines
    now = {first: score_fingerprint(config, first) for first in {min(line.step, 1) for line in lines}}
    return [line for line in lines if line.made_with == now[min(line.step, 1)]]


def _plugins_digest(plugin_dir: str | None) -> str:
    return _files_digest(sorted(Path(plugin_dir).expanduser().glob("**/*.py"))) if plugin_dir else ""


def _data_digest(taskset: TasksetConfig) -> str:
    """Of the contents of local files; another source is known by its name."""
    path = Path(taskset.path).expanduser()
    if path.is_file():
        return _files_digest([path])
    try:
        return _files_digest(find_files(path, taskset.split, taskset.subset_name)) if path.is_dir() else taskset.path
    except DataError:
        return "no data"


def _model_digest(model_path: str) -> str:
    folder = Path(model_path).expanduser()
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)) if folder.is_dir() else []
    return _files_digest(files, EDGE_BYTES) if files else model_path


def _files_digest(files: Iterable[Path], edge: int = 0) -> str:
    """SHA-256 of names, sizes and contents; with `edge`, of that many bytes at both ends of each file."""
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if not edge or size <= 2 * edge:
                while block := content.read(EDGE_BYTES):
                    digest.update(block)
            else:
                digest.update(content.read(edge))
                content.seek(size - edge)
                digest.update(content.read(edge))
    return digest.hexdigest()
