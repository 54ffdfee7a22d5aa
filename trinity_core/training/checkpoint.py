"""Saves and restores the trainer's state in a checkpoint folder.

`actor/` (and `critic/`): `model_world_size_W_rank_r.pt` and `optim_…` hold whole tensors by name, each in the file of
one rank (those of `optim_…` also in further files, `…_part_2.pt`); `extra_state_…` holds the rank's random states;
`trainer_state.json` holds the rest. For a policy with an adapter, the tensors are the adapter's alone, and
`actor/lora_adapter/adapter_config.json` describes it. Files are loaded with `weights_only`, so no code in them can run.
"""

from __future__ import annotations

import json
import math
import random
import socket
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_core.checkpoints.adapters import CONFIG, read_config
from trinity_core.checkpoints.beginning import STATE, Beginning
from trinity_core.errors import DataError
from trinity_core.files import from_record
from trinity_core.layout import ADAPTER, shard_name
from trinity_core.pinned import CopyStream
from trinity_core.training.distributed import Ranks, sum_over_ranks
from trinity_core.training.engine import TrainingEngine
from trinity_core.training.learner import Learner
from trinity_core.training.lora import refuse_other_adapter
from trinity_core.training.saving import Copying
from trinity_core.training.state import (
    loss_scale,
    optimizer_state,
    optimizer_steps,
    parameters,
    restore,
    weights,
    whole_shape,
)

PIECE_BYTES = 2 << 30
"""Bytes of optimiser state in one file of a rank."""
UNRESTRICTED = "unrestricted"
"""The `trainer.save_strategy` with which all ranks write at once."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State other than tensors, the same on every rank."""

    step: int
    optimizer_steps: dict[str, int]
    """Number of updates, by folder (`actor`, `critic`)."""
    objective: dict[str, float] = field(default_factory=dict)
    loss_scales: dict[str, dict[str, float]] = field(default_factory=dict)
    began: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Read the state from a checkpoint's folder. Raises DataError for a newer release's."""
        return from_record(cls, json.loads((folder / STATE).read_text()), folder / STATE)


def engines_by_folder(learner: Learner) -> dict[str, TrainingEngine]:
    engines = {"actor": learner.engine}
    if learner.critic is not None:
        engines["critic"] = learner.critic.engine
    return engines


def copy(learner: Learner, step: int, copying: Copying, began: Beginning | None = None) -> None:
    """Copy the state after `step`: this rank's share of the tensors and, on rank 0, the shared files. Collective.

    The engines' next update waits until their tensors are copied.
    """
    ranks = learner.ranks
    engines = engines_by_folder(learner)
    for part, engine in engines.items():
        names = [f"{part}/{shard_name(kind, ranks.world_size, ranks.rank)}" for kind in ("model", "optim")]
        stream = engine.copies if engine.plain else None  # tensors that ZeRO gathers are gone at the next one
        _copy_share(weights(engine), names[0], ranks, copying, stream)
        _copy_share(optimizer_state(engine), names[1], ranks, copying, stream, PIECE_BYTES)
        file = BytesIO()
        torch.save(random_state(ranks), file)
        copying.small[f"{part}/{shard_name('extra_state', ranks.world_size, ranks.rank)}"] = file.getvalue()
    if ranks.first:
        counts = {part: optimizer_steps(engine) for part, engine in engines.items()}
        scales = {part: loss_scale(engine) for part, engine in engines.items()}
        state = TrainerState(step, counts, learner.objective.state(), scales, asdict(began) if began else {})
        copying.small[STATE] = json.dumps(asdict(state), indent=1).encode() + b"\n"
        if learner.adapter is not None:
            config = json.dumps(learner.adapter.config, indent=1).encode() + b"\n"
            copying.small[f"actor/{ADAPTER}/{CONFIG}"] = config


def largest_file(learner: Learner) -> int:
    """Return the size in bytes of the largest file that `copy` makes on one rank."""
    sizes = []
    for engine in engines_by_folder(learner).values():
        saved = sum(math.prod(whole_shape(p, engine)) for _, p in parameters(engine))
        share = saved // learner.ranks.world_size
        sizes.append(max(share * engine.settings.dtype.itemsize, min(PIECE_BYTES, share * 12)))
    return max(sizes)


def model_bytes(learner: Learner) -> int:
    """Return the size in bytes of the whole policy, an adapter's base included: the output of a conversion."""
    engine = learner.engine
    return sum(math.prod(whole_shape(p, engine)) for p in engine.module.parameters()) * engine.settings.dtype.itemsize


