"""Experience: one sampled or given sequence with everything training needs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from trinity_core.errors import DataError

Json = Any


@dataclass(slots=True, eq=False)
class Experience:
    """A prompt of P tokens, then T tokens: the policy's actions, tool output between them, an expert's answer.

    Invariants (checked on construction): `action_mask`, `logprobs` and `versions` have length T = len(tokens) - P,
    P >= 1, T >= 1.
    """

    tokens: np.ndarray
    """int32 [P + T]: prompt, then response."""
    prompt_length: int
    """P."""
    action_mask: np.ndarray
    """bool [T]: true where the token was chosen by the policy (or is to be imitated); only these carry loss."""
    logprobs: np.ndarray | None = None
    """float32 [T]: the engine's log-probs of the chosen tokens, at sampling temperature; 0 where not an action."""
    versions: np.ndarray | None = None
    """int32 [T]: the policy version (trainer step) that chose each token; -1 where not an action."""
    reward: float | None = None
    """Scalar reward of the sequence; None for supervised data and for answers that could not be judged."""
    token_rewards: np.ndarray | None = None
    """float32 [T]: per-token rewards, if the workflow gives any; they add to `reward`."""
    group: str = ""
    """Rollouts of one task in one explore step (and a DPO pair) share a group; groups are never split over batches."""
    run: int = 0
    """The repeat within its group. In a DPO pair 0 is the chosen and 1 the rejected answer."""
    turn: int = 0
    """The position within its run, for workflows that give several experiences a run."""
    state: str = ""
    """The state in which the turn began, equal for equal ones, if the workflow gives it; for algorithms that compare
    turns (`gigpo`)."""
    task_index: int = -1
    """The row of its task in the taskset (file order), or -1."""
    is_expert: bool = False
    """Given by an expert data set rather than sampled from the policy."""
    truncated: bool = False
    """The response hit its length limit before it ended."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [T]: a teacher's log-probs of the same tokens (on-policy distillation)."""
    temperature: float | None = None
    """Temperature of the distribution that its log-probs belong to; None if no policy sampled it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers averaged over a step: reward parts, response length; `verifier_errors` is summed."""
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

    def copied(self) -> Experience:
        """Another one with the same arrays, but with metrics and info of its own. Its invariants hold already."""
        other: Experience = object.__new__(Experience)
        for name in Experience.__slots__:
            setattr(other, name, getattr(self, name))
        other.metrics, other.info = dict(self.metrics), dict(self.info)
        return other

    @property
    def response_length(self) -> int:
        """T."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_unscored(self) -> bool:
        """True if unscored and fully masked: excluded from advantages and loss."""
        return self.reward is None and not self.action_mask.any()

    @property
    def newest_version(self) -> int:
        """The newest policy version among its tokens; -1 if no policy sampled any."""
        return -1 if self.versions is None else int(self.versions.max())


_ARRAYS = {"logprobs": np.float32, "versions": np.int32, "token_rewards": np.float32, "teacher_logprobs": np.float32}
_ALWAYS = ("tokens", "action_mask")
_SCALARS = (
    "prompt_length", "reward", "group", "run", "turn", "state", "task_index", "is_expert", "truncated",
    "temperature", "metrics", "info",
)  # fmt: skip


def to_bytes(experiences: Sequence[Experience]) -> bytes:
    """Serialise as one safetensors file: each array of all experiences end to end, the scalars as JSON in its metadata.

    No pickle is involved. Much cheaper than one file per experience.
    """
    rows: list[dict[str, Json]] = []
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for e in experiences:
        given = {name: value for name in (*_ALWAYS, *_ARRAYS) if (value := getattr(e, name)) is not None}
        for name, value in given.items():
            parts[name].append(value)
        lengths = {name: len(value) for name, value in given.items()}
        rows.append({name: getattr(e, name) for name in _SCALARS} | {"lengths": lengths})
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    return save_arrays(arrays, {"experiences": json.dumps(rows, default=_as_json)})


def _as_json(value: Any) -> Json:
    """JSON for a value in `info` that JSON does not know: NumPy as lists and numbers, the rest as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def from_bytes(blob: bytes) -> list[Experience]:
    """The inverse of `to_bytes`. The arrays of the experiences are views of shared arrays."""
    rows = scalars(blob)
    arrays: dict[str, np.ndarray] = load_arrays(blob)
    ends = dict.fromkeys(arrays, 0)
    experiences = []
    for row in rows:
        own: dict[str, Json] = {}
        for name, length in row.pop("lengths").items():
            start, ends[name] = ends[name], ends[name] + length
            own[name] = arrays[name][start : ends[name]]
        experiences.append(Experience(**own, **row))
    return experiences


def scalars(blob: bytes) -> list[dict[str, Json]]:
    """The fields of each experience of `to_bytes` that are no arrays, and the arrays' `lengths`."""
    header_length = int.from_bytes(blob[:8], "little")
    rows: list[dict[str, Json]] = json.loads(json.loads(blob[8 : 8 + header_length])["__metadata__"]["experiences"])
    return rows


def arrays_json(experience: Experience) -> dict[str, Json]:
    """The arrays of an experience as lists, and what they are read by: what `from_json` makes it from again."""
    given = {name: getattr(experience, name) for name in (*_ALWAYS, *_ARRAYS)}
    lists = {name: value.tolist() for name, value in given.items() if value is not None}
    return {name: getattr(experience, name) for name in ("prompt_length", "state", "temperature")} | lists


def from_json(row: dict[str, Json]) -> Experience:
    """An experience from JSON that holds `arrays_json` among other fields. Raises DataError if it does not."""
    try:
        given: dict[str, Any] = {name: np.asarray(row[name]) for name in (*_ALWAYS, *_ARRAYS) if name in row}
        return Experience(**given, **{name: row[name] for name in _SCALARS if name in row})
    except (TypeError, ValueError) as error:
        raise DataError(f"the row is no experience: {error}") from error
