"""Durable puts and leases of the experience store against raw SQLite, measured alternately.

A put stores a batch of experiences (64 tokens each, in groups of up to 8), a lease takes one for a train step. Raw
SQLite is one table: a put is one transaction of INSERTs of the same bytes, a lease one SELECT and one UPDATE; no
positions of explorers, no lineages, no record of what was leased to whom. Both are measured with settings that survive
a power cut (`synchronous=FULL`: each commit waits for the disk), and with settings that survive a killed process
(NORMAL, which runs use between two checkpoints). The claim: with FULL at least 0.7 of raw SQLite.

    python benchmarks/store.py
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from measured import ROOT
from sqlalchemy import URL, Engine, event

from trinity_core.config.paths import STORE_BACKENDS
from trinity_core.data.experience import Experience, from_bytes, to_bytes
from trinity_core.exchange.store.sqlite import SQLite
from trinity_core.exchange.store.store import ExperienceStore

BATCHES = (1, 8, 64)
GROUP, PROMPT, RESPONSE = 8, 16, 48
CLAIM = 0.7
WARM_UP = 600
"""Experiences before the clock starts: by then each write-ahead log has its final size. Growing a file takes longer to
sync than writing to one, and raw SQLite, which writes less, would grow its log throughout."""
Batch = list[Experience]


class DurableSQLite(SQLite):
    """The store's SQLite with `synchronous=FULL`; its URL begins with `durable://`."""

    def connect(self, url: URL) -> Engine:
        engine = super().connect(url.set(drivername="sqlite"))
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=FULL"))
        return engine


class Ours:
    def __init__(self, folder: Path, full: bool) -> None:
        STORE_BACKENDS.setdefault("durable", f"{__name__}:DurableSQLite")
        self._store = ExperienceStore.open(f"{'durable' if full else 'sqlite'}:///{folder}/store.db")
        self._store.position("explorer")

    def put(self, number: int, batch: Batch) -> None:
        self._store.put("explorer", number, {"step": number}, batch, 0)

    def lease(self, number: int, rows: int) -> Batch:
        return self._store.lease(number, rows, 0) or []


class Raw:
    def __init__(self, folder: Path, full: bool) -> None:
        self._connection = sqlite3.connect(folder / "raw.db", isolation_level=None)
        for pragma in ("journal_mode=WAL", f"synchronous={'FULL' if full else 'NORMAL'}"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY, step INTEGER, rows BLOB NOT NULL)")
        self._connection.execute("CREATE INDEX ready ON queue (step, id)")

    def put(self, number: int, batch: Batch) -> None:
        groups = [(to_bytes(batch[i : i + GROUP]),) for i in range(0, len(batch), GROUP)]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO queue (rows) VALUES (?)", groups)
        self._connection.execute("COMMIT")

    def lease(self, number: int, rows: int) -> Batch:
        groups = -(-rows // GROUP)
        self._connection.execute("BEGIN IMMEDIATE")
        queued = self._connection.execute(
            "SELECT id, rows FROM queue WHERE step IS NULL ORDER BY id LIMIT ?", (groups,)
        ).fetchall()
        self._connection.executemany("UPDATE queue SET step = ? WHERE id = ?", [(number, key) for key, _ in queued])
        self._connection.execute("COMMIT")
        return [experience for _, blob in queued for experience in from_bytes(blob)]


def batch_of(rows: int, number: int) -> Batch:
    """`rows` experiences in groups, as an explore step gives them."""
    rng = np.random.default_rng(number)
    return [
        Experience(
            tokens=rng.integers(0, 50_000, PROMPT + RESPONSE),
            prompt_length=PROMPT,
            action_mask=np.ones(RESPONSE, bool),
            logprobs=rng.standard_normal(RESPONSE),
            versions=np.zeros(RESPONSE),
            reward=float(row % 2),
            group=f"{number}/{row // GROUP}",
            run=row % GROUP,
        )
        for row in range(rows)
    ]


def rates(make: Callable[[Path], Ours | Raw], rows: int, rounds: int, disk: Path) -> tuple[float, float]:
    """Puts and leases a second."""
    warm_up = max(WARM_UP // rows, 2)
    batches = [batch_of(rows, number) for number in range(warm_up + rounds)]
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        queue = make(Path(folder))
        for number, batch in enumerate(batches[:warm_up], 1):
            queue.put(number, batch)
            assert len(queue.lease(number, rows)) == rows
        began = time.perf_counter()
        for number, batch in enumerate(batches[warm_up:], warm_up + 1):
            queue.put(number, batch)
        put = time.perf_counter()
        for number in range(warm_up + 1, warm_up + rounds + 1):
            assert len(queue.lease(number, rows)) == rows
        return rounds / (put - began), rounds / (time.perf_counter() - put)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="puts and leases of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=ROOT, help="a folder on the disk to measure")
    args = parser.parse_args()
    print("                     batch   puts/s    raw  ratio   leases/s    raw  ratio")
    for full in (True, False):
        for rows in BATCHES:
            pairs = [
                tuple(rates(partial(side, full=full), rows, args.rounds, args.disk) for side in (Ours, Raw))
                for _ in range(args.pairs)
            ]
            put, lease = (
                (
                    *(statistics.median(pair[side][what] for pair in pairs) for side in (0, 1)),
                    statistics.median(ours[what] / raw[what] for ours, raw in pairs),
                )
                for what in (0, 1)
            )
            print(
                f"{'power cut (FULL)' if full else 'kill (NORMAL)':20}{rows:6d}"
                f"{put[0]:9.0f}{put[1]:7.0f}{put[2]:7.2f}{lease[0]:11.0f}{lease[1]:7.0f}{lease[2]:7.2f}"
                + (f"  (claim: at least {CLAIM})" if full else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
