"""Kill the processes of small runs, and report whether anything was lost or changed.

    python benchmarks/chaos.py --kills 200                # many kills, several a run, of everything
    python benchmarks/chaos.py --equal 50 --busy half     # one kill per run; each must end with the undisturbed weights

`--seed` makes every number reproducible, except for the exact moments of the kills. A run that ends with other weights
is compared with the undisturbed one, and the first token or number that differs is printed; its folder is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measured import BUILD, ROOT, make_tiny

sys.path.insert(0, str(ROOT / "tests" / "chaos"))
from comparing import first_difference
from killing import VICTIMS, ChaosRun, Kill, draw_kills

KILLS_A_RUN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help=f"kills of a campaign, {KILLS_A_RUN} a run")
    parser.add_argument("--equal", type=int, default=0, metavar="RUNS", help="runs with one kill each")
    parser.add_argument("--what", default="", help=f"victims, of {','.join(VICTIMS)}; for --equal, flow by default")
    parser.add_argument(
        "--through",
        choices=["page", "flow"],
        default="page",
        help="start runs by `python -m trinity_core.run`, or as a Prefect flow with a server of its own, a victim too",
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", nargs="?", const="all", default="none", choices=["none", "half", "all"],
                        help="runs beside which another process keeps a core busy")  # fmt: skip
    parser.add_argument("--out", type=Path, default=BUILD, help="the runs go to chaos/ in it, which is emptied")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run and the busy process end with this one
    out = args.out / "chaos"
    what = tuple(args.what.split(",")) if args.what else ("flow",) if args.equal else VICTIMS
    if args.through == "flow" and not args.what and args.kills:
        what += ("server",)
    runs = args.equal or max(1, args.kills // KILLS_A_RUN)
    kills_a_run = 1 if args.equal else KILLS_A_RUN
    shutil.rmtree(out, ignore_errors=True)
    with chaos_run(out / "undisturbed", args.steps, args.through) as reference:
        reference.go()
    print(f"undisturbed: {reference.digest()[:16]}", flush=True)
    counts: Counter[str] = Counter()
    for number in range(1, runs + 1):
        rng = random.Random(f"{args.seed}/{number}")
        kills = draw_kills(rng, args.steps, rng.choices(what, k=kills_a_run))
        busy = args.busy == "all" or (args.busy == "half" and number % 2 == 0)
        faults = one_run(out / f"run_{number}", reference, kills, busy, counts)
        counts["runs"] += 1
        counts["good runs"] += not faults
        for fault in faults:
            print(f"    {fault}", flush=True)
        if not faults:
            shutil.rmtree(out / f"run_{number}")
    print(json.dumps(counts))
    sys.exit(counts["good runs"] != counts["runs"])


def one_run(folder: Path, reference: ChaosRun, kills: tuple[Kill, ...], busy: bool, counts: Counter[str]) -> list[str]:
    """Run with these kills; what is wrong afterwards."""
    began = time.monotonic()
    with chaos_run(folder, reference.steps, reference.through) as run, busy_process(busy):
        try:
            run.go(kills)
        except AssertionError as error:
            return [str(error)]
    counts.update(f"killed {what}" for killed in run.killed for what in killed.kill.what.split("+"))
    faults = run.faults()
    equal = run.digest() == reference.digest()
    if not equal:
        faults.append(first_difference(reference.job, run.job, run.steps))
    print(
        f"{folder.name}: {'equal' if equal else 'UNEQUAL'}, {time.monotonic() - began:.0f} s, {run.attempts} attempts"
        f"{', busy' if busy else ''}; killed {'; '.join(str(killed.kill) for killed in run.killed) or 'nothing'}",
        flush=True,
    )
    return faults


def chaos_run(folder: Path, steps: int, through: str) -> ChaosRun:
    """A run of the benchmarks' model below `folder`."""
    tiny = make_tiny()
    return ChaosRun(folder, tiny / "model", tiny / "data", steps, through=through)


@contextmanager
def busy_process(wanted: bool) -> Iterator[None]:
    """Within this context another process keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
