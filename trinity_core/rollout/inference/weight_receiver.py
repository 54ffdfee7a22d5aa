"""The engine's side of weight sync: a mix-in for vLLM's worker, which reads the tensors where they are needed."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_core.base.errors import TrinityError
from trinity_core.base.threads import end_with
from trinity_core.exchange.checkpoints.adapters import (
    CONFIG,
    PEFT_PREFIX,
    A,
    B,
    plain_name,
    read_config,
    read_tensors,
    scaling,
)
from trinity_core.exchange.checkpoints.hub_names import HubNames
from trinity_core.exchange.checkpoints.huggingface import folder_tensors, safetensors_files
from trinity_core.exchange.sync.tensorfile import value_digest
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.sync.weight_check import ABSORBED, COMPUTED, PACKED, SAME
from trinity_core.rollout.inference.vllm_types import ADAPTER

if TYPE_CHECKING:
    import torch
    from torch import nn

T = TypeVar("T")
log = logging.getLogger(__name__)

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
EMBEDDED = (".embed_tokens.weight", ".wte.weight", ".embed_in.weight")
"""Suffixes of the names of input embeddings: of most models, of GPT-2, of GPT-NeoX."""
COMPUTING = ("composed_loader", "A_weight_loader")
"""vLLM's weight loaders that do not copy: -exp(A_log) in Mamba layers, an offset of norms."""
DIGEST = "packed_weight_digest"
"""Attribute of a module: the value digest of the weight of which its kernel has a packed copy."""


class WeightReceiver:
    """Added to every worker of an engine (`worker_extension_cls`) and called by `collective_rpc`."""

    def receive_weights(self, method: str, path: str, version: int) -> None:
        """Load a published version, or (method `folder`) a Hugging Face folder, into the model."""
        from vllm.platforms import current_platform

        worker: Any = self
        if worker.vllm_config.lora_config is not None:
            put_in_place(worker, _adapter_tensors(method, path, version, worker.model_config.model))
            return
        tensors = folder_tensors(Path(path)) if method == "folder" else _published(method, path, version)
        if getattr(worker.model_config.hf_text_config, "tie_word_embeddings", True):  # a model's own code may lack it
            tensors = with_head(tensors)
        if not current_platform.is_cpu():
            worker.reload_weights(weights_iterator=tensors)
            return
        drop_expert_kernels(worker.get_model())
        with digests_before_packing(_dtype(worker)):
            worker.reload_weights(weights_iterator=tensors)

    def parameter_digests(self) -> dict[str, int | None]:
        """Return the current value digests of this rank's parameters; see `trinity_core.exchange.sync.weight_check`."""
        worker: Any = self
        digests = parameter_digests(worker.get_model(), _dtype(worker))
        return {plain_name(names): value for names, value in digests.items()} | adapter_digests(worker)


def _adapter_tensors(method: str, path: str, version: int, base: str) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors, with the matrices B multiplied by its scale, from a published version or a peft
    folder; none for the engine's own model `base`. Raises DataError for the folder of another whole model."""
    if method != "folder":
        return dict(_published(method, path, version))
    folder = Path(path)
    if not path or folder.resolve() == Path(base).resolve():
        return {}
    scale = scaling(read_config(folder))
    return {name: tensor * scale if name.endswith(B) else tensor for name, tensor in read_tensors(folder).items()}


def put_in_place(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the worker's adapter by these tensors; without any, by one that changes nothing.

    Raises TrinityError if vLLM cannot adapt one of the matrices; without tensors, one of those in the engine's
    settings, so that a run ends before it begins.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    adapters = manager._adapter_manager
    if tensors:
        rank = next(int(tensor.shape[0]) for name, tensor in tensors.items() if name.endswith(A))
        settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        by_name = {f"{PEFT_PREFIX}{name}.weight": tensor.clone() for name, tensor in tensors.items()}
        mapper = getattr(worker.get_model(), "hf_to_vllm_mapper", None)  # for models whose modules vLLM renames
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER, by_name, settings, "cpu", manager.lora_config.lora_dtype,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )  # fmt: skip
    else:
        adapter = adapters.create_dummy_lora(ADAPTER, 1, manager.embedding_modules)  # of zeros
    packed = adapters.packed_modules  # a packed module takes adapters of its parts, not of a fused matrix
    places = {*adapters.modules, *(part for parts in packed.values() for part in parts)} - set(packed)
    targets = () if tensors else manager.lora_config.target_modules
    lost = {name for name in adapter.loras if tensors and name not in places}
    lost |= {name for name in targets if not any(module.split(".")[-1] == name for module in places)}
    if lost:
        raise TrinityError(
            f"vLLM cannot put an adapter on {min(lost)} of this model; leave it out of "
            "model.lora_configs[0].target_modules",
            key="model.lora_configs[0].target_modules",
        )
    adapters.remove_adapter(ADAPTER)
    adapters.add_adapter(adapter)
    adapters.activate_adapter(ADAPTER)


