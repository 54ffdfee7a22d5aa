"""A model that the OpenAI API serves: its engines, and how its prompts are rendered and its answers parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_core.rollout.inference.pool import EnginePool


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]
    """Names by which requests may call it; the first is its own."""
    path: str
    pool: EnginePool
    max_model_len: int
    stop_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """Without effect: vLLM's server code computes nothing, but requires a number format."""
    trust_remote_code: bool = False
    speculative_config: Any = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False
    log_requests: bool = False
    chat_template: str | None = None
    """None: the tokenizer's own."""
    template_args: tuple[tuple[str, Any], ...] = ()
    sampling: tuple[tuple[str, Any], ...] = ()
    """Sampling arguments of requests that set none."""
    recorded: bool = True
    """True if sessions record its answers: for the policy, not for an auxiliary model."""
