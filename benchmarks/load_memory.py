"""Peak host memory of several ranks that load a model and take a step, against one model with its optimizer state.

Each rank reports the peak of its resident memory beyond what it had with torch, DeepSpeed and transformers imported;
malloc is set as in a run. Under ZeRO 3 everything is divided among the ranks, and only one of them reads the models:
together at most 1.3 times what one model with its state takes. On top of these 16 bytes a parameter count the reference
model (4), DeepSpeed's partition of the gradients (4, from the start) and the file's pages that one rank maps.

    python benchmarks/load_memory.py [--ranks 2 4] [--tiny]
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from training_part import rollouts

from trinity_core.runtime.actors import KEPT_MEMORY, KERNELS

LIMIT = 1.3
STATE = 12
"""Bytes of a parameter's optimizer state under ZeRO: float32 weights (DeepSpeed 0.19.8 copies those of a float32 model
too) and two moments."""


def one_rank(folder: Path, rank: int, ranks: int, port: int, load_only: bool) -> int:
    """Bytes that loading, and a step unless `load_only`, took of memory at the peak."""
    from trinity_core.config import config_from_dict
    from trinity_core.training.distributed import join
    from trinity_core.training.learner import Learner

    group = join(rank, ranks, "127.0.0.1", port, use_gpu=False)
    config = config_from_dict(
        {
            "name": "run", "mode": "train", "checkpoint_root_dir": str(folder),
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 1e-5}},
            "model": {"model_path": str(folder / "model"), "max_prompt_tokens": 64, "max_response_tokens": 64},
            "cluster": {"gpu_per_node": 0},
            "trainer": {"zero_stage": 3, "max_token_len_per_gpu": 128},
            "buffer": {"batch_size": 16, "total_steps": 1000, "trainer_input": {"experience_buffer": {"name": "b"}}},
        }
    )  # fmt: skip
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    before = psutil.Process().memory_info().rss
    learner = Learner(config, 1000, group)
    if not load_only:
        learner.step(rollouts(learner.model_config.vocab_size)[: 2 * ranks], 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def measured(folder: Path, ranks: int, load_only: bool) -> int:
    """The peaks of so many ranks together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""} | KEPT_MEMORY | KERNELS
    command = [sys.executable, __file__, "--folder", str(folder), "--port", str(port), "--ranks", str(ranks)]
    command += ["--load-only"] * load_only
    with tempfile.TemporaryDirectory() as logs:
        files = [Path(logs, str(rank)) for rank in range(ranks)]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=file.open("w"), env=environment)
            for rank, file in enumerate(files)
        ]
        if any(codes := [process.wait() for process in started]):
            sys.exit(f"exit codes of the ranks: {codes}")
        return sum(int(file.read_text().splitlines()[-1]) for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tiny", action="store_true", help="30 million parameters instead of 300")
    parser.add_argument("--load-only", action="store_true", help="no step, whose activations and gradients count too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(one_rank(args.folder, args.rank, args.ranks[0], args.port, args.load_only))
        return 0
    from trinity_core.data.tiny import TinySize, make_model
    from trinity_core.runtime.preflight.model_shape import shape_of

    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        size = TinySize(512, 1536, 8, 8, 4) if args.tiny else TinySize(1024, 4096, 18, 16, 8, vocabulary=16_384)
        make_model(Path(folder, "model"), 0, size)
        shape = shape_of(str(Path(folder, "model")))
        assert shape is not None
        whole = shape.parameters * (4 + STATE)
        print(f"{shape.parameters / 1e6:.0f} million parameters, {whole / 1e9:.2f} GB with the optimizer's state")
        for ranks in args.ranks:
            taken = measured(Path(folder), ranks, args.load_only)
            worst = max(worst, taken / whole)
            print(f"{ranks} ranks: {taken / 1e9:.2f} GB, {taken / whole:.2f} times that (aim: at most {LIMIT})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
