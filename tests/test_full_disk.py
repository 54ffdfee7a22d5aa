"""A disk that is full for a while: what is written waits for room, once announced, and is whole in the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import json, logging, sys, threading, time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from trinity_core.base import files
from trinity_core.exchange.checkpoints import convert
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.exchange.checkpoints.resume import latest_whole
from trinity_core.config import Config
from trinity_core.data.experience import Experience
from trinity_core.base.files import TEMPORARY
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import hold, is_held, release
from trinity_core.run.summary import write_summary
from trinity_core.exchange.store.archive import Archive
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync.memory import MemoryVersions
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.tracking.curve import LearningCurve
from trinity_core.exchange.tracking.forwarder import Forwarder
from trinity_core.exchange.tracking.metrics_file import MetricsFile, read_metrics, rewind
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.exchange.tracking.writers import Writer
from trinity_core.exchange.checkpoints.shard_writer import Piece, Segment, ShardWriter

disk, filler = Path(sys.argv[1]), Path(sys.argv[1]) / "filler"
waits = []
files.ROOM_PAUSE = 0.05


class Freeing(logging.Handler):
    """Makes room once somebody has waited for it for a moment."""

    def emit(self, record):
        if "there is no space left" in record.getMessage():
            waits.append(record.getMessage())
            threading.Timer(0.1, filler.unlink, [True]).start()


logging.getLogger("trinity_core").addHandler(Freeing())


def fill():
    """Leave no byte on the disk."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def full(what, write):
    """Write on a full disk, which has room as soon as the log says that the writer waits."""
    before = len(waits)
    fill()
    write()
    assert len(waits) == before + 1, (what, waits[before:])
    filler.unlink(missing_ok=True)


def rows(count):
    return [Experience(np.arange(2000), 2, np.ones(1998, bool), reward=1.0, group="g") for _ in range(count)]


store = ExperienceStore.open(disk / "store.db", "job")
store.put("explorer", 1, {"at": 1}, rows(4), 0)
full("store", lambda: store.put("explorer", 2, {"at": 2}, rows(40), 0))
full("another store", lambda: ExperienceStore.open(disk / "other.db", "job").close())
full("leave", lambda: store.leave("explorer"))
assert store.position("explorer").step == 2 and store.stats().ready == 44

metrics = MetricsFile(disk, "trainer")
metrics.write(1, {"loss": 1.0})
full("metrics", lambda: metrics.write(2, {f"number_{i}": 1.0 for i in range(1000)}))
assert [line.step for line in read_metrics(disk)] == [1, 2]

layout = JobLayout(disk)
folder = begin(layout, 1)
(folder / "actor").mkdir()
piece = Piece("actor/model_world_size_1_rank_0.pt")
segment = Segment()
segment.add(piece, "weights", torch.arange(50_000))
full("checkpoint", lambda: ShardWriter().write(str(folder), piece))
full("commit", lambda: commit(layout, 1, folder))
assert latest_whole(disk) == 1
assert torch.load(disk / "global_step_1/actor/model_world_size_1_rank_0.pt")["weights"].sum() == 1249975000

shared = MemoryVersions(disk / "records", spill=disk / "spill", shared=disk / "shared")
full("weights where shared memory is full too", lambda: shared.publish(1, [("weight", torch.arange(50_000.0))]))
shared.remove()
versions = open_versions("checkpoint", disk)
full("weights", lambda: versions.publish(1, [("weight", torch.arange(50_000.0))]))
assert dict(versions.load(1))["weight"][-1] == 49_999

sent = []
writer = Writer()
writer.artifact = lambda path, folder: sent.append(path.read_text())
save_rollouts(disk, "eval", 1, [SampledRollout("a question " * 40, "an answer " * 40)] * 16)
fill()
with suppress(OSError):
    Forwarder(disk, writer, "bench").poll()
filler.unlink()
Forwarder(disk, writer, "bench").poll()
assert [text.count("an answer") > 16 for text in sent] == [True]

