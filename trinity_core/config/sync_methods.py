"""The values of `synchronizer.sync_method`: requirements and implementation of each.

Contains only what checks, defaults and placement need. The classes are in `trinity_core.exchange.sync`, imported when
a run opens its weights (`trinity_core.exchange.sync.versions`), so that importing this table is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class SyncMethod:
    """A way to transfer weights from the trainer to the engines."""

    implementation: str
    """`module:class` of its `trinity_core.exchange.sync.versions.WeightVersions`."""
    route: str
    """How the weights travel: the end of "weights go …"."""
    one_node: bool = False
    """True if explorer and trainer must be on the same node."""
    separate_runs: bool = False
    """True if explorer and trainer may be separate runs (modes `explore` and `train`)."""
    vllm_backend: str = ""
    """vLLM's weight transfer backend with which the trainer pushes weights into the engines. Empty if engines load
    published weights."""
    without_own_gpus: str = ""
    """The method that replaces this one if trainer and engines do not have separate GPUs. Empty if this method does not
    need them."""


SYNC_METHODS: dict[str, SyncMethod] = {
    "nccl": SyncMethod(
        "trinity_core.exchange.sync.nccl:PushedVersions",
        "from GPU to GPU",
        vllm_backend="nccl",
        without_own_gpus="memory",
    ),
    "memory": SyncMethod("trinity_core.exchange.sync.memory:MemoryVersions", "through shared memory", one_node=True),
    "checkpoint": SyncMethod(
        "trinity_core.exchange.sync.checkpoint:CheckpointVersions", "through the run's folder", separate_runs=True
    ),
    "champion": SyncMethod(
        "trinity_core.exchange.sync.champion:ChampionVersions", "from the project's champion", separate_runs=True
    ),
}
"""Methods by name, in order of preference."""

if TYPE_CHECKING:
    SyncMethodName = str
else:
    SyncMethodName = Literal[tuple(SYNC_METHODS)]
    """Type of settings that accept the names in the table."""


def default_sync_method(mode: str, several_nodes: bool = False, adapter: bool = False) -> str:
    """Return the first method that supports `mode`: explorer and trainer are one run only in `both`.

    For a LoRA adapter, choose one that need not push full weights, and that supports several nodes if there are.
    """
    fits = (
        name
        for name, method in SYNC_METHODS.items()
        if (mode == "both" or method.separate_runs)
        and not (adapter and (method.vllm_backend or (several_nodes and method.one_node)))
    )
    return next(fits)
