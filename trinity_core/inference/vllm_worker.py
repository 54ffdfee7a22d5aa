"""Methods added to vLLM's workers (`worker_extension_cls`) and called by `collective_rpc`."""

from __future__ import annotations

import os
from typing import Any

from trinity_core.inference.weight_receiver import WeightReceiver
from trinity_core.threads import end_with


class WorkerExtension(WeightReceiver):
    """Loads weights and, on the CPU, replaces vLLM's sampler."""

    def end_with(self, actor: int) -> None:
        """End this worker, and vLLM's engine process above it, as soon as the process `actor` has ended.

        vLLM's engine process does not notice a parent that was killed, and would keep the GPU.
        """
        above = [] if os.getppid() == actor else [os.getppid()]
        end_with(actor, above)

    def use_seeded_sampler(self) -> None:
        """Sample tokens with `trinity_core.inference.seeded_sampler` from now on. CPU only."""
        from trinity_core.inference.seeded_sampler import SeededSampler

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.sampler = SeededSampler(runner)
