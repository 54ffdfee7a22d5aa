"""The ranks of a trainer: process group, device, and the few collectives besides DeepSpeed's own."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trinity_core.base.addresses import LOOPBACK, interface_of, own_address
from trinity_core.base.errors import TrinityError

if TYPE_CHECKING:
    import torch

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Longest time that one rank waits for another in a collective, including rank 0's wait for a batch."""
RENDEZVOUS_TIMEOUT = timedelta(minutes=15)
"""Time for all ranks to join; their processes already run. Torch's error says how many have joined."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share sequences with this one."""

    rank: int
    """Index of this rank in the group."""
    size: int
    group: Any


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among the workers of one trainer."""

    rank: int
    world_size: int
    device: torch.device
    sequence: SequenceGroup | None = None
    """None: each rank has whole sequences."""
    data_group: Any = None
    """Ranks with different sequences, one of each `SequenceGroup`; None: all ranks."""

    @property
    def first(self) -> bool:
        """True on rank 0, which talks to the rest of the run."""
        return self.rank == 0

    @property
    def sharing(self) -> int:
        """Number of ranks that share a sequence."""
        return self.sequence.size if self.sequence else 1


_listeners: dict[tuple[str, int], socket.socket] = {}


def meeting_point() -> tuple[str, int]:
    """Return an address and a port on which this process listens from now on. Called on rank 0.

    The listener stays open because another process could take a port that is merely free.
    """
    listener = socket.create_server((own_address(), 0))
    address, port = listener.getsockname()[:2]
    _listeners.clear()
    _listeners[address, port] = listener
    return address, port


def uses_gpu() -> bool:
    """True if this process has a usable GPU. Raises TrinityError if it was given one that torch cannot use."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if torch.cuda.is_available() or visible in ("", "-1"):
        return torch.cuda.is_available()
    try:
        torch.cuda.init()
        reason = "torch sees no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip()
    raise TrinityError(
        f"the trainer was given GPU {visible} (CUDA_VISIBLE_DEVICES), but torch cannot use it: {reason}. Install a "
        "driver that fits this torch, or train on the CPU with cluster.gpu_per_node: 0",
        key="cluster.gpu_per_node",
    )


def join(rank: int, world_size: int, master_addr: str, master_port: int, use_gpu: bool) -> Ranks:
    """Join the process group: NCCL with a GPU, gloo otherwise; each process sees its own GPU as device 0.

    Sets the environment that DeepSpeed reads, so call it before `start_deepspeed`. A process that is already in a group
    (a second trainer in the same processes) stays in it.
    """
    os.environ.update(
        DS_ACCELERATOR="cuda" if use_gpu else "cpu",
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
    )
    # By default gloo listens on the host name's address, which other nodes may not reach.
    if interface := interface_of(LOOPBACK if master_addr == LOOPBACK else own_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    import torch

    device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if torch.distributed.is_initialized():
        met = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if met != (rank, world_size):
            raise RuntimeError(f"this process is rank {met[0]} of {met[1]} and cannot become {rank} of {world_size}")
        return Ranks(rank, world_size, device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
        store=_rendezvous_store(rank, world_size, master_addr, master_port),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return Ranks(rank, world_size, device)


def start_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed, which probes its operators, and let it use the process group; return the module."""
    import deepspeed

    # DeepSpeed's CPU backend would compile an all-reduce for inference at startup; training uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # ZeRO 3 partitions a model before `deepspeed.initialize`; uninitialized, it would assume a single rank.
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(backend, dist_init_required=False, verbose=False)
    return deepspeed


def _rendezvous_store(rank: int, world_size: int, address: str, port: int) -> torch.distributed.Store:
    """Return torch's store, served by rank 0 on `address` only: by default it listens on every interface. A single
    rank has one in its own memory, which no other account can write to."""
    from torch.distributed import HashStore, TCPStore

    listener = _listeners.pop((address, port), None)
    if world_size == 1:
        if listener:
            listener.close()
        return HashStore()
    descriptor = (listener or socket.create_server((address, port))).detach() if rank == 0 else None
    return TCPStore(address, port, world_size, rank == 0, RENDEZVOUS_TIMEOUT, master_listen_fd=descriptor)


def broadcast_bytes(blob: bytes | None, ranks: Ranks) -> bytes:
    """Return rank 0's `blob` on every rank (the others pass None), without pickle."""
    import torch

    if ranks.world_size == 1:
        assert blob is not None
        return blob
    size = torch.tensor([0 if blob is None else len(blob)])
    torch.distributed.broadcast(size, 0)
    if not size:
        return b""  # torch makes no tensor of it
    buffer = (
        torch.empty(int(size), dtype=torch.uint8)
        if blob is None
        else torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    )
    torch.distributed.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


def from_first(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return rank 0's `values` on every rank; all have the same shape and dtype."""
    import torch

    if ranks.world_size > 1:
        values = values.contiguous()
        torch.distributed.broadcast(values, 0)
    return values


def sum_over_ranks(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum `values` element-wise and in place over all ranks, or over those with different sequences."""
    import torch

    if ranks.world_size > 1:
        torch.distributed.all_reduce(values, group=ranks.data_group)
    return values


def any_rank(flag: bool, ranks: Ranks) -> bool:
    import torch

    flags = torch.tensor([int(flag)])
    if ranks.world_size > 1:
        torch.distributed.all_reduce(flags)
    return bool(flags[0])
