"""The `cluster` section: the machines of a run."""

from __future__ import annotations

from trinity_core.config.section import Section
from trinity_core.config.types import Count, Flag, Natural


class ClusterConfig(Section):
    """Nodes and GPUs. Engines take theirs first, what is left is the trainer's."""

    node_num: Count = 1
    """Nodes of the run; more than one need `ray_address`."""
    gpu_per_node: Natural | None = None
    """GPUs of each node, which must be free; null means all that a node has, 0 runs engines and trainer on the CPU."""
    ray_address: str | None = None
    """Ray cluster to join, as `host:port` or `auto`; its token is where Ray keeps it. Null starts one for the run."""
    allow_oversized: Flag = False
    """Start a run although it needs, by the estimate of `trinity plan`, more memory or disk than this machine has."""
