"""Saves and restores the trainer's state in a checkpoint folder.

`actor/` (and `critic/`): `model_world_size_W_rank_r.pt` and `optim_…` hold whole tensors by name, each in the file of
one rank (those of `optim_…` also in further files, `…_part_2.pt`); `extra_state_…` holds the rank's random states;
`trainer_state.json` holds the rest. Of a policy with an adapter those are the adapter's tensors alone, and
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_core.adapters import read_config, write_config
from trinity_core.checkpoints.beginning import STATE, Beginning
from trinity_core.errors import DataError, on_failure
from trinity_core.files import clear_errors, when_room
from trinity_core.layout import ADAPTER, shard_name
from trinity_core.training.distributed import Ranks, barrier, sum_over_ranks
from trinity_core.training.engine import TrainingEngine
from trinity_core.training.learner import Learner
from trinity_core.training.lora import refuse_other_adapter
from trinity_core.training.state import optimizer_state, optimizer_steps, restore, weights

PIECE_BYTES = 2 << 30
"""Of the optimiser's state that a rank gathers before it writes a file."""
UNRESTRICTED = "unrestricted"
"""The `trainer.save_strategy` with which all ranks write at once."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State other than tensors, the same on every rank."""

    step: int
    optimizer_steps: dict[str, int]
    """Updates made, by folder (`actor`, `critic`)."""
    objective: dict[str, float] = field(default_factory=dict)
    """Adaptive coefficients."""
    began: dict[str, str] = field(default_factory=dict)
    """The `Beginning` of the run."""


def engines_by_folder(learner: Learner) -> dict[str, TrainingEngine]:
    """The engines whose state a checkpoint holds, by folder name."""
    engines = {"actor": learner.engine}
    if learner.critic is not None:
        engines["critic"] = learner.critic.engine
    return engines


def save(
    learner: Learner, step: int, folder: Path, strategy: str = UNRESTRICTED, began: Beginning | None = None
) -> None:
    """Write the whole state after `step` to `folder`, which exists. Collective.

    `strategy` says which ranks may write at once; see `writing_turns`. Raises TrinityError if the disk is full or not
    writable.
    """
    ranks = learner.ranks
    turns = writing_turns(strategy, ranks)
    for part, engine in engines_by_folder(learner).items():
        target = folder / part
        with clear_errors("writing", target):
            target.mkdir(exist_ok=True)
            _save_share(weights(engine), target / shard_name("model", ranks.world_size, ranks.rank), ranks, turns)
            optimizer = target / shard_name("optim", ranks.world_size, ranks.rank)
            _save_share(optimizer_state(engine), optimizer, ranks, turns, PIECE_BYTES)
            _save(random_state(ranks), target / shard_name("extra_state", ranks.world_size, ranks.rank))
    if ranks.first:
        counts = {part: optimizer_steps(engine) for part, engine in engines_by_folder(learner).items()}
        state = TrainerState(step, counts, learner.objective.state(), asdict(began) if began else {})
        if learner.adapter is not None:
            write_config(learner.adapter.config, folder / "actor" / ADAPTER)
        text = json.dumps(asdict(state), indent=1) + "\n"
        when_room(lambda: (folder / STATE).write_text(text), folder)


def writing_turns(strategy: str, ranks: Ranks) -> list[int]:
    """The turn in which each rank writes, by `trainer.save_strategy`. Collective.

    `unrestricted`: all at once; `single_node`: one node after the other; `single_process` and `single_thread`: one rank
    after the other (each worker writes with one thread, so both mean the same).
    """
    if strategy == UNRESTRICTED or ranks.world_size == 1:
        return [0] * ranks.world_size
    if strategy != "single_node":
        return list(range(ranks.world_size))
    nodes = torch.zeros(ranks.world_size, dtype=torch.int64)
    nodes[ranks.rank] = zlib.crc32(socket.gethostname().encode())
    order = {node: turn for turn, node in enumerate(sorted(set(sum_over_ranks(nodes, ranks).tolist())))}
    return [order[node] for node in nodes.tolist()]


def _save_share(
    tensors: Iterator[tuple[str, Tensor]], path: Path, ranks: Ranks, turns: list[int], piece: float = math.inf
) -> None:
    """Write this rank's share of `tensors` in its turn: to `path`, and what is beyond `piece` bytes to `…_part_2.pt`,
    `…_part_3.pt` and so on. Collective: every rank iterates over all tensors, and so writes a piece when others do.
    """
    mine: dict[str, Tensor] = {}
    passed, parts = 0, 1
    for number, (name, tensor) in enumerate(tensors):
        if passed >= piece * ranks.world_size:
            _save_in_turn(mine, path if parts == 1 else part_of(path, parts), ranks, turns)
            mine, passed, parts = {}, 0, parts + 1
        passed += tensor.nbytes
        if number % ranks.world_size == ranks.rank:
            mine[name] = _compact(tensor)
    _save_in_turn(mine, path if parts == 1 else part_of(path, parts), ranks, turns)


def part_of(path: Path, number: int) -> Path:
    """The file of a further piece of what begins in `path`."""
    return path.with_stem(f"{path.stem}_part_{number}")


def _save_in_turn(state: dict[str, Tensor], path: Path, ranks: Ranks, turns: list[int]) -> None:
    for turn in range(max(turns) + 1):
        if turns[ranks.rank] == turn:
            _save(state, path)
        if max(turns):
            barrier(ranks)


def _save(state: dict[str, Any], path: Path) -> None:
    def write() -> None:
        with on_failure(partial(path.unlink, missing_ok=True)):
            torch.save(state, path)

    when_room(write, path)


def _compact(tensor: Tensor) -> Tensor:
    """A copy on the CPU that owns its storage: `torch.save` would write the whole buffer of a view."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def load(learner: Learner, folder: Path) -> TrainerState:
    """Restore the state in `folder`, written by any number of workers. Collective.

    Raises DataError for a checkpoint of another adapter, or of none.
    """
    saved = folder / "actor" / ADAPTER
    refuse_other_adapter(read_config(saved) if saved.exists() else None, learner.adapter, folder)
    state = TrainerState(**json.loads((folder / STATE).read_text()))
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
    """The states of this process's random generators, as plain values and tensors."""
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
    """The inverse of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
