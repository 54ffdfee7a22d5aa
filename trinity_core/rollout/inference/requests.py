"""The messages between the explorer and an engine: token ids and numbers in flat arrays, never text.

Letters of shapes: N requests of a batch, P prompt tokens and T response tokens of one request (`docs/glossary.md`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from typing import Any, Literal

import numpy as np

from trinity_core.base.errors import InputError, TransientFault
from trinity_core.config.sync_methods import SYNC_METHODS

StopReason = Literal["stop", "length", "abort"]
STOP_REASONS: tuple[StopReason, ...] = ("stop", "length", "abort")


LEAST_TEMPERATURE = 0.01
"""Lowest temperature except 0; vLLM raises lower ones to it."""


class EngineLost(TransientFault):
    """An engine died or is unusable; its requests in flight can go to another engine."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling arguments. Log-probs are log_softmax(logits / temperature) over the whole vocabulary, even if `top_p`,
    `top_k` or `min_tokens` restrict the choice, or a penalty changes it."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the sequence already holds, and multiplies the negative ones."""
    min_tokens: int = 0
    """Shortest response, the end token included."""
    stop_token_ids: tuple[int, ...] = ()
    structured_output: Mapping[str, Any] | None = None
    """Arguments of vLLM's `StructuredOutputsParams`, of which a grammar is made that guides the answer."""

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the distribution that the log-probs belong to."""
        return max(self.temperature, LEAST_TEMPERATURE) if self.temperature else 1.0

    @property
    def is_restricted(self) -> bool:
        """True if some tokens of the vocabulary may be excluded, or are penalised."""
        return self.top_p < 1 or self.top_k > 0 or self.min_tokens > 1 or self.repetition_penalty != 1

    def check(self) -> None:
        """Raise InputError for a value that an engine would refuse, with all requests of the same call."""
        for name, wrong, allowed in (
            ("temperature", not 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", not 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k < -1, "the number of tokens to choose from, or -1 for all"),
            ("repetition_penalty", not 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("max_tokens", self.max_tokens < 1, "at least 1"),
        ):
            if wrong:
                raise InputError(f"sampling with {name} {getattr(self, name)}: it must be {allowed}", key=name)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence to sample: int32 [P] prompt tokens and the seed of its random stream."""

    key: str
    """Unique among the requests in flight."""
    prompt: np.ndarray
    sampling: Sampling
    seed: int | None = None
    params: Any = None
    """vLLM's own `SamplingParams`, for arguments that `Sampling` lacks; `sampling` has the token limits."""

    def after(self, sampled: Sample) -> Request:
        """Return the request for the rest after `sampled`, which must have fewer than `max_tokens` tokens."""
        count = len(sampled.tokens)
        most, least = self.sampling.max_tokens - count, max(0, self.sampling.min_tokens - count)
        prompt = np.concatenate([self.prompt, sampled.tokens])
        return replace(self, prompt=prompt, sampling=replace(self.sampling, max_tokens=most, min_tokens=least))


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The most likely tokens at each of T positions: the sampled one first, then the K most likely."""

    tokens: np.ndarray
    """int32 [T, K + 1]."""
    logprobs: np.ndarray
    """float32 [T, K + 1]."""
    ranks: np.ndarray
    """int32 [T]: rank of the sampled token, from 1."""

    def part(self, places: slice) -> TopLogprobs:
        return TopLogprobs(self.tokens[places], self.logprobs[places], self.ranks[places])

    def then(self, rest: TopLogprobs) -> TopLogprobs:
        return TopLogprobs(
            np.concatenate([self.tokens, rest.tokens]),
            np.concatenate([self.logprobs, rest.logprobs]),
            np.concatenate([self.ranks, rest.ranks]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A sample of T tokens (the end token included), their log-probs and the policy version of each."""

    tokens: np.ndarray
    """int32 [T]."""
    logprobs: np.ndarray
    """float32 [T]."""
    versions: np.ndarray
    """int32 [T]."""
    reason: StopReason
    top: TopLogprobs | None = None

    def part(self, places: slice) -> Sample:
        top = self.top and self.top.part(places)
        return Sample(self.tokens[places], self.logprobs[places], self.versions[places], self.reason, top)

    def then(self, rest: Sample) -> Sample:
        """Append the tokens of `rest`, which also has the stop reason."""
        return Sample(
            np.concatenate([self.tokens, rest.tokens]),
            np.concatenate([self.logprobs, rest.logprobs]),
            np.concatenate([self.versions, rest.versions]),
            rest.reason,
            self.top.then(rest.top) if self.top and rest.top else self.top or rest.top,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """N samples as flat arrays, each sent as one buffer however many samples there are."""

    lengths: np.ndarray
    """int32 [N]: T of each."""
    tokens: np.ndarray
    """int32 [sum T]."""
    logprobs: np.ndarray
    """float32 [sum T]."""
    versions: np.ndarray
    """int32 [sum T]."""
    reasons: np.ndarray
    """uint8 [N]: index into `STOP_REASONS`."""
    tops: dict[int, TopLogprobs] = field(default_factory=dict)
    """Top log-probs by index, for the requests that asked for them."""

    @classmethod
    def pack(cls, samples: Sequence[Sample]) -> SampleBatch:
        return cls(
            np.array([len(sample.tokens) for sample in samples], dtype=np.int32),
            np.concatenate([sample.tokens for sample in samples] or [np.empty(0, np.int32)]),
            np.concatenate([sample.logprobs for sample in samples] or [np.empty(0, np.float32)]),
            np.concatenate([sample.versions for sample in samples] or [np.empty(0, np.int32)]),
            np.array([STOP_REASONS.index(sample.reason) for sample in samples], dtype=np.uint8),
            {i: sample.top for i, sample in enumerate(samples) if sample.top is not None},
        )

    def unpack(self) -> list[Sample]:
        """The inverse of `pack`, as views."""
        ends = np.cumsum(self.lengths)
        return [
            Sample(self.tokens[end - n : end], self.logprobs[end - n : end], self.versions[end - n : end], reason, top)
            for n, end, reason, top in zip(
                self.lengths,
                ends,
                (STOP_REASONS[r] for r in self.reasons),
                map(self.tops.get, range(len(ends))),
                strict=True,
            )
        ]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where an engine finds a version of the weights."""

    method: str
    """`folder`: the Hugging Face folder `path`; else the sync method of the run in `path`, which publishes versions."""
    path: str = ""

    @property
    def pushed(self) -> bool:
        """True if the trainer has already pushed the weights into the engine, which then loads nothing."""
        return self.method in SYNC_METHODS and bool(SYNC_METHODS[self.method].vllm_backend)

    def newest(self) -> int | None:
        """Return the newest published version; None without any, or for a folder."""
        from trinity_core.exchange.sync.versions import open_versions

        return open_versions(self.method, self.path).latest() if self.method in SYNC_METHODS else None


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    version: int
    seconds: float
    gap: float | None
    """Largest difference between engine and trainer in a log-prob of the weight check, nats; None without a check."""
    check_seconds: float = 0.0
    """Part of `seconds` spent on checks after loading."""


@dataclass(eq=False)
class GrowingSample:
    handed: Sample | None = None
    before: Sample | None = None
    """The part sampled by engines that are now lost."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def whole(self, sample: Sample) -> Sample:
        """Return the whole sample, of which this engine sampled `sample`."""
        return sample if self.before is None else self.before.then(sample)

    @property
    def known(self) -> int:
        """Number of this engine's tokens handed out."""
        return _length(self.handed) - _length(self.before)

    def grow(self, new: Sample) -> None:
        """Hand out the tokens that this engine has sampled after the `known` ones."""
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
    """Set if its single request is streamed."""

    def resume(self) -> None:
        """Reduce the request to the part not handed out, for another engine."""
        if self.growth is not None and self.growth.handed is not None:
            [request] = self.requests
            before, self.growth.before = self.growth.before, self.growth.handed
            count = 0 if before is None else len(before.tokens)
            self.requests = [request.after(self.growth.handed.part(slice(count, None)))]

    def finish(self, samples: list[Sample]) -> None:
        """Deliver the samples unless the caller has stopped waiting."""
        if not self.future.done():
            self.future.set_result([self.growth.whole(sample) for sample in samples] if self.growth else samples)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def assign(sizes: Sequence[int], loads: Sequence[int]) -> list[list[int]]:
    """Assign batches to engines, each to the least loaded one (the first of several); return the indices for each
    engine.

    `sizes`: requests of each batch (a `PendingRequests`), which is never split. `loads`: requests in flight in each
    engine.
    """
    least = [(load, engine) for engine, load in enumerate(loads)]
    heapify(least)
    shares: list[list[int]] = [[] for _ in loads]
    for pending, size in enumerate(sizes):
        load, engine = least[0]
        shares[engine].append(pending)
        heapreplace(least, (load + size, engine))
    return shares
