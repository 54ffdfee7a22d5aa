"""Conversations as tokens: recorded answers are continued as sampled, and the text of messages stays text."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.exceptions import VLLMValidationError
from vllm.renderers import ChatParams
from vllm.renderers.online_renderer import OnlineRenderer

from trinity_core.base.errors import DataError
from trinity_core.data.control_tokens import control_tokens, encode
from trinity_core.data.turns import Message, continued_prompt, text_after_answer
from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, Exchange, setting_of

log = logging.getLogger(__name__)

CONTEXT = ("tools", "documents")
"""Arguments of a request that a template writes into the prompt."""
MOST_CHARACTERS = 2000
"""Number of characters of a prompt to log, from its end, where requests differ."""
TOO_LONG = (
    "This model's maximum context length is {0} tokens. However, {1} tokens of {2} leave none for an "
    "answer. Please reduce their length."
)
NEW_SEQUENCE = (
    "an agent's request begins a new sequence, so its rollout becomes several: %s. Later ones are not logged; the "
    "metric sequences_per_rollout counts them. A rollout is one sequence if its agent sends its history back unchanged"
)


class SessionRenderer(OnlineRenderer):
    """vLLM's renderer of chat completions and responses. It is given the prompt's tokens in two cases: the conversation
    continues a recorded answer, or its text holds control tokens, which vLLM would take for the tokens."""

    def __init__(self, *args: Any, recorded: bool, **named: Any) -> None:
        """`recorded`: True if sessions record the model's answers."""
        super().__init__(*args, **named)
        self._recorded, self._turn = recorded, threading.Lock()
        self._tokenizer = copy.deepcopy(self.renderer.get_tokenizer())  # others are used in other threads
        self._control = control_tokens(self._tokenizer, self.chat_template)
        self._has_logged = False

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        *args: Any,
        **named: Any,
    ) -> Any:
        """See `OnlineRenderer`."""
        _materialise(messages)
        params = request.build_chat_params(default_template, default_template_content_format).with_defaults(
            {**(default_template_kwargs or {}), "tools": tool_dicts, "tokenize": False}
        )
        tokens = await self._tokens(request, params, messages)
        if tokens is not None:
            request.kv_transfer_params = {"prompt_token_ids": tokens}
        conversation, prompts = await super().preprocess_chat(
            request, messages, default_template, default_template_content_format, default_template_kwargs, tool_dicts,
            *args, **named,
        )  # fmt: skip
        self._check_room(prompts, "messages")
        return conversation, prompts

    async def preprocess_completion(self, *args: Any, **named: Any) -> Any:
        """See `OnlineRenderer`."""
        prompts = await super().preprocess_completion(*args, **named)
        self._check_room(prompts, "prompt")
        return prompts

    def _check_room(self, prompts: Sequence[Any], parameter: str) -> None:
        """Raise for a prompt that leaves no room for an answer: vLLM refuses one that is just full with errors of other
        kinds."""
        longest = self.model_config.max_model_len
        for prompt in prompts:
            rendered = prompt.get("prompt_token_ids")
            if isinstance(rendered, list) and len(rendered) >= longest:
                raise VLLMValidationError(TOO_LONG.format(longest, len(rendered), parameter), parameter=parameter)

    async def _tokens(self, request: Any, params: ChatParams, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens of the prompt; None if vLLM renders it itself."""
        exchange, echo = EXCHANGE.get() if self._recorded else None, getattr(request, "echo", False)
        if exchange is not None and getattr(request, "add_generation_prompt", True) and not echo:
            exchange.messages, exchange.setting = messages, setting_of(params.chat_template_kwargs)
            if (tokens := await self._continued(exchange, params, messages)) is not None:
                return tokens
        if request.kv_transfer_params or not self._control.are_in((messages, _context(params))):
            return None
        if echo:
            raise VLLMValidationError("messages with control tokens cannot be echoed.", parameter="echo")
        return await asyncio.to_thread(self._with_plain_text, params, messages)

    async def _continued(self, exchange: Exchange, params: ChatParams, messages: Sequence[Message]) -> list[int] | None:
        """Return the recorded tokens of the answer that `messages` continue, with those after it; None if there is no
        such answer, or the template does not show where it ends."""
        continued = exchange.session.continued(exchange.setting, messages)
        if (departure := exchange.session.departure(exchange.setting, messages)) is not None:
            self._log_departure(departure)
        if continued is None:
            return None
        call, count = continued
        exchange.continues = call
        rest = await asyncio.to_thread(self._after_answer, params, messages, count)
        if rest is None:
            self._log_departure("the chat template does not show where the answer before it ends")
            return None
        exchange.recorded = len(call.tokens)
        return continued_prompt(call, rest).tolist()

    def _with_plain_text(self, params: ChatParams, messages: Sequence[Message]) -> list[int]:
        with self._turn:
            try:
                return encode(self._tokenizer, self._rendered(params, messages))
            except DataError as error:  # the template changes text with control tokens
                raise VLLMValidationError(f"{error}.", parameter="messages") from error

    def _after_answer(self, params: ChatParams, messages: Sequence[Message], count: int) -> list[int] | None:
        def render(conversation: list[Message], generation: bool) -> str:
            try:
                return self._rendered(params, conversation, add_generation_prompt=generation)
            except (ValueError, VLLMValidationError) as error:
                raise DataError(str(error)) from error

        with self._turn:
            try:
                text = text_after_answer(render, messages, count)
                return None if text is None else encode(self._tokenizer, text)
            except DataError as error:  # the whole conversation may still be rendered
                log.debug("a conversation begins a new sequence: %s", error)
                return None

    def _rendered(self, params: ChatParams, messages: Sequence[Message], **arguments: Any) -> str:
        def render(those: Any, context: Any) -> str:
            rest = {**params.chat_template_kwargs, **context, **arguments}
            _, prompt = self.renderer.render_messages(
                copy.deepcopy(those), ChatParams(params.chat_template, params.chat_template_content_format, rest)
            )
            return str(prompt.get("prompt", ""))  # no text if the tokenizer renders token ids at once

        return self._control.rendered(render, messages, _context(params))

    def _log_departure(self, why: str) -> None:
        """Log the first one: most requests of an agent are alike."""
        if not self._has_logged:
            self._has_logged = True
            log.warning(NEW_SEQUENCE, why)


def _materialise(messages: list[Any]) -> None:
    """Replace parts of messages that can be read once, as pydantic gives them, by lists."""
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str | list | None):
            message["content"] = list(content)


def _context(params: ChatParams) -> dict[str, Any]:
    return {name: value for name, value in params.chat_template_kwargs.items() if name in CONTEXT}


class RequestLog(RequestLogger):
    """Replaces vLLM's own, whose log shows only warnings here."""

    def __init__(self, tokenizer: Any) -> None:
        self.max_log_len = MOST_CHARACTERS
        self._tokenizer = copy.deepcopy(tokenizer)  # the other one is used in other threads

    def log_inputs(  # see RequestLogger
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int] | None, prompt_embeds: Any, params: Any,
        lora_request: Any,
    ) -> None:  # fmt: skip
        tokens = prompt_token_ids or []
        text = prompt if prompt is not None else self._tokenizer.decode(tokens)
        shown = text if len(text) <= MOST_CHARACTERS else f"…{text[-MOST_CHARACTERS:]}"
        log.info("request %s: %d tokens, %r, %s", request_id, len(tokens), shown, params)
