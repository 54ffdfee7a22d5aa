"""An external OpenAI-compatible endpoint: chat completions over HTTP, with time limits, retries and honest failure.

A request that fails for good raises `Unanswered` and costs one answer. An endpoint that is down, or that answers none
of its first requests, is a `TransientFault`; one that refuses all requests (a wrong key, an unknown model) an
`EndpointError`. Each names the endpoint. The key is sent as a header and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import BaseModel, Field, ValidationError

from trinity_core.config.schema.external import ExternalModelConfig
from trinity_core.errors import EndpointError, TransientFault, Unanswered

log = logging.getLogger(__name__)

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 that another attempt may change."""
REFUSED = (401, 402)
"""Those that concern every request: the key, the account."""
REFUSED_AT_FIRST = (403, 404, 405)
"""The same, unless the endpoint has answered before: then they concern this one request, such as a moderated one."""
FIRST_DELAY = 0.5
"""Seconds before the first retry. Each further pause is twice as long, half of it at random, so that requests that
failed together do not come back together."""
LONGEST_DELAY = 30.0
LONGEST_ASKED = 120.0
"""Longest pause that an endpoint may ask for (`Retry-After`), seconds."""
CONNECT_SECONDS = 20.0
GIVE_UP = 8
"""Requests that fail for good, before any is answered, until the endpoint counts as broken."""
SHOWN = 300
"""Characters of a refusal's body that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of an endpoint."""

    text: str
    finish_reason: str
    prompt_tokens: int
    """Tokens as the endpoint counts them; 0 if it does not."""
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
    """One attempt failed."""

    def __init__(
        self, why: str, again: bool = True, wait: float | None = None, status: int = 0, met: bool = True
    ) -> None:
        super().__init__(why)
        self.again = again
        """Whether another attempt may succeed."""
        self.wait = wait
        """The pause that the endpoint asks for, seconds."""
        self.status = status
        self.met = met
        """False if no connection came about."""


@dataclass
class Endpoint:
    """Asks one endpoint. Used from one event loop."""

    settings: ExternalModelConfig
    key: str = field(default="", repr=False)
    budget: float = 800.0
    """Seconds for a request with all its retries."""
    first_delay: float = FIRST_DELAY
    section: str = "explorer.external_model"
    """Where a user gave its settings."""
    retries: int = 0
    """Attempts that were made again."""
    _answered: int = 0
    _failed: int = 0
    _client: httpx.AsyncClient | None = None
    _gate: asyncio.Semaphore | None = None

    def __str__(self) -> str:
        return endpoint_name(self.settings)

    async def ask(self, body: dict[str, Any]) -> Answer:
        """The answer to one request. Raises `Unanswered`, `EndpointError` or `TransientFault`."""
        self._gate = self._gate or asyncio.Semaphore(self.settings.requests_at_once)
        async with self._gate:
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
                    return answer
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close its connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _attempt(self, body: dict[str, Any], deadline: float) -> Answer:
        seconds = min(self.settings.timeout, max(deadline - time.monotonic(), 0.0))
        try:
            async with asyncio.timeout(seconds):
                response = await self._connections().post("chat/completions", json=body)
        except TimeoutError:
            raise _Fault(f"no answer within {seconds:.3g} s") from None
        except httpx.TransportError as error:
            met = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise _Fault(f"{type(error).__name__} {error}".strip(), met=met) from None
        if not response.is_success:
            raise self._refusal(response)
        try:
            return read_answer(response.content)
        except ValidationError:
            raise _Fault(f"no chat completion but {self._shown(response.text)}") from None

    def _connections(self) -> httpx.AsyncClient:
        if self._client is None:
            size = self.settings.requests_at_once
            self._client = httpx.AsyncClient(
                base_url=self.settings.base_url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=size, max_keepalive_connections=size),
            )
        return self._client

    def _refusal(self, response: httpx.Response) -> _Fault:
        status = response.status_code
        again = status in RETRIED or status >= 500
        return _Fault(f"HTTP {status}: {self._shown(response.text)}", again, asked_pause(response.headers), status)

    def _failure(self, fault: _Fault, answered: int, attempts: int) -> Exception:
        """What a request that failed for good raises; `answered` had been answered when it began."""
        if fault.status in REFUSED or (fault.status in REFUSED_AT_FIRST and not self._answered):
            keys = f"base_url, model_name and api_key_env of {self.section}"
            return EndpointError(f"{self} refuses every request: {fault}. Check {keys}.")
        self._failed += 1
        if not fault.met and self._answered == answered:
            return TransientFault(f"{self} cannot be reached: {fault}")
        if fault.again and not self._answered and self._failed >= GIVE_UP:
            return TransientFault(f"{self} has answered none of {self._failed} requests; the last one: {fault}")
        return Unanswered(f"{self} did not answer in {attempts} attempt{'s' * (attempts > 1)}: {fault}")

    def _pause(self, attempt: int) -> float:
        longest = min(self.first_delay * 2**attempt, LONGEST_DELAY)
        return longest * random.uniform(0.5, 1.0)

    def _shown(self, text: str) -> str:
        """The beginning of a body on one line."""
        line = " ".join(without_key(text, self.key).split())
        return line[:SHOWN] or "nothing"


def endpoint_name(settings: ExternalModelConfig) -> str:
    """The endpoint in messages."""
    return f"endpoint {settings.base_url} (model {settings.model_name})"


def without_key(text: str, key: str) -> str:
    """The same text with the key masked: some endpoints repeat it in their errors."""
    return text.replace(key, "***") if key else text


def read_answer(content: bytes) -> Answer:
    """The first choice of a chat completion. Raises pydantic's ValidationError for anything else."""
    response = _Response.model_validate_json(content)
    choice, usage = response.choices[0], response.usage or _Usage()
    content_parts = choice.message.content or ""
    if not isinstance(content_parts, str):
        content_parts = "".join(str(part.get("text", "")) for part in content_parts)
    return Answer(content_parts, choice.finish_reason or "stop", usage.prompt_tokens, usage.completion_tokens)


def asked_pause(headers: httpx.Headers) -> float | None:
    """Seconds of a `Retry-After` header, a number or a date; None without a usable one."""
    given = headers.get("retry-after", "")
    try:
        return max(float(given), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(given).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
