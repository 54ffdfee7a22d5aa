"""Methods added to vLLM's workers (`worker_extension_cls`) and called by `collective_rpc`."""

from __future__ import annotations

from typing import Any

from trinity_core.inference.weight_receiver import WeightReceiver


class WorkerExtension(WeightReceiver):
    """Loads weights and, on the CPU, replaces vLLM's sampler."""

    def use_seeded_sampler(self) -> None:
        """Sample tokens with `trinity_core.inference.seeded_sampler` from now on. CPU only."""
        from trinity_core.inference.seeded_sampler import SeededSampler

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.sampler = SeededSampler(runner)
