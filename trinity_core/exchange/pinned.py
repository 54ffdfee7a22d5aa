"""Fast copies from GPU to host memory that overlap with computation."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from threading import Event
from typing import Any

from trinity_core.base.lazy import torch

ALIGNMENT = 256
REFUSED = Event()
"""Set once CUDA has refused to pin memory in this process."""
log = logging.getLogger(__name__)


def pin(buffer: mmap.mmap) -> int:
    """Pin a mapping so that GPU copies run at full speed, if this process uses CUDA. Return its address, or 0.

    Only worthwhile for memory that is reused: pinning takes as long as one copy. Do not pin a copy-on-write mapping,
    such as a reader's of a weight version: it would get its own pages. After CUDA has refused once, nothing more is
    pinned.
    """
    if "torch" not in sys.modules or not torch.cuda.is_initialized() or REFUSED.is_set():
        return 0
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, len(buffer), 0)
    if int(error) != 0:  # such as a limit on locked memory: the copy is slower but correct
        log.warning("shared memory cannot be pinned (CUDA error %d): copies from the GPU are slower", int(error))
        REFUSED.set()
        with suppress(
            RuntimeError
        ):  # clears the error, which would otherwise stay this thread's last one until a kernel raises it
            torch.ones(1, device="cuda")
        return 0
    return int(address)


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class HostBuffer:
    """One block of host memory, made and pinned once, to which tensors move and from which they come back.

    torch's own pinned allocations are rounded up to powers of two, one by one, and kept.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._address = 0

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies in the block, which replace those of an earlier call. Waits until they are whole."""
        ends = list(accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0))
        if self._block is None or len(self._block) < ends[-1]:
            if self._address:
                unpin(self._address)
            self._block = mmap.mmap(-1, max(ends[-1], 1))
            self._address = pin(self._block)
        block, copied = torch.frombuffer(self._block, dtype=torch.uint8), []
        for start, tensor in zip(ends, tensors, strict=False):
            target = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied.append(target.copy_(tensor, non_blocking=True))
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return copied


class CopyStream:
    """Copies tensors from a device to host memory while the device continues to compute.

    A tensor may be changed or freed after `hold_device`; its copy may be read after `copied().synchronize()`. On a CPU,
    and for tensors already in host memory, copies are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._stream = self._device.Stream()

    def copy(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy the content that `tensor` has after all work queued on the device so far."""
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            target.copy_(tensor, non_blocking=True)

    def copied(self) -> Any:
        """Return an event that is done when all copies so far are. Other threads may wait for it."""
        event = torch.cuda.Event(blocking=True) if self._device is torch.cuda else self._device.Event()
        event.record(self._stream)
        return event

    def hold_device(self) -> None:
        """Make the device wait until the copies are done. The host does not wait."""
        self._device.current_stream().wait_stream(self._stream)
