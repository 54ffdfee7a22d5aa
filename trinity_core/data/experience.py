"""Experience: one sampled or given sequence with everything that training needs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import from_record

Json = Any


STEP_REWARD = "step_reward"
"""Metric with a turn's own reward if `reward` is that of its whole run; `gigpo` adds up these."""


STORE = "the experience store"
"""Source of `to_bytes` data in messages."""


@dataclass(slots=True, eq=False)
class Experience:
    """A prompt of P tokens, then T tokens: the policy's actions, tool output between them, or an expert's answer.

    Invariants (checked on construction): `action_mask`, `logprobs` and `versions` have length T = len(tokens) - P, P >=
    1, T >= 1.
    """

    tokens: np.ndarray
    """int32 [P + T]: prompt, then response."""
    prompt_length: int
    """P."""
    action_mask: np.ndarray
    """bool [T]: true for tokens that the policy sampled (or is to imitate); only these carry loss."""
    logprobs: np.ndarray | None = None
    """float32 [T]: the engine's log-probs of the sampled tokens, at sampling temperature; 0 elsewhere."""
    versions: np.ndarray | None = None
    """int32 [T]: the policy version (train step) that sampled each token; -1 elsewhere."""
    reward: float | None = None
    """Scalar reward of the sequence; None for supervised data and for answers that could not be judged."""
    token_rewards: np.ndarray | None = None
    """float32 [T]: per-token rewards, if the workflow provides any; they add to `reward`."""
    group: str = ""
    """Rollouts of one task in one explore step (and a DPO pair) share a group, unless the workflow makes several;
    groups are never split over batches."""
    run: int = 0
    """The index of the rollout within its group. In a DPO pair 0 is the chosen and 1 the rejected answer."""
    turn: int = 0
    """The position within its run, for workflows that return several experiences a run."""
    state: str = ""
    """The state in which the turn began, equal for equal ones, if the workflow provides it; for algorithms that compare
    turns (`gigpo`)."""
    task_index: int = -1
    """The row of its task in the task set (file order), or -1."""
    is_expert: bool = False
    """True if it comes from an expert data set rather than from the policy."""
    truncated: bool = False
    """True if the response reached its length limit."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [T]: a teacher's log-probs of the same tokens (on-policy distillation)."""
    teacher_prompt: np.ndarray | None = None
    """int32 [any]: the prompt that the teacher reads in place of this one, before the same response, if the trainer
    computes the teacher's distributions."""
    temperature: float | np.ndarray | None = None
    """Temperature of the distribution of its log-probs: one for all tokens, or float32 [T] if turns were sampled at
    different ones; None if no policy sampled it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers averaged over a step: reward parts, response length; `verifier_errors` is summed."""
    info: dict[str, Json] = field(default_factory=dict)
    """JSON for people: prompt and response text, reference answer, workflow name."""

    def __post_init__(self) -> None:
        self.tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        length = len(self.tokens) - self.prompt_length
        if self.prompt_length < 1 or length < 1:
            raise DataError(
                f"an experience needs a prompt and a response, not {self.prompt_length} and {length} tokens",
                key="prompt_length",
            )
        self.action_mask = np.ascontiguousarray(self.action_mask, dtype=np.bool_)
        for name, dtype in {**_ARRAYS, **_FREE}.items():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, np.ascontiguousarray(value, dtype=dtype))
        if isinstance(self.temperature, list | np.ndarray):
            self.temperature = np.ascontiguousarray(self.temperature, dtype=np.float32)
            if self.temperature.shape != (length,):
                raise DataError(
                    f"experience.temperature has shape {self.temperature.shape}, but the response has {length} tokens",
                    key="temperature",
                )
        if self.temperature is not None and np.any(np.asarray(self.temperature) <= 0):
            raise DataError(
                "experience.temperature must be positive: the log-probs of greedy answers are those at 1",
                key="temperature",
            )
        for name in ("action_mask", *_ARRAYS):
            value = getattr(self, name)
            if value is not None and value.shape != (length,):
                raise DataError(
                    f"experience.{name} has shape {value.shape}, but the response has {length} tokens", key=name
                )

    def copied(self) -> Experience:
        """Return a copy with its own arrays, metrics, and lists and dicts in info, without checking the invariants
        again."""
        other: Experience = object.__new__(Experience)
        for name in Experience.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, np.ndarray) else value)
        other.metrics, other.info = dict(self.metrics), _copy(self.info)
        return other

    @property
    def response_length(self) -> int:
        """T."""
        return len(self.tokens) - self.prompt_length

    @property
    def total_reward(self) -> float | None:
        """`reward` plus the sum of `token_rewards`; None if it has neither."""
        if self.token_rewards is None:
            return self.reward
        return float(self.token_rewards.sum(dtype=np.float64)) + (0.0 if self.reward is None else self.reward)

    @property
    def is_unscored(self) -> bool:
        """True if unscored and fully masked: excluded from advantages and loss."""
        return self.total_reward is None and not self.action_mask.any()

    @property
    def sampled(self) -> np.ndarray:
        """bool [T]: true if a policy sampled the token, even if `action_mask` excludes it; the action mask if
        `versions` name no policy."""
        return self.action_mask if self.versions is None or self.newest_version < 0 else self.versions >= 0

    @property
    def is_unsampled(self) -> bool:
        """True if nothing was sampled, for example after a prompt that is too long: the answer is one token without
        loss."""
        return self.versions is not None and self.newest_version < 0 and not self.action_mask.any()

    @property
    def newest_version(self) -> int:
        """The newest policy version among its tokens; -1 if no policy sampled any."""
        return -1 if self.versions is None else int(self.versions.max())


