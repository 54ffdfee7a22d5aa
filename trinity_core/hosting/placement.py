"""Assigns GPUs and threads to processes: pure arithmetic, before any process of the run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config
from trinity_core.config.resolve import most_repeats
from trinity_core.config.rules.resources import colocates, engine_gpus, gpu_rules, sequence_rules, trainer_workers
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.rollout.inference.settings import gpu_sequences


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and GPUs of one node."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class AnyNode:
    """Lets Ray choose the node of each process. Methods return Ray's scheduling strategy; see also
    `nodes.ReservedNodes`."""

    def engine(self, index: int) -> Any:
        return "DEFAULT"

    def auxiliary(self, model: int, index: int) -> Any:
        return "DEFAULT"

    def trainer(self, rank: int) -> Any:
        return "DEFAULT"

    def first(self) -> Any:
        return "DEFAULT"

    def release(self) -> None:
        """Release what is reserved; actors that still use it end."""


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs and threads of each process of a run. GPU numbers are Ray's: a fraction shares a GPU."""

    gpu_per_node: int
    engines: int
    """Number of the policy's engines; 0 if the run does not generate."""
    engine_gpus: float
    auxiliary_gpus: tuple[int, ...]
    """GPUs per engine of each auxiliary model."""
    trainers: int
    trainer_gpus: float
    """GPUs per trainer worker."""
    engine_threads: int
    trainer_threads: int
    in_turn: bool
    """True if engines and trainer alternate, so that each may use every core."""
    gpus: float = 0
    nodes: AnyNode = AnyNode()
    """Nodes of a joined cluster that are reserved for these processes."""
    colocated: bool = False
    """True if engine and trainer take turns on the GPU (`exchange/sync/shared_gpu.py`) or on the CPU."""

    @property
    def shares_gpu(self) -> bool:
        return bool(self.engines) and bool(self.trainers) and 0 < self.engine_gpus < 1

    @property
    def on_gpu(self) -> bool:
        return self.gpu_per_node > 0


def flow_of(config: Config) -> str:
    """Return the flow for this configuration, given its stages, its mode, and whether its algorithm uses rollouts."""
    if config.stages:
        return "pipeline"
    if config.mode == "bench":
        return "gate" if config.gate.enable else "evaluate"
    return "rft" if config.algorithm_type.uses_rollouts else "sft"


def weakest(nodes: Sequence[Machine], number: int) -> Machine:
    """Return the smallest of the `number` nodes with the most GPUs. Raises TrinityError if there are fewer nodes."""
    if number > len(nodes):
        raise TrinityError(
            f"cluster.node_num asks for {number} nodes, but the Ray cluster has {len(nodes)}. Lower it, or let more "
            f"nodes join (`ray start --address=…`).",
            key="cluster.node_num",
        )
    strongest = sorted(nodes, key=lambda node: node.gpus, reverse=True)[:number]
    return replace(strongest[-1], cpus=min(node.cpus for node in strongest))


