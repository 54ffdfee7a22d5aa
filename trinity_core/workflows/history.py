"""Recording a model's calls (`rollout_model.enable_history`), for workflows that hand the model to other code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.workflows.rollout_model import Completion, RolloutModel


class RecordingModel:
    """A RolloutModel that also keeps an Experience of every answer, in the order of the answers.

    The record grows until it is cleared: call `extract_experience_from_history` once per rollout.
    """

    def __init__(self, model: RolloutModel) -> None:
        self.model = model
        self._history: list[Experience] = []

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    async def chat(self, messages: Sequence[dict[str, Any]], n: int = 1, **args: Any) -> list[Completion]:
        """Like the model's method of that name; the answers are recorded."""
        return self._kept(await self.model.chat(messages, n, **args))

    async def generate(self, prompt_tokens: Sequence[int], n: int = 1, **args: Any) -> list[Completion]:
        """Like the model's method of that name; the answers are recorded."""
        return self._kept(await self.model.generate(prompt_tokens, n, **args))

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Like the model's method of that name."""
        return await self.model.logprobs(tokens)

    def render(self, messages: Sequence[dict[str, Any]], tools: Any = None, **args: Any) -> str:
        """Like the model's method of that name."""
        return self.model.render(messages, tools, **args)

    def message(self, answer: Completion, tools: Any = None) -> dict[str, Any]:
        """Like the model's method of that name."""
        return self.model.message(answer, tools)

    def chat_sync(self, messages: Sequence[dict[str, Any]], n: int = 1, **args: Any) -> list[Completion]:
        """Like the model's method of that name; the answers are recorded."""
        return self._kept(self.model.chat_sync(messages, n, **args))

    def generate_sync(self, prompt_tokens: Sequence[int], n: int = 1, **args: Any) -> list[Completion]:
        """Like the model's method of that name; the answers are recorded."""
        return self._kept(self.model.generate_sync(prompt_tokens, n, **args))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """The experiences of all answers since the record was last cleared. The caller sets their rewards."""
        taken = list(self._history)
        if clear_history:
            self._history.clear()
        return taken

    def _kept(self, completions: list[Completion]) -> list[Completion]:
        self._history += [completion.experience() for completion in completions]
        return completions
