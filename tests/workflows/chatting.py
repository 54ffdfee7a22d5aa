"""A policy with prepared turns, and its own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trinity_core.workflows import Completion
from trinity_core.workflows.rollout_model import plain_message

END = 2
"""The token that ends a turn, `>`."""


class Pairs:
    """One token a letter, but one token for each pair `ab` in encoded text: text sampled letter by letter would change
    if it were tokenised again."""

    eos_token_id = END

    def encode(self, text: str, **_: Any) -> list[int]:
        tokens, at = [], 0
        while at < len(text):
            pair = text[at : at + 2] == "ab"
            tokens.append(1 if pair else END if text[at] == ">" else ord(text[at]))
            at += 2 if pair else 1
        return tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        known = {1: "ab", END: "" if skip_special_tokens else ">"}
        return "".join(known.get(token) or ("" if token in known else chr(token)) for token in tokens)


class Turns:
    """A policy whose turns are prepared: token ids, or text, which is sampled letter by letter and then ended."""

    def __init__(self, *turns: str | Sequence[int], max_model_len: int = 10_000) -> None:
        self.tokenizer = Pairs()
        self.turns = [[*map(ord, turn), END] if isinstance(turn, str) else list(turn) for turn in turns]
        self.max_model_len = max_model_len
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        """The prompt and the arguments of each call."""
        self.templates: list[str | None] = []

    def render(self, messages, tools=None, *, chat_template=None, prompt=True) -> str:
        for message in messages:
            for call in message.get("tool_calls", ()):
                assert isinstance(call["function"]["arguments"], dict)  # as many templates want it
        text = "".join(f"<{message['role'][0]}{message['content']}>" for message in messages)
        return (f"[{len(tools)}]" if tools else "") + text + ("<a" if prompt else "")

    def message(self, answer, tools=None) -> dict[str, Any]:
        """An answer of the form `name {json}` is a tool call."""
        name, _, arguments = answer.text.partition(" ")
        if not (tools and arguments.startswith("{")):
            return plain_message(answer)
        call = {"id": f"c{len(self.asked)}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    async def chat(self, messages, n=1, tools=None, *, seeds=None, chat_template=None, **how) -> list[Completion]:
        prompt = self.tokenizer.encode(self.render(messages, tools))
        return await self.generate(prompt, n, seeds=seeds, chat_template=chat_template, **how)

    async def generate(self, prompt_tokens, n=1, *, seeds=None, chat_template=None, **how) -> list[Completion]:
        assert n == 1
        if len(prompt_tokens) >= self.max_model_len:
            return [self._answer(prompt_tokens[: self.max_model_len - 1], [END], "prompt_too_long")]
        tokens = self.turns[len(self.asked)]
        self.asked.append((list(prompt_tokens), {"seeds": seeds, **how}))
        self.templates.append(chat_template)
        return [self._answer(prompt_tokens, tokens, "stop" if tokens[-1] == END else "length")]

    def _answer(self, prompt: Sequence[int], tokens: list[int], reason: Any) -> Completion:
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) - 100 * len(self.asked)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        version = np.full(len(tokens), len(self.asked), np.int32)
        return Completion(np.array(prompt, np.int32), np.array(tokens, np.int32), logprobs, version, text, reason)
