"""Checkpoints appear whole, damaged ones are passed over, old ones go."""

import errno
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
import torch
from forkserver import PROCESSES
from raising import raising

from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.files import clear_errors, remove_leftovers, temporary_sibling, write_atomically
from trinity_core.base.layout import ABANDONED, MANIFEST, JobLayout, shard_name
from trinity_core.exchange.checkpoints.commit import begin, commit, damage, remove_old
from trinity_core.exchange.checkpoints.resume import (
    abandon_after,
    claim,
    fresh_folder,
    fresh_name,
    latest_whole,
    newest_run,
    whole_steps,
)
from trinity_core.exchange.sync.checkpoint import CheckpointVersions


@pytest.fixture
def layout(tmp_path):
    return JobLayout(tmp_path / "project" / "name").create()


def save(layout, step, text="weights", **kwargs):
    folder = begin(layout, step)
    (folder / "actor").mkdir()
    (folder / "actor" / shard_name("model", 1, 0)).write_text(text * 100)
    (folder / "state.json").write_text("{}")
    return commit(layout, step, folder, **kwargs)


def test_a_committed_checkpoint_is_whole_and_latest(layout):
    assert latest_whole(layout.root) is None
    folder = save(layout, 3)
    assert folder == layout.step(3)
    assert damage(folder) is None
    assert layout.latest_checkpoint.read_text() == "3\n"
    assert latest_whole(layout.root) == 3
    assert not list(layout.root.glob(".*"))


