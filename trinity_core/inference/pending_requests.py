"""What the pool is asked for, and a streamed sample as it grows, also over the loss of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity_core.inference.requests import Request, Sample


@dataclass(eq=False)
class GrowingSample:
    """The sample of a streamed request as it grows."""

    handed: Sample | None = None
    """All that was handed out."""
    before: Sample | None = None
    """The part of it that engines sampled which were lost since."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def whole(self, sample: Sample) -> Sample:
        """The whole sample, of which this engine sampled `sample`."""
        return sample if self.before is None else self.before.then(sample)

    @property
    def known(self) -> int:
        """Tokens of this engine that were handed out."""
        return _length(self.handed) - _length(self.before)

    def grow(self, new: Sample) -> None:
        """Hand out what this engine has sampled after the `known` tokens."""
        if len(new.tokens):
            self.handed = new if self.handed is None else self.handed.then(new)
            self.changed.set()


def _length(sample: Sample | None) -> int:
    return 0 if sample is None else len(sample.tokens)


@dataclass(eq=False)
class PendingRequests:
    """Requests that belong together (the samples of one prompt) and the future of their samples."""

    requests: Sequence[Request]
    future: asyncio.Future[list[Sample]]
    growth: GrowingSample | None = None
    """Set if its one request is streamed."""

    def resume(self) -> None:
        """Ask another engine only for what was not handed out yet."""
        if self.growth is not None and self.growth.handed is not None:
            [request] = self.requests
            before, self.growth.before = self.growth.before, self.growth.handed
            known = 0 if before is None else len(before.tokens)
            self.requests = [request.after(self.growth.handed.part(slice(known, None)))]

    def finish(self, samples: list[Sample]) -> None:
        """Hand over the samples unless nobody waits for them any more."""
        if not self.future.done():
            self.future.set_result([self.growth.whole(one) for one in samples] if self.growth else samples)

    def fail(self, error: Exception) -> None:
        """Hand over why there are none."""
        if not self.future.done():
            self.future.set_exception(error)
