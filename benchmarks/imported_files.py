"""The project's files that any process imports between `trinity run` and the end of the first training step.

    python benchmarks/imported_files.py [key=value …]

Counted are files of `trinity_core`, `tasks`, `flows` and the plugins of the configuration, each once, by Python's audit
event for the execution of a module. Only the end of the step is waited for: the run is then stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from measured import BENCHMARK, ROOT, make_tiny, trinity

RECORDER = """
import os, sys

def record(event, arguments):
    if event == "exec" and arguments[0].co_name == "<module>" and arguments[0].co_filename.startswith(ROOT):
        os.write(FILE, (arguments[0].co_filename + "\\n").encode())

ROOT, FILE = os.environ["RECORDED_ROOT"], os.open(os.environ["RECORDED_FILES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(record)
"""
"""Imported, as `sitecustomize`, by each Python of the run."""
LIMIT_SECONDS = 300.0


def files_of_first_step(folder: Path, overrides: list[str]) -> set[str]:
    """Run the benchmarks' configuration to the end of the first step; return the files imported, relative to ours."""
    (folder / "sitecustomize.py").write_text(RECORDER)
    record, checkpoints = folder / "files", folder / "checkpoints"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")))),
        "TRINITY_CHECKPOINT_ROOT_DIR": str(checkpoints),
        "RECORDED_ROOT": f"{ROOT}{os.sep}",
        "RECORDED_FILES": str(record),
    }
    command = [trinity(), "run", "--config", BENCHMARK, "buffer.total_steps=3", *overrides]
    with (folder / "log").open("w+") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not first_step_ended(checkpoints):
                if run.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"no first step:\n{(folder / 'log').read_text()[-3000:]}")
                time.sleep(0.1)
            files = record.read_text().splitlines()
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait()
    return {path.removeprefix(f"{ROOT}{os.sep}") for path in files if f"{os.sep}.venv" not in path}


def first_step_ended(checkpoints: Path) -> bool:
    lines = [line for path in checkpoints.glob("**/metrics.jsonl") for line in path.read_text().splitlines()]
    return any(json.loads(line)["source"] == "trainer" for line in lines if line.endswith("}"))


def main() -> None:
    make_tiny()
    with tempfile.TemporaryDirectory() as folder:
        files = files_of_first_step(Path(folder), sys.argv[1:])
    rooms = Counter("/".join(Path(file).parts[:2]) for file in files)
    for file in sorted(files):
        print(file)
    print(", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    print(f"{len(files)} files (aim: at most 180)")


if __name__ == "__main__":
    main()
