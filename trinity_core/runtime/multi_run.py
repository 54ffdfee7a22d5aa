"""Explorers and a trainer as runs of their own, beside each other in one process: checked together, sharing one Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trinity_core.config import Config
from trinity_core.errors import TrinityError
from trinity_core.runtime.cluster import Cluster, close_cluster, placement_of
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.faults import CANCEL_TOKEN, CancelToken
from trinity_core.runtime.placement import Placement


@dataclass(frozen=True, slots=True)
class Part:
    """One of the runs."""

    name: str
    """`trainer`, or the explorer's name."""
    file: str
    """Its configuration."""
    config: Config
    placement: Placement


def plan_parts(files: Sequence[str], overrides: Sequence[str]) -> list[Part]:
    """The runs that may work beside each other, by their checked configurations.

    Raises ConfigError or TrinityError, and `TransientFault` if the GPUs of one are in use.
    """
    configs = {file: load_checked(file, list(overrides)) for file in files}
    first, *_ = configs
    for file, config in configs.items():
        if config.mode != "train" and not config.explores_alone:
            raise TrinityError(
                f"{file} has mode {config.mode}. Beside each other run configurations with mode: explore or serve, and "
                "one with mode: train."
            )
        if config.job_dir != configs[first].job_dir:
            raise TrinityError(
                f"{file} and {first} are different runs: project, name and checkpoint_root_dir must be the same."
            )
    names = [_name(configs[file]) for file in files]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        files_named = ", ".join(file for file, name in zip(files, names, strict=True) if name in twice)
        raise TrinityError(
            f"{files_named} are one and the same part of the run ({twice[0]}). Give each explorer another "
            "explorer.name; a run has one trainer."
        )
    return [Part(_name(config), file, config, placement_of(config)) for file, config in configs.items()]


@contextmanager
def shared_ray(parts: Sequence[Part], opened: Cluster) -> Iterator[CancelToken]:
    """Within this context all parts share one Ray and its cores; yields the token that cancels all of them.

    At its end Ray is closed. Raises TrinityError if they need more GPUs together than there are.
    """
    try:
        opened.check_room(sum(part.placement.gpus for part in parts))
        nodes = opened.nodes
        opened.nodes = [replace(node, cpus=max(node.cpus // len(parts), 1)) for node in nodes]
        token = CancelToken()
        before = CANCEL_TOKEN.set(token)
        try:
            yield token
        finally:
            CANCEL_TOKEN.reset(before)
            opened.nodes = nodes
    finally:
        close_cluster(opened)


def gpus_together(parts: Sequence[Part]) -> int:
    """GPUs of each node for all parts. Raises TrinityError if the parts use several Rays."""
    addresses = {part.config.cluster.ray_address for part in parts}
    if len(addresses) > 1:
        raise TrinityError(f"cluster.ray_address differs between {', '.join(part.file for part in parts)}.")
    return sum(part.placement.gpu_per_node for part in parts)


def _name(config: Config) -> str:
    return "trainer" if config.mode == "train" else config.explorer.name
