"""Trinity-RFT's `Experience` as its workflows read and write it, and the conversion to this project's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity_core.base.errors import TrinityError
from trinity_core.data.experience import STEP_REWARD
from trinity_core.data.experience import Experience as Recorded
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS
from trinity_core.workflows.rollout_model import Completion


@dataclass
class EID:
    """Where an experience belongs: a workflow sets `run` and `step`, and `task` for a separate group."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = ""


@dataclass(kw_only=True, eq=False)
class Experience:
    """P prompt tokens, then T tokens. Arrays are torch tensors or are converted to them."""

    tokens: Any
    """int32 [P + T]."""
    prompt_length: int = 1
    """P."""
    logprobs: Any = None
    """float32 [T]."""
    action_mask: Any = None
    """bool [T]; None: all tokens of the response."""
    reward: float | None = None
    token_level_reward: Any = None
    """float32 [T]."""
    teacher_logprobs: Any = None
    """float32 [T]."""
    truncate_status: str | None = None
    """`prompt_truncated`: nothing was sampled. `response_truncated`: the conversation outgrew the context."""
    response_text: str | None = None
    prompt_text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    eid: EID = field(default_factory=EID)
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    recorded: Recorded | None = None
    """The tokens as sampled; None if a workflow made the experience."""
    answer: Completion | None = None
    """The model's answer, if there is exactly one."""

    def __post_init__(self) -> None:
        import torch

        for name in ("tokens", "logprobs", "action_mask", "token_level_reward", "teacher_logprobs"):
            dtype = {"tokens": torch.int32, "action_mask": torch.bool}.get(name, torch.float32)
            if getattr(self, name) is not None:
                setattr(self, name, torch.as_tensor(getattr(self, name)).to(dtype))
        if self.action_mask is None:
            self.action_mask = torch.ones(len(self.tokens) - self.prompt_length, dtype=torch.bool)
        self.info, self.metrics = self.info or {}, self.metrics or {}


def as_recorded(experience: Experience, sampled: Mapping[tuple[bytes, int], Recorded]) -> Recorded:
    """Convert to this project's experience. `sampled`: recorded samples by tokens and prompt length.

    Sampled tokens keep the log-probs, versions and temperature of their sampling, even if a workflow made its own
    `Experience` of them; it can remove tokens from the loss but never add any. Other tokens are the workflow's own: an
    expert's if they have no log-probs, no reward and no teacher's log-probs. A reward of NaN makes the experience
    unscored.
    """
    if not isinstance(experience, Experience):
        raise TrinityError(f"a Trinity-RFT workflow returns a list of Experience, not of {type(experience).__name__}")
    tokens, mask = _array(experience.tokens, np.int32), _array(experience.action_mask, np.bool_)
    recorded = experience.recorded
    if (
        recorded is None
        or recorded.prompt_length != experience.prompt_length
        or not np.array_equal(recorded.tokens, tokens)
    ):
        recorded = sampled.get((tokens.tobytes(), experience.prompt_length))
    if recorded is None:
        logprobs = _array(experience.logprobs, np.float32)
        signs = (logprobs, experience.reward, experience.token_level_reward, experience.teacher_logprobs)
        is_expert = all(sign is None for sign in signs)
        result = Recorded(tokens, experience.prompt_length, mask, logprobs, is_expert=is_expert)
    else:
        result = recorded.copied()
        result.action_mask = recorded.action_mask & mask
    result.info = (
        {"prompt": experience.prompt_text, "response": experience.response_text} | result.info | experience.info
    )
    unscored = experience.reward is not None and math.isnan(experience.reward)
    result.reward = None if unscored else experience.reward
    result.metrics |= experience.metrics | ({VERIFIER_ERRORS: 1.0} if unscored else {})
    result.token_rewards = None if unscored else _array(experience.token_level_reward, np.float32)
    if result.reward is not None and result.token_rewards is not None:
        result.reward -= float(result.token_rewards.sum(dtype=np.float64))
    result.teacher_logprobs = _array(experience.teacher_logprobs, np.float32)
    result.run, result.turn, result.group = experience.eid.run, experience.eid.step, str(experience.eid.task)
    if (state := experience.info.get("env_state_hash")) is not None:
        result.state = str(state)
    if STEP_REWARD in experience.info:
        result.metrics[STEP_REWARD] = experience.info[STEP_REWARD]
    return result


def _array(tensor: Any, dtype: Any) -> Any:
    return None if tensor is None else np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=dtype)