def place(config: Config, machine: Machine) -> Placement:
    """Distribute a run over `cluster.node_num` nodes, each like `machine`.

    Raises TrinityError if the configuration asks for more than the nodes have, or leaves the trainer without a GPU.
    """
    nodes = config.cluster.node_num
    per_node = _gpus_per_node(config, machine)
    total = per_node * nodes
    trains = config.mode in ("both", "train")
    rollout = config.explorer.rollout_model
    engines = rollout.engine_num if "explorer.rollout_model" in config.engine_models else 0
    models = config.explorer.auxiliary_models if config.uses_engines else ()
    auxiliary = tuple(model.tensor_parallel_size for model in models)
    others = sum(model.engine_num for model in models)
    trainers = trainer_workers(config, total) if trains else 0
    colocated = bool(engines) and trains and colocates(config, total)
    if config.cluster.colocate and config.is_synchronous and total > 1:
        raise TrinityError(
            f"cluster.colocate is for one GPU, and the run has {total} GPUs: leave it out.", key="cluster.colocate"
        )
    is_lockstep = config.is_synchronous and SyncSchedule.of(config).is_lockstep
    in_turn = (is_lockstep or colocated) and bool(engines) and trains
    faults = [*(gpu_rules(config, per_node) if total else ()), *(sequence_rules(config, trainers) if trains else ())]
    for fault in faults:
        raise TrinityError(str(fault), key=fault.key)
    if not total:
        engine_threads, trainer_threads = threads(machine.cpus, engines + others, trainers, in_turn)
        return Placement(
            0, engines, 0, (0,) * len(auxiliary), trainers, 0, engine_threads, trainer_threads, in_turn,
            colocated=colocated,
        )  # fmt: skip
    others_gpus = sum(model.engine_num * model.tensor_parallel_size for model in models)
    shares = trains and engine_gpus(config) == total
    gpus_of_engine = 0.5 if shares else float(rollout.tensor_parallel_size)
    trainer_gpus = 0.5 if shares else float(trains)
    engine_threads, trainer_threads = threads(machine.cpus, engines + others, max(trainers // nodes, 1), False)
    return Placement(
        per_node, engines, gpus_of_engine, auxiliary, trainers, trainer_gpus, engine_threads, trainer_threads, in_turn,
        engines * gpus_of_engine + others_gpus + trainers * trainer_gpus + config.gpus_beside, colocated=colocated,
    )  # fmt: skip


def alone(config: Config, placement: Placement) -> Placement:
    """Return the placement of the auxiliary models without the policy's engines and the trainer."""
    models = config.explorer.auxiliary_models
    count = sum(model.engine_num for model in models)
    gpus = sum(model.engine_num * taken for model, taken in zip(models, placement.auxiliary_gpus, strict=True))
    cores = placement.engine_threads * (placement.engines + count)
    return replace(
        placement, engines=0, engine_gpus=0, trainers=0, trainer_gpus=0, gpus=gpus,
        engine_threads=max(cores // max(count, 1), 1),
    )  # fmt: skip


def components_of(config: Config, placement: Placement) -> set[str]:
    needs = {
        "explore": placement.engines > 0 and (config.mode == "both" or config.explores_alone),
        "train": placement.trainers > 0,
    }
    return {name for name, needed in needs.items() if needed}


def threads(cpus: int, engines: int, trainers: int, in_turn: bool) -> tuple[int, int]:
    """Return OpenMP threads of (one engine, one trainer worker).

    Processes that work at the same time never use more threads than cores. In turn, either side may use all cores.
    """
    if in_turn:
        return max(cpus // max(engines, 1), 1), max(cpus // max(trainers, 1), 1)
    share = max(cpus // max(engines + trainers, 1), 1)
    return share, share


def sync_method(config: Config, placement: Placement) -> tuple[str, str]:
    """Return the sync method of the run, and a notice if it is not the configured one ("" otherwise)."""
    asked = config.synchronizer.sync_method
    instead = SYNC_METHODS[asked].without_own_gpus
    if instead and SYNC_METHODS[instead].one_node and config.cluster.node_num > 1:
        instead = "checkpoint"
    route = f"weights go {SYNC_METHODS[instead].route}" if instead else ""
    if instead and not placement.on_gpu:
        return instead, f"No GPU is used, so sync_method {asked} means {instead}: {route}."
    if instead and placement.trainer_gpus < 1 and placement.trainers:
        return instead, (
            f"Engine and trainer share a GPU, which {asked.upper()} does not allow: "
            f"sync_method {asked} means {instead}: {route}."
        )
    return asked, ""


QUEUED = 2
"""Answers asked for at once, over those that a GPU engine processes at once: the rest waits in vLLM's queue. More would
not fill it better, and waits there count towards `explorer.max_timeout`."""


def runners(config: Config, placement: Placement, gpu_memory: int = 0) -> int:
    """Return the number of concurrent workflows per engine: as configured, or on a GPU all tasks of a step, but at most
    `QUEUED` times what fills `max_num_seqs`. `gpu_memory`: bytes of one of its GPUs, 0 if unknown."""
    explorer = config.explorer
    if not placement.on_gpu or config.written("explorer.runner_per_model") is not None:
        return explorer.runner_per_model
    repeats = most_repeats(config.buffer, config.algorithm)
    full = -(-(explorer.rollout_model.max_num_seqs or gpu_sequences(gpu_memory)) // repeats)
    whole_step = -(-config.buffer.batch_size // max(placement.engines, 1))
    return max(explorer.runner_per_model, full, min(whole_step, QUEUED * full))


def unfilled_engine(config: Config, placement: Placement, gpu_memory: int = 0) -> str:
    """Return a notice if `explorer.runner_per_model` leaves more than half of a GPU engine's places empty, else ""."""
    if not (placement.on_gpu and placement.engines and config.written("explorer.runner_per_model")):
        return ""
    asked = config.explorer.runner_per_model
    repeats = most_repeats(config.buffer, config.algorithm)
    places = config.explorer.rollout_model.max_num_seqs or gpu_sequences(gpu_memory)
    sequences = min(places, config.buffer.batch_size * repeats // placement.engines)
    if 2 * asked * repeats >= sequences:
        return ""
    return (
        f"explorer.runner_per_model: {asked} × {repeats} answers at once; an engine on this GPU would take {sequences} "
        "of a step. Leave it out, or raise it, unless the workflows need the limit."
    )


def _gpus_per_node(config: Config, machine: Machine) -> int:
    configured = config.cluster.gpu_per_node
    if configured is None:
        return machine.gpus
    if configured > machine.gpus:
        available = f"a node has {machine.gpus}" if machine.gpus else "there is none"
        raise TrinityError(
            f"cluster.gpu_per_node asks for {configured} GPU{'s' * (configured > 1)}, but {available} "
            f"({machine.cpus} CPU cores). Lower it (0 runs engines and trainer on the CPU), or leave it out for all.",
            key="cluster.gpu_per_node",
        )
    return configured
