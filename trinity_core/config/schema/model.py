"""The `model` section: the policy, its critic, and their token limits."""

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
    """A LoRA adapter, trained instead of the model's own weights."""

    name: str = "lora"
    """Name of the adapter."""
    path: str | None = None
    """Folder of an adapter to start from, in peft's format; null starts a new one, which has no effect at first."""
    lora_rank: Annotated[Count, Le(512)] = 32
    """Rank of each matrix update."""
    lora_alpha: Positive = 32.0
    """The update is scaled by `lora_alpha / lora_rank`."""
    lora_dropout: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Dropout of the adapter's inputs in SFT and DPO."""
    target_modules: Names = ("all-linear",)
    """Last name parts of the matrices to adapt, such as `[q_proj, v_proj]`; `all-linear` means all but the output
    embedding."""
    exclude_modules: Names = ()
    """Matrices of `target_modules` that get no adapter, by the last part of their names."""
    load_in_4bit: Flag = False
    """Hold the model's own weights in 4 bits (bitsandbytes NF4) in trainer and engines: QLoRA. Needs GPUs."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The names in `target_modules`; empty for `all-linear`."""
        return () if self.target_modules == ("all-linear",) else self.target_modules

    def adapts(self, name: str) -> bool:
        """True if a matrix whose name ends in `name` gets an adapter, where the model has one."""
        return name.rpartition(".")[2] not in self.exclude_modules and (not self.modules or name in self.modules)


class ModelConfig(Section):
    """Model paths, token limits, and the sampling defaults of every task set."""

    model_path: str = ""
    """The model to train: a Hugging Face folder or hub name."""
    critic_model_path: Derived[str] = DERIVED
    """The critic's starting model; by default `model_path`."""
    max_model_len: Derived[Tokens] = DERIVED
    """Maximum sequence length, prompt and response together; by default `max_prompt_tokens + max_response_tokens`."""
    max_prompt_tokens: Derived[Tokens] = DERIVED
    """Maximum prompt length; by default what `max_response_tokens` leaves of `max_model_len`."""
    max_response_tokens: Derived[Tokens] = DERIVED
    """Maximum response length; by default what `max_prompt_tokens` leaves of `max_model_len`."""
    min_response_tokens: Annotated[Natural, Unit("tokens")] = 1
    """Minimum response length, below `max_response_tokens`; 0 allows empty answers."""
    enable_prompt_truncation: Flag = True
    """Truncate prompts longer than `max_prompt_tokens` and exclude their experiences from the loss; otherwise such
    rows are rejected, and a longer prompt of a workflow is an error."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy. A task set's `rollout_args` can override it."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: share of the probability mass to sample from."""
    top_k: Annotated[Integer, Ge(-1), Unit("tokens")] = -1
    """Number of most likely tokens to sample from; -1 means all."""
    repetition_penalty: Positive = 1.0
    """Above 1, tokens that prompt or answer already hold become less likely: their logits are divided by it, or
    multiplied if negative. Log-probs are recorded without it, as the trainer computes them."""
    custom_chat_template: str | None = None
    """Chat template (Jinja text) that replaces the tokenizer's."""
    chat_template_path: str | None = None
    """File with a chat template; give this or `custom_chat_template`."""
    enable_thinking: Flag | None = None
    """Passed to chat templates that support it; null keeps the template's own default."""
    trust_remote_code: Flag = False
    """Run Python code that comes with the model."""
    lora_configs: Many[LoraConfig] = ()
    """The adapter to train, as a list with one entry; empty trains all weights."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter to train; None if all weights are trained."""
        return self.lora_configs[0] if self.lora_configs else None
