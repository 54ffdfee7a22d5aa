"""What `get_openai_client` gives a workflow: `chat.completions.create` alone, on a `ModelWrapper`, without HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trinity_core.errors import TrinityError

SAMPLING = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "tools")
IGNORED = (
    "model", "logprobs", "top_logprobs", "seed", "user", "timeout", "tool_choice", "parallel_tool_calls",
    "extra_body", "extra_headers",
)  # fmt: skip
"""Arguments that change nothing: the policy calls tools as it likes."""


@dataclass
class Client:
    """The synchronous client; its answers are recorded like those of `chat`."""

    model_path: str
    _message: Callable[..., Any]
    _chat: Callable[..., Any]

    @property
    def chat(self) -> Client:
        """So that `client.chat.completions.create` is `client.create`."""
        return self

    completions = chat

    def create(self, *, messages: Any, **options: Any) -> Any:
        """An `openai.types.chat.ChatCompletion`. Raises TrinityError for an argument that is not followed."""
        asked = _asked(messages, options)
        return self._completion(self._chat(**asked), asked.get("tools"))

    def _completion(self, answers: list[Any], tools: Any) -> Any:
        from openai.types.chat import ChatCompletion

        choices = []
        for index, one in enumerate(answers):
            message = self._message(one.answer, tools)
            reason = "length" if one.recorded.truncated else "tool_calls" if message.get("tool_calls") else "stop"
            choices.append({"index": index, "finish_reason": reason, "message": message, "logprobs": None})
        values = {"id": "chatcmpl", "object": "chat.completion", "created": 0, "model": self.model_path}
        return ChatCompletion.model_validate({**values, "choices": choices})


class AsyncClient(Client):
    """The asynchronous client."""

    async def create(self, *, messages: Any, **options: Any) -> Any:
        """See `Client.create`."""
        asked = _asked(messages, options)
        return self._completion(await self._chat(**asked), asked.get("tools"))


def _asked(messages: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `ModelWrapper.chat`."""
    absent: tuple[Any, ...] = (None, False, [], {})
    named = {
        name: value
        for name, value in options.items()
        if name == "temperature" or (value not in absent and type(value).__name__ not in ("NotGiven", "Omit"))
    }
    if unknown := [name for name in named if name not in SAMPLING + IGNORED]:
        raise TrinityError(f"the client that a Trinity-RFT workflow gets here does not take {', '.join(unknown)}")
    asked = {name.replace("_completion", ""): value for name, value in named.items() if name in SAMPLING}
    asked["messages"] = [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in messages]
    return asked
