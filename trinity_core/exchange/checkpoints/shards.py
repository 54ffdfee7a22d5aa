"""Reads a model's shards, in any of these formats, into whole tensors by Hugging Face name.

- Our trainer: `model_world_size_W_rank_r.pt` hold whole tensors, each in the file of one rank.
- FSDP: the same file names; each holds `DTensor` shards of every parameter.
- Megatron: a `torch.distributed.checkpoint` folder of a dense Qwen2, Qwen3 or Llama model.

Files are loaded with `weights_only`, so that no code in them is executed.

Names and layouts are those of Megatron-Core's `GPTModel`: query, key and value rows in one weight, interleaved by query
group; gate and up projection stacked; layer norms inside the linear layer that follows them (Transformer Engine) or
separate. Layers may be numbered, or stacked along a first dimension.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import DataError

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


def merge_shards(files: Sequence[Path]) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """Return the whole tensors of all ranks' shards, and a function that returns the data of one by name.

    Tensors that must be joined are without data. Raises DataError if the shards do not match.
    """
    import torch
    from torch.distributed.tensor import DTensor

    ranks = [load_shard(path) for path in files]
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
    import torch

    try:
        with torch.serialization.safe_globals(_safe_types()):
            # Mapped, only the tensors being written are in memory; older formats cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read without running code from it: {error}", key=str(path)) from error
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
        f"the ranks hold different pieces of {name} and they are no DTensors, so nothing says how it was cut", key=name
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


PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
LAYER_NAME = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
PREFIX = re.compile(r"^(?:(?:model\d*|module)\.)+")
_SAFE_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_SAFE_NAMES = {
    ("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_dtype"), ("pathlib", "PosixPath"), ("pathlib", "Path"), ("builtins", "set"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


def find_megatron(actor: Path) -> Path | None:
    """Return the distributed checkpoint in or below `actor`, or None."""
    for folder in (actor, actor / "dist_ckpt", actor / "model"):
        if (folder / ".metadata").is_file():
            return folder
    return None


def read_megatron(folder: Path) -> dict[str, torch.Tensor]:
    """Read the whole model tensors of the distributed checkpoint in `folder`, under Megatron's names."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = _reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and "optimizer" not in name and "_extra_state" not in name:
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        """Reads `.metadata`, a pickle, without running code from it."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
            if metadata.storage_meta is None:
                from torch.distributed.checkpoint.metadata import StorageMeta

                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype | torch.layout | torch.memory_format):
            return vars(torch)[name]
        if module in _SAFE_MODULES or (module, name) in _SAFE_NAMES:
            return super().find_class(module, name)
        asked = f"{module}.{name}"
        raise DataError(f"the checkpoint's metadata asks for {asked}, which is not data; it is not read", key=asked)


def from_megatron(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Rename, split and unstack `tensors` for the model described by `config` (a `config.json`).

    Raises DataError for an unknown name.
    """
    converted: dict[str, torch.Tensor] = {}
    for megatron_name, tensor in tensors.items():
        name = PREFIX.sub("", megatron_name)
        if name in PLAIN:
            padded = name != "decoder.final_layernorm.weight"  # vocabularies are padded for tensor parallelism
            converted[PLAIN[name]] = tensor[: config["vocab_size"]].clone() if padded else tensor
            continue
        match = LAYER_NAME.fullmatch(name)
        if match is None:
            raise DataError(f"the Megatron tensor {megatron_name} has no counterpart in a dense Hugging Face model")
        layers = enumerate(tensor) if match[1] is None else [(int(match[1]), tensor)]
        for index, value in layers:
            for part, piece in _layer_parts(match[2], value, config):
                converted[f"model.layers.{index}.{part}"] = piece.contiguous().clone()
    return converted


def _layer_parts(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if name in LAYER:
        yield LAYER[name], tensor
    elif name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        kind = name.rpartition(".")[2]
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        size = config.get("head_dim") or config["hidden_size"] // heads
        per_group = heads // groups
        grouped = tensor.reshape(groups, per_group + 2, size, *tensor.shape[1:])
        for part, piece in (
            ("q", grouped[:, :per_group]), ("k", grouped[:, per_group]), ("v", grouped[:, per_group + 1]),
        ):  # fmt: skip
            yield f"self_attn.{part}_proj.{kind}", piece.reshape(-1, *tensor.shape[1:])
    elif name == "mlp.linear_fc1.weight":
        gate, up = tensor.chunk(2, dim=0)
        yield "mlp.gate_proj.weight", gate
        yield "mlp.up_proj.weight", up
    else:
        raise DataError(f"the Megatron layer tensor {name} has no counterpart in a dense Hugging Face model")
