"""Time from the command to the first training step, against the sum of what is unavoidable.

What any such run must do once is unavoidable: import prefect, ray and mlflow; import vLLM and build an engine; import
torch, transformers and DeepSpeed and load the model. Each is timed in a fresh process of its own, one after another.
The run does several of these at the same time, and more: it starts Prefect's server and Ray, opens the store, and
explores the first step. The claim: at most 1.3 times the sum. Nothing is compiled on either side, as in `configs/`:
compiling is a choice for long runs.

    python benchmarks/start_time.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured import BENCHMARK, ROOT, make_tiny, run_rft

PARTS = {
    "flow": "import prefect, ray, mlflow",
    "engine": """
import sys
import ray
from trinity_core.base.lazy import lean_imports
with lean_imports():
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    arguments = EngineArgs(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, disable_log_stats=True,
                           enable_chunked_prefill=False, max_num_batched_tokens=16384)
    LLMEngine.from_engine_args(arguments)
""",
    "trainer": """
import sys
import ray
from trinity_core.base.lazy import lean_imports
with lean_imports():
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
""",
}
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": str(os.cpu_count()),
}


def unavoidable(model: Path) -> dict[str, float]:
    """Seconds of each part, in a process of its own."""
    seconds = {}
    for part, program in PARTS.items():
        began = time.perf_counter()
        command = [sys.executable, "-c", program, str(model)]
        subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=True, capture_output=True)
        seconds[part] = time.perf_counter() - began
    return seconds


def first_step(*overrides: str) -> float:
    """Seconds from the command to the end of the first training step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        lines = run_rft(Path(folder), "buffer.total_steps=1", *overrides)
    return next(line["time"] for line in lines if line["source"] == "trainer") - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    model = make_tiny() / "model"
    one_of_each = ("explorer.rollout_model.engine_num=1", "trainer.worker_num=1")
    not_compiled = ("explorer.rollout_model.enforce_eager=true", "trainer.torch_compile=false")
    print(f"{BENCHMARK} with one engine and one trainer worker, not compiled")
    ratios = []
    for pair in range(1, args.pairs + 1):
        parts = unavoidable(model)
        told = " + ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
        mine = first_step(*one_of_each, *not_compiled)
        ratios.append(mine / sum(parts.values()))
        print(f"pair {pair}: first step after {mine:.1f} s / ({told}) s = {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} (claim: at most 1.30)")


if __name__ == "__main__":
    main()
