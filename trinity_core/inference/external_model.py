"""A model behind an external endpoint, as workflows see it: messages in, text out, no token ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Never, Protocol

from trinity_core.config import Config
from trinity_core.config.schema.external import ExternalModelConfig
from trinity_core.data.formats import Message, Tool
from trinity_core.errors import TrinityError
from trinity_core.inference.endpoint import Answer
from trinity_core.inference.external_session import ExternalSession, text_completion
from trinity_core.workflows.rollout_model import Completion, plain_message

log = logging.getLogger(__name__)


class Asks(Protocol):
    """What a model asks of its endpoint (`Endpoint`)."""

    async def ask(self, body: dict[str, Any]) -> Answer:
        """The answer to one request."""


@dataclass
class ExternalModel:
    """A `RolloutModel` for evaluation. Its completions have text, and lengths as the endpoint counts them.

    Their token ids are -1 and their log-probs NaN. What needs token ids or a tokenizer raises TrinityError.
    """

    endpoint: Asks
    settings: ExternalModelConfig
    key: str = field(default="", repr=False)
    usual: dict[str, Any] = field(default_factory=dict)
    """Sampling of calls that do not say."""
    budget: float = 800.0
    """Seconds for a request of an agent's client with all its retries."""
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
        """See `RolloutModel.chat`; each answer is a request of its own. The endpoint has its own chat template."""
        given = self.usual | {name: value for name, value in sampling.items() if value is not None}
        bodies = [self._body(messages, tools, None if seeds is None else seeds[run], given) for run in range(n)]
        answers = await asyncio.gather(*(self.endpoint.ask(body) for body in bodies))
        return [self._completion(answer) for answer in answers]

    async def generate(self, prompt_tokens: Sequence[int], n: int = 1, **_: Any) -> list[Completion]:
        """Raises TrinityError: an endpoint takes messages."""
        self._refuse("continues token ids")

    def chat_sync(self, messages: Sequence[Message], n: int = 1, *arguments: Any, **named: Any) -> list[Completion]:
        """`chat` from another thread."""
        return asyncio.run_coroutine_threadsafe(self.chat(messages, n, *arguments, **named), self.loop).result()

    def generate_sync(self, prompt_tokens: Sequence[int], n: int = 1, **_: Any) -> list[Completion]:
        """As `generate`."""
        self._refuse("continues token ids")

    async def logprobs(self, tokens: Sequence[int]) -> Never:
        """Raises TrinityError: an endpoint takes messages."""
        self._refuse("asks for the log-probs of given tokens")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **_: Any) -> str:
        """Raises TrinityError: the endpoint has a chat template of its own."""
        self._refuse("asks for the text of a prompt")

    def message(self, answer: Completion, tools: Sequence[Tool] | None = None) -> Message:
        """The text of the answer: the endpoint reads tool calls itself, for agents in sessions."""
        return plain_message(answer)

    def session(self, run: int = 0) -> ExternalSession:
        """The endpoint for an agent: address, key and clients."""
        return ExternalSession(self.settings, self.key, self.budget)

    def _body(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, seed: int | None, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        body = {"model": self.settings.model_name, "messages": list(messages), "seed": seed, **sampling}
        if tools:
            body["tools"] = list(tools)
        if (body.get("top_k") or 0) < 1:  # all tokens; OpenAI's own API knows no top_k
            body["top_k"] = None
        return {name: value for name, value in (body | self.settings.request_args).items() if value is not None}

    def _completion(self, answer: Answer) -> Completion:
        if not answer.tokens and answer.text and not self._warned:
            self._warned = True
            log.warning("the endpoint %s counts no tokens: lengths of responses are not known", self.settings.base_url)
        return text_completion(answer)

    def _refuse(self, does: str) -> Never:
        raise TrinityError(
            f"The workflow {does}, which an endpoint (explorer.external_model) does not offer: only `model.chat` and "
            "`model.session` work there. Choose another workflow for this eval set."
        )


def usual_sampling(config: Config) -> dict[str, Any]:
    """Sampling of the `model` section."""
    model = config.model
    return {
        "temperature": model.temperature,
        "top_p": model.top_p,
        "top_k": model.top_k,
        "max_tokens": model.max_response_tokens,
    }
