"""The engine's side of weight sync: a mix-in for vLLM's worker, which reads the tensors where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import nn

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


class WeightReceiver:
    """Added to every worker of an engine (`worker_extension_cls`) and called by `collective_rpc`."""

    def receive_weights(self, method: str, path: str, version: int) -> None:
        """Load a published version, or (method `folder`) a Hugging Face folder, into the model."""
        from vllm.platforms import current_platform

        worker: Any = self
        tensors = with_head(_folder_tensors(Path(path)) if method == "folder" else _published(method, path, version))
        if current_platform.is_cpu():
            drop_expert_kernels(worker.get_model())
        worker.reload_weights(weights_iterator=tensors)


def drop_expert_kernels(model: nn.Module) -> None:
    """Make vLLM's next reload prepare experts for the CPU's kernels again, as it did at the start.

    If a mixture of experts has a kernel, vLLM's reload copies new weights unchanged into the tensors that the kernel
    reads: right on a GPU, wrong on the CPU, where the kernel's layout differs. Without a kernel it rebuilds both.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def check_there(method: str, path: str, version: int) -> None:
    """Raise what `receive_weights` would: `VersionGone` for missing weights, `DataError` for damaged ones.

    Errors in vLLM's own processes come back as text, without their type; so the check runs in this process first.
    """
    if method == "folder":
        _files(Path(path))
    else:
        _published(method, path, version)


def _published(method: str, path: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    from trinity_core.sync.methods import open_versions

    return open_versions(method, path).load(version)


def _folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, opened.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no safetensors file; convert the checkpoint first")
    return files


def with_head(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, followed by the embeddings as `lm_head.weight` if no head is among them.

    vLLM's CPU backend keeps a repacked copy of a tied head, which stays at its old values unless it is loaded by name.
    """
    head = embeddings = None
    for name, tensor in tensors:
        head = tensor if name == HEAD else head
        embeddings = tensor if name == EMBEDDINGS else embeddings
        yield name, tensor
    if head is None and embeddings is not None:
        yield HEAD, embeddings
