"""How well a step of `configs/gsm8k/gsm8k.yaml` fills an engine on a GPU: its seconds over those of one call.

The step's 1,024 answers (mean 285 tokens, longest 1,024) go through the project's own pool, with as many groups at once
as the recipe gives, to an engine that only counts time: continuous batching, and a decode step of 3.2 ms and 12 us a
row, as measured elsewhere for 1.5B parameters in bfloat16 on an H100. Time is virtual, so the figures do not depend on
this machine. The limit is the same engine given all answers in one call. The claim: a step takes at most 1.15 times
that, on a GPU of 80 GB (1,024 sequences at once) and of 24 GB (256).

    python benchmarks/convoy.py
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np

from trinity_core.config import load_config
from trinity_core.hosting.placement import Machine, place, runners
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Request, Sample, SampleBatch, Sampling
from trinity_core.rollout.inference.settings import EngineSettings, gpu_sequences

RECIPE = "configs/gsm8k/gsm8k.yaml"
TURNS = 12
"""Turns of the event loop between an answer's end and the next engine step: callers begin their next group."""
CLAIM = 1.15


def answer_lengths(count: int, longest: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(np.log(260), 0.5, count), 20, longest).astype(int)


class CountingEngine:
    """Decodes up to `at_once` sequences together. A prompt's first token is the length of its answer."""

    def __init__(self, at_once: int) -> None:
        self.settings = EngineSettings("", 2048, on_gpu=True, max_num_seqs=at_once)
        self.at_once, self.seconds, self.steps = at_once, 0.0, 0
        self._waiting: list[tuple[int, asyncio.Future[Sample]]] = []
        self._decoding: asyncio.Task[None] | None = None

    async def start(self) -> float:
        return 0.0

    async def stop(self) -> None:
        """Nothing runs."""

    async def sampled(self) -> int:
        return self.steps

    async def generate(self, requests: list[Request]) -> SampleBatch:
        loop = asyncio.get_running_loop()
        asked = [(int(request.prompt[0]), loop.create_future()) for request in requests]
        self._waiting += asked
        if self._decoding is None or self._decoding.done():
            self._decoding = loop.create_task(self._decode())
        return SampleBatch.pack(await asyncio.gather(*(future for _, future in asked)))

    async def _decode(self) -> None:
        running: list[tuple[int, asyncio.Future[Sample]]] = []  # the step at which each ends
        await turns()
        while self._waiting or running:
            free = self.at_once - len(running)
            running += [(self.steps + length, future) for length, future in self._waiting[:free]]
            del self._waiting[:free]
            self.steps += 1
            self.seconds += 0.0032 + 12e-6 * len(running)
            ended = [future for end, future in running if end <= self.steps]
            if ended:
                running = [(end, future) for end, future in running if end > self.steps]
                for future in ended:
                    token = np.zeros(1, np.int32)
                    future.set_result(Sample(token, token.astype(np.float32), token, "stop"))
                await turns()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def step(gpu_gib: int) -> tuple[float, float, float]:
    """Seconds of a step, seconds of one call, and mean number of sequences at once."""
    config = load_config(RECIPE, ["cluster.gpu_per_node=2"])
    repeats, groups = config.algorithm.repeat_times, config.buffer.batch_size
    at_once = runners(config, place(config, Machine(16, 2)), gpu_gib << 30)
    lengths = answer_lengths(groups * repeats, config.model.max_response_tokens or 1024)
    requests = [Request(str(i), np.array([length]), Sampling(1024)) for i, length in enumerate(lengths)]
    engine, alone = (CountingEngine(gpu_sequences(gpu_gib << 30)) for _ in range(2))
    pool, gate = EnginePool([engine], ""), asyncio.Semaphore(at_once)
    await pool.start()

    async def group(index: int) -> None:
        async with gate:
            await pool.generate(requests[index * repeats : (index + 1) * repeats])

    await asyncio.gather(*map(group, range(groups)))
    await pool.stop()
    await alone.generate(requests)
    return engine.seconds, alone.seconds, float(lengths.sum()) / engine.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    worst = 0.0
    for gpu_gib in (80, 24):
        seconds, limit, batch = asyncio.run(step(gpu_gib))
        ratio = seconds / limit
        worst = max(worst, ratio)
        print(f"GPU of {gpu_gib} GB: {seconds:.1f} s, one call {limit:.1f} s, mean batch {batch:.0f}: {ratio:.2f}")
    print(f"a step over one call: {worst:.2f} (claim: at most {CLAIM})")
    sys.exit(worst > CLAIM)


if __name__ == "__main__":
    main()
