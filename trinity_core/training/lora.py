"""The policy as a frozen base with a LoRA adapter (peft)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import expanded
from trinity_core.config import LoraConfig
from trinity_core.exchange.checkpoints.adapters import (
    ACTIVE,
    adapter_config,
    differences,
    is_adapter,
    linear_names,
    plain_name,
    read_tensors,
    router_names,
    scaling,
    start_fault,
)


@dataclass(frozen=True, slots=True)
class Adapter:
    config: dict[str, Any]
    linear: list[str]
    """Module names that `all-linear` stands for."""

    @property
    def scaling(self) -> float:
        return scaling(self.config)


def in_4_bits(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments with which transformers loads a model in 4 bits (QLoRA, Dettmers et al. 2023, arXiv
    2305.14314).

    Raises TrinityError without a GPU or bitsandbytes: the check before a run sees only one machine.
    """
    key = "model.lora_configs[0].load_in_4bit"
    if device.type != "cuda":
        raise TrinityError(f"{key}: needs a GPU; on this machine leave it out", key=key)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise TrinityError(
            f"{key}: needs bitsandbytes on this node: pip install --no-deps -r requirements/qlora.txt", key=key
        )
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def add_adapter(lm: Any, lora: LoraConfig, base: str, seed: int, dropout: bool) -> Adapter:
    """Freeze `lm` and add the adapter of `lora.path`, or a new one with B = 0.

    A is drawn from `seed` alone, so that a restarted run starts the same. Dropout is 0 unless `dropout` is true. Raises
    TrinityError if the model lacks the target matrices, if one is the output embedding, or if the adapter in the folder
    does not match.
    """
    import peft
    from peft.tuners.lora.layer import ParamWrapper

    config = adapter_config(lora, base, linear := linear_names(lm), router_names(lm))
    _require_known(lora, linear)
    settings = peft.LoraConfig(
        r=lora.lora_rank, lora_alpha=config["lora_alpha"], target_modules=config["target_modules"],
        exclude_modules=config.get("exclude_modules"), lora_dropout=lora.lora_dropout if dropout else 0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    dtype = next(p.dtype for p in lm.parameters() if p.is_floating_point())
    head = lm.get_output_embeddings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, lm, ACTIVE)
        except ValueError as error:
            raise TrinityError(
                f"model.lora_configs[0].target_modules: {str(error).splitlines()[0]}",
                key="model.lora_configs[0].target_modules",
            ) from error
    if lm.get_output_embeddings() is not head:
        raise TrinityError(
            "model.lora_configs[0].target_modules: the output embedding cannot have an adapter: log-probs are computed "
            "with its weight, which may be the input embedding's too; leave it out",
            key="model.lora_configs[0].target_modules",
        )
    if experts := [name for name, module in lm.named_modules() if isinstance(module, ParamWrapper)]:
        raise TrinityError(
            f"model.lora_configs[0].target_modules: peft puts adapters on {experts[0]}, one for each expert, which are "
            "not supported; name matrices that experts do not have, such as those of attention",
            key="model.lora_configs[0].target_modules",
        )
    tensors = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    if other := [name for name in tensors if not is_adapter(plain_name(name))]:
        raise TrinityError(
            f"model.lora_configs[0].target_modules: {other[0]} is not a matrix of a linear layer; adapters on others "
            "are not supported; name linear layers, or all-linear",
            key="model.lora_configs[0].target_modules",
        )
    if transposed := [name for name, module in lm.named_modules() if vars(module).get("fan_in_fan_out")]:
        raise TrinityError(
            f"model.lora_configs[0].target_modules: {transposed[0]} keeps its matrix transposed, as GPT-2 does, and "
            "adapters of such matrices are not supported; name others, or leave model.lora_configs out",
            key="model.lora_configs[0].target_modules",
        )
    for p in tensors.values():
        p.data = p.data.to(dtype)
    if lora.path is not None:
        _start_from(lora, expanded(lora.path), {plain_name(name): p for name, p in tensors.items()})
    return Adapter(config, linear)


def _require_known(lora: LoraConfig, linear: Sequence[str]) -> None:
    if unknown := set(lora.exclude_modules) - set(linear):
        raise TrinityError(
            f"model.lora_configs[0].exclude_modules: the model has no matrix {min(unknown)}; it has "
            f"{', '.join(linear)}",
            key="model.lora_configs[0].exclude_modules",
        )


def _start_from(lora: LoraConfig, folder: Path, tensors: dict[str, torch.nn.Parameter]) -> None:
    if fault := start_fault(lora):
        raise TrinityError(f"model.lora_configs[0].path: {fault}", key="model.lora_configs[0].path")
    saved = read_tensors(folder)
    wrong = set(saved) ^ set(tensors) or {name for name, p in tensors.items() if p.shape != saved[name].shape}
    if wrong:
        raise TrinityError(
            f"model.lora_configs[0].path: the adapter in {folder} and this model's with these target_modules are not "
            f"alike at {min(wrong)}; give the target_modules that the adapter was trained with, and its base",
            key="model.lora_configs[0].path",
        )
    with torch.no_grad():
        for name, p in tensors.items():
            p.copy_(saved[name])


def refuse_other_adapter(saved: dict[str, Any] | None, adapter: Adapter | None, folder: Path) -> None:
    """Raise DataError if the checkpoint in `folder` was trained with another adapter, or if only one has an adapter."""
    if saved is None or adapter is None:
        if (saved is None) is (adapter is None):
            return
        trained = "all weights" if saved is None else "an adapter"
        wrong = [f"{trained} instead of {'all weights' if adapter is None else 'an adapter'}"]
    else:
        every = {"target_modules": adapter.linear} if saved.get("target_modules") == "all-linear" else {}
        wrong = differences(saved | every, adapter.config)
    if wrong:
        raise DataError(
            f"the checkpoint {folder} was trained with {', '.join(wrong)}: set model.lora_configs as it was, or give "
            "the run another `name`"
        )