@pytest.mark.parametrize("harm", ["missing", "short", "changed", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(layout, harm, caplog):
    save(layout, 2)
    folder = save(layout, 4)
    shard = folder / "actor" / shard_name("model", 1, 0)
    if harm == "missing":
        shard.unlink()
    elif harm == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif harm == "changed":
        shard.write_bytes(b"X" + shard.read_bytes()[1:])
    elif harm == "manifest":
        (folder / "manifest.json").write_text("{")
    else:
        (folder / "manifest.json").unlink()
    assert latest_whole(layout.root) == 2
    assert "global_step_4 is skipped" in caplog.text
    assert whole_steps(layout.root) == ([2, 4] if harm == "changed" else [2])


def test_checkpoint_of_another_format_is_refused_not_passed_over(layout):
    """Another release wrote it: to that one it is whole, so nothing is taken back to the checkpoint before it."""
    save(layout, 2)
    manifest = save(layout, 4) / MANIFEST
    written = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({"format": 2, "step": 4, "parts": written["files"]}))
    with raising(DataError, key=str(manifest)):
        latest_whole(layout.root)
    assert whole_steps(layout.root) == [2]
    manifest.write_text(json.dumps(written))
    assert latest_whole(layout.root) == 4


@pytest.mark.parametrize("what", ["manifest", "shard"])
def test_a_file_that_cannot_be_read_is_no_damage(layout, what, monkeypatch):
    """It cannot be, for a while: a link to itself."""
    save(layout, 2)
    folder = save(layout, 4)
    file = folder / MANIFEST if what == "manifest" else folder / "actor" / shard_name("model", 1, 0)
    content = file.read_bytes()
    file.unlink()
    file.symlink_to(file)

    def repair():
        write_atomically(file, content)

    waits = []
    with monkeypatch.context() as timed:
        timed.setattr("trinity_core.base.waits.time.sleep", waits.append)
        assert whole_steps(layout.root) == [2] and not waits, "pages list checkpoints at once"
        assert whole_steps(layout.root, or_unreadable=True) == [2, 4] and not waits, "a new one is saved at once"
    with monkeypatch.context() as impatient:
        impatient.setattr("trinity_core.exchange.checkpoints.commit.READ_SECONDS", 0.0)
        with pytest.raises(TransientFault):
            latest_whole(layout.root)
    repairing = threading.Timer(0.3, repair)
    repairing.start()
    assert latest_whole(layout.root) == 4
    repairing.join()


def test_an_abandoned_checkpoint_is_never_used_again(layout):
    """Whole or not, until its step is saved anew."""
    for step in (2, 4, 6):
        save(layout, step)
    CheckpointVersions(layout.root).publish(7, [("w", torch.ones(3))])
    shard = layout.actor(6) / shard_name("model", 1, 0)
    shard.rename(layout.root / "away")
    assert latest_whole(layout.root) == 4
    abandon_after(layout.root, 4)
    (layout.root / "away").rename(shard)
    assert latest_whole(layout.root) == 4 and whole_steps(layout.root) == [2, 4]
    assert not (layout.step(7) / ABANDONED).exists(), "it holds published weights alone"
    save(layout, 6)
    assert latest_whole(layout.root) == 6


def test_published_weights_outlive_the_checkpoint_of_their_step(layout):
    """An explorer may still need version 1 when the checkpoint of step 3 displaces that of step 1."""
    weights = CheckpointVersions(layout.root)
    for step in (1, 2, 3):
        weights.publish(step, [("w", torch.full((3,), float(step)))], keep=3)
        save(layout, step, keep=1)
    assert weights.versions() == [1, 2, 3] and dict(weights.load(1))["w"].tolist() == [1, 1, 1]
    assert whole_steps(layout.root) == [3]
    assert [path.name for path in sorted(layout.step(1).rglob("*"))] == ["actor", "weights.json", "weights.safetensors"]
    weights.publish(4, [("w", torch.ones(3))], keep=2)
    assert layout.steps() == [3, 4]


def test_old_checkpoints_are_removed_except_protected(layout):
    for step in range(1, 6):
        save(layout, step, keep=2, protect={2})
    assert layout.steps() == [2, 4, 5]
    assert remove_old(layout, 5, 0) == [2, 4]


@pytest.mark.parametrize("published", [False, True])
def test_a_conversion_may_clean_up_while_its_checkpoint_is_removed(layout, published, monkeypatch):
    for step in (2, 4):
        save(layout, step)
    if published:
        CheckpointVersions(layout.root).publish(2, [("w", torch.ones(3))])
    unfinished = temporary_sibling(layout.huggingface(2))
    unfinished.mkdir()
    (unfinished / "model.safetensors").touch()
    unlink = os.unlink

    def conversion_cleans_up(path, **options):
        if Path(path).name.startswith("model"):  # a file in the folder of the unfinished one, or in that itself
            monkeypatch.setattr("os.unlink", unlink)
            for folder in [*layout.root.rglob(unfinished.name)]:
                shutil.rmtree(folder)
        unlink(path, **options)

    monkeypatch.setattr("os.unlink", conversion_cleans_up)
    assert remove_old(layout, 4, 1) == [2]
    assert whole_steps(layout.root) == [4] and layout.steps() == ([2, 4] if published else [4])
    assert not list(layout.root.rglob(".*"))


def test_damaged_checkpoint_does_not_displace_whole_ones(layout):
    """Of 40 and 80 the latter is damaged; the run resumes from 40 and saves at 55."""
    for step in (40, 80):
        save(layout, step, keep=2)
    (layout.actor(80) / shard_name("model", 1, 0)).write_text("cut short")
    save(layout, 55, keep=1)
    assert layout.steps() == [55, 80] and latest_whole(layout.root) == 55
    save(layout, 80, keep=2)
    assert layout.steps() == [55, 80] and latest_whole(layout.root) == 80


def test_an_abandoned_checkpoint_does_not_count_among_those_kept(layout):
    """Of 2, 4 and 5 the last is damaged; the run goes back to 4, and saves at 6 and 8."""
    for step in (2, 4, 5):
        save(layout, step)
    abandon_after(layout.root, 4)
    save(layout, 6, keep=2)
    assert layout.steps() == [4, 5, 6] and whole_steps(layout.root) == [4, 6]
    save(layout, 8, keep=2)
    assert layout.steps() == [6, 8]


def test_leftovers_of_a_killed_writer_are_removed(layout):
    save(layout, 1)
    dead = begin(layout, 2)
    (dead / "half").write_text("x")
    assert latest_whole(layout.root) == 1
    others = layout.root / ".explorer_meta.json.tmp-1"
    others.write_text("another process is writing this")
    save(layout, 2)
    assert not dead.exists()
    others.unlink()
    assert remove_leftovers(layout.root) == []


def _save_for_ever(root):
    layout = JobLayout(root)
    step = (latest_whole(root) or 0) + 1
    while True:
        save(layout, step, str(step), keep=2)
        step += 1


@pytest.mark.campaign
def test_killed_at_any_moment(layout):
    last = 0
    for milliseconds in range(0, 32, 4):
        process = PROCESSES.Process(target=_save_for_ever, args=(layout.root,), daemon=True)
        process.start()
        patience = time.monotonic() + 60
        while (latest_whole(layout.root) or 0) <= last:
            assert time.monotonic() < patience and process.is_alive()
        time.sleep(milliseconds / 1000)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        step = latest_whole(layout.root) or 0
        assert step > last
        last = step
    save(layout, last + 1)
    assert latest_whole(layout.root) == last + 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG])
