"""A model behind an external endpoint, as workflows see it: messages in, text out, no token ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self

import numpy as np

from trinity_core.config import Config
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.data.experience import Experience
from trinity_core.data.formats import Tool
from trinity_core.data.messages import Message, with_text_arguments
from trinity_core.errors import EndpointError, TrinityError, Unanswered
from trinity_core.inference.endpoint import NO_KEY, REFUSED, Answer, Endpoint, endpoint_name, without_key
from trinity_core.threads import RunsElsewhere, in_this_loop
from trinity_core.timing import uncounted
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rollout_model import Completion, RolloutModel, plain_message

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

log = logging.getLogger(__name__)

CUT_SHORT = ("length", "content_filter")
"""Finish reasons of truncated answers."""


@dataclass
class ExternalModel(RolloutModel):
    """A `RolloutModel` for evaluation. Its completions have text, and lengths as reported by the endpoint.

    Their token ids are -1 and their log-probs NaN. Methods that need token ids or a tokenizer raise TrinityError.
    """

    endpoint: Endpoint
    usual: dict[str, Any] = field(default_factory=dict)
    outside: RunsElsewhere = in_this_loop
    """Runs the endpoint's calls in its loop if the workflow has another one."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    version: int = 0
    _warned: bool = False

    @property
    def tokenizer(self) -> Any:
        """Raises TrinityError: an endpoint has none."""
        self._refuse("asks for the tokenizer")

    async def chat(
        self,
        messages: Sequence[Message],
        n: int = 1,
        tools: Sequence[Tool] | None = None,
        *,
        seeds: Sequence[int] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """See `RolloutModel.chat`; each answer is a separate request. The endpoint has its own chat template."""
        sampled_with = self.usual | {name: value for name, value in sampling.items() if value is not None}
        bodies = [self._body(messages, tools, None if seeds is None else seeds[run], sampled_with) for run in range(n)]
        queueing = uncounted()
        answers = await asyncio.gather(*(self.outside(self.endpoint.ask(body, queueing)) for body in bodies))
        return [self._completion(answer) for answer in answers]

    async def generate(self, prompt_tokens: Sequence[int], n: int = 1, **_: Any) -> list[Completion]:
        """Raises TrinityError: an endpoint takes messages."""
        self._refuse("continues token ids")

    async def logprobs(self, tokens: Sequence[int]) -> Never:
        """Raises TrinityError: an endpoint takes messages."""
        self._refuse("asks for the log-probs of given tokens")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **_: Any) -> str:
        """Raises TrinityError: the endpoint has its own chat template."""
        self._refuse("asks for the text of a prompt")

    def message(self, answer: Completion, tools: Sequence[Tool] | None = None) -> Message:
        """Return the text of the answer: the endpoint parses tool calls itself, for agents in sessions."""
        return plain_message(answer)

    def session(self, run: int = 0) -> ExternalSession:
        """Return the endpoint for an agent: address, key and clients."""
        return ExternalSession(self.endpoint.settings, self.endpoint.key, self.endpoint.budget)

    def _body(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, seed: int | None, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        body = {
            "model": self.endpoint.settings.model_name,
            "messages": [with_text_arguments(message) for message in messages],
            "seed": seed,
            **sampling,
        }
        if tools:
            body["tools"] = list(tools)
        if (body.get("top_k") or 0) < 1:  # all tokens; OpenAI's own API has no top_k
            body["top_k"] = None
        return {
            name: value for name, value in (body | self.endpoint.settings.request_args).items() if value is not None
        }

    def _completion(self, answer: Answer) -> Completion:
        if not answer.tokens and answer.text and not self._warned:
            self._warned = True
            log.warning("the %s counts no tokens: lengths of responses are not known", self.endpoint)
        return text_completion(answer)

    def _refuse(self, does: str) -> Never:
        raise TrinityError(
            f"The workflow {does}, which an endpoint (explorer.external_model) does not offer: only `model.chat` and "
            "`model.session` work there. Choose another workflow for this eval set."
        )


def usual_sampling(config: Config) -> dict[str, Any]:
    model = config.model
    alone = model.max_prompt_tokens == model.max_response_tokens == (model.max_model_len or 0) - 1
    return {
        "temperature": model.temperature,
        "top_p": model.top_p,
        "top_k": model.top_k,
        "max_tokens": None if alone else model.max_response_tokens,  # the rest of `max_model_len` is not a limit
    }


def text_completion(answer: Answer) -> Completion:
    """Return a completion with only text and lengths: token ids are -1, log-probs NaN."""
    length = max(answer.tokens, 1)
    return Completion(
        np.full(max(answer.prompt_tokens, 1), -1, dtype=np.int32),
        np.full(length, -1, dtype=np.int32),
        np.full(length, np.nan, dtype=np.float32),
        0,
        answer.text,
        "length" if answer.finish_reason in CUT_SHORT else "stop",
    )


@dataclass(eq=False)
class ExternalSession:
    """Address, key and clients for an agent. Safe to use from any thread.

    As a context manager it turns an uncaught endpoint error of the agent into `Unanswered` (`EndpointError` for a wrong
    key): the answer is missing, not wrong.
    """

    settings: ExternalModelConfig
    key: str = field(repr=False)
    budget: float = 800.0
    """Seconds for a client's request with all its retries."""

    def __post_init__(self) -> None:
        self.base_url, self.model_name = self.settings.base_url, self.settings.model_name
        self.api_key = self.key or NO_KEY

    @cached_property
    def openai_client(self) -> OpenAI:
        """An `openai.OpenAI` client with the retries and the time limit of `explorer.external_model`."""
        from openai import OpenAI

        return OpenAI(**self._client_args)

    @cached_property
    def openai_async_client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(**self._client_args)

    @property
    def _client_args(self) -> dict[str, Any]:
        retries = self.settings.max_retry_times
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "timeout": min(self.settings.timeout, self.budget / (retries + 1)),
            "max_retries": retries,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        from openai import APIError, APIStatusError

        if isinstance(error, APIError):
            why = f"{endpoint_name(self.settings)} failed an agent: {without_key(str(error), self.key)}"
            refused = isinstance(error, APIStatusError) and error.status_code in REFUSED
            raise (EndpointError if refused else Unanswered)(why) from None

    def experiences(self, reward: Reward | float | None = None, **fields: Any) -> list[Experience]:
        """Return one experience with the reward and `fields`; its tokens are unknown."""
        return [text_completion(Answer("", "stop", 0, 0)).experience(reward, **fields)]
