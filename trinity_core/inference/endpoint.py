"""An external OpenAI-compatible endpoint, called by the `openai` client with time limits and retries.

A request that finally fails raises `Unanswered` and costs one answer. An endpoint that is down, or that answers nothing
while `GIVE_UP` requests fail, is a `TransientFault`; one that refuses all requests (a wrong key, an unknown model) an
`EndpointError`. Each names the endpoint. The key is sent as a header and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.errors import EndpointError, TransientFault, Unanswered
from trinity_core.timing import BusyTimer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 that are worth a retry."""
REFUSED = (401, 402)
"""Statuses that apply to every request: the key, the account."""
REFUSED_AT_FIRST = (403, 404, 405)
"""Statuses that apply to every request until the endpoint has answered one; then to one, such as a moderated
request."""
FIRST_DELAY = 0.5
"""Seconds before the first retry. Each further pause doubles; half of it is random, so that requests that failed
together are not retried together."""
LONGEST_DELAY = 30.0
LONGEST_ASKED = 120.0
"""Longest pause that an endpoint may request (`Retry-After`), seconds."""
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


class _Fault(Exception):
    def __init__(
        self, why: str, again: bool = True, wait: float | None = None, status: int = 0, met: bool = True
    ) -> None:
        super().__init__(why)
        self.again = again
        """True if another attempt may succeed."""
        self.wait = wait
        """Pause requested by the endpoint, seconds."""
        self.status = status
        self.met = met
        """False if no connection was made."""


@dataclass
class Endpoint:
    """Sends requests to one endpoint. Used from one event loop."""

    settings: ExternalModelConfig
    key: str = field(default="", repr=False)
    budget: float = 800.0
    """Seconds for a request with all its retries."""
    first_delay: float = FIRST_DELAY
    section: str = "explorer.external_model"
    retries: int = 0
    _answered: int = 0
    _failed: int = 0
    """Requests since the last answer that finally failed and began after it."""
    _client: AsyncOpenAI | None = None
    _free: asyncio.Semaphore | None = None

    def __str__(self) -> str:
        return endpoint_name(self.settings)

    async def ask(self, body: dict[str, Any], queueing: BusyTimer | None = None) -> Answer:
        """Return the answer to one request. Raises `Unanswered`, `EndpointError` or `TransientFault`.

        `queueing` runs while the request waits for one of the `requests_at_once` slots.
        """
        self._free = self._free or asyncio.Semaphore(self.settings.requests_at_once)
        with ExitStack() as queued:
            if self._free.locked() and queueing is not None:
                queued.enter_context(queueing)
            async with self._free:
                queued.close()
                return await self._answer(body)

    async def _answer(self, body: dict[str, Any]) -> Answer:
        self._openai()  # its import takes a second, which must not count as the endpoint's
        answered, deadline = self._answered, time.monotonic() + self.budget
        for attempt in range(self.settings.max_retry_times + 1):
            try:
                answer = await self._attempt(body, deadline)
            except _Fault as fault:
                pause = self._pause(attempt) if fault.wait is None else min(fault.wait, LONGEST_ASKED)
                late = time.monotonic() + pause >= deadline
                if late or not fault.again or attempt == self.settings.max_retry_times:
                    raise self._failure(fault, answered, attempt + 1) from None
                log.debug("%s: attempt %d failed: %s", self, attempt + 1, fault)
                self.retries += 1
                await asyncio.sleep(pause)
            else:
                self._answered += 1
                self._failed = 0
                return answer
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _attempt(self, body: dict[str, Any], deadline: float) -> Answer:
        from httpx2 import ConnectError, ConnectTimeout
        from openai import APIConnectionError, APIStatusError, Omit

        seconds = min(self.settings.timeout, max(deadline - time.monotonic(), 0.0))
        arguments = {name: value for name, value in body.items() if name not in ("model", "messages")}
        try:
            async with asyncio.timeout(seconds):
                response = await self._openai().chat.completions.with_raw_response.create(
                    model=body["model"],
                    messages=body["messages"],
                    extra_body=arguments,
                    extra_headers=None if self.key else {"Authorization": Omit()},
                )
        except TimeoutError:
            raise _Fault(f"no answer within {seconds:.3g} s") from None
        except APIConnectionError as error:
            cause = error.__cause__ or error
            met = not isinstance(cause, ConnectError | ConnectTimeout)
            raise _Fault(f"{type(cause).__name__} {cause}".strip(), met=met) from None
        except APIStatusError as error:
            status, headers = error.status_code, error.response.headers
            again = status in RETRIED or status >= 500
            raise _Fault(
                f"HTTP {status}: {self._excerpt(error.response.text)}", again, asked_pause(headers), status
            ) from None
        try:
            return read_answer(response.content)
        except ValidationError:
            raise _Fault(f"no chat completion but {self._excerpt(response.text)}") from None

    def _openai(self) -> AsyncOpenAI:
        """Return the client. It makes a single attempt: `ask` counts retries and ends them with the budget."""
        from openai import AsyncOpenAI, Timeout

        if self._client is None:
            self._client = AsyncOpenAI(
                base_url=self.settings.base_url,
                api_key=self.key or NO_KEY,
                timeout=Timeout(None, connect=CONNECT_SECONDS),
                max_retries=0,
            )
            # By default the client reads them from OPENAI_ORG_ID and OPENAI_PROJECT_ID, which are for OpenAI and
            # another key.
            self._client.organization = self._client.project = None
        return self._client

    def _failure(self, fault: _Fault, answered: int, attempts: int) -> Exception:
        """Return the error of a request that finally failed; `answered` is the number of answers when it began."""
        if fault.status in REFUSED or (fault.status in REFUSED_AT_FIRST and not self._answered):
            keys = f"base_url, model_name and api_key_env of {self.section}"
            return EndpointError(f"{self} refuses every request: {fault}. Check {keys}.")
        if self._answered == answered and fault.again:
            if not fault.met:
                return TransientFault(f"{self} cannot be reached: {fault}")
            self._failed += 1
            if self._failed >= GIVE_UP:
                return TransientFault(
                    f"{self} answered nothing while {self._failed} requests failed; the last: {fault}"
                )
        return Unanswered(f"{self} did not answer in {attempts} attempt{'s' * (attempts > 1)}: {fault}")

    def _pause(self, attempt: int) -> float:
        longest = min(self.first_delay * 2**attempt, LONGEST_DELAY)
        return longest * random.uniform(0.5, 1.0)

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


def asked_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a `Retry-After` header, a number or a date; None without a usable one."""
    value = headers.get("retry-after", "")
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
