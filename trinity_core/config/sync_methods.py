"""The values of `synchronizer.sync_method`: what each needs and allows, and the class that implements it.

Only facts that checks, defaults and placement ask for. The classes are in `trinity_core.sync` and are imported when a
run opens its weights (`trinity_core.sync.versions`), so that this table is as light as the rest of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class SyncMethod:
    """One way by which weights get from the trainer to the engines."""

    implementation: str
    """`module:class` of its `trinity_core.sync.versions.WeightVersions`."""
    route: str
    """How the weights travel: the end of "weights go …"."""
    one_node: bool = False
    """True if explorer and trainer must be on the same node."""
    separate_runs: bool = False
    """True if explorer and trainer may be runs of their own (modes `explore` and `train`)."""
    vllm_backend: str = ""
    """The backend of vLLM's weight transfer by which the trainer pushes weights into the engines. Empty if engines load
    what the trainer has published."""
    without_own_gpus: str = ""
    """The method that takes over where trainer and engines do not each have GPUs of their own. Empty if this method
    needs none."""


SYNC_METHODS: dict[str, SyncMethod] = {
    "nccl": SyncMethod(
        "trinity_core.sync.nccl:PushedVersions", "from GPU to GPU", vllm_backend="nccl", without_own_gpus="memory"
    ),
    "memory": SyncMethod("trinity_core.sync.memory:MemoryVersions", "through shared memory", one_node=True),
    "checkpoint": SyncMethod(
        "trinity_core.sync.checkpoint:CheckpointVersions", "through the run's folder", separate_runs=True
    ),
}
"""Methods by name, in order of preference."""

if TYPE_CHECKING:
    SyncMethodName = str
else:
    SyncMethodName = Literal[tuple(SYNC_METHODS)]
    """A setting of this type accepts the names of the table."""


def default_sync_method(mode: str, several_nodes: bool = False, adapter: bool = False) -> str:
    """The first method that serves `mode`: only in `both` are explorer and trainer one run.

    For a LoRA adapter, one that need not push full weights, and that works on several nodes if there are.
    """
    fits = (
        name
        for name, method in SYNC_METHODS.items()
        if (mode == "both" or method.separate_runs)
        and not (adapter and (method.vllm_backend or (several_nodes and method.one_node)))
    )
    return next(fits)