_ARRAYS = {"logprobs": np.float32, "versions": np.int32, "token_rewards": np.float32, "teacher_logprobs": np.float32}
_FREE = {"teacher_prompt": np.int32}
"""Arrays of any length."""
_STORED = ("tokens", "action_mask", *_ARRAYS, *_FREE)
_SCALARS = (
    "prompt_length", "reward", "group", "run", "turn", "state", "task_index", "is_expert", "truncated",
    "temperature", "metrics", "info",
)  # fmt: skip


def to_bytes(experiences: Sequence[Experience]) -> bytes:
    """Serialise as one safetensors file: each array of all experiences concatenated, scalars as JSON in its metadata.

    Without pickle, and much cheaper than one file per experience.
    """
    rows: list[dict[str, Json]] = []
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for e in experiences:
        arrays_present = {name: value for name in _STORED if (value := getattr(e, name)) is not None}
        for name, value in arrays_present.items():
            parts[name].append(value)
        lengths = {name: len(value) for name, value in arrays_present.items()}
        rows.append({name: getattr(e, name) for name in _SCALARS} | {"lengths": lengths})
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    return save_arrays(arrays, {"experiences": _text_of(rows)})


def _text_of(rows: Sequence[Mapping[str, Json]]) -> str:
    """Return JSON that UTF-8 can hold. Escapes, 7 bytes for a Chinese character, only if a text has half a surrogate
    pair."""
    text = json.dumps(rows, default=as_json, ensure_ascii=False)
    return text if text.isascii() or _is_utf8(text) else json.dumps(rows, default=as_json)


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _copy(value: Any) -> Any:
    """Copy what an operator may change in an info. Other objects, which are stored as text, need not be copyable."""
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_copy(part) for part in value]
    return value.copy() if isinstance(value, np.ndarray | set) else value


def as_json(value: Any) -> Json:
    """JSON fallback for values in `info`: NumPy as lists and numbers, anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def require_json(info: Mapping[str, Any], giver: str, key: str = "info") -> None:
    """Raise TrinityError if the `info` from `giver` cannot be stored: a key is not a string or number, or a value
    contains itself."""
    try:
        json.dumps(info, default=as_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise TrinityError(f"{giver} gave an info that JSON cannot hold: {error}", key=key) from error


def from_bytes(blob: bytes) -> list[Experience]:
    """Inverse of `to_bytes`; arrays are views of shared arrays. Raises DataError for those of a newer release."""
    rows = scalars(blob)
    arrays: dict[str, np.ndarray] = load_arrays(blob)
    ends = dict.fromkeys(arrays, 0)
    experiences = []
    for row in rows:
        fields: dict[str, Json] = {}
        for name, length in row.pop("lengths").items():
            start, ends[name] = ends[name], ends[name] + length
            fields[name] = arrays[name][start : ends[name]]
        experiences.append(from_record(Experience, fields | row, STORE))
    return experiences


def scalars(blob: bytes) -> list[dict[str, Json]]:
    """Return the scalar fields of each experience in `to_bytes` data, and the arrays' `lengths`."""
    header_length = int.from_bytes(blob[:8], "little")
    rows: list[dict[str, Json]] = json.loads(json.loads(blob[8 : 8 + header_length])["__metadata__"]["experiences"])
    return rows


def arrays_json(experience: Experience) -> dict[str, Json]:
    """Return the arrays of an experience as lists, and the scalars that `from_json` needs to restore them."""
    values = {name: getattr(experience, name) for name in _STORED}
    lists = {name: value.tolist() for name, value in values.items() if value is not None}
    temperature = experience.temperature
    read_by = {
        "prompt_length": experience.prompt_length, "state": experience.state,
        "temperature": temperature.tolist() if isinstance(temperature, np.ndarray) else temperature,
    }  # fmt: skip
    return read_by | lists


def from_json(row: dict[str, Json]) -> Experience:
    """Restore an experience from JSON with the fields of `arrays_json`. Raises DataError if that fails."""
    try:
        arrays: dict[str, Any] = {name: np.asarray(row[name]) for name in _STORED if name in row}
        return Experience(**arrays, **{name: row[name] for name in _SCALARS if name in row})
    except (TypeError, ValueError) as error:
        raise DataError(f"the row is not an experience: {error}") from error


def rollouts_of(rows: Sequence[Experience]) -> list[str]:
    """[B] the rollout of each row within its group. Rows that share group, run and turn are separate rollouts."""
    rows_at = Counter((row.group, row.run, row.turn) for row in rows)
    unnumbered = {(group, run) for (group, run, _), count in rows_at.items() if count > 1}
    return [f"{row.run}" + f"/{i}" * ((row.group, row.run) in unnumbered) for i, row in enumerate(rows)]


def rollout_rewards(rows: Sequence[Experience]) -> list[float | None]:
    """[B] the reward of each row's rollout: the mean of its judged rows' total rewards; None if no row was judged."""
    keys = [(row.group, rollout) for row, rollout in zip(rows, rollouts_of(rows), strict=True)]
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, row in zip(keys, rows, strict=True):
        if row.total_reward is not None:
            rewards[key].append(row.total_reward)
    means = {key: mean_reward(values) for key, values in rewards.items()}
    return [means.get(key) for key in keys]


def mean_reward(rewards: Sequence[float]) -> float:
    """Return the mean, exactly the common value of equal rewards, so that equal rollouts never differ by rounding."""
    return rewards[0] if len(set(rewards)) == 1 else float(np.mean(rewards))
