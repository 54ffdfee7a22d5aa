"""The parts of one asynchronous run, a trainer and its explorers, each from its own configuration, on one Ray."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster, placement_of
from trinity_core.hosting.faults import CANCEL_TOKEN, CancelToken
from trinity_core.hosting.placement import Placement
from trinity_core.run.attempt import PLAIN, Frontend
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import run_request
from trinity_core.run.stage import StageRequest

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval of checks whether the trainer has gone back to a checkpoint after its explorer finished."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run of an asynchronous training: the trainer or an explorer."""

    name: str
    """`trainer`, or the explorer's name."""
    file: str
    config: Config
    placement: Placement


def plan_parts(files: Sequence[str], overrides: Sequence[str]) -> list[Part]:
    """Return the parts of one asynchronous run, with checked configurations, from their files.

    Raises ConfigError or TrinityError, and TransientFault if GPUs of a part are in use.
    """
    configs = {file: load_checked(file, list(overrides)) for file in files}
    first, *_ = configs
    for file, config in configs.items():
        if config.mode != "train" and not config.explores_alone:
            raise TrinityError(
                f"{file} has mode {config.mode}. The parts of one run have mode: explore or serve, and one has "
                "mode: train.",
                key="mode",
            )
        if config.job_dir != configs[first].job_dir:
            raise TrinityError(
                f"{file} and {first} are different runs: project, name and checkpoint_root_dir must be the same.",
                key="name",
            )
    names = [_part_name(configs[file]) for file in files]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        files_named = ", ".join(file for file, name in zip(files, names, strict=True) if name in twice)
        raise TrinityError(
            f"{files_named} are the same part of the run ({twice[0]}). Give each explorer another "
            "explorer.name; a run has one trainer.",
            key="explorer.name",
        )
    return [Part(_part_name(config), file, config, placement_of(config)) for file, config in configs.items()]


@contextmanager
def shared_ray(parts: Sequence[Part], opened: Cluster) -> Iterator[CancelToken]:
    """Within this context all parts share one Ray and its cores; yields the token that cancels all of them.

    Ray is closed at the end. Raises TrinityError if the parts need more GPUs together than there are.
    """
    try:
        opened.check_room(sum(part.placement.gpus for part in parts))
        nodes = opened.nodes
        opened.nodes = [replace(node, cpus=max(node.cpus // len(parts), 1)) for node in nodes]
        token = CancelToken()
        reset_token = CANCEL_TOKEN.set(token)
        try:
            yield token
        finally:
            CANCEL_TOKEN.reset(reset_token)
            opened.nodes = nodes
    finally:
        close_cluster(opened)


def gpus_together(parts: Sequence[Part]) -> int:
    """Return the GPUs per node for all parts. Raises TrinityError if the parts use several Rays."""
    addresses = {part.config.cluster.ray_address for part in parts}
    if len(addresses) > 1:
        raise TrinityError(f"cluster.ray_address differs between {', '.join(part.file for part in parts)}.")
    return sum(part.placement.gpu_per_node for part in parts)


def _part_name(config: Config) -> str:
    return "trainer" if config.mode == "train" else config.explorer.name


def run_parts(files: Sequence[str], overrides: Sequence[str] = (), frontend: Frontend = PLAIN) -> dict[str, Any]:
    """Run a trainer and its explorers, each from its own configuration, on one Ray; return part → summary.

    When one fails for good, the others save and end. A finished explorer runs again if its trainer goes back to a
    checkpoint before steps that it explored.
    """

    def resolve_parts() -> list[Part]:
        parts = plan_parts(files, overrides)
        frontend.announce(parts[0].config, "async")
        return parts

    def run_part(part: Part, trained: Event, token: CancelToken) -> dict[str, Any]:
        request = StageRequest(part.config, "rft", file=part.file)
        try:
            while True:
                summary = frontend.subflow(request, lambda: run_request(request, frontend))
                config = part.config.with_values({"name": summary["name"]})  # the run may be in a fresh folder
                if config.mode != "explore" or not _explores_again(config, trained, token):
                    return summary
        finally:
            if part.config.mode == "train":
                trained.set()

    parts = frontend.call("resolve", resolve_parts, retries=True)
    opened = frontend.call("cluster", lambda: open_cluster(parts[0].config, gpus_together(parts)), retries=True)
    trained = Event()
    if all(part.config.mode != "train" for part in parts):
        trained.set()
    with shared_ray(parts, opened) as token:
        return frontend.run_components(token, {part.name: partial(run_part, part, trained, token) for part in parts})


def _explores_again(config: Config, trained: Event, token: CancelToken) -> bool:
    """Wait until the trainer or all parts end. Return True if the trainer went back before steps of this explorer."""
    name = config.explorer.name
    with open_run_store(config) as store:
        lineage = -1
        while not trained.wait(LOOK_SECONDS) and not token.cancelled:
            earlier_lineage, lineage = lineage, store.lineage()
            explorer = None if lineage == earlier_lineage else store.stats().explorers.get(name)
            if explorer and explorer.is_expected and not store.trainer().finished:
                step = explorer.step + 1
                log.warning("the trainer went back to a checkpoint: %s explores again from step %d", name, step)
                return True
    return False
