"""What a part of a run needs: items of memory or disk, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Need:
    """One item of memory or disk."""

    what: str
    bytes: int
    why: str
    """How the number is computed, such as `33,571,328 parameters × 4 bytes`."""
    spared: bool = False
    """True for memory that is used only if it is free."""
    held: bool = False
    """True for what a run holds throughout and whose size is known: weights and optimizer, an engine's share of a GPU.
    Other needs are estimated peaks."""


def total(needs: Iterable[Need]) -> int:
    return sum(need.bytes for need in needs)


def size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit < 2 else f"{count:.3g} {UNITS[unit]}"


def parts(needs: Iterable[Need]) -> str:
    """List needs, the largest first, without what is used only if it is free."""
    largest = sorted((need for need in needs if not need.spared), key=lambda need: -need.bytes)
    return ", ".join(f"{size(need.bytes)} {need.what}" for need in largest)


ENGINE, TRAINER, AUXILIARY, REWARDS = "engine", "trainer worker", "auxiliary engine", "reward worker"


@dataclass(frozen=True, slots=True)
class ProcessEstimate:
    """Processes of one kind."""

    kind: str
    """`engine`, `trainer worker`, `reward worker`, or `auxiliary engine` with its model; `evaluation's …` for those of
    an evaluation beside training."""
    number: int
    gpus: float
    """GPUs per process; a fraction shares a GPU, 0 computes on the CPU."""
    threads: int
    memory: tuple[Need, ...] | None = None
    """Peak memory per process: of a GPU, or on the CPU of the machine. None if it cannot be estimated."""
    unknown: str = ""
    host: tuple[Need, ...] = ()
    """Peak host memory of a process on a GPU."""
    once: tuple[Need, ...] = ()
    """Host memory that all of them on GPUs take once together."""
    share: int = 0
    """Bytes of a GPU that vLLM may take, which `memory` must not exceed; 0: it has no such limit."""
    in_turn: bool = False
    """True if it leaves the GPU, but for its context, to the other side in turn (`cluster.colocate`)."""

    @property
    def bytes(self) -> int:
        return self.number * total(self.memory or ())