def test_refusals_of_the_system_are_clear(number, tmp_path):
    with raising(TrinityError, key=str(tmp_path)), clear_errors("writing", tmp_path):
        raise OSError(number, "no")


def test_fresh_name(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    assert fresh_name(tmp_path, "run", now=now) == "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".pipeline.lock").touch()
    assert fresh_name(tmp_path, "run", now=now) == "run", "a start was refused"
    (tmp_path / "run" / "log").mkdir(parents=True)
    assert fresh_name(tmp_path, "run", now=now) == "run_20260102030405"
    (tmp_path / "run_20260102030405").mkdir()
    assert fresh_name(tmp_path, "run", now=now) == "run_20260102030405_2"
    (tmp_path / "run_20260102030405_2").mkdir()
    assert fresh_name(tmp_path, "run", now=now) == "run_20260102030405_3"


def test_retry_continues_in_its_own_folder(tmp_path):
    (tmp_path / "run" / "log").mkdir(parents=True)
    first = fresh_name(tmp_path, "run", "flow 1")
    claim(tmp_path / first, "run", "flow 1")
    claim(tmp_path / "run_rft", "run_rft", "flow 2")
    assert first != "run" and fresh_name(tmp_path, "run", "flow 1") == first
    assert fresh_name(tmp_path, "run", "flow 2") not in ("run", first, "run_rft"), "that is another stage's"
    assert fresh_name(tmp_path, "run") not in ("run", first)


def begun(root, flow):
    """A fresh folder of `run`, in which a run has been started."""
    name = fresh_folder(root, "run", flow)
    JobLayout(root / name).identity.touch()
    return name


def test_parts_that_ask_at_once_get_one_fresh_folder(tmp_path):
    (tmp_path / "run" / "log").mkdir(parents=True)
    for attempt in range(10):
        with ThreadPoolExecutor(3) as parts:
            folders = set(parts.map(lambda _, flow=f"flow {attempt}": begun(tmp_path, flow), range(3)))
        assert folders == {newest_run(tmp_path, "run")}
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 11


def test_newest_run_is_the_one_begun_last(tmp_path):
    assert newest_run(tmp_path, "run") == "run"
    first, second = begun(tmp_path, "flow 1"), begun(tmp_path, "flow 2")
    fresh_folder(tmp_path, "run", "flow 3")  # which is refused before it begins
    assert (first, newest_run(tmp_path, "run")) == ("run", second)
    assert newest_run(tmp_path, "run_big") == "run_big"
    assert fresh_folder(tmp_path, "run", "flow 1") == first, "a retry"
    assert newest_run(tmp_path, "run") == second
    shutil.rmtree(tmp_path / second)
    assert newest_run(tmp_path, "run") == "run"