def writing_turns(strategy: str, ranks: Ranks) -> list[int]:
    """Return the turn in which each rank writes, by `trainer.save_strategy`. Collective.

    `unrestricted`: all at once; `single_node`: one node after the other; `single_process` and `single_thread`: one rank
    after the other (each worker writes with one thread, so both mean the same).
    """
    if strategy == UNRESTRICTED or ranks.world_size == 1:
        return [0] * ranks.world_size
    if strategy != "single_node":
        return list(range(ranks.world_size))
    nodes = nodes_of(ranks)
    order = {node: turn for turn, node in enumerate(sorted(set(nodes)))}
    return [order[node] for node in nodes]


def nodes_of(ranks: Ranks) -> list[int]:
    """Return a number for the node of each rank. Collective."""
    nodes = torch.zeros(ranks.world_size, dtype=torch.int64)
    nodes[ranks.rank] = zlib.crc32(socket.gethostname().encode())
    return sum_over_ranks(nodes, ranks).tolist()


def _copy_share(
    tensors: Iterator[tuple[str, Tensor]], file: str, ranks: Ranks, copying: Copying, stream: CopyStream | None,
    piece: float = math.inf,
) -> None:  # fmt: skip
    """Copy this rank's share of `tensors` to `file`, and anything beyond `piece` bytes to `…_part_2.pt`, `…_part_3.pt`
    and so on.

    Collective: every rank iterates over all tensors, so all ranks end their files at the same tensors.
    """
    numbered, parts = enumerate(tensors), 1
    following = next(numbered, None)

    def share() -> Iterator[tuple[str, Tensor]]:
        nonlocal following
        passed = 0
        while following is not None and passed < piece * ranks.world_size:
            number, (name, tensor) = following
            passed += tensor.nbytes
            if number % ranks.world_size == ranks.rank:
                yield name, tensor
            following = next(numbered, None)

    copying.file(file, share(), stream=stream)
    while following is not None:
        parts += 1
        copying.file(part_of(file, parts), share(), stream=stream)


def part_of(file: str, number: int) -> str:
    return f"{file.removesuffix('.pt')}_part_{number}.pt"


def load(learner: Learner, folder: Path) -> TrainerState:
    """Restore the state in `folder`, written by any number of workers. Collective.

    Raises DataError for a checkpoint of another adapter, or of none, and for one of a newer release.
    """
    saved = folder / "actor" / ADAPTER
    refuse_other_adapter(read_config(saved) if saved.exists() else None, learner.adapter, folder)
    state = TrainerState.read(folder)
    zero_losses = learner.zero_losses()
    for part, engine in engines_by_folder(learner).items():
        if part not in state.optimizer_steps:
            raise DataError(f"the checkpoint {folder} has no {part}; was it made with another algorithm?")
        source = folder / part
        restore(
            engine,
            _load_all(source, "model"),
            _load_all(source, "optim"),
            state.optimizer_steps[part],
            zero_losses[part],
            state.loss_scales.get(part, {}),
        )
    learner.objective.load_state(state.objective)
    own = folder / "actor" / shard_name("extra_state", learner.ranks.world_size, learner.ranks.rank)
    if own.exists():
        set_random_state(torch.load(own, weights_only=True))
    return state


def _load_all(folder: Path, content: str) -> dict[str, Tensor]:
    files = sorted(folder.glob(f"{content}_world_size_*_rank_*.pt"))
    if not files:
        raise DataError(f"the checkpoint {folder} has no {content}_world_size_*_rank_*.pt")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    return tensors


def random_state(ranks: Ranks) -> dict[str, Any]:
    """Return the states of this process's random generators, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
