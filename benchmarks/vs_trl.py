"""Whole GRPO steps (rollout, reward, store, update, weight sync, metrics) against TRL's GRPOTrainer, pair by pair.

Same machine, model, prompts and lengths: 16 tasks x 8 rollouts, random weights, so that every answer has exactly the
largest length. TRL runs in its own environment, made from requirements/trl.txt if it is missing. The claim: the ratio
is at most 0.8, or 1 with an adapter, because each linear map of our engine then becomes three (`one_adapter.py`).

    python benchmarks/vs_trl.py --max-new-tokens 40 --pairs 3
    python benchmarks/vs_trl.py --lora                           # an adapter on either side
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measured import BUILD, ROOT, cycles, make_tiny, run_rft


def peer_python() -> str:
    """The Python of TRL's environment."""
    python = BUILD / "trl" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", "requirements/trl.txt"]
        subprocess.run(pip, check=True, cwd=ROOT)
    return str(python)


def peer_step(args: argparse.Namespace) -> float:
    """Median seconds of a step of TRL."""
    tiny = make_tiny()
    command = [peer_python(), "benchmarks/peers/trl_grpo.py", str(tiny / "model"), str(tiny / "data" / "train.jsonl")]
    command += ["--steps", str(args.steps), "--max-new-tokens", str(args.max_new_tokens)]
    command += ["--lora"] * args.lora
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  TRL    {json.dumps(report)}", flush=True)
    return report["step_seconds"]


def our_step(args: argparse.Namespace) -> float:
    """Median seconds of a step of ours."""
    overrides = [f"model.max_response_tokens={args.max_new_tokens}", f"buffer.total_steps={args.steps}"]
    overrides += ["model.lora_configs=[{lora_rank: 16, lora_alpha: 32}]"] * args.lora
    with tempfile.TemporaryDirectory() as folder:
        lines = run_rft(Path(folder), *overrides)
    seconds = list(cycles(lines).values())
    lengths = [m["metrics"].get("response_length/mean") for m in lines if m["source"] == "explorer"]
    report = {"step_seconds": statistics.median(seconds), "steps": len(seconds), "mean_response_tokens": lengths[-1]}
    print(f"  Trinity {json.dumps(report)}", flush=True)
    return report["step_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 16 on all linear layers")
    args = parser.parse_args()
    claim = 1.0 if args.lora else 0.8
    ratios = []
    for pair in range(1, args.pairs + 1):
        ratios.append(our_step(args) / peer_step(args))
        print(f"pair {pair}: step of Trinity Flows / step of TRL = {ratios[-1]:.2f}", flush=True)
    print(
        f"median ratio {statistics.median(ratios):.2f} (claim: at most {claim:.2f}), {args.max_new_tokens} new tokens"
    )


if __name__ == "__main__":
    main()
