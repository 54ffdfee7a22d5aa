"""How the GPUs are shared out: veRL's engines and trainer take turns on them, here each has its own."""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 0.6
"""`gpu_memory_utilization` at which engine and trainer may share the only GPU."""


@dataclass(frozen=True)
class GpuLayout:
    """The GPUs of the engines; the trainer has what is left."""

    engines: int
    """Engines of the policy."""
    tensor_parallel: int
    """GPUs of each."""
    reward_models: int = 0
    """Copies of the reward model, each on a GPU."""


def gpu_layout(total: int, tensor_parallel: int, reward_model: bool) -> GpuLayout:
    """A quarter of the GPUs for the policy's engines, a quarter for a reward model, as in the guides' examples.

    At least one engine. Where the trainer would be left without a GPU, an engine has fewer than `tensor_parallel`.
    """
    rewards = max(total // 4, 1) if reward_model else 0
    most = max(total - rewards - 1, 1)
    size = tensor_parallel
    while size > most:
        size = max(size // 2, 1)
    return GpuLayout(max(min(total // 4, most) // size, 1), size, rewards)
