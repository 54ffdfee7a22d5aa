"""Writes checkpoint files in a separate process, from memory that it shares with the trainer.

The process leaves the cores and the GIL to the trainer. It never gives a checkpoint its final name: the trainer does
that, because it holds the run's lock.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import on_failure
from trinity_core.base.files import clear_errors, remove_leftovers, sync_file, when_room
from trinity_core.exchange.checkpoints.commit import entry_of
from trinity_core.exchange.pinned import CopyStream, pin, unpin

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Position of a tensor in the memory of its piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Piece:
    """The tensors of one file of a checkpoint."""

    file: str
    memory: str = ""
    bytes: int = 0
    tensors: list[TensorPlace] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    """Metadata of a safetensors file; None: the file is written with `torch.save`."""


class ShardWriter:
    def write(self, folder: str, piece: Piece) -> dict[str, int | str]:
        """Write a piece into the checkpoint's folder, flush it, and return its manifest entry.

        Raises TrinityError if the disk stays full, or is not writable.
        """
        path = Path(folder) / piece.file
        with clear_errors("writing", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            when_room(partial(_write, dict(_mapped(piece)), path, piece.metadata), path)
            sync_file(path)
        return entry_of(path)

    def convert(self, folder: str) -> None:
        """Add the checkpoint in Hugging Face format, with an adapter merged into its base.

        Raises TrinityError if it cannot be converted.
        """
        from trinity_core.exchange.checkpoints.convert import convert

        remove_leftovers(Path(folder) / "actor", "huggingface")  # left by a killed process
        convert(Path(folder), merge=True)


class ShardProcess(ShardWriter):
    """Writes in a separate process. It ignores SIGTERM, sent for example to all processes of a machine: the trainer
    decides."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import torch

        torch.set_num_threads(1)


def _write(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    import torch
    from safetensors.torch import save_file

    with on_failure(partial(path.unlink, missing_ok=True)):
        if metadata is None:
            torch.save(tensors, path)
        else:
            save_file(tensors, path, metadata)


def _mapped(piece: Piece) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as parts of the memory, each with its own storage, because `torch.save` writes whole
    storages."""
    import torch

    memory: Any = None
    if piece.bytes:
        with Path(piece.memory).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), piece.bytes)
    for slot in piece.tensors:
        dtype: torch.dtype = vars(torch)[slot.dtype]
        count = torch.Size(slot.shape).numel()
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=slot.offset) if count else None
        yield slot.name, torch.empty(slot.shape, dtype=dtype) if flat is None else flat.view(slot.shape)


class Segment:
    """Anonymous memory for one file, reused for the same file of the next checkpoint: a new page costs three times as
    much as copying into it.

    It grows with its content; if sizes change, what no longer fits is freed. Memory that receives a GPU's tensors is
    pinned. A tensor lies in one chunk, and chunks never move, so that a GPU may still be copying while others are
    added.
    """

    ALIGNMENT = 64
    CHUNK = 64 << 20
    """Bytes mapped at a time; a larger tensor has its own chunk."""

    def __init__(self) -> None:
        self._file = os.memfd_create("trinity-checkpoint")
        self._chunks: list[mmap.mmap] = []
        self._pinned: dict[int, int] = {}
        """Chunk → its address, or 0 if it cannot be pinned."""
        self._current = self._used = 0
        """Index of the chunk being filled, and bytes used in it."""
        self._copied: Any = None
        self.is_free = True
        """True once the content has been written."""

    def begin(self) -> None:
        self._current = self._used = 0
        self.is_free = False

    def add(self, piece: Piece, name: str, tensor: torch.Tensor, stream: CopyStream | None = None) -> None:
        """Append a tensor of any device to `piece`, all of whose tensors are in this segment; asynchronously with
        `stream`."""
        import torch

        offset = 0
        if tensor.nbytes:
            begin = self._room(tensor.nbytes)
            chunk = self._chunks[self._current]
            if tensor.is_cuda and self._current not in self._pinned:
                self._pinned[self._current] = pin(chunk)
            flat = torch.frombuffer(chunk, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            if stream is None:
                flat.view(tensor.shape).copy_(tensor.detach())
            else:
                stream.copy(flat.view(tensor.shape), tensor.detach())
                self._copied = stream.copied()
            self._used = begin + tensor.nbytes
            offset = sum(map(len, self._chunks[: self._current])) + begin
        dtype = str(tensor.dtype).removeprefix("torch.")
        piece.tensors.append(TensorPlace(name, dtype, tuple(tensor.shape), offset))
        piece.memory = f"/proc/{os.getpid()}/fd/{self._file}"
        piece.bytes = max(piece.bytes, offset + tensor.nbytes)

    def _room(self, size: int) -> int:
        begin = -(-self._used // self.ALIGNMENT) * self.ALIGNMENT
        if self._used and begin + size > len(self._chunks[self._current]):
            self._current, begin = self._current + 1, 0
        if self._current < len(self._chunks):
            if begin + size <= len(self._chunks[self._current]):
                return begin
            self._drop(self._current)
        start, length = sum(map(len, self._chunks)), -(-max(size, self.CHUNK) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, start + length)  # untouched pages take no memory
        self._chunks.append(mmap.mmap(self._file, length, offset=start))
        return 0

    def until_copied(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        with suppress(RuntimeError):  # a GPU that has failed copies nothing
            self.until_copied()
        self._drop(0)
        os.close(self._file)

    def _drop(self, first: int) -> None:
        for number in range(first, len(self._chunks)):
            if address := self._pinned.pop(number, 0):
                unpin(address)
        del self._chunks[first:]
        os.ftruncate(self._file, sum(map(len, self._chunks)))
