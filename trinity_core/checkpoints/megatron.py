"""Reads Megatron-Core distributed checkpoints of dense Qwen2, Qwen3 and Llama models as Hugging Face tensors.

Names and layouts are those of Megatron-Core's `GPTModel`: query, key and value rows in one weight, interleaved by query
group; gate and up projection stacked; layer norms inside the linear layer that follows them (Transformer Engine) or
separate. Layers may be numbered, or stacked along a first dimension. Mixtures of experts are not covered.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.errors import DataError

if TYPE_CHECKING:
    import torch

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


def find(actor: Path) -> Path | None:
    """Return the distributed checkpoint in or below `actor`, or None."""
    for folder in (actor, actor / "dist_ckpt", actor / "model"):
        if (folder / ".metadata").is_file():
            return folder
    return None


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Read the whole model tensors of the distributed checkpoint in `folder`, under Megatron's names."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = _reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and "optimizer" not in name and "_extra_state" not in name:
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


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
        raise DataError(f"the checkpoint's metadata asks for {module}.{name}, which is not data; it is not read")


def to_huggingface(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
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
