"""Peak host memory of several ranks that load a model and take steps, against one model with its optimizer state.

What one process must hold to train in float32 is 16 bytes a parameter: weights, gradients and Adam's two moments, of 4
each (the "model states" of Rajbhandari et al. 2020, arXiv 1910.02054). A run with a KL penalty also holds a reference
model, of 4 more. Under ZeRO 3 all of it is divided among the ranks, which together must take at most 1.3 times that at
any moment.

A sample every 20 ms adds up the proportional set sizes of the ranks, in which a page that two ranks map counts once,
and subtracts what they had after importing torch, DeepSpeed and transformers. malloc is set as in a run. Layers
recompute their activations, which would otherwise take 0.2 GB on each rank for its two short rows.

    python benchmarks/load_memory.py [--ranks 2 4] [--no-reference] [--tiny]
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training_part import rollouts

from trinity_core.hosting.actors import KEPT_MEMORY, KERNELS

LIMIT = 1.3
STATES, REFERENCE = 16, 4
"""Bytes of a parameter."""
STEPS = 2
"""The second has Adam's moments from its beginning."""


def one_rank(folder: Path, rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    """Load the models and take two steps, unless `load_only`; a line of output once everything is imported."""
    from trinity_core.config import config_from_dict
    from trinity_core.training.distributed import join
    from trinity_core.training.learner import Learner

    group = join(rank, ranks, "127.0.0.1", port, use_gpu=False)
    config = config_from_dict(
        {
            "name": "run", "mode": "train", "checkpoint_root_dir": str(folder),
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 1e-5},
                          **({"kl_loss_fn": "none"} if args.no_reference else {})},
            "model": {"model_path": str(folder / "model"), "max_prompt_tokens": 64, "max_response_tokens": 64},
            "cluster": {"gpu_per_node": 0},
            "trainer": {
                "zero_stage": 3, "max_token_len_per_gpu": 128,
                "trainer_config": {"actor_rollout_ref": {"model": {"enable_gradient_checkpointing": True}}},
            },
            "buffer": {"batch_size": 16, "total_steps": 1000, "trainer_input": {"experience_buffer": {"name": "b"}}},
        }
    )  # fmt: skip
    for name in ("transformers.models.qwen2.modeling_qwen2", "deepspeed.runtime.zero.muon.muon_optimizer"):
        importlib.import_module(name)  # in which DeepSpeed imports torch's compiler
    print("ready", flush=True)
    sys.stdin.readline()
    learner = Learner(config, 1000, group)
    assert (learner.reference is None) is args.no_reference and learner.settings.gradient_checkpointing
    for step in range(1, 1 + STEPS * (not args.load_only)):
        learner.step(rollouts(learner.model_config.vocab_size)[: 2 * ranks], step)


def proportional(process: subprocess.Popen) -> int:
    """Bytes of its proportional set size; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def measured(folder: Path, ranks: int, args: argparse.Namespace) -> int:
    """The peak of so many ranks together, beyond what they had when everything was imported."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""} | KEPT_MEMORY | KERNELS
    command = [sys.executable, __file__, "--folder", str(folder), "--port", str(port), "--ranks", str(ranks)]
    command += ["--load-only"] * args.load_only + ["--no-reference"] * args.no_reference
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    started = [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(ranks)]
    for process in started:
        for line in process.stdout:
            if line == "ready\n":
                break
    before = peak = sum(proportional(process) for process in started)
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    while any(process.poll() is None for process in started):
        peak = max(peak, sum(proportional(process) for process in started))
        time.sleep(0.02)
    if any(process.returncode for process in started):
        sys.exit(f"exit codes of the ranks: {[process.returncode for process in started]}")
    return peak - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tiny", action="store_true", help="30 million parameters instead of 300")
    parser.add_argument("--load-only", action="store_true", help="no step, whose activations and gradients count too")
    parser.add_argument("--no-reference", action="store_true", help="GRPO without a KL penalty")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        one_rank(args.folder, args.rank, args.ranks[0], args.port, args)
        return 0
    from trinity_core.data.tiny import TinySize, make_model
    from trinity_core.run.preflight.model_shape import shape_of

    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        size = TinySize(512, 1536, 8, 8, 4) if args.tiny else TinySize(1024, 4096, 18, 16, 8, vocabulary=16_384)
        make_model(Path(folder, "model"), 0, size)
        shape = shape_of(str(Path(folder, "model")))
        assert shape is not None
        whole = shape.parameters * (STATES + REFERENCE * (not args.no_reference))
        print(f"{shape.parameters / 1e6:.0f} million parameters, {whole / 1e9:.2f} GB with the optimizer's state")
        for ranks in args.ranks:
            taken = measured(Path(folder), ranks, args)
            worst = max(worst, taken / whole)
            print(f"{ranks} ranks: {taken / 1e9:.2f} GB, {taken / whole:.2f} times that (aim: at most {LIMIT})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