def adapter_digests(worker: Any) -> dict[str, int | None]:
    """Return the value digests of this rank's matrices A and B; zeros contribute nothing."""
    digests: dict[str, int | None] = {}
    if worker.vllm_config.lora_config is None:
        return digests
    for name, module in worker.model_runner.lora_manager._adapter_manager.modules.items():
        for end, stacked in ((A, module.lora_a_stacked), (B, module.lora_b_stacked)):
            digests[f"{name}{end}"] = sum(value_digest(part, _dtype(worker)) for part in stacked)
    return digests


def _dtype(worker: Any) -> str:
    return str(worker.model_config.dtype).removeprefix("torch.")


def parameter_digests(model: nn.Module, dtype: str) -> dict[str, int | None]:
    """Return the value digest, in `dtype`, of each nonempty parameter of `model`, and of each packed weight.

    A packed weight cannot be read; its digest was taken before packing, and is None if no load packed it. A parameter
    shared by several modules has all its names (`weight_check.SAME`). A parameter that its loader computes or the
    engine rounds has the digest of its own bits, which shows changes but cannot be compared with the published tensor.
    The two matrices that latent attention derives from `kv_b_proj` share one digest, that of `kv_b_proj`.
    """
    import torch
    from torch.nn.functional import linear

    digests: dict[str, int | None] = {}
    quantized = {id(p) for module in model.modules() if _is_quantized(module) for p in module.parameters(recurse=False)}
    absorbed = {id(p): m for m in model.modules() for p in _absorbed(m)}
    parameters = {id(p): p for p in model.parameters() if p.numel() and id(p) not in absorbed}
    for names, parameter in _with_names(parameters, model.named_parameters(remove_duplicate=False)):
        if id(parameter) in quantized or _is_computed(parameter):
            digests[f"{names}{COMPUTED}"] = value_digest(parameter.detach().as_subclass(torch.Tensor))
        else:
            digests[names] = value_digest(parameter, dtype)
    sources = ((m, vars(m)["_modules"]["kv_b_proj"]) for m in absorbed.values())
    made_of = {id(source): m for m, source in sources if not _is_quantized(source)}
    for names, module in _with_names(made_of, model.named_modules(remove_duplicate=False), ".weight"):
        digests[f"{names}{ABSORBED}"] = sum(value_digest(part, dtype) for part in _absorbed(module))
    packed = {id(m): m for m in model.modules() if vars(m).get("cpu_linear", linear) is not linear}
    for names, module in _with_names(packed, model.named_modules(remove_duplicate=False), ".weight"):
        digests[f"{names}{PACKED}"] = vars(module).get(DIGEST)
    _say_once(tuple(name.removesuffix(COMPUTED) for name in digests if name.endswith(COMPUTED)))
    return digests


def _with_names(
    modules: dict[int, T], named_modules: Iterable[tuple[str, Any]], last: str = ""
) -> Iterator[tuple[str, T]]:
    """Yield each of the `modules` (by its id) with all its names."""
    names: dict[int, list[str]] = {}
    for name, module in named_modules:
        names.setdefault(id(module), []).append(f"{name}{last}")
    yield from ((SAME.join(names[key]), module) for key, module in modules.items())


def _absorbed(module: nn.Module) -> list[nn.Parameter]:
    """Return W_UK and W_UV of latent attention, which decoding reads instead of `kv_b_proj`; vLLM makes them at each
    load."""
    absorbed = [module._parameters.get(name) for name in ("W_UK_T", "W_UV")]
    return [parameter for parameter in absorbed if parameter is not None]


