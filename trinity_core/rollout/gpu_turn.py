"""An explorer's turn on the GPU that its engines share with the trainer (`cluster.colocate`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity_core.config import Config
from trinity_core.inference.pool import EnginePool
from trinity_core.layout import JobLayout
from trinity_core.rollout.records import StepRecords
from trinity_core.sync.shared_gpu import SharedGpu
from trinity_core.threads import DaemonThreads


class GpuTurn:
    """Outside of it the engines sleep. Where no GPU is shared, it is always this explorer's turn."""

    def __init__(self, config: Config, records: StepRecords) -> None:
        lock, side = JobLayout(config.job_dir).gpu_lock, f"explorer {config.explorer.name}"
        self._gpu = SharedGpu(lock, side) if config.cluster.colocate else None
        self._timeout = config.synchronizer.sync_timeout
        self._records = records

    @property
    def is_shared(self) -> bool:
        """Whether the trainer shares the GPU."""
        return self._gpu is not None

    @property
    def is_over(self) -> bool:
        """Whether the engines sleep."""
        return self._gpu is not None and not self._gpu.held

    @property
    def text(self) -> str:
        """What is waited for, in words; empty if nothing is."""
        return self._gpu.text if self._gpu else ""

    async def begin(self, pool: EnginePool, is_unneeded: Callable[[], bool]) -> bool:
        """Wait for the trainer to leave the GPU, and wake the engines; False once `is_unneeded()`.

        Raises what `SharedGpu.acquire` and `EnginePool.wake` raise.
        """
        if self._gpu is None or self._gpu.held:
            return True
        run = asyncio.get_running_loop().run_in_executor
        with self._records.spent("wait"):
            acquired = await run(DaemonThreads("gpu"), self._gpu.acquire, self._timeout, is_unneeded)
        if acquired:
            with self._records.spent("wake"):
                await pool.wake()
        return acquired

    def tell_progress(self) -> None:
        """A step is stored: the trainer goes on waiting."""
        if self._gpu is not None:
            self._gpu.tell_progress()

    async def end(self, pool: EnginePool) -> None:
        """Put the engines to sleep and let the trainer have the GPU."""
        if self._gpu is not None and self._gpu.held:
            with self._records.spent("sleep"):
                await pool.sleep()
            self._gpu.release()
