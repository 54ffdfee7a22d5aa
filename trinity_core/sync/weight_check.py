"""The weight check: fixed tokens whose log-probs trainer and engine must agree on after a weight sync.

An engine that loaded a tensor under the wrong name, in the wrong order, or not at all still generates text, but its
log-probs differ. The check cannot tell apart versions whose difference is below the noise of the dtype (neighbouring
versions of a bfloat16 run, say); which version was loaded is settled by the version's record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trinity_core.errors import WeightSyncError

TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "fp8": 2.0}
"""Largest gap of one token's log-prob (nats) between different kernels with the same weights, by compute dtype. The
log-prob is a difference of logits of size 10 to 40: one rounding of bfloat16 (2^-8, relative) is 0.04 to 0.16. That of
an engine with fp8 weights or cache is assumed, not measured."""


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """`logprobs[i]` is the trainer's log-prob of `tokens[i + 1]` after `tokens[: i + 1]`, at temperature 1."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """len(tokens) - 1 values, in nats."""
    dtype: str = "float32"
    """The trainer's compute dtype."""
    tolerance: float | None = None
    """Largest gap allowed for one token; None: by dtype."""

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.logprobs) != len(self.tokens) - 1:
            raise ValueError(f"a weight check of {len(self.tokens)} tokens cannot have {len(self.logprobs)} log-probs")

    @property
    def allowed(self) -> float:
        """The tolerance in force, in nats."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance

    def to_json(self) -> dict[str, Any]:
        """JSON for a version's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightCheck:
        """The inverse of `to_json`."""
        return cls(tuple(value["tokens"]), tuple(value["logprobs"]), value["dtype"], value["tolerance"])


def verify_weights(
    expected: Sequence[float] | WeightCheck, got: Sequence[float], tolerance: float | None = None
) -> float:
    """Compare the engine's log-probs `got` with the trainer's; return the largest gap in nats.

    `expected` is a `WeightCheck`, whose tolerance is the default, or plain log-probs.
    Raises `WeightSyncError` if a gap exceeds the tolerance, is not a number, or the lengths differ.
    """
    if isinstance(expected, WeightCheck):
        tolerance = expected.allowed if tolerance is None else tolerance
        expected = expected.logprobs
    tolerance = TOLERANCES["float32"] if tolerance is None else tolerance
    if len(expected) != len(got):
        raise WeightSyncError(f"the engine returned {len(got)} log-probs for a weight check of {len(expected)}")
    gaps = [abs(float(a) - float(b)) for a, b in zip(expected, got, strict=True)]
    worst = max(range(len(gaps)), key=lambda i: math.inf if math.isnan(gaps[i]) else gaps[i])
    if math.isnan(gaps[worst]) or gaps[worst] > tolerance:
        raise WeightSyncError(
            f"the engine does not hold the weights that the trainer published: log-prob {worst} of the weight check is "
            f"{float(got[worst]):.6g} in the engine and {float(expected[worst]):.6g} in the trainer (allowed gap "
            f"{tolerance:g}, {sum(not gap <= tolerance for gap in gaps)} of {len(gaps)} tokens beyond it). "
            "Check that every tensor reaches the engine, `lm_head.weight` of tied embeddings included."
        )
    return gaps[worst]
