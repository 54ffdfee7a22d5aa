"""The protocol of a running vLLM, implemented in this process (CPU) and on `AsyncLLM` (GPU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from trinity_core.inference.requests import Request, Sample, WeightSource


class Backend(Protocol):
    """One running vLLM. Any number of calls may be in flight.

    Raises `TrinityError` for what no retry can fix (a missing model, an invalid request). After any other error except
    `TransientFault` it is unusable.
    """

    version: int
    """The version of the weights in use; 0 is the model folder itself."""

    async def start(self) -> None:
        """Load the model; returns when it can generate."""

    async def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests; the result is in their order."""

    def so_far(self, known: Mapping[str, int]) -> list[Sample | None]:
        """By key, what was sampled for requests in flight after so many tokens, but for the newest; None for others."""

    async def abort(self, keys: Sequence[str]) -> None:
        """Give requests up; their samples carry the stop reason `abort`."""

    async def load(self, source: WeightSource, version: int) -> None:
        """Load a version of the weights between two tokens.

        Requests in flight continue with it: their KV cache is computed again, and each token keeps the version that
        sampled it. Raises `VersionGone` or `DataError`, without any change, if the weights are not there, and
        `WeightSyncError` if they are not those that were published.
        """

    async def parameter_digests(self) -> list[dict[str, int | None]]:
        """For each rank, the value digests of its parameters; see `trinity_core.sync.parameter_check`."""

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Called while no request is in flight."""

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1, nats) of tokens 1 … of a sequence, each after the tokens before it."""

    def sampled(self) -> int:
        """A number that grows with every token sampled. May be called while anything else is in progress."""

    async def stop(self) -> None:
        """End vLLM; requests in flight fail. A backend that has not started may be stopped too."""


@runtime_checkable
class WeightTransfer(Protocol):
    """A backend into which the trainer pushes weights; see `trinity_core.sync.nccl_transfer`."""

    async def join(self, init_info: dict[str, Any]) -> None:
        """Enter the trainer's group."""

    async def begin_update(self) -> None:
        """Pause generation until `end_update`."""

    async def update(self, update_info: dict[str, Any]) -> None:
        """Receive what the trainer sends now."""

    async def end_update(self, version: int) -> None:
        """Put the received weights in use as `version` and continue generation."""
