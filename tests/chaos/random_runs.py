"""Random configurations, really run: each is refused with a key and a line, or runs and keeps every promise.

    python tests/chaos/random_runs.py --count 20 [--first 100]     # one after another
    python tests/chaos/random_runs.py --seed 7 --keep runs         # one again; its folder stays
    python tests/chaos/random_runs.py --count 3000 --only-checks   # what is refused and why, without running anything

`random_settings.py` draws them. A run takes a few steps of the small model. In a third of them a random process is
killed at a random moment, and what has failed is started again. Then these must hold: exit code 0, the configured
number of steps, finite metrics, a clean audit, complete checkpoints, weights checked in the engines, the same rewards
in archive and metrics, memory within the plan, and no process or file left behind. A synchronous run that was killed
must end with the same weights as the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil
import yaml
from comparing import first_difference
from random_settings import PLUGIN, Draw, draw

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import read_json
from trinity_core.base.layout import JobLayout
from trinity_core.base.program import ending_on_sigterm
from trinity_core.config import Config, stages
from trinity_core.config.findings import ConfigError
from trinity_core.data.tiny import make_model, make_pairs, make_problems, write_jsonl
from trinity_core.exchange.checkpoints.huggingface import tensors_sha256
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.sync.memory import memory_root
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics
from trinity_core.hosting.placement import Machine
from trinity_core.results.audit import audit_runs
from trinity_core.run.configuration import load_checked
from trinity_core.run.preflight.needs import ENGINE, TRAINER, total
from trinity_core.run.preflight.stage_plan import StagePlan, plan_json, plans_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measured import ROOT
from peaks import Peak, Peaks
from soak import MARK, processes

LIMIT = 420.0
"""Seconds of a run."""
MOST_STARTS = 4
"""Of one command after a kill."""
REFUSED = 2
"""Exit code."""
HONEST = ("nothing is left to train on", "no experience came", "prompt that is too long")
"""Errors about the data that a draw has: nothing is wrong with the run."""
OTHERS = ("ray", "vllm_dist_", "torchinductor_")
"""Beginnings of names that Ray, vLLM and torch leave in the folder for temporary files."""
TITLES = {ENGINE: "ray::InProcessEngine", TRAINER: "ray::TrainerActor"}
RATIO = (0.6, 1.7)
"""Memory by the plan to memory measured."""


class Run:
    """One draw in a folder of its own. `faults` says what is wrong with it."""

    def __init__(self, folder: Path, drawn: Draw) -> None:
        self.folder, self.drawn = folder, drawn
        self.mark, self.killed = uuid4().hex, ""
        self.faults: list[str] = []
        self.peaks: list[Peaks] = []
        (folder / "tmp").mkdir(parents=True)
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(drawn.tree, sort_keys=False))

    @property
    def log(self) -> str:
        """What the commands printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def checked(self) -> list[Config]:
        """The configuration of each command. Raises ConfigError."""
        return [load_checked(self.file, overrides) for overrides in self.drawn.parts]

    def go(self, kills: bool = True) -> list[int]:
        """Start the commands, and again those that fail after the kill; their exit codes."""
        starts, began = Counter(range(len(self.drawn.parts))), time.monotonic()
        running = {part: self._start(part) for part in starts}
        codes: dict[int, int] = {}
        while running and time.monotonic() < began + LIMIT:
            time.sleep(0.2)
            if kills and not self.killed and self._is_due(began):
                self._kill()
            for part, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                codes[part] = code
                del running[part]
                if code not in (0, REFUSED) and self.killed and starts[part] < MOST_STARTS:
                    starts[part] += 1
                    running[part] = self._start(part)
        for part, process in running.items():
            self.faults.append(f"{' '.join(self.drawn.parts[part])} hangs")
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            codes[part] = -1
        return [code for _, code in sorted(codes.items())]

    def _start(self, part: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trinity_core.run", "--config", str(self.file)]
        environment = os.environ | {MARK: self.mark, "TMPDIR": str(self.folder / "tmp")}
        with (self.folder / f"part{part}.log").open("ab") as log:
            command += self.drawn.parts[part]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.peaks.append(Peaks(process.pid))
        return process

    def _is_due(self, began: float) -> bool:
        after = self.drawn.kill_after
        if after is None or after >= 0:
            return after is not None and time.monotonic() > began + after
        metrics = [*self.folder.glob("checkpoints/random/*/monitor/metrics.jsonl")]
        return any(time.time() - path.stat().st_mtime < -after and '"trainer"' in path.read_text() for path in metrics)

    def _kill(self) -> None:
        found = sorted(processes(self.mark), key=lambda process: process.pid)
        with suppress(psutil.Error, IndexError):
            victim = found[int(self.drawn.victim * len(found))]
            self.killed = " ".join(victim.cmdline())[:60] or victim.name()
            victim.kill()

    # ---- afterwards ----

    def check(self, configs: Sequence[Config], codes: Sequence[int]) -> None:
        """Add what is wrong with a run that has ended."""
        if any(codes):
            self.faults.append(f"ended with {codes}: {self.log[-1500:]}")
            return
        if not self.killed and "Traceback" in self.log:
            self.faults.append(f"traceback: {self.log[self.log.index('Traceback') :][:1500]}")
        peaks = [peak for watched in self.peaks for peak in watched.end()]
        for config in configs:
            plans = plans_of(config, Machine(os.cpu_count() or 1, 0))
            json.loads(plan_json(plans))
            for stage, plan in zip(stages(config), plans, strict=True):
                self.faults += [f"{stage.name}: {fault}" for fault in faults_of(stage, plan)]
            self.faults += wrong_memory(peaks, plans[-1])
        self.faults += self.left_behind()

    def left_behind(self) -> Iterator[str]:
        """Processes and files."""
        until = time.monotonic() + 30
        while (left := [*processes(self.mark)]) and time.monotonic() < until:
            time.sleep(0.5)
        for process in left:
            with suppress(psutil.Error):
                yield f"process left: {' '.join(process.cmdline())[:200]}"
                process.kill()
        files = [path.name for path in (self.folder / "tmp").iterdir() if not path.name.startswith(OTHERS)]
        if files:
            yield f"files left: {files[:5]}"
        for job in self.folder.glob("checkpoints/random/*"):
            if memory_root(job).exists():
                yield f"shared memory left: {memory_root(job)}"


def faults_of(stage: Config, plan: StagePlan) -> Iterator[str]:
    """What a run's folder shows to be wrong."""
    jobs = sorted(stage.job_dir.parent.glob(f"{stage.job_dir.name}*"), key=lambda path: path.stat().st_mtime)
    job = stage.job_dir if stage.continue_from_checkpoint or not jobs else jobs[-1]
    lines = read_metrics(job)
    for line in lines:
        if bad := [name for name, value in line.metrics.items() if not math.isfinite(value)]:
            yield f"step {line.step} of {line.source}: {bad[:5]} are not finite"
    trained = [line.step for line in lines if line.source == "trainer"]
    if stage.mode in ("both", "train"):
        if trained != list(range(1, len(trained) + 1)):
            yield f"train steps {trained}"
        if plan.total_steps != len(trained):
            yield f"{len(trained)} train steps, planned {plan.total_steps} ({plan.steps_why})"
        whole, keep = whole_steps(job), stage.trainer.max_checkpoints_to_keep
        if not whole or max(whole) != len(trained) or (keep and len(whole) > keep + 1):
            yield f"checkpoints {whole}"
    if stage.mode == "both":
        versions = {line.metrics["version"] for line in lines if line.source == "explorer"}
        checks = [line for line in lines if "weight_sync/check_gap" in line.metrics]
        if len(versions) > 1 and not checks:
            yield f"versions {sorted(versions)} without a weight check"
    if stage.mode in ("both", "explore") and not stage.is_supervised:
        for audit in audit_runs(job).values():
            ended = audit.trained + audit.dropped + audit.failed + audit.pending
            if not audit.clean or ended != audit.tasks_drawn:
                yield f"audit: {audit}"
    if stage.mode in ("both", "train") and not stage.is_supervised:
        yield from wrong_rewards(job, lines)


def wrong_rewards(job: Path, lines: Sequence[MetricLine]) -> Iterator[str]:
    """Rewards in the archive that are not those of the metrics."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for text in JobLayout(job).archive.read_text().splitlines():
        row = json.loads(text)
        if row["reward"] is not None and not row["is_expert"]:
            rewards[row["step"]].append(row["reward"])
    for line in lines:
        if line.source == "trainer" and "reward/max" in line.metrics:
            expected = max(rewards[line.step], default=math.nan)
            if not math.isclose(line.metrics["reward/max"], expected, abs_tol=1e-5):
                yield f"step {line.step}: reward/max {line.metrics['reward/max']}, by the archive {expected}"


def wrong_memory(peaks: Sequence[Peak], plan: StagePlan) -> Iterator[str]:
    """Processes whose memory the plan estimates wrongly."""
    for process in plan.processes:
        measured = [peak.bytes for peak in peaks if peak.title.startswith(TITLES.get(process.kind, "-"))]
        planned = total(process.memory or ())
        if measured and not RATIO[0] < (ratio := planned / max(measured)) < RATIO[1]:
            yield f"memory of {process.kind}: planned {planned >> 20} MiB, ratio {ratio:.2f}"


def one_seed(seed: int, root: Path, only_checks: bool = False) -> tuple[str, list[str]]:
    """(what became of the draw, its faults)."""
    began = time.monotonic()
    run = Run(root / f"s{seed}", draw(seed, root / f"s{seed}", root / "tiny"))
    try:
        configs = run.checked()
    except ConfigError as error:
        wrong = [f"without a place: {one}" for one in error.problems if not (one.key and one.line)]
        return "refused: " + "; ".join(f"{one.key} {one.message}" for one in error.problems), wrong
    if only_checks:
        json.loads(plan_json(plans_of(configs[0], Machine(os.cpu_count() or 1, 0))))
        return "accepted", []
    codes = run.go()
    if REFUSED in codes or (any(codes) and any(text in run.log for text in HONEST)):
        return f"told: {run.log[-600:]}", list(run.left_behind())
    run.check(configs, codes)
    if run.killed and configs[0].is_synchronous and not any(codes):
        run.faults += unequal(run, root / f"s{seed}u", configs[0])
    return f"ran {time.monotonic() - began:.0f} s" + (f", killed {run.killed}" if run.killed else ""), run.faults


def unequal(run: Run, folder: Path, config: Config) -> Iterator[str]:
    """How a run that was killed differs from the same run undisturbed."""
    tree = run.drawn.tree | {"checkpoint_root_dir": f"{folder}/checkpoints"}
    other = Run(folder, Draw(tree, run.drawn.parts, None, 0))
    if any(codes := other.go()):
        yield f"the undisturbed run ended with {codes}: {other.log[-1500:]}"
        return
    jobs = [stages(one.checked()[0])[-1].job_dir for one in (other, run)]
    summaries = [read_json(job / "summary.json") or {} for job in jobs]
    if len({tensors_sha256(Path(summary["hf_dir"])) for summary in summaries}) > 1:
        yield first_difference(*jobs, steps=summaries[0]["step"])


def make_data(folder: Path) -> None:
    """A small model, a plugin, and small splits, of which `few` is shorter than an epoch of most runs."""
    (folder / "plugins").mkdir(parents=True)
    (folder / "plugins/own.py").write_text(PLUGIN)
    make_model(folder / "model", 1)
    splits = make_problems(3, 40, 5, 30)
    for split, rows in {**splits, "few": splits["train"][:7], "dpo": make_pairs(3, 20, [])}.items():
        write_jsonl(folder / f"data/{split}.jsonl", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, action="append", help="run these only")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--only-checks", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; those with faults stay in it")
    args = parser.parse_args()
    root = (args.keep or Path(tempfile.mkdtemp(prefix="random"))).absolute()
    counts: Counter[str] = Counter()
    if not (root / "tiny").exists():
        make_data(root / "tiny")
    for seed in args.seed or range(args.first, args.first + args.count):
        shutil.rmtree(root / f"s{seed}", ignore_errors=True)
        shutil.rmtree(root / f"s{seed}u", ignore_errors=True)
        try:
            outcome, faults = one_seed(seed, root, args.only_checks)
        except (TrinityError, OSError, KeyError, ValueError) as error:  # a check that fails itself is a finding too
            outcome, faults = "broke", [f"{type(error).__name__}: {error}"]
        counts[outcome.split()[0].rstrip(":,")] += 1
        counts["faulty"] += bool(faults)
        print(f"{seed}: {outcome}", *faults, sep="\n    ", flush=True)
        if not faults and not args.seed:
            shutil.rmtree(root / f"s{seed}")
            shutil.rmtree(root / f"s{seed}u", ignore_errors=True)
    print(json.dumps(counts))
    if not args.keep:
        shutil.rmtree(root)
    sys.exit(bool(counts["faulty"]))


if __name__ == "__main__":
    with ending_on_sigterm():
        main()
