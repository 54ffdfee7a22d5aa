"""Whether `trinity plan` estimates the memory that a run takes: 30 random configurations, run for two steps each.

Each configuration draws a model of 1 to 100 million parameters, lengths, batches, number formats, algorithm, ZeRO
stage, workers and checkpointing. It is really run, on the CPU, and Linux reports the peak memory of the largest trainer
worker and the largest engine. The claim: in at least 27 of 30 both are within 15 % of what the plan says.

    python benchmarks/plan.py --results peaks.jsonl             # runs those that are missing in the file, then judges
    python benchmarks/plan.py --results peaks.jsonl --most 0    # judges those in the file

Runs are added to the file as they end, so they can be collected in several calls. The estimates are recomputed each
time, so that a changed formula can be judged by earlier runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from trinity_core.config import config_from_dict
from trinity_core.data.tiny import TinySize, make_model, make_problems, make_untrained, write_jsonl
from trinity_core.hosting.placement import Machine
from trinity_core.run.preflight.needs import ENGINE, REWARDS, ProcessEstimate, total
from trinity_core.run.preflight.stage_plan import plans_of

CLAIM, TOLERANCE = 27, 0.15
STEPS = 2
WORK = 3e11
"""Floating-point operations of a train step, at most: a few seconds of two cores."""
PARAMETERS = (1e6, 1e8)
"""The model's size is drawn evenly on a logarithmic scale."""
PROMPT_TOKENS = 64
"""The longest prompt of the problems has about as many."""
LOOK_SECONDS = 0.1
"""Between two looks at the peaks that Linux keeps; what a process takes after the last one is missed."""


def draw(number: int) -> tuple[TinySize, dict[str, Any]]:
    """Configuration `number`: its model, and its settings without paths."""
    rng = random.Random(f"plan {number}")
    wanted = math.exp(rng.uniform(*map(math.log, PARAMETERS)))
    while True:
        size, settings = _draw_size(rng), _draw_settings(rng)
        parameters = _parameters(size)
        if 0.8 <= parameters / wanted <= 1.25 and _work(parameters, settings) <= WORK:
            return size, settings


