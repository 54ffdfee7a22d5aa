"""What coordination costs per experience with 1, 10, 100 and 1,000 explorers and engines that do nothing else.

Explorers: each has its own connection to one store, puts a group of 8 experiences a step and looks for the newest
weights after it; one trainer leases batches of 64. Engines: one pool gives each engine two prompts of 8 requests, which
it answers at once. Work grows with their number, so the cost per experience should stay the same. The claim: it stays
within a factor of two of that with one explorer and one engine. Costs are processor time, because one process simulates
what many do in a run.

    python benchmarks/scale.py
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from store import batch_of

from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync.memory import MemoryVersions
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Request, Sample, SampleBatch, Sampling
from trinity_core.rollout.inference.settings import EngineSettings

SIZES = (1, 10, 100, 1000)
GROUP, BATCH, PROMPTS = 8, 64, 2
LEAST, STEPS = 4000, 4
"""Experiences of one measurement, and steps of each explorer, at least."""
CLAIM = 2.0


def explorers(count: int, folder: Path) -> dict[str, float]:
    """Microseconds per experience of `count` explorers with a trainer."""
    stores = [ExperienceStore.open(f"sqlite:///{folder}/store.db") for _ in range(count)]
    weights = [MemoryVersions(folder / "weights", folder / "spill") for _ in range(count)]
    publisher = MemoryVersions(folder / "weights", folder / "spill")
    steps = max(STEPS, -(-LEAST // (count * GROUP)))
    groups = [batch_of(GROUP, number) for number in range(count * (steps + 1))]
    spent = dict.fromkeys(("put", "lease", "weights"), 0.0)
    version, began = 0, 0.0

    def lap(what: str) -> None:
        nonlocal began
        now = time.process_time()
        spent[what] += now - began
        began = now

    for index, store in enumerate(stores):
        store.position(f"explorer {index}")
    publisher.publish(0, [("w", torch.zeros(8))])
    for step in range(1, steps + 2):
        if step == 2:  # each connection has been used once
            spent = dict.fromkeys(spent, 0.0)
        began = time.process_time()
        for index, store in enumerate(stores):
            store.put(f"explorer {index}", step, {"step": step}, groups.pop(), version)
        lap("put")
        if any(version_files.latest() != version for version_files in weights):
            raise AssertionError("an explorer does not see the newest version")
        lap("weights")
        while stores[0].lease(version + 1, BATCH, version) is not None:
            version += 1
            lap("lease")
            publisher.publish(version, [("w", torch.full((8,), float(version)))])
            lap("weights")
        lap("lease")
    for store in stores:
        store.close()
    publisher.remove()
    return {what: seconds / (count * steps * GROUP) * 1e6 for what, seconds in spent.items()}


class IdleEngine:
    """Answers every request with one token, at once."""

    async def start(self) -> float:
        return 0.0

    settings = EngineSettings("", 16)

    async def generate(self, requests) -> SampleBatch:
        token = np.zeros(1, np.int32)
        return SampleBatch.pack([Sample(token, token.astype(np.float32), token, "stop") for _ in requests])

    async def stop(self) -> None:
        """Nothing runs."""


async def engines(count: int) -> float:
    """Microseconds per request of a pool of `count` engines."""
    pool = EnginePool([IdleEngine() for _ in range(count)], "")
    await pool.start()
    rounds = -(-LEAST // (count * PROMPTS * GROUP))
    prompt, sampling = np.zeros(16, np.int32), Sampling(1)
    began = time.process_time()
    for _ in range(rounds):
        asks = [[Request(f"{i}/{j}", prompt, sampling) for j in range(GROUP)] for i in range(count * PROMPTS)]
        await asyncio.gather(*(pool.generate(ask) for ask in asks))
    spent = time.process_time() - began
    await pool.stop()
    return spent / (rounds * count * PROMPTS * GROUP) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # it walks through the objects of a thousand processes
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # three files for each connection to SQLite
    parts = ("put", "lease", "weights", "engines")
    print("processor time per experience, µs\n" + f"{'number':>8}" + "".join(f"{part:>9}" for part in (*parts, "all")))
    first = 0.0
    for count in SIZES:
        measured = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                measured.append(explorers(count, Path(folder)) | {"engines": asyncio.run(engines(count))})
        row = [statistics.median(times[part] for times in measured) for part in parts]
        whole = sum(row)
        first = first or whole
        print(f"{count:8d}" + "".join(f"{value:9.1f}" for value in (*row, whole)) + f"   {whole / first:.2f} of one")
    print(f"(claim: at most {CLAIM:g} of one)")


if __name__ == "__main__":
    main()