archive = Archive(disk / "buffer" / "experiences.jsonl")
archive.path.parent.mkdir()
archive.extend(1, lambda step: rows(1))
full("archive", lambda: archive.extend(300, lambda step: rows(2)))
assert [json.loads(line)["step"] for line in archive.path.open()] == [1, *(n for n in range(2, 301) for _ in "ab")]

metrics.write(3, {"loss": 3.0})
full("metrics of a rewind", lambda: rewind(disk, 2))
assert [line.step for line in read_metrics(disk)] == [1, 2]
full("lock of a run", lambda: hold(disk, "training"))
assert (disk / ".training.lock").read_text().startswith("process ")
release(disk, "training")
assert not is_held(disk, "training")
config = Config(project="project", name="run", checkpoint_root_dir=str(disk))
config.job_dir.mkdir(parents=True)
full("summary", lambda: write_summary(config, {"words": "word " * 9999}))
full("curve", lambda: LearningCurve(disk).draw())

base, huggingface = Path(sys.argv[1]).parent / "base", disk / "huggingface"
base.mkdir()
huggingface.mkdir()
(base / "tokenizer.json").write_text("word " * 9999)
full("tokenizer", lambda: convert.copy_companions(base, huggingface))
assert (huggingface / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()
tensors = {"weight": torch.zeros(1000)}
full("model", lambda: convert.write_model(tensors, tensors.__getitem__, huggingface))
assert (huggingface / "model.safetensors").exists() and not [path for path in disk.rglob("*") if TEMPORARY in path.name]
'''


QUOTA = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define REFUSING(name, parameters, arguments) \
    ssize_t name parameters { \
        if (fd > 2 && access(getenv("QUOTA_USED_UP"), F_OK) == 0) { errno = EDQUOT; return -1; } \
        return ((ssize_t (*) parameters) dlsym(RTLD_NEXT, #name)) arguments; \
    }
REFUSING(write, (int fd, const void *bytes, size_t count), (fd, bytes, count))
REFUSING(pwrite, (int fd, const void *bytes, size_t count, off_t at), (fd, bytes, count, at))
REFUSING(pwrite64, (int fd, const void *bytes, size_t count, off64_t at), (fd, bytes, count, at))
"""
"""Refuses all writes to files, as a file system with a used-up quota does, while the file `QUOTA_USED_UP` is there."""

STORE_IN_A_QUOTA = """
import logging, os, sys, threading
from pathlib import Path

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.exchange.store.store import ExperienceStore

used_up, waits = Path(os.environ["QUOTA_USED_UP"]), []


class Freeing(logging.Handler):
    def emit(self, record):
        if "there is no space left" in record.getMessage():
            waits.append(record)
            used_up.unlink()


logging.getLogger("trinity_core").addHandler(Freeing())
row = Experience(np.arange(2000), 2, np.ones(1998, bool), reward=1.0, group="g")
store = ExperienceStore.open(used_up.parent / "store.db", "job")
used_up.touch()
store.put("explorer", 1, {"at": 1}, [row] * 40, 0)
assert len(waits) == 1 and store.stats().ready == 40
"""


def test_a_store_waits_for_room_in_a_quota(tmp_path: Path) -> None:
    """SQLite says of it what it says of a broken disk."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, which the test makes a library with")
    (tmp_path / "quota.c").write_text(QUOTA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "quota.so", "quota.c", "-ldl"], cwd=tmp_path, check=True)
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / "quota.so"), "QUOTA_USED_UP": str(tmp_path / "used_up")}
    command = [sys.executable, "-c", STORE_IN_A_QUOTA]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_writers_wait_for_room(tmp_path: Path) -> None:
    """On a small file system of its own, in a mount namespace: nothing of it is left."""
    if shutil.which("unshare") is None:
        pytest.skip("the program unshare is not there, by which the test gets a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    mount = f"mount -t tmpfs -o size=4m tmpfs {disk}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("this system does not let its users mount a file system in a namespace of their own")
    command = f"{mount} && exec {sys.executable} {tmp_path / 'program.py'} {disk}"
    done = subprocess.run([*inside, command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
