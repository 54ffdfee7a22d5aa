"""The engine's side of weight sync: a mix-in for vLLM's worker, which reads the tensors where they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.errors import DataError

if TYPE_CHECKING:
    import torch

    from trinity_core.inference.weight_copy import Reloader

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


class WeightReceiver:
    """Added to every worker of an engine (`worker_extension_cls`) and called by `collective_rpc`."""

    _reloader: Reloader | None = None

    def receive_weights(self, method: str, path: str, version: int) -> None:
        """Load a published version, or (method `folder`) a Hugging Face folder, into the model."""
        from vllm.platforms import current_platform

        from_folder = method == "folder"
        tensors = with_head(_folder_tensors(Path(path)) if from_folder else _published(method, path, version))
        if not current_platform.is_cpu():
            self._vllm_reload(tensors)
        elif from_folder:
            self._vllm_reload_on_cpu(tensors)
        else:
            self._reload(tensors)

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._reloader is None:
            from trinity_core.inference.weight_copy import Reloader

            worker: Any = self
            self._reloader = Reloader(worker.get_model(), self._vllm_reload_on_cpu)
        self._reloader.load(tensors)

    def _vllm_reload_on_cpu(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from trinity_core.inference.weight_copy import prepare_experts_anew

        worker: Any = self
        prepare_experts_anew(worker.get_model())
        self._vllm_reload(tensors)

    def _vllm_reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        worker: Any = self
        worker.reload_weights(weights_iterator=tensors)


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
