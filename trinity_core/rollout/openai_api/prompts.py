"""Prompts of the OpenAI API, rendered as vLLM's server renders them. The text of messages stays text."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, ChatParams

from trinity_core.base.errors import DataError
from trinity_core.data.control_tokens import control_tokens, encode
from trinity_core.data.turns import Message, text_after_answer

log = logging.getLogger(__name__)

CONTEXT = ("tools", "documents")
"""Arguments of a request that a template writes into the prompt."""
MOST_CHARACTERS = 2000
"""Number of characters of a prompt to log, from its end, where requests differ."""


class Prompts:
    """Renders and tokenises conversations. Its methods may be called in threads; they take turns."""

    def __init__(self, renderer: BaseRenderer[Any], template: str | None) -> None:
        self._renderer, self._turn = renderer, threading.Lock()
        self._tokenizer = copy.deepcopy(renderer.get_tokenizer())  # others are used in other threads
        self._control = control_tokens(self._tokenizer, template)

    def hold_control_tokens(self, params: ChatParams, messages: Sequence[Message]) -> bool:
        """True if messages, tools or documents hold control tokens: vLLM would take their text for the tokens."""
        return self._control.are_in((messages, _context(params)))

    def tokens(self, params: ChatParams, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt. Raises VLLMValidationError if the template changes text with control
        tokens."""
        with self._turn:
            try:
                return encode(self._tokenizer, self._rendered(params, messages))
            except DataError as error:
                raise VLLMValidationError(f"{error}.", parameter="messages") from error

    def tokens_after_answer(self, params: ChatParams, messages: Sequence[Message], count: int) -> list[int] | None:
        """Return the tokens that the template writes after the answer in message `count`; None if it does not show
        them."""

        def render(those: list[Message], generation: bool) -> str:
            return self._rendered(params, those, add_generation_prompt=generation)

        with self._turn:
            try:
                text = text_after_answer(render, messages, count)
                return None if text is None else encode(self._tokenizer, text)
            except (ValueError, DataError) as error:  # the whole conversation may still be rendered
                log.debug("a conversation begins a new sequence: %s", error)
                return None

    def _rendered(self, params: ChatParams, messages: Sequence[Message], **arguments: Any) -> str:
        def render(those: Any, context: Any) -> str:
            rest = {**params.chat_template_kwargs, **context, **arguments}
            _, prompt = self._renderer.render_messages(
                copy.deepcopy(those), ChatParams(params.chat_template, params.chat_template_content_format, rest)
            )
            return str(prompt.get("prompt", ""))  # no text if the tokenizer renders token ids at once

        return self._control.rendered(render, messages, _context(params))


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
