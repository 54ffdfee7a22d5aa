"""The `model` section: the policy, its critic, and how many tokens they see."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le, Lt

from trinity_core.config.types import (
    DERIVED,
    Count,
    Derived,
    Flag,
    Integer,
    Many,
    Names,
    Natural,
    NonNegative,
    Number,
    Positive,
    PositiveShare,
    Section,
    Tokens,
    Unit,
)


class LoraConfig(Section):
    """A LoRA adapter, which is trained in place of the model's own weights."""

    name: str = "lora"
    """Name of the adapter."""
    path: str | None = None
    """Folder of an adapter to start from, as peft writes it; null starts a new one, which changes nothing at first."""
    lora_rank: Annotated[Count, Le(512)] = 32
    """Rank of the update of each matrix."""
    lora_alpha: Positive = 32.0
    """The update is scaled by `lora_alpha / lora_rank`."""
    lora_dropout: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Share of an adapter's inputs that is dropped at random in SFT and DPO."""
    target_modules: Names = ("all-linear",)
    """Last parts of the names of the matrices with an update, such as `[q_proj, v_proj]`; `all-linear` means all but
    the output embedding."""
    load_in_4bit: Flag = False
    """Keep the model's own weights in 4 bits (NF4 of bitsandbytes) in trainer and engines: QLoRA. Needs GPUs."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of `target_modules`; empty for `all-linear`."""
        return () if self.target_modules == ("all-linear",) else self.target_modules


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
    lora_configs: Many[LoraConfig] = ()
    """The adapter to train, a list of one; empty trains all weights."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter to train; None if all weights are trained."""
        return self.lora_configs[0] if self.lora_configs else None
