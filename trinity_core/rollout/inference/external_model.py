"""A model behind an external OpenAI-compatible endpoint: messages in, text out, no token ids.

A request that finally fails raises `Unanswered` and costs one answer. An endpoint that is down, or that answers nothing
while `GIVE_UP` requests fail, is a `TransientFault`; one that refuses all requests (a wrong key, an unknown model) an
`EndpointError`. Each names the endpoint. The key is sent as a header and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from trinity_core.base.errors import EndpointError, TransientFault, TrinityError, Unanswered
from trinity_core.base.threads import RunsElsewhere, in_this_loop
from trinity_core.base.timing import BusyTimer, uncounted
from trinity_core.config import Config
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.data.experience import Experience
from trinity_core.data.formats import Tool
from trinity_core.data.messages import Message, with_text_arguments
from trinity_core.workflows.base import all_of
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rollout_model import Completion, RolloutModel, plain_message

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


PASSING = (408, 409, 429)
"""Statuses below 500 that say nothing of the request itself."""
REFUSED = (401, 402)
"""Statuses that apply to every request: the key, the account."""
REFUSED_AT_FIRST = (403, 404, 405)
"""Statuses that apply to every request until the endpoint has answered one; then to one, such as a moderated
request."""
NO_KEY = "none"
"""Placeholder key for endpoints without one, since clients require a key."""
CONNECT_SECONDS = 20.0
GIVE_UP = 8
"""Number of finally failed requests, without any answer in between, after which the endpoint counts as broken."""
SHOWN = 300
"""Number of characters of an error body to show."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str
    prompt_tokens: int
    """Token counts as reported by the endpoint; 0 without."""
    tokens: int


class _Message(BaseModel):
    content: str | list[dict[str, Any]] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)


