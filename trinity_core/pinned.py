"""Copies from a GPU to the machine's memory: at full speed, and while the GPU computes."""

from __future__ import annotations

import logging
import mmap
import sys
from contextlib import suppress
from threading import Event
from typing import Any

from trinity_core.lazy import torch

REFUSED = Event()
"""CUDA has refused to pin memory in this process."""
log = logging.getLogger(__name__)


def pin(buffer: mmap.mmap) -> int:
    """Register a mapping with CUDA, if this process uses it: a GPU then copies at full speed. Its address, or 0.

    Only memory that is reused is worth it: pinning takes as long as one copy. A mapping that is copy-on-write, such as
    a reader's of a weight version, would get pages of its own. Once CUDA has refused, nothing more is pinned.
    """
    if "torch" not in sys.modules or not torch.cuda.is_initialized() or REFUSED.is_set():
        return 0
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, len(buffer), 0)
    if int(error) != 0:  # such as a limit on locked memory: the copy is slower, and right
        log.warning("shared memory cannot be pinned (CUDA error %d): copies from the GPU are slower", int(error))
        REFUSED.set()
        with suppress(RuntimeError):  # the error stays this thread's last one until a kernel raises it
            torch.ones(1, device="cuda")
        return 0
    return int(address)


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


class CopyStream:
    """Copies tensors of a device to the machine's memory while the device goes on.

    A tensor may be changed or freed after `hold_device`, its copy be read after `copied().synchronize()`. On a CPU,
    whose streams do nothing, and of a tensor that is in the machine's memory, a copy is made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._stream = self._device.Stream()

    def copy(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy what `tensor` holds after all that the device has been given to do so far."""
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            target.copy_(tensor, non_blocking=True)

    def copied(self) -> Any:
        """An event: all copies so far have been made. Other threads may wait for it."""
        event = torch.cuda.Event(blocking=True) if self._device is torch.cuda else self._device.Event()
        event.record(self._stream)
        return event

    def hold_device(self) -> None:
        """Let the device do nothing further before the copies are made; the host does not wait."""
        self._device.current_stream().wait_stream(self._stream)