def _is_quantized(module: nn.Module) -> bool:
    """True if the engine itself rounds the module's weights (`quantization: fp8`)."""
    method = vars(module).get("quant_method")
    return method is not None and not type(method).__name__.startswith("Unquantized")


def _is_computed(parameter: nn.Parameter) -> bool:
    loader = vars(parameter).get("weight_loader")
    return inspect.isfunction(loader) and inspect.unwrap(loader).__name__ in COMPUTING


@cache
def _say_once(names: tuple[str, ...]) -> None:
    if names:
        log.info(
            "the parameter check leaves out %s: their loader computes them from what is published", ", ".join(names)
        )


@contextmanager
def digests_before_packing(dtype: str) -> Iterator[None]:
    """Within this context, keep the digest of each weight that vLLM's CPU backend packs for its kernels.

    Packing drops the weight, and the packed copy is opaque. A module that is not packed again keeps its old digest, as
    its kernel keeps the old copy: a tied head that was not loaded by its own name.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def digest_and_pack(layer: nn.Module, remove_weight: bool) -> None:
        setattr(layer, DIGEST, value_digest(layer.weight, dtype))  # type: ignore[arg-type]
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = digest_and_pack
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack


def drop_expert_kernels(model: nn.Module) -> None:
    """Make vLLM's next reload prepare experts for the CPU's kernels again, as at startup.

    If a mixture of experts has a kernel, vLLM's reload copies new weights unchanged into the tensors that the kernel
    reads: right on a GPU, wrong on the CPU, where the kernel's layout differs. Without a kernel it rebuilds both.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def check_there(method: str, path: str, version: int) -> None:
    """Raise `VersionGone` for missing weights and `DataError` for damaged files, before the engine gives up its current
    weights.

    The check runs in this process because errors in vLLM's processes return as text, without their type.
    """
    if method == "folder":
        if path and not (Path(path) / CONFIG).is_file():
            safetensors_files(Path(path))
    else:
        open_versions(method, path).load(version)


def _published(method: str, path: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    return open_versions(method, path).load(version)


def with_head(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, followed by the embeddings as `lm_head.weight` if there is no head among them.

    vLLM's CPU backend keeps a repacked copy of a tied head, which keeps its old values unless it is loaded by name.
    """
    head = embeddings = None
    for name, tensor in tensors:
        head = tensor if name == HEAD else head
        embeddings = tensor if name.endswith(EMBEDDED) else embeddings
        yield name, tensor
    if head is None and embeddings is not None:
        yield HEAD, embeddings


def take_trainers_tensors(model: Any, config: Any) -> None:
    """Make one of vLLM's models accept a trainer's tensors, whichever way they arrive: each calls `load_weights`.

    They have transformers' names (`HubNames`) and include a tied head, which classes without `lm_head` (Gemma 2,
    Command R: their embeddings compute the logits) refuse. `config` is transformers' configuration of the model.
    """
    modules = (name for name, _ in model.named_modules(remove_duplicate=False))
    left_out = () if any(name.split(".")[-1] == "lm_head" for name in modules) else (HEAD,)

    on_hub = HubNames.of_config(config)

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        by_name = ((name, tensor) for name, tensor in on_hub.tensors(tensors) if name not in left_out)
        return type(model).load_weights(model, by_name)

    model.load_weights = load_weights


class WorkerExtension(WeightReceiver):
    def end_with(self, actor: int) -> None:
        """End this worker, and vLLM's engine process above it, as soon as the process `actor` has ended.

        vLLM's engine process does not notice a parent that was killed, and would keep the GPU.
        """
        above = [] if os.getppid() == actor else [os.getppid()]
        end_with(actor, above)

    def take_trainers_tensors(self) -> None:
        worker: Any = self
        take_trainers_tensors(worker.get_model(), worker.model_config.hf_text_config)

    def use_seeded_sampler(self) -> None:
        """Sample tokens with `trinity_core.rollout.inference.seeded_sampler` from now on. CPU only."""
        from trinity_core.rollout.inference.seeded_sampler import SeededSampler

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.sampler = SeededSampler(runner)
