"""How the time of a quickstart RFT step divides, and the share that is overhead.

Generate, reward, store, train, sync weights and save are the work of a step (the weight check, part of weight sync,
should be below 3 %); everything else (waiting for one another, messages between processes, metrics, bookkeeping) is
overhead. The aim: under 5 % of a step.

    python benchmarks/step_time.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from measured import by_source, cycles, run_rft

EXPLORER = {
    "generate": "generate",
    "reward": "reward",
    "store": "store",
    "weight sync": "weight_sync",
    "weight check": "weight_check",
}
TRAINER = {
    "train": ("lay_out", "log_probs", "values", "advantages", "update_critic", "update_actor"),
    "publish": ("publish",),
    "save": ("save",),
    "draw": ("draw",),
}


def divide(lines: list[dict]) -> dict[str, float]:
    """Median seconds of each part of a step; `whole` is the time from one step's end to the next's."""
    explorer, trainer, whole = by_source(lines, "explorer"), by_source(lines, "trainer"), cycles(lines)
    rows = []
    for step in sorted(whole.keys() & explorer.keys()):
        mine, theirs = explorer[step]["metrics"], trainer[step]["metrics"]
        row = {part: mine.get(f"timing_s/{key}", 0.0) for part, key in EXPLORER.items()}
        row |= {part: sum(theirs.get(f"timing_s/{key}", 0.0) for key in keys) for part, keys in TRAINER.items()}
        rows.append(row | {"whole": whole[step]})
    return {part: statistics.median(row[part] for row in rows) for part in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = run_rft(
            Path(folder), "buffer.batch_size=32", "explorer.runner_per_model=32", f"buffer.total_steps={args.steps}"
        )
    parts = divide(lines)
    whole, check = parts.pop("whole"), parts.pop("weight check")
    for part, seconds in parts.items():
        print(f"{part:16}{seconds * 1e3:8.1f} ms {seconds / whole:7.1%}")
    print(f"{'  weight check':16}{check * 1e3:8.1f} ms {check / whole:7.1%}  (aim: under 3 %)")
    rest = whole - sum(parts.values())
    print(f"{'everything else':16}{rest * 1e3:8.1f} ms {rest / whole:7.1%}  (aim: under 5 %)")
    print(f"{'whole step':16}{whole * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
