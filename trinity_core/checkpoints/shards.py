"""Reads a model's shards, in any of these formats, into whole tensors by Hugging Face name.

- Our trainer: `model_world_size_W_rank_r.pt` hold whole tensors, each in the file of one rank.
- FSDP: the same file names; each holds `DTensor` shards of every parameter.
- Megatron: a `torch.distributed.checkpoint` folder, see `megatron`.

Files are loaded with `weights_only`, so that no code in them is executed.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.errors import DataError

if TYPE_CHECKING:
    import torch

SHARD_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def shard_files(actor: Path) -> list[Path]:
    """Return the model's shard files in order of rank, possibly none. Raises DataError if one is missing."""
    by_world: dict[int, dict[int, Path]] = {}
    for path in actor.glob("model_world_size_*_rank_*.pt"):
        if match := SHARD_FILE.fullmatch(path.name):
            by_world.setdefault(int(match[1]), {})[int(match[2])] = path
    if not by_world:
        return []
    if len(by_world) > 1:
        raise DataError(f"{actor} holds shards of different world sizes ({sorted(by_world)}): remove the wrong ones")
    ((world, by_rank),) = by_world.items()
    missing = sorted(set(range(world)) - set(by_rank))
    if missing:
        raise DataError(f"{actor} lacks the model shards of ranks {missing} of {world}")
    return [by_rank[rank] for rank in range(world)]


def merge(actor: Path) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """Return the whole tensors of the shards in `actor`, and a function that returns the data of one by name.

    Tensors that must be joined are without data. Raises DataError if the shards do not match.
    """
    import torch
    from torch.distributed.tensor import DTensor

    ranks = [load_shard(path) for path in shard_files(actor)]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    pieces = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    tensors = {
        name: torch.empty(first.shape, dtype=first.dtype, device="meta")
        if isinstance(first, DTensor)
        else _shared(name, [first, *others])
        for name, (first, *others) in pieces.items()
    }
    return tensors, lambda name: merge_dtensors(name, pieces[name]) if tensors[name].is_meta else tensors[name]


def load_shard(path: Path) -> dict[str, Any]:
    """Return one rank's tensors by name. Raises DataError if the file is damaged or holds more than plain data."""
    import pickle

    import torch

    try:
        with torch.serialization.safe_globals(_safe_types()):
            # Mapped, only the tensors being written are in memory; older formats cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read without running code from it: {error}") from error
    if isinstance(loaded, dict) and set(loaded) <= {"model", "state_dict", "module"} and len(loaded) == 1:
        (loaded,) = loaded.values()
    if not isinstance(loaded, dict):
        raise DataError(f"{path} holds a {type(loaded).__name__} instead of tensors by name")
    return loaded


def _safe_types() -> list[Any]:
    """Return the classes of a saved DTensor besides tensors: layout descriptions, which execute nothing."""
    from collections import OrderedDict

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return [OrderedDict, DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard, Replicate, Partial]


def _shared(name: str, pieces: Sequence[Any]) -> torch.Tensor:
    import torch

    first = pieces[0]
    if not isinstance(first, torch.Tensor):
        raise DataError(f"the entry {name} of a model shard is a {type(first).__name__}, not a tensor")
    if len(pieces) == 1 or all(torch.equal(first, piece) for piece in pieces[1:]):
        return first
    raise DataError(
        f"the ranks hold different pieces of {name} and they are no DTensors, so nothing says how it was cut"
    )


def merge_dtensors(name: str, pieces: Sequence[Any]) -> torch.Tensor:
    """Join `DTensor` shards, one per rank in order, over a mesh of one or two dimensions (FSDP, HSDP, TP x DP).

    Replicating mesh dimensions contribute their first piece; sharding ones are joined along the sharded dimension.
    """
    import torch

    spec = pieces[0].device_mesh
    placements = pieces[0].placements
    mesh_shape = tuple(spec.mesh.shape)
    if math.prod(mesh_shape) != len(pieces):
        raise DataError(f"{name} lies on a mesh of {mesh_shape}, but there are {len(pieces)} shards")
    order = spec.mesh.reshape(-1).tolist()
    lined_up = [pieces[rank].to_local() for rank in order]
    merged = _join(lined_up, list(mesh_shape), list(placements), name)
    if tuple(merged.shape) != tuple(pieces[0].shape):
        raise DataError(f"{name} has shape {tuple(merged.shape)} when joined instead of {tuple(pieces[0].shape)}")
    return torch.as_tensor(merged)


def _join(pieces: list[torch.Tensor], mesh: list[int], placements: list[Any], name: str) -> torch.Tensor:
    """Join over the innermost dimension of the mesh first: the last split is joined first."""
    import torch

    while mesh:
        width, placement = mesh.pop(), placements.pop()
        blocks = [pieces[i : i + width] for i in range(0, len(pieces), width)]
        if placement.is_replicate():
            pieces = [block[0] for block in blocks]
        elif placement.is_shard():
            pieces = [torch.cat(block, dim=placement.dim) for block in blocks]
        else:
            raise DataError(f"{name} is {placement} on its mesh: a sum that was never taken cannot be converted")
    return pieces[0]
