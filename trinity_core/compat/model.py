"""Trinity-RFT's `ModelWrapper` on a `RolloutModel`: sampled tokens are never tokenised again."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from trinity_core.base.errors import TrinityError
from trinity_core.base.threads import call_in, tied
from trinity_core.compat.experience import Experience
from trinity_core.data.control_tokens import encode
from trinity_core.data.experience import Experience as Recorded
from trinity_core.data.messages import canonical
from trinity_core.workflows.base import all_of
from trinity_core.workflows.rollout_model import Completion, RolloutModel
from trinity_core.workflows.trajectory import Trajectory

Messages = Sequence[Mapping[str, Any]]
Key = tuple[str, ...]
NO_SAMPLING = (
    "logprobs", "top_logprobs", "seed", "model", "user", "timeout", "tool_choice", "parallel_tool_calls", "extra_body",
    "extra_headers",
)  # fmt: skip
"""Arguments without effect: log-probs are always recorded, seeds derive from the run's, and the policy decides on tool
calls."""


def _both(work: Callable[..., Coroutine[Any, Any, Any]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make a blocking and an async method for the workflow's thread from a coroutine for the model's loop."""

    def blocking(self: ModelWrapper, *args: Any, **options: Any) -> Any:
        return call_in(self.loop, work(self, *args, **options))

    async def awaited(self: ModelWrapper, *args: Any, **options: Any) -> Any:
        answer = asyncio.run_coroutine_threadsafe(work(self, *args, **options), self.loop)
        return await asyncio.wrap_future(tied(answer))

    blocking.__doc__ = awaited.__doc__ = work.__doc__
    return blocking, awaited


