"""Explorers and a trainer as runs of their own, beside each other in one process: checked together, sharing one Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trinity_core.config import Config
from trinity_core.errors import TrinityError
from trinity_core.runtime.cluster import close_cluster, open_cluster, placement_of
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.ending import SHARED_END, SharedEnd


@dataclass(frozen=True, slots=True)
class Part:
    """One of the runs."""

    name: str
    """`trainer`, or the explorer's name."""
    file: str
    """Its configuration."""
    config: Config


def plan_parts(files: Sequence[str], overrides: Sequence[str]) -> list[Part]:
    """The checked configurations of runs that may work beside each other. Raises ConfigError or TrinityError."""
    parts = [_part(file, load_checked(file, list(overrides))) for file in files]
    for part in parts:
        if part.config.mode != "train" and not part.config.explores_alone:
            raise TrinityError(
                f"{part.file} has mode {part.config.mode}. Beside each other run configurations with mode: explore or "
                "serve, and one with mode: train."
            )
        if part.config.job_dir != parts[0].config.job_dir:
            raise TrinityError(
                f"{part.file} and {parts[0].file} are different runs: project, name and checkpoint_root_dir must be "
                "the same."
            )
    twice = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
    if twice:
        files_named = ", ".join(part.file for part in parts if part.name in twice)
        raise TrinityError(
            f"{files_named} are one and the same part of the run ({twice[0]}). Give each explorer another "
            "explorer.name; a run has one trainer."
        )
    return parts


@contextmanager
def beside(parts: Sequence[Part]) -> Iterator[SharedEnd]:
    """Within this context one Ray is up for all parts, which share its cores; yields the request to end all of them.

    Raises TrinityError if they need more GPUs together than there are.
    """
    first = parts[0].config
    opened = open_cluster(first, gpus_together(parts))
    try:
        opened.check_room(sum(placement_of(part.config).gpus for part in parts))
        nodes = opened.nodes
        opened.nodes = [replace(node, cpus=max(node.cpus // len(parts), 1)) for node in nodes]
        end = SharedEnd()
        token = SHARED_END.set(end)
        try:
            yield end
        finally:
            SHARED_END.reset(token)
            opened.nodes = nodes
    finally:
        close_cluster(opened)


def gpus_together(parts: Sequence[Part]) -> int:
    """GPUs of each node for all parts. Raises TrinityError if the parts use several Rays."""
    addresses = {part.config.cluster.ray_address for part in parts}
    if len(addresses) > 1:
        raise TrinityError(f"cluster.ray_address differs between {', '.join(part.file for part in parts)}.")
    return sum(placement_of(part.config).gpu_per_node for part in parts)


def _part(file: str, config: Config) -> Part:
    return Part("trainer" if config.mode == "train" else config.explorer.name, file, config)
