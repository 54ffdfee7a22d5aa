"""Real processes, killed at any moment; a real PostgreSQL; a full disk."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from forkserver import PROCESSES
from hypothesis import given
from hypothesis import strategies as st
from raising import raising
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from store_helpers import ids, make_rows
from store_writers import STEPS, explore, fill_up, stop_in_mid_transaction

from trinity_core.base import waits
from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.config.paths import database_url
from trinity_core.exchange.store import backend, ledger, postgresql, sqlite
from trinity_core.exchange.store.audit import judge, read
from trinity_core.exchange.store.database import explain
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore


def test_killed_explorers_lose_and_repeat_nothing(server_url, tmp_path):
    url, run = server_url or f"sqlite:///{tmp_path}/s.db", str(tmp_path)
    running, kills, batches = {}, itertools.count(), []
    with ExperienceStore.open(url, run) as store:
        assert [store.position(name).step for name in ("a", "b")] == [0, 0], "one that was never seen is not waited for"
    while True:
        for name in ("a", "b"):
            if name not in running or not running[name].is_alive():
                running[name] = PROCESSES.Process(target=explore, args=(url, run, name), daemon=True)
                running[name].start()
        time.sleep(random.random() * (0.08 + 0.01 * next(kills)))  # ever longer: a slow machine must get on too
        victim = random.choice(list(running.values()))
        if len(batches) < 20:
            victim.kill()
            victim.join()
        store = ExperienceStore.open(url, run)
        while (batch := store.lease(len(batches) + 1, 6, len(batches))) is not None:
            if not batch:
                break
            batches.append(ids(batch))
        if store.exhausted():
            break
        store.close()
    for process in running.values():
        process.join()
    seen = [row for batch in batches for row in batch]
    expected = {f"{n}{s}g{g}r{r}" for n in "ab" for s in range(1, STEPS + 1) for g in (0, 1) for r in (0, 1)}
    assert len(seen) == len(set(seen)), "nothing twice"
    assert set(seen) == expected, "nothing lost"


def test_a_failure_may_hold_any_character(store):
    """A model's half emoji or a binary file's bytes in an error message: nothing that a retry would change."""
    rows = make_rows(1, 1)
    rows[0].info |= {"response": "half \ud83d, nul \0"}
    drawn = [DrawnTask("t", "set/1", 0, failure="ValueError: half \ud83d, nul \0"), DrawnTask("g0", "set/2", 1)]
    assert store.put("e", 1, {"said": "\ud83d\0"}, rows, 0, drawn=drawn)
    assert store.lease(1, 1, 0)[0].info["response"] == "half \ud83d, nul \0"
    with store._database.read() as connection:
        audit = judge(read(connection, store._tables), {}, 0, 0)
    assert audit.clean and audit.failed_because == {"ValueError: half ?, nul ? (after 1 tries)": 1}


def test_postgresql_writers_take_turns(postgresql_url):
    processes = [
        PROCESSES.Process(target=explore, args=(postgresql_url, "/jobs/turns", name), daemon=True)
        for name in ("a", "b", "c")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    with ExperienceStore.open(postgresql_url, "/jobs/turns") as store:
        batch = ids(store.lease(1, 10_000, 0))
        assert len(batch) == len(set(batch)) == 3 * STEPS * 4


@pytest.mark.parametrize("url", ["nonsense://", "sqlite://", "sqlite:///:memory:"])
def test_unusable_urls_are_refused(url):
    with pytest.raises(TrinityError):
        ExperienceStore.open(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:secret@h/db",
        "mysql://u:secret@h/db",
        "postgresql+nodriver://u:secret@h/db",
        "postgresql://u:sec/ret@h:port/db",
    ],
)
def test_a_wrong_url_is_shown_without_its_password(url, tmp_path):
    for attempt in (lambda: ExperienceStore.open(url), lambda: ExperienceStore.open(database_url(url, tmp_path))):
        with raising(TrinityError, key="buffer.trainer_input.experience_buffer.path") as caught:
            attempt()
        assert "ret" not in str(caught.value) and url.partition(":")[0] in str(caught.value)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "s.db"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(DataError):
        ExperienceStore.open(path)


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    queue = PROCESSES.Queue()
    process = PROCESSES.Process(target=fill_up, args=(url, queue), daemon=True)
    process.start()
    assert "cannot be used" in queue.get(timeout=60)
    process.join()
    with ExperienceStore.open(url) as store:
        assert store.position("e").position == {"o": 1}
        assert store.stats().ready == 8


@pytest.mark.parametrize("ends", [True, False])
def test_a_stopped_writer_is_waited_for_and_named(tmp_path, monkeypatch, caplog, ends):
    """It holds SQLite's lock until it continues or dies."""
    monkeypatch.setattr(sqlite, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(waits, "FIRST_SECONDS", 0.1)
    url = f"sqlite:///{tmp_path}/s.db"
    with ExperienceStore.open(url, "/jobs/held", patience=300 if ends else 1) as store:
        stopped = PROCESSES.Process(target=stop_in_mid_transaction, args=(url, 60.0))
        stopped.start()
        try:
            while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            if ends:
                threading.Timer(2.0, os.kill, (stopped.pid, signal.SIGCONT)).start()
                assert store.put("e", 1, {}, make_rows(1), 0)
            else:
                with pytest.raises(TransientFault, match=f"process {stopped.pid} .*stopped"):
                    store.put("e", 1, {}, make_rows(1), 0)
        finally:
            stopped.kill()
            stopped.join()
    assert f"process {stopped.pid} " in caplog.text and f"kill -CONT {stopped.pid}" in caplog.text


def test_postgresql_does_not_wait_for_a_stopped_writer(postgresql_url, monkeypatch):
    """It holds the row on which all writers wait, and its connection stays open."""
    monkeypatch.setattr(backend, "BUSY_TIMEOUT", 4.0)
    with ExperienceStore.open(postgresql_url, "/jobs/held") as store:
        stopped = PROCESSES.Process(target=stop_in_mid_transaction, args=(postgresql_url, 4.0))
        stopped.start()
        try:
            while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            assert store.put("e", 1, {}, make_rows(1), 0), "the server has ended the other's transaction"
        finally:
            stopped.kill()
            stopped.join()


def test_postgresql_names_a_lock_and_a_transaction_cut_short(postgresql_url, monkeypatch):
    """Far apart limits: also on a busy machine the lock passes first in one case, the transaction in the other."""
    monkeypatch.setattr(backend, "BUSY_TIMEOUT", 1.0)
    with ExperienceStore.open(postgresql_url, "/jobs/limits") as waits:
        monkeypatch.setattr(backend, "BUSY_TIMEOUT", 600.0)
        with (
            ExperienceStore.open(postgresql_url, "/jobs/limits") as holds,
            holds._database.write(),
            pytest.raises(TransientFault),
        ):
            waits.put("e", 1, {}, make_rows(1), 0)
        monkeypatch.setattr(backend, "BUSY_TIMEOUT", 1.0)
        with ExperienceStore.open(postgresql_url, "/jobs/limits") as stands:
            with pytest.raises(TransientFault), stands._database.write():
                time.sleep(1.5)
            assert waits.put("e", 1, {}, make_rows(1), 0)
            assert stands.stats().ready == 2, "on a new connection"


class Server:
    """The tests' PostgreSQL server, which is stopped and started again."""

    def __init__(self, url):
        self.folder = make_url(url).query["host"]
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
        self.control = [programs[-1] if programs else shutil.which("pg_ctl"), "-D", f"{self.folder}/data", "-w"]

    def run(self, *words):
        owner = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
        subprocess.run([*self.control, *words], check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **owner)

    def start(self):
        options = f"-c listen_addresses='' -k {self.folder} -c fsync=off"
        self.run("-l", f"{self.folder}/log", "-o", options, "start")


def test_a_postgresql_server_that_is_restarted_is_waited_for(postgresql_url, monkeypatch, caplog):
    """With the store's actors: else each restart of the server would end all runs that use it."""
    server = Server(postgresql_url)
    with ExperienceStore.open(postgresql_url, "/jobs/restart") as store, store._database.watching() as look:
        assert store.put("e", 1, {}, make_rows(1), 0)
        server.run("-m", "fast", "stop")
        starting = threading.Timer(1.0, server.start)
        starting.start()
        try:
            assert store.put("e", 2, {}, make_rows(1), 0) and look() > 0
        finally:
            starting.join()
        assert store.stats().ready == 4 and "does not answer" in caplog.text
        server.run("-m", "fast", "stop")
        monkeypatch.setattr(postgresql, "AWAY_SECONDS", 0.0)
        try:
            with pytest.raises(TransientFault):
                store.trainer()
        finally:
            server.start()


def test_a_transaction_that_stood_still_is_repeated(postgresql_url, monkeypatch):
    """As after a cut of the network in the middle of it: the server has ended it, and nothing of it was committed."""

    def stand_still(*arguments):
        if not stood:
            stood.append(True)
            time.sleep(1.5)
        return whole(*arguments)

    stood, whole = [], ledger.number
    monkeypatch.setattr(backend, "BUSY_TIMEOUT", 1.0)
    with ExperienceStore.open(postgresql_url, "/jobs/stood") as store:
        monkeypatch.setattr(ledger, "number", stand_still)
        assert store.put("e", 1, {}, make_rows(1), 0) and stood
        assert store.stats().ready == 2


def test_watching_notices_commits_of_other_processes(open_store):
    with open_store() as mine, open_store() as other, mine._database.watching() as look:
        before = look()
        assert look() == before
        other.put("e", 1, {}, make_rows(2), 0)
        after = look()
        assert after != before
        assert other.put("e", 1, {}, make_rows(2), 0) is False
        assert look() == after


@given(st.sampled_from(["database is locked", "connection refused", "server closed the connection unexpectedly"]))
def test_passing_faults_are_transient(text):
    error = explain(OperationalError("select", {}, Exception(text)), make_url("postgresql://u:secret@h/d"), {})
    assert isinstance(error, TransientFault)
    assert "secret" not in str(error)
