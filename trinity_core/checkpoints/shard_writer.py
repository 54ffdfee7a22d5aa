"""Writes the files of a trainer's checkpoints, in a separate process, from memory that both have mapped.

The process leaves the cores to the trainer, needs no interpreter lock of the trainer's, and gives no checkpoint its
name: that is done by the trainer, which holds the run's lock.
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

from trinity_core.checkpoints.commit import entry_of
from trinity_core.errors import on_failure
from trinity_core.files import clear_errors, remove_leftovers, sync_file, when_room
from trinity_core.pinned import CopyStream, pin, unpin

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in the memory of its piece."""

    name: str
    dtype: str
    """Its name in torch: `bfloat16`."""
    shape: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Piece:
    """The tensors of one file of a checkpoint."""

    file: str
    """Its path in the checkpoint's folder."""
    memory: str = ""
    """The file that is mapped."""
    bytes: int = 0
    tensors: list[TensorPlace] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    """Metadata of a file in the safetensors format; None: the file is one of `torch.save`."""


class ShardWriter:
    """Writes files one after the other."""

    def write(self, folder: str, piece: Piece) -> dict[str, int | str]:
        """Write a piece into the checkpoint's folder and flush it; its entry in the manifest.

        Raises TrinityError if the disk stays full, or is not writable.
        """
        path = Path(folder) / piece.file
        with clear_errors("writing", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            when_room(partial(_write, dict(_mapped(piece)), path, piece.metadata), path)
            sync_file(path)
        return entry_of(path)

    def convert(self, folder: str) -> None:
        """Add the checkpoint in Hugging Face format, an adapter merged into its base.

        Raises TrinityError if it cannot be converted.
        """
        from trinity_core.checkpoints.convert import convert

        remove_leftovers(Path(folder) / "actor", "huggingface")  # of a process that was killed meanwhile
        convert(Path(folder), merge=True)


class ShardProcess(ShardWriter):
    """Writes in a separate process. A request to end (SIGTERM to all processes of a machine) is the trainer's."""

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
    """The tensors as parts of the memory, each with its own storage: `torch.save` writes whole storages."""
    import torch

    memory: Any = None
    if piece.bytes:
        with Path(piece.memory).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), piece.bytes)
    for place in piece.tensors:
        dtype: torch.dtype = vars(torch)[place.dtype]
        count = torch.Size(place.shape).numel()
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=place.offset) if count else None
        yield place.name, torch.empty(place.shape, dtype=dtype) if flat is None else flat.view(place.shape)


class Segment:
    """Memory without a name for one file, kept for the same file of the next checkpoint: a page that is new costs three
    times the copy into it.

    It grows with what is put into it; where that has other sizes than before, what does not fit is given back. What a
    GPU's tensors are copied to is pinned; a tensor lies in one chunk, and no chunk moves, so that a GPU may still be
    copying while others are added.
    """

    ALIGNMENT = 64
    CHUNK = 64 << 20
    """Bytes that are mapped at a time; a larger tensor has a chunk of its own."""

    def __init__(self) -> None:
        self._file = os.memfd_create("trinity-checkpoint")
        self._chunks: list[mmap.mmap] = []
        self._pinned: dict[int, int] = {}
        """Chunk -> its address, or 0 if it cannot be pinned."""
        self._current = self._used = 0
        """The chunk that is being filled, and the bytes in it."""
        self._copied: Any = None
        self.is_free = True
        """What is here has been written."""

    def begin(self) -> None:
        """Forget what is there."""
        self._current = self._used = 0
        self.is_free = False

    def add(self, piece: Piece, name: str, tensor: torch.Tensor, stream: CopyStream | None = None) -> None:
        """Copy a tensor of any device to the end of `piece`, all of whose tensors are here; in a stream if given."""
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
        """Where `size` bytes begin in what is then the current chunk."""
        begin = -(-self._used // self.ALIGNMENT) * self.ALIGNMENT
        if self._used and begin + size > len(self._chunks[self._current]):
            self._current, begin = self._current + 1, 0
        if self._current < len(self._chunks):
            if begin + size <= len(self._chunks[self._current]):
                return begin
            self._drop(self._current)
        start, length = sum(map(len, self._chunks)), -(-max(size, self.CHUNK) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, start + length)  # pages that nobody touches are free
        self._chunks.append(mmap.mmap(self._file, length, offset=start))
        return 0

    def until_copied(self) -> None:
        """Wait until all tensors are here."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        with suppress(RuntimeError):  # a GPU that has failed copies nothing
            self.until_copied()
        self._drop(0)
        os.close(self._file)

    def _drop(self, first: int) -> None:
        """Give the memory of a chunk and of those after it back."""
        for number in range(first, len(self._chunks)):
            if address := self._pinned.pop(number, 0):
                unpin(address)
        del self._chunks[first:]
        os.ftruncate(self._file, sum(map(len, self._chunks)))