def _draw_size(rng: random.Random) -> TinySize:
    heads, channels = rng.choice((4, 6, 8, 10, 12)), rng.choice((32, 64))
    hidden = heads * channels
    return TinySize(
        hidden_size=hidden,
        intermediate_size=hidden * rng.choice((2, 3, 4)),
        layers=rng.choice((2, 3, 4, 6, 8, 12, 16)),
        heads=heads,
        key_value_heads=rng.choice((heads, heads // 2)),
        vocabulary=rng.choice((None, 4096, 16384, 32768, 65536)),
    )


def _draw_settings(rng: random.Random) -> dict[str, Any]:
    algorithm = rng.choice(("grpo", "grpo", "reference", "ppo"))
    workers = rng.choice((1, 1, 2))
    return {
        "algorithm": {
            "algorithm_type": "ppo" if algorithm == "ppo" else "grpo",
            "repeat_times": rng.choice((4, 8)),
            "kl_loss_fn": "k2" if algorithm == "reference" else "none",
        },
        "model": {
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": rng.choice((16, 32, 64, 128, 192)),
        },
        "buffer": {"batch_size": rng.choice((2, 4, 8, 16)), "total_steps": STEPS},
        "explorer": {
            "rollout_model": {
                "dtype": rng.choice(("float32", "float32", "bfloat16")),
                "kv_cache_gib": rng.choice((None, None, 0.25, 1.0)),
                "max_num_seqs": rng.choice((16, 64, 256)),
            },
        },
        "synchronizer": {"sync_method": rng.choice(("memory", "memory", "checkpoint"))},
        "trainer": {
            "worker_num": workers,
            "zero_stage": rng.choice((None, 0, 1, 2, 3)),
            "dtype": rng.choice(("float32", "float32", "bfloat16")),
            "gradient_checkpointing": rng.random() < 0.25,
            "max_token_len_per_gpu": rng.choice((512, 1024, 2048, 4096, 16384)),
        },
    }


def _parameters(size: TinySize) -> int:
    """About: the matrices of a Qwen2 model with tied embeddings."""
    narrow = size.hidden_size * size.key_value_heads // size.heads
    layer = size.hidden_size * (2 * size.hidden_size + 2 * narrow + 3 * size.intermediate_size)
    return (size.vocabulary or 1024) * size.hidden_size + size.layers * layer


def _work(parameters: int, settings: dict[str, Any]) -> float:
    """Floating-point operations of a train step: 6 for each parameter and token, and as many again for a critic."""
    rows = settings["buffer"]["batch_size"] * settings["algorithm"]["repeat_times"]
    models = 2 if settings["algorithm"]["algorithm_type"] == "ppo" else 1
    return 6.0 * models * parameters * rows * (PROMPT_TOKENS / 2 + settings["model"]["max_response_tokens"])


def run(number: int, log: Path) -> dict[str, Any]:
    """Run configuration `number`; what is added to the results."""
    size, settings = draw(number)
    with tempfile.TemporaryDirectory(prefix=f"plan-{number}-") as name:
        folder = Path(name)
        make_model(folder / "model", number, size)
        write_jsonl(folder / "data" / "train.jsonl", make_problems(number, 64, 1, 1)["train"])
        tree = with_paths(settings, folder)
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "trinity_core.run", "--config", str(folder / "run.yaml")]
        code, peaks = peaks_of(command, log, TORCHDYNAMO_DISABLE="1")
        return {
            "number": number, "code": code, "size": asdict(size), "settings": settings,
            "peaks": peaks,
        }  # fmt: skip


def peaks_of(command: Sequence[str], log: Path, **environment: str) -> tuple[int, dict[str, int]]:
    """Run a command with its output in `log`; its exit code, and the largest peak (VmHWM, bytes) by process title."""
    peaks: dict[str, int] = {}
    with log.open("w") as output:
        started = psutil.Popen(command, stdout=output, stderr=output, env=os.environ | environment)
        while started.poll() is None:
            for process in started.children(recursive=True):
                with suppress(psutil.Error, OSError):  # it has ended meanwhile
                    title, status = " ".join(process.cmdline()), Path(f"/proc/{process.pid}/status").read_text()
                    if peak := re.search(r"VmHWM:\s+(\d+)", status):
                        peaks[title] = max(int(peak[1]) * 1024, peaks.get(title, 0))
            time.sleep(LOOK_SECONDS)
    return started.returncode, peaks


def with_paths(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings as a run of the model and the data in `folder`."""
    taskset = {
        "name": "train", "path": str(folder / "data"), "split": "train", "default_reward_fn_type": "math_reward",
        "format": {"prompt_key": "question", "response_key": "answer"},
    }  # fmt: skip
    return {
        **settings,
        "checkpoint_root_dir": str(folder / "runs"),
        "monitor": {"monitor_type": "tensorboard"},
        "model": {**settings["model"], "model_path": str(folder / "model")},
        "buffer": {**settings["buffer"], "explorer_input": {"taskset": taskset}},
    }


def judge(runs: Sequence[dict[str, Any]]) -> None:
    """Print each measured peak, its estimate and their ratio, and how many configurations are estimated."""
    right = 0
    for run in runs:
        ratios = []
        for process in estimates(run):
            title = "ray::InProcessEngine" if process.kind == ENGINE else "ray::TrainerActor"
            measured = max(peak for name, peak in run["peaks"].items() if name.startswith(title))
            ratios.append(total(process.memory) / measured)
            told = f"plan {total(process.memory) >> 20:6,} MiB, measured {measured >> 20:6,} MiB"
            print(f"{run['number']:3}  {process.kind:15} {told}, ratio {ratios[-1]:.2f}")
        right += all(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    print(f"{right} of {len(runs)} configurations within {TOLERANCE:.0%} (claim: {CLAIM} of 30)")


def estimates(run: dict[str, Any]) -> Sequence[ProcessEstimate]:
    """The processes that `trinity plan` estimates for a run, of whose model the headers are made again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shape(folder / "model", TinySize(**run["size"]))
        config = config_from_dict(with_paths(run["settings"], folder))
        (stage,) = plans_of(config, Machine(os.cpu_count() or 1, 0))
        return [process for process in stage.processes if process.kind != REWARDS]  # whose peaks were not measured


def write_shape(folder: Path, size: TinySize) -> None:
    """config.json and the header of the weights of a model, without the weights."""
    import torch

    with torch.device("meta"):
        model = make_untrained(size)
    model.config.save_pretrained(folder)
    header = {name: {"dtype": "F32", "shape": list(p.shape)} for name, p in model.named_parameters()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="File of JSON lines.")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--most", type=int, default=30, help="Runs of this call.")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    missing = [number for number in range(args.count) if number not in {run["number"] for run in done}]
    for number in missing[: args.most]:
        outcome = run(number, args.results.with_suffix(f".{number}.log"))
        with args.results.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        print(f"{number}: ended with {outcome['code']}", flush=True)
    ended = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    judge([run for run in ended if not run["code"]])


if __name__ == "__main__":
    main()
