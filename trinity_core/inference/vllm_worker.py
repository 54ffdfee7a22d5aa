"""What is added to vLLM's workers, and called by `collective_rpc`: `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

from trinity_core.inference.weight_receiver import WeightReceiver


class WorkerExtension(WeightReceiver):
    """Takes weights from the trainer, and chooses tokens in our way where it is told to."""

    def use_seeded_sampler(self) -> None:
        """Choose tokens by `trinity_core.inference.seeded_sampler` from now on. On the CPU only."""
        from trinity_core.inference.seeded_sampler import SeededSampler

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.sampler = SeededSampler(runner)
