"""Random mistakes in our recipes and the guides' YAML: how each is reported, and how soon.

    python benchmarks/mutations.py                  # 10,000
    python benchmarks/mutations.py --count 500 --seed 7 --show 20

Prints how many were accepted and refused, the slowest, and every bad report: a traceback, a problem without a key or
with the wrong one, a wrong suggestion, more than 2 s. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import chdir
from pathlib import Path

from mutating import Mistake, Verdict, mistake, recipes, surroundings, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mistakes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="bad answers that are printed in full")
    args = parser.parse_args()
    started = time.perf_counter()
    verdicts = campaign(args.count, args.seed)
    seconds = sorted((answer.seconds for _, _, answer in verdicts), reverse=True)
    refused = sum(1 for _, _, answer in verdicts if answer.problems)
    bad = [entry for entry in verdicts if entry[2].fault]
    print(f"{args.count} mistakes in {time.perf_counter() - started:.0f} s: {refused} refused, ", end="")
    print(f"{args.count - refused - len(bad)} accepted, {len(bad)} bad answers")
    print(
        f"slowest {', '.join(f'{number:.2f}' for number in seconds[:5])} s; median {seconds[len(seconds) // 2]:.3f} s"
    )
    for kind, count in Counter(answer.fault.partition(":")[0] for _, _, answer in bad).most_common():
        print(f"  {count:5} {kind}")
    for name, made, answer in bad[: args.show]:
        print(f"\n{name}: {answer.fault}\n{_shown(made)}")
    sys.exit(bool(bad))


def campaign(count: int, seed: int) -> list[tuple[str, Mistake, Verdict]]:
    """So many mistakes, each in a recipe, with what was said of it."""
    dice, texts = random.Random(seed), list(recipes().items())
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.environ.update(surroundings(Path(folder)))
        results = []
        for _ in range(count):
            name, text = dice.choice(texts)
            made = mistake(text, random.Random(dice.random()))
            results.append((name, made, verdict(made, Path(folder))))
        return results


def _shown(made: Mistake) -> str:
    text = made.text if len(made.text) < 4000 else made.text[:4000] + "…"
    overrides = [f"  override {override!r}" for override in made.overrides]
    return "\n".join([*overrides, *(f"  | {line}" for line in text.splitlines())])


if __name__ == "__main__":
    main()
