"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): tensor names, peft's folder format, merging.

A matrix W [out, in] with an adapter computes W x + s B A x, with A [r, in], B [out, r] and s = lora_alpha / r. Tensors
are named after their module: `model.layers.0.self_attn.q_proj.lora_A` and `….lora_B`. Imports no torch at the top, so
that flows may ask for names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import DataError
from trinity_core.base.files import clear_errors, expanded, sync_file, temporary_sibling, when_room, write_json
from trinity_core.base.layout import now_at

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.config import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = ".lora_A", ".lora_B"
ACTIVE = "default"
"""peft's name for the adapter in a model."""
PEFT_PREFIX = "base_model.model."
SHAPING = ("peft_type", "r", "lora_alpha", "target_modules")
"""Entries of an adapter's configuration that determine the shape and meaning of its tensors."""
_UNSET: tuple[Any, ...] = (None, {}, [], False)
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"), _UNSET),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"), _UNSET),
    **dict.fromkeys(("alpha_pattern", "rank_pattern", "alora_invocation_tokens", "arrow_config"), _UNSET),
    **dict.fromkeys(("kasa_config", "monteclora_config", "velora_config"), _UNSET),
}  # fmt: skip
"""peft settings that make an adapter more than A and B with one scale, or change the base, with the values for which
they do not."""


def plain_name(name: str) -> str:
    """Return a parameter's name in a model with a peft adapter; for base parameters, the name without an adapter."""
    return name.replace(".base_layer.", ".").removesuffix(f".{ACTIVE}.weight")


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def adapter_config(lora: LoraConfig, base: str, linear: Sequence[str], routers: Collection[str] = ()) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for an adapter of the model `base`, without adapters on `routers`.

    `linear` lists the names for `all-linear`, a setting that in peft would also include the experts of a mixture.
    """
    alpha = int(lora.lora_alpha) if lora.lora_alpha.is_integer() else lora.lora_alpha
    excluded = {"exclude_modules": list(routers)} if routers else {}
    targets = list(filter(lora.adapts, lora.modules or linear))
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.lora_rank,
        "lora_alpha": alpha, "lora_dropout": lora.lora_dropout, "target_modules": targets,
        "bias": "none", "inference_mode": True, **excluded,
    }  # fmt: skip


def scaling(config: Mapping[str, Any]) -> float:
    return float(config["lora_alpha"]) / int(config["r"])


def differences(saved: Mapping[str, Any], configured: Mapping[str, Any]) -> list[str]:
    pairs = {key: (_value(saved.get(key)), _value(configured.get(key))) for key in SHAPING}
    return [f"{key} {old} instead of {new}" for key, (old, new) in pairs.items() if old != new]


def _value(entry: Any) -> Any:
    return sorted(entry) if isinstance(entry, list) else entry


def read_config(folder: Path) -> dict[str, Any]:
    """Read the adapter configuration in `folder`. Raises DataError if there is none, or the adapter is not plain
    LoRA."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no LoRA adapter: {CONFIG} cannot be read ({error})", key=str(folder)
        ) from error
    if more := [key for key, values in PLAIN.items() if config.get(key, values[0]) not in values]:
        raise DataError(
            f"the adapter in {folder} is more than LoRA's matrices A and B with one scale: {', '.join(more)}",
            key=more[0],
        )
    return config


def base_of(config: Mapping[str, Any], step_folder: Path) -> str:
    """Return the path or hub name of a checkpoint's base model, also if all runs were moved."""
    return now_at(str(config["base_model_name_or_path"]), step_folder.absolute().parent.parent.parent)


def start_fault(lora: LoraConfig) -> str:
    """Return why a run cannot start from the adapter in `lora.path`, judging by its configuration; "" if it can."""
    if lora.path is None:
        return ""
    try:
        theirs = read_config(expanded(lora.path))
    except DataError as error:
        return str(error)
    ours = {"r": lora.lora_rank, "lora_alpha": lora.lora_alpha}
    wrong = [
        f"{name} {theirs.get(name)} instead of {value:g}" for name, value in ours.items() if theirs.get(name) != value
    ]
    return f"the adapter in {lora.path} has {', '.join(wrong)}; give its own values next to path" if wrong else ""


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the adapter's tensors in `folder`, under our names. Raises DataError for a tensor that is not A or B."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        raise DataError(f"{folder} holds no LoRA adapter: there is no {WEIGHTS}")
    tensors = {
        name.removeprefix(PEFT_PREFIX).removesuffix(".weight"): value
        for name, value in load_file(folder / WEIGHTS).items()
    }
    if other := [name for name in tensors if not is_adapter(name)]:
        raise DataError(f"{folder / WEIGHTS} holds {other[0]}, which is none of LoRA's matrices A and B")
    return tensors


def write_adapter(tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write peft's files into `folder`. The weights, which complete the adapter, are written last.

    Raises TrinityError if the disk stays full, or the folder is not writable.
    """
    from safetensors.torch import save_file

    write_json(folder / CONFIG, config)
    by_name = {f"{PEFT_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    temporary = temporary_sibling(folder / WEIGHTS)
    with clear_errors("writing", folder / WEIGHTS):
        try:
            when_room(partial(save_file, by_name, temporary, {"format": "pt"}), temporary)
            sync_file(temporary)
            temporary.replace(folder / WEIGHTS)
        finally:
            temporary.unlink(missing_ok=True)
        sync_file(folder)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A, computed in at least float32 and rounded to the dtype of `weight`.

    If B is zero, W is returned unchanged: adding 0 would turn -0.0 into 0.0 and change the digest of a new adapter's
    base.
    """
    import torch

    if not b.any():
        return weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def merged_tensor(name: str, tensor: Tensor, adapter: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the base model's tensor with the adapter merged, or the tensor itself if the adapter does not change
    it."""
    module = name.removesuffix(".weight")
    if module + A not in adapter:
        return tensor
    return merged_weight(tensor, adapter[module + A], adapter[module + B], scale)


def require_matrices(adapter: Iterable[str], base: Collection[str]) -> None:
    """Raise DataError if the base model lacks a matrix that the adapter changes. Both arguments are tensor names."""
    missing = [name.removesuffix(A) for name in adapter if name.endswith(A)]
    if missing := [module for module in missing if f"{module}.weight" not in base]:
        raise DataError(
            f"the base model has no {min(missing)}.weight, which the adapter changes; is it another model?",
            key=min(missing),
        )


def linear_names(lm: Any, among: Collection[str] = ()) -> list[str]:
    """Return the last name parts of the matrices in a Hugging Face model that get an adapter.

    These are matrices whose names end in one of `among`; if that is empty (`all-linear`), all but the output embedding.
    Routers (`router_names`) are excluded.
    """
    head, ends = lm.get_output_embeddings(), tuple(f".{name}" for name in among)
    names = [name for name, m in _linear_layers(lm) if m is not head]
    leaves = {name.rpartition(".")[2] for name in names if not among or f".{name}".endswith(ends)}
    return sorted(leaves - set(router_names(lm)))


def router_names(lm: Any) -> list[str]:
    """Return the last name parts of routers whose class is a linear layer, but which also return the chosen experts."""
    return sorted({name.rpartition(".")[2] for name, m in _linear_layers(lm) if type(m).__name__.endswith("Router")})


def _linear_layers(lm: Any) -> list[tuple[str, Any]]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D  # from GPT-2, with transposed matrices

    return [(name, m) for name, m in lm.named_modules() if isinstance(m, nn.Linear | Conv1D)]
