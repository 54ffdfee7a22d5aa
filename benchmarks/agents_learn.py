"""The small model learns the same word problems three ways: by `math_workflow`, through the `openai` client, and
through a command that gets only the address of the API.

    python benchmarks/agents_learn.py [--steps 30] [--tasks 8] [--only client command]

Prints one line for each: mean reward of the first and the last fifth of the steps, median seconds per step, and the
counts of `trinity audit`. The exit code is 1 if a reward did not rise or the audit found a problem.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from learns import ANEW, FOLDER, REWARD, warm_model
from measured import ROOT, newest, run, trinity

from trinity_core.run.audit import audit_runs

QUICK_START = "configs/quickstart/quickstart.yaml"
TRAIN = "buffer.explorer_input.taskset"
API = "explorer.rollout_model.enable_openai_api=true"
AGENTS = Path(__file__).parent / "agents"
COMMAND = f'["{sys.executable}", "-I", "-S", "{AGENTS / "by_command.py"}"]'
WAYS = {
    "math": (),
    "client": (API, f"plugin_dir={AGENTS}", f"{TRAIN}.default_workflow_type=by_client"),
    "command": (
        API,
        f"{TRAIN}.default_workflow_type=command_workflow",
        f"{TRAIN}.default_reward_fn_type=math_reward",
        f"{TRAIN}.workflow_args={{command: {COMMAND}, time_limit: 120}}",
    ),
}


def main() -> None:
    """Run the chosen ways and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=8)
    args = parser.parse_args()
    if not (FOLDER / "data" / "train.jsonl").exists():
        subprocess.run([trinity(), "tiny", "--out", str(FOLDER), "--seed", "1"], check=True, cwd=ROOT)
    model = warm_model()
    failed = [way for way in args.only if not learns(way, model, args)]
    sys.exit(f"did not learn: {', '.join(failed)}" if failed else 0)


def learns(way: str, model: Path, args: argparse.Namespace) -> bool:
    """Run one way and print its line."""
    sizes = (f"buffer.total_steps={args.steps}", f"buffer.batch_size={args.tasks}")
    overrides = (f"name=by_{way}", f"model.model_path={model}", "stages=[]", *sizes, *ANEW, *WAYS[way])
    lines = run(QUICK_START, FOLDER / "checkpoints", *overrides, TRINITY_TASKSET_PATH=str(FOLDER / "data"))
    trained = [line for line in lines if line["source"] == "trainer" and REWARD in line["metrics"]]
    rewards = [line["metrics"][REWARD] for line in trained]
    fifth = max(1, len(rewards) // 5)
    start, end = statistics.mean(rewards[:fifth]), statistics.mean(rewards[-fifth:])
    seconds = statistics.median(after["time"] - before["time"] for before, after in pairwise(trained))
    [audit] = audit_runs(newest(FOLDER / "checkpoints", f"*/by_{way}*")).values()
    print(
        f"{way:8} {REWARD} {start:.3f} -> {end:.3f} in {len(rewards)} steps of {seconds:.2f} s; "
        f"audit {'clean' if audit.clean else audit.problems[:3]}, {audit.sampled_tokens} tokens sampled in sessions",
        flush=True,
    )
    return end > start and audit.clean


if __name__ == "__main__":
    main()
