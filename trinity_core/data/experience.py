"""Experience: one sampled (or given) sequence, with all that training needs to know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from trinity_core.errors import DataError

Json = Any


@dataclass(slots=True, eq=False)
class Experience:
    """A prompt of P tokens, then R tokens: the policy's actions, tool output between them, an expert's answer.

    Invariants (checked on construction): `action_mask`, `logprobs` and `versions` have length R = len(tokens) - P,
    P >= 1, R >= 1.
    """

    tokens: np.ndarray
    """int32 [P + R]: prompt, then response."""
    prompt_length: int
    """P."""
    action_mask: np.ndarray
    """bool [R]: true where the token was chosen by the policy (or is to be imitated); only these carry loss."""
    logprobs: np.ndarray | None = None
    """float32 [R]: the engine's log-probs of the chosen tokens, at sampling temperature; 0 where not an action."""
    versions: np.ndarray | None = None
    """int32 [R]: the policy version (trainer step) that chose each token; -1 where not an action."""
    reward: float | None = None
    """The sequence's scalar reward; None for supervised data."""
    token_rewards: np.ndarray | None = None
    """float32 [R]: per-token rewards, where a workflow gives them; they add to `reward`."""
    group: str = ""
    """Rollouts of one task in one explore step (and a DPO pair) share a group; groups are never split over batches."""
    run: int = 0
    """The repeat within its group. In a DPO pair 0 is the chosen and 1 the rejected answer."""
    turn: int = 0
    """The position within its run, for workflows that give several experiences a run."""
    task_index: int = -1
    """The row of its task in the taskset (file order), or -1."""
    is_expert: bool = False
    """Given by an expert data set rather than sampled from the policy."""
    truncated: bool = False
    """The response hit its length limit before it ended."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [R]: a teacher's log-probs of the same tokens (on-policy distillation)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to average over a step: reward parts, response length, verifier errors."""
    info: dict[str, Json] = field(default_factory=dict)
    """JSON for people: prompt and response text, reference answer, workflow name."""

    def __post_init__(self) -> None:
        self.tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        length = len(self.tokens) - self.prompt_length
        if self.prompt_length < 1 or length < 1:
            raise DataError(
                f"an experience needs a prompt and a response, not {self.prompt_length} and {length} tokens"
            )
        self.action_mask = np.ascontiguousarray(self.action_mask, dtype=np.bool_)
        for name, dtype in _ARRAYS.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, np.ascontiguousarray(value, dtype=dtype))
        for name in ("action_mask", *_ARRAYS):
            value = getattr(self, name)
            if value is not None and value.shape != (length,):
                raise DataError(f"experience.{name} has shape {value.shape}, but the response has {length} tokens")

    @property
    def response_length(self) -> int:
        """R."""
        return len(self.tokens) - self.prompt_length

    @property
    def newest_version(self) -> int:
        """The newest policy version that chose a token of it; -1 where no policy did."""
        return -1 if self.versions is None else int(self.versions.max())

    def to_bytes(self) -> bytes:
        """Serialise as safetensors, the scalars as JSON in its metadata. No pickle is involved."""
        arrays = {"tokens": self.tokens, "action_mask": self.action_mask}
        arrays |= {name: value for name in _ARRAYS if (value := getattr(self, name)) is not None}
        return save_arrays(arrays, {"experience": json.dumps({name: getattr(self, name) for name in _SCALARS})})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Experience:
        """The inverse of `to_bytes`."""
        header_length = int.from_bytes(blob[:8], "little")
        scalars = json.loads(json.loads(blob[8 : 8 + header_length])["__metadata__"]["experience"])
        arrays: dict[str, Json] = load_arrays(blob)
        return cls(**arrays, **scalars)


_ARRAYS = {"logprobs": np.float32, "versions": np.int32, "token_rewards": np.float32, "teacher_logprobs": np.float32}
_SCALARS = (
    "prompt_length", "reward", "group", "run", "turn", "task_index", "is_expert", "truncated", "metrics", "info",
)  # fmt: skip
