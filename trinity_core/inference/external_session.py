"""An agent's rollout against an external endpoint: the agent's own client talks to it, and nothing is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from trinity_core.config.schema.external import ExternalModelConfig
from trinity_core.data.experience import Experience
from trinity_core.errors import EndpointError, Unanswered
from trinity_core.inference.endpoint import REFUSED, Answer, endpoint_name, without_key
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rollout_model import Completion

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


def text_completion(answer: Answer) -> Completion:
    """An answer of which only text and lengths are known: token ids are -1, log-probs NaN."""
    length = max(answer.tokens, 1)
    return Completion(
        np.full(max(answer.prompt_tokens, 1), -1, dtype=np.int32),
        np.full(length, -1, dtype=np.int32),
        np.full(length, np.nan, dtype=np.float32),
        0,
        answer.text,
        "length" if answer.finish_reason == "length" else "stop",
    )


@dataclass(eq=False)
class ExternalSession:
    """Address, key and clients for an agent. Safe to use from any thread.

    As a context it turns an error of the endpoint that the agent lets through into `Unanswered` (`EndpointError` for a
    wrong key): the answer is missing, not wrong.
    """

    settings: ExternalModelConfig
    key: str = field(repr=False)
    budget: float = 800.0
    """Seconds for a request of a client with all its retries."""

    @property
    def api_key(self) -> str:
        """The endpoint's key; any text where it has none, since clients insist on one."""
        return self.key or "none"

    @property
    def base_url(self) -> str:
        """The endpoint's own address."""
        return self.settings.base_url

    @property
    def model_name(self) -> str:
        """The model's name at the endpoint."""
        return self.settings.model_name

    @cached_property
    def openai_client(self) -> OpenAI:
        """An `openai.OpenAI` for it, with the retries and the time limit of `explorer.external_model`."""
        from openai import OpenAI

        return OpenAI(**self._client_args)

    @cached_property
    def openai_async_client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` for it."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(**self._client_args)

    @property
    def _client_args(self) -> dict[str, Any]:
        given = self.settings
        return {
            "base_url": given.base_url,
            "api_key": self.api_key,
            "timeout": min(given.timeout, self.budget / (given.max_retry_times + 1)),
            "max_retries": given.max_retry_times,
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
        """One experience that holds the reward and `fields`; its tokens are not known."""
        return [text_completion(Answer("", "stop", 0, 0)).experience(reward, **fields)]