@dataclass(eq=False)
class ModelWrapper:
    """A model for the thread of one workflow object. Its answers are sampled in `loop`, that of the `RolloutModel`."""

    model: RolloutModel
    loop: asyncio.AbstractEventLoop
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: Callable[[int, int], int] | None = None
    """Returns the seed of an answer from the index of its call and its index in the call."""
    chat_template: str | None = None
    model_path: str = "policy"
    history: list[Experience] = field(default_factory=list)
    sampled: dict[tuple[bytes, int], Recorded] = field(default_factory=dict)
    """See `as_recorded`."""
    _known: dict[Key, tuple[Trajectory, Completion]] = field(default_factory=dict)
    """Conversations that end with an answer of the model."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    enable_history = True

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return one Experience for each answer since the record was last cleared.

        An answer that continues the previous one is the next step of its rollout.
        """
        experiences = list(self.history)
        for earlier, later in itertools.pairwise(experiences):
            if later.tokens[: later.prompt_length][: len(earlier.tokens)].equal(earlier.tokens):
                later.eid.step = earlier.eid.step + 1
        if clear_history:
            self.history.clear()
        return experiences

    def get_openai_client(self) -> Any:
        """Return a blocking client with only `chat.completions.create`, without HTTP."""
        return _client(self, self.create)

    def get_openai_async_client(self) -> Any:
        return _client(self, self.create_async)

    async def get_message_token_len(self, messages: Messages) -> int:
        """Return the number of tokens of a conversation, up to the start of its next answer."""
        return len(self._encoded(self.model.render([*map(dict, messages)], chat_template=self.chat_template)))

    async def _chat(self, messages: Messages, n: int = 1, tools: Any = None, **options: Any) -> list[Experience]:
        """Return `n` answers to a conversation. If it continues a recorded answer, it continues the recorded tokens."""
        conversation = [dict(message) for message in messages]
        if conversation[-1]["role"] == "assistant":  # the first words of the answer
            beginning = self.model.render(conversation[:-1], tools, chat_template=self.chat_template)
            return await self._generate([beginning + conversation[-1]["content"]], n, **options)
        prefix, length = self._recorded_prefix(conversation, tools)
        number, sampling = next(self._numbers), self._sampling(options)
        if prefix and prefix[1].finish_reason == "prompt_too_long":
            branches, answers = [prefix[0]] * n, [prefix[1]] * n
        else:
            new = Trajectory(self.model, conversation, tools=tools, chat_template=self.chat_template)
            branches = [(prefix[0] if prefix else new).copied() for _ in range(n)]
            for branch in branches:
                branch.add(*(conversation[length:] if prefix else ()))
            seeds = [self._seeds(number, i, 1) for i in range(n)]
            acts = [branch.act(seeds=own_seeds, **sampling) for branch, own_seeds in zip(branches, seeds, strict=True)]
            answers = await all_of(acts)
        for branch, answer in zip(branches, answers, strict=True):
            for message in (self.model.message(answer, tools), {"role": "assistant", "content": answer.text}):
                self._known[_key([*conversation, message], tools)] = branch, answer
        return [self._answered(answer, conversation) for answer in answers]

    async def _create(self, *, messages: Any, **options: Any) -> Any:
        """Return an `openai.types.chat.ChatCompletion`, recorded like answers of `chat`."""
        from openai.types.chat import ChatCompletion

        conversation = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in messages]
        sampling = {
            name.replace("_completion", ""): value
            for name, value in options.items()
            if value is not None and value is not False and type(value).__name__ not in ("NotGiven", "Omit")
        }
        answers: list[Any] = await self._chat(conversation, **sampling)
        choices = []
        for index, item in enumerate(answers):
            message = self.model.message(item.answer, sampling.get("tools"))
            reason = "length" if item.recorded.truncated else "tool_calls" if message.get("tool_calls") else "stop"
            choices.append({"index": index, "finish_reason": reason, "message": message, "logprobs": None})
        values = {"id": "chatcmpl", "object": "chat.completion", "created": 0, "model": self.model_path}
        return ChatCompletion.model_validate({**values, "choices": choices})

    async def _generate(self, prompts: Sequence[str], n: int = 1, **options: Any) -> list[Experience]:
        number, sampling, template = next(self._numbers), self._sampling(options), self.chat_template
        calls = [
            self.model.generate(
                self._encoded(text), n, seeds=self._seeds(number, index * n, n), chat_template=template, **sampling
            )
            for index, text in enumerate(prompts)
        ]
        return [self._answered(answer, None) for answers in await all_of(calls) for answer in answers]

    async def _logprobs(self, tokens: Any, temperature: float | None = None) -> Any:
        """float32 tensor [T - 1], of the tokens after the first. Raises TrinityError for a temperature other than 1."""
        import torch

        if temperature not in (None, 1):
            raise TrinityError(f"log-probs are at temperature 1, but the workflow asks for {temperature}")
        return torch.from_numpy(await self.model.logprobs([int(token) for token in tokens]))

    async def _convert(self, messages: Messages, tools: Any = None, temperature: float | None = None) -> Experience:
        """Return the recorded turns of a conversation as one sequence, without anything after the last one.

        Raises TrinityError if this model sampled none of its answers.
        """
        prefix, _ = self._recorded_prefix(messages, tools)
        if prefix is None:
            raise TrinityError(
                "none of the conversation's answers was sampled by this model, so it cannot become an experience; "
                "answers must be in it exactly as `response_text` returned them"
            )
        trajectory, answer = prefix
        recorded = trajectory.experience()
        full = answer.finish_reason == "prompt_too_long"
        cut = ("response_truncated" if recorded.action_mask.any() else "prompt_truncated") if full else None
        return self._kept(recorded, messages, None, cut)

    chat, chat_async = _both(_chat)
    create, create_async = _both(_create)
    generate, generate_async = _both(_generate)
    logprobs, logprobs_async = _both(_logprobs)
    convert_messages_to_experience, convert_messages_to_experience_async = _both(_convert)

    def _sampling(self, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen_options = {
            name: value for name, value in options.items() if value is not None and name not in NO_SAMPLING
        }
        if chosen_options.get("top_k") == -1:  # GenerationConfig's default
            del chosen_options["top_k"]
        return {**self.sampling, **chosen_options}

    def _seeds(self, number: int, first: int, n: int) -> list[int] | None:
        return None if self.seed is None else [self.seed(number, first + i) for i in range(n)]

    def _recorded_prefix(self, messages: Messages, tools: Any) -> tuple[tuple[Trajectory, Completion] | None, int]:
        """Return the longest recorded prefix of a conversation, and its number of messages."""
        key = _key(messages, tools)
        for length in range(len(messages), 0, -1):
            if key[: length + 1] in self._known:
                return self._known[key[: length + 1]], length
        return None, 0

    def _encoded(self, text: str) -> list[int]:
        return encode(self.model.tokenizer, text)

    def _answered(self, answer: Completion, messages: Messages | None) -> Experience:
        metrics = {"response_length": float(len(answer.tokens)), "truncated": float(answer.finish_reason != "stop")}
        cut = "prompt_truncated" if answer.finish_reason == "prompt_too_long" else None
        experience = self._kept(answer.experience(metrics=metrics), messages, answer, cut)
        self.history.append(experience)
        return experience

    def _kept(
        self, recorded: Recorded, messages: Messages | None, answer: Completion | None, cut: str | None
    ) -> Experience:
        prompt, response = np.split(recorded.tokens, [recorded.prompt_length])
        self.sampled[recorded.tokens.tobytes(), recorded.prompt_length] = recorded
        return Experience(
            tokens=recorded.tokens.copy(),
            prompt_length=recorded.prompt_length,
            logprobs=None if recorded.logprobs is None else recorded.logprobs.copy(),
            action_mask=recorded.action_mask.copy(),
            truncate_status=cut,
            prompt_text=self.model.tokenizer.decode(prompt.tolist()),
            response_text=answer.text if answer else self.model.tokenizer.decode(response.tolist()),
            messages=None if messages is None else [*map(dict, messages)],
            recorded=recorded,
            answer=answer,
        )


def _client(model: ModelWrapper, create: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=create)), model_path=model.model_path
    )


def _key(messages: Messages, tools: Any) -> Key:
    """Return a key of the tools and messages that does not depend on their spelling."""
    return (json.dumps(tools or [], sort_keys=True, default=str), *map(canonical, messages))