class _Response(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


@dataclass
class RateLimit:
    """Spaces requests so that a minute has no more of them, and of their tokens, than allowed."""

    requests: int | None = None
    tokens: int | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _next: float = -math.inf
    """When the next request may begin, as for their number."""
    _paid: float = -math.inf
    """When the tokens so far have been let through."""

    async def turn(self) -> None:
        """Return when the next request may begin."""
        if self.requests is not None:
            begin = max(self.clock(), self._next)
            self._next = begin + 60 / self.requests
            await self.sleep(begin - self.clock())
        while (seconds := self._paid - self.clock()) > 0:
            await self.sleep(seconds)

    def count(self, tokens: int) -> None:
        """Note the tokens of a request that has been answered."""
        if self.tokens is not None:
            self._paid = max(self._paid, self.clock()) + 60 * tokens / self.tokens


@dataclass
class Endpoint:
    """Sends requests to one endpoint; OpenAI's client retries them. Used from one event loop."""

    settings: ExternalModelConfig
    key: str = field(default="", repr=False)
    budget: float = 800.0
    """Seconds for a request with all its retries."""
    section: str = "explorer.external_model"
    _answered: int = 0
    _failed: int = 0
    """Requests since the last answer that finally failed and began after it."""
    _client: AsyncOpenAI | None = None
    _free: asyncio.Semaphore | None = None

    def __post_init__(self) -> None:
        self.rate = RateLimit(self.settings.requests_per_minute, self.settings.tokens_per_minute)

    def __str__(self) -> str:
        return endpoint_name(self.settings)

    async def ask(self, body: dict[str, Any], queueing: BusyTimer | None = None) -> Answer:
        """Return the answer to one request. Raises `Unanswered`, `EndpointError` or `TransientFault`.

        `queueing` runs while the request waits for one of the `requests_at_once` slots, and for its minute.
        """
        self._free = self._free or asyncio.Semaphore(self.settings.requests_at_once)
        with ExitStack() as queued:
            if queueing is not None:
                queued.enter_context(queueing)
            async with self._free:
                await self.rate.turn()
                queued.close()
                answer = await self._answer(body)
        self.rate.count(answer.prompt_tokens + answer.tokens)
        return answer

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _answer(self, body: dict[str, Any]) -> Answer:
        from httpx2 import ConnectError, ConnectTimeout
        from openai import APIConnectionError, APIStatusError, Omit

        client, answered = self._openai(), self._answered
        arguments = {name: value for name, value in body.items() if name not in ("model", "messages")}
        try:
            async with asyncio.timeout(self.budget):
                response = await client.chat.completions.with_raw_response.create(
                    model=body["model"],
                    messages=body["messages"],
                    extra_body=arguments,
                    extra_headers=None if self.key else {"Authorization": Omit()},
                )
            answer = read_answer(response.content)
        except TimeoutError as error:
            # The fault of the attempt after which the budget cut a pause short; None if it cut an attempt short.
            last = error.__cause__.__context__ if error.__cause__ else None
            is_down = isinstance(last, ConnectError | ConnectTimeout)
            raise self._failure(f"no answer within {self.budget:.3g} s", answered, is_down=is_down) from None
        except APIConnectionError as error:
            cause = error.__cause__ or error
            is_down = isinstance(cause, ConnectError | ConnectTimeout)
            raise self._failure(f"{type(cause).__name__} {cause}".strip(), answered, is_down=is_down) from None
        except APIStatusError as error:
            why = f"HTTP {error.status_code}: {self._excerpt(error.response.text)}"
            raise self._failure(why, answered, error.status_code) from None
        except ValidationError:
            raise self._failure(f"no chat completion but {self._excerpt(response.text)}", answered) from None
        self._answered += 1
        self._failed = 0
        return answer

    def _openai(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, Timeout

        if self._client is None:
            self._client = AsyncOpenAI(
                base_url=self.settings.base_url,
                api_key=self.key or NO_KEY,
                timeout=Timeout(self.settings.timeout, connect=min(self.settings.timeout, CONNECT_SECONDS)),
                max_retries=self.settings.max_retry_times,
            )
            # By default the client reads them from OPENAI_ORG_ID and OPENAI_PROJECT_ID, which are for OpenAI and
            # another key.
            self._client.organization = self._client.project = None
        return self._client

    def _failure(self, why: str, answered: int, status: int = 0, is_down: bool = False) -> Exception:
        """Return the error of a request that finally failed; `answered` is the number of answers when it began."""
        if status in REFUSED or (status in REFUSED_AT_FIRST and not self._answered):
            keys = f"base_url, model_name and api_key_env of {self.section}"
            return EndpointError(f"{self} refuses every request: {why}. Check {keys}.")
        is_own_fault = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in PASSING
        if self._answered == answered and not is_own_fault:
            if is_down:
                return TransientFault(f"{self} cannot be reached: {why}")
            self._failed += 1
            if self._failed >= GIVE_UP:
                return TransientFault(f"{self} answered nothing while {self._failed} requests failed; the last: {why}")
        return Unanswered(f"{self} did not answer: {why}")

    def _excerpt(self, text: str) -> str:
        line = " ".join(without_key(text, self.key).split())
        return line[:SHOWN] or "nothing"


def endpoint_name(settings: ExternalModelConfig) -> str:
    return f"endpoint {settings.base_url} (model {settings.model_name})"


def without_key(text: str, key: str) -> str:
    """Mask the key: some endpoints repeat it in their errors."""
    return text.replace(key, "***") if key else text


def read_answer(content: bytes) -> Answer:
    """Return the first choice of a chat completion. Raises pydantic's ValidationError for anything else."""
    response = _Response.model_validate_json(content)
    choice, usage = response.choices[0], response.usage or _Usage()
    content_parts = choice.message.content or ""
    if not isinstance(content_parts, str):
        content_parts = "".join(str(part.get("text", "")) for part in content_parts)
    return Answer(content_parts, choice.finish_reason or "stop", usage.prompt_tokens, usage.completion_tokens)


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
    def name(self) -> str:
        return self.endpoint.settings.model_name

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Raises TrinityError: the endpoint has its own chat template."""
        self._refuse("asks for the tokens that end an answer")

    @property
    def tokenizer(self) -> Any:
        """Raises TrinityError: an endpoint has none."""
        self._refuse("asks for the tokenizer")

    @property
    def max_model_len(self) -> int:
        """Raises TrinityError: an endpoint does not tell."""
        self._refuse("asks for the longest sequence")

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
        answers = await all_of([self.outside(self.endpoint.ask(body, queueing)) for body in bodies])
        return [self._completion(answer) for answer in answers]

    async def generate(self, prompt_tokens: Sequence[int], n: int = 1, **_: Any) -> list[Completion]:
        """Raises TrinityError: an endpoint takes messages."""
        self._refuse("continues token ids")

    async def logprobs(self, tokens: Sequence[int]) -> Never:
        """Raises TrinityError: an endpoint takes messages."""
        self._refuse("asks for the log-probs of given tokens")

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **_: Any) -> Never:
        """Raises TrinityError: the endpoint has its own chat template."""
        self._refuse("asks for the tokens of a prompt")

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
