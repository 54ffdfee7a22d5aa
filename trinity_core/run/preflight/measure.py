"""`trinity plan --measure`: the pace of each stage, measured by a trial in a separate process.

python -m trinity_core.run.preflight.measure --config FILE --stage NAME --folder DIR [key=value …]

runs the trial of one stage below DIR.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psutil

from trinity_core.base.children import start_detached
from trinity_core.base.errors import TrinityError
from trinity_core.base.processes import stop
from trinity_core.base.program import ending_on_sigterm, run_app
from trinity_core.base.waits import poll
from trinity_core.config import Config, stages
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import run_request
from trinity_core.run.preflight.pace_cache import (
    LEFT_OUT,
    STEPS,
    Pace,
    cache_file,
    cached_pace,
    hindrance,
    keep,
    make_folder,
    pace_of,
    trial_of,
)
from trinity_core.run.stage import StageRequest, pick_stage, stage_names

MOST_SECONDS = 1800.0
"""Time for a stage's trial; steps of more than five minutes are better observed in the run itself."""
LOOK_SECONDS = 0.5
GRACE_SECONDS = 30.0
LAST_LINES = 8


def measure(file: Path, overrides: Sequence[str], config: Config, say: Callable[[str], None]) -> None:
    """Measure the stages of a checked configuration, given by `file` and `overrides`, that are not measured yet.

    Raises TrinityError if a trial fails or takes longer than `MOST_SECONDS`, or if paces cannot be saved.
    """
    for name, stage in zip(stage_names(config), stages(config), strict=True):
        if why := hindrance(stage):
            say(f"{stage.name} is not measured: {why}.")
        elif pace := cached_pace(stage):
            say(f"{stage.name} was measured {pace.measured}; to measure it again, remove {cache_file(stage)}.")
        else:
            make_folder()  # fails early if the measurement could not be saved
            keep(stage, measured_pace(file, overrides, name, stage, say))


def measured_pace(file: Path, overrides: Sequence[str], name: str, stage: Config, say: Callable[[str], None]) -> Pace:
    """Measure a stage's pace: run `STEPS` steps in a separate process, in a temporary folder."""
    say(f"Measuring {stage.name}: {STEPS} steps on this machine. Processes start and load the model …")
    with tempfile.TemporaryDirectory(prefix="trinity-plan-") as folder_name:
        folder = Path(folder_name)
        job_dir = trial_of(stage, folder).job_dir
        command = [
            sys.executable, "-m", "trinity_core.run.preflight.measure",
            "--config", str(file), "--stage", name, "--folder", folder_name, *overrides,
        ]  # fmt: skip
        began = time.time()
        with _running(command, folder / "trial.log", say) as trial:
            _watch(trial, job_dir, stage.name, say)
        lines = read_metrics(job_dir)
        if trial.returncode:
            raise TrinityError(f"{stage.name} could not be measured, its trial ended with:\n{_end(folder)}")
    try:
        return pace_of(lines, began, LEFT_OUT, f"{datetime.now():%Y-%m-%d %H:%M}")
    except ValueError as error:
        raise TrinityError(f"{stage.name} could not be measured: {error}. Does its data last for {STEPS}?") from None


@contextmanager
def _running(command: Sequence[str], log: Path, say: Callable[[str], None]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output in `log`; it is ended, with all its descendants, however this context ends."""
    process = start_detached(command, log)
    try:
        yield process
    finally:
        if process.poll() is None:
            say(f"Ending the trial, within {GRACE_SECONDS:g} s …")
            stop(psutil.Process(process.pid), GRACE_SECONDS)
            process.wait(GRACE_SECONDS)


def _watch(trial: subprocess.Popen[bytes], job_dir: Path, name: str, say: Callable[[str], None]) -> None:
    """Report each step of the trial until it ends. Raises TrinityError if that takes too long."""
    done = 0
    for _ in poll(MOST_SECONDS, pause=LOOK_SECONDS):
        if trial.poll() is not None:
            return
        steps = max((line.step for line in read_metrics(job_dir) if line.source == "trainer"), default=0)
        if steps > done:
            done = steps
            say(f"Measuring {name}: step {done} of {STEPS}")
    raise TrinityError(
        f"{name} could not be measured: after {MOST_SECONDS / 60:g} minutes it has done {done} of {STEPS} steps. "
        "Measure it with a smaller batch_size or max_response_tokens, given as key=value.",
        key="buffer.batch_size",
    )


def _end(folder: Path) -> str:
    return os.linesep.join((folder / "trial.log").read_text(errors="replace").strip().splitlines()[-LAST_LINES:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--stage", default="")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    config, _ = pick_stage(load_checked(options.config, options.overrides), options.stage)
    run_request(StageRequest(trial_of(config, options.folder)))


if __name__ == "__main__":
    with ending_on_sigterm():
        run_app(main)
