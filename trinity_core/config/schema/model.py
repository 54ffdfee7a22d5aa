"""The `model` section: the policy, its critic, and how many tokens they see."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from trinity_core.config.types import (
    DERIVED,
    Derived,
    Flag,
    Integer,
    Natural,
    NonNegative,
    PositiveShare,
    Section,
    Tokens,
    Unit,
)


class ModelConfig(Section):
    """Model paths, token limits, and the sampling defaults of every task set."""

    model_path: str = ""
    """The model that is trained: a Hugging Face folder or hub name."""
    critic_model_path: Derived[str] = DERIVED
    """The model the critic starts from; by default `model_path`."""
    max_model_len: Derived[Tokens] = DERIVED
    """Longest sequence, prompt and response together; by default `max_prompt_tokens + max_response_tokens`."""
    max_prompt_tokens: Derived[Tokens] = DERIVED
    """Longest prompt; by default what `max_response_tokens` leaves of `max_model_len`."""
    max_response_tokens: Derived[Tokens] = DERIVED
    """Longest generated response; by default what `max_prompt_tokens` leaves of `max_model_len`."""
    min_response_tokens: Annotated[Natural, Unit("tokens")] = 1
    """Shortest generated response, less than `max_response_tokens`; 0 lets an answer end at once."""
    enable_prompt_truncation: Flag = True
    """Cut prompts that are longer than `max_prompt_tokens` and leave their experiences out of the loss; without it
    such a task is an error."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy. A task set's `rollout_args` may differ."""
    top_p: PositiveShare = 1.0
    """Share of the probability mass that is sampled from."""
    top_k: Annotated[Integer, Ge(-1), Unit("tokens")] = -1
    """Most likely tokens that are sampled from; -1 means all."""
    custom_chat_template: str | None = None
    """Chat template (Jinja text) used in place of the tokenizer's."""
    chat_template_path: str | None = None
    """File with a chat template; give this or `custom_chat_template`."""
    enable_thinking: Flag | None = None
    """Passed to chat templates that know it; null leaves the template's own default."""
    trust_remote_code: Flag = False
    """Run Python code that comes with the model."""
