"""Makes the text and tool calls of an answer independent of whether it is streamed.

vLLM parses streamed answers with other code than whole ones; it takes the beginning of a malformed tool call for a
call. Here a stream's tool calls are those of the whole answer, sent at its end. Text is streamed as it is sampled: text
sent before the end stays, even if the parser, having seen the end, would leave it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import make_tool_call_id

from trinity_core.inference.tool_parsing import Read, parsed

log = logging.getLogger(__name__)


class OneAnswer:
    """Replaces the methods of a parser that parse one answer."""

    def __init__(self, parser: Parser, another: Callable[[], Parser], known: int, auto_tools: bool) -> None:
        """`another` makes a new parser. `known`: tokens at the start of the prompt that are a recorded conversation; a
        parser would take the end of its thoughts for the end of the new ones."""
        self._parse, self._parse_delta, self._set_prompt = parser.parse, parser.parse_delta, parser.set_prompt_token_ids
        self._another, self._known, self._auto_tools = another, known, auto_tools
        self._has_tools = parser.tool_parser is not None
        self._text, self._tokens = "", list[int]()
        self._sent = {"reasoning": "", "content": ""}
        self._spaces = {"reasoning": "", "content": ""}
        """White space that is sent only if more text follows."""
        self._held = False
        parser.parse = self.parse  # type: ignore[method-assign]
        parser.parse_delta = self.parse_delta  # type: ignore[method-assign]
        parser.set_prompt_token_ids = self.set_prompt_token_ids  # type: ignore[method-assign]

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        self._set_prompt(prompt_token_ids[self._known :])

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> Read:
        """See `Parser`. An answer that the parser cannot parse is text."""
        return parsed(self._parse, model_output, request, enable_auto_tools, model_output_token_ids)

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        prompt = prompt_token_ids and prompt_token_ids[self._known :]
        if not (self._has_tools and self._auto_tools and request.tools and request.tool_choice != "none"):
            return self._parse_delta(delta_text, delta_token_ids, request, prompt, finished=finished)
        self._text += delta_text
        self._tokens += delta_token_ids
        if finished:
            return self._rest(request, prompt or [])
        return None if self._held else self._next(delta_text, delta_token_ids, request, prompt)

    def _next(self, text: str, tokens: list[int], request: Any, prompt: list[int] | None) -> DeltaMessage | None:
        """Return the new text, up to the first sign of a tool call."""
        try:
            message = self._parse_delta(text, tokens, request, prompt, finished=False)
        except Exception as error:
            log.debug("the rest of a stream is read at its end", exc_info=error)
            self._held = True
            return None
        if message is None:
            return None
        self._held = bool(message.tool_calls)
        new: dict[str, Any] = {}
        for name, part in (("reasoning", message.reasoning), ("content", message.content)):
            text = self._spaces[name] + (part or "")
            if shown := text.rstrip():  # white space before a tool call belongs to neither
                new[name] = shown
                self._sent[name] += shown
            self._spaces[name] = text[len(shown) :]
        return DeltaMessage(**new) if new else None

    def _rest(self, request: Any, prompt: list[int]) -> DeltaMessage:
        """Return the part of the whole answer that has not been sent."""
        whole = self._another()
        whole.set_prompt_token_ids(prompt)
        self._parse = whole.parse
        reasoning, content, calls = self.parse(self._text, request, self._auto_tools, self._tokens)
        read = {"reasoning": reasoning if request.include_reasoning else None, "content": content}
        new: dict[str, Any] = {
            name: text[len(self._sent[name]) :]
            for name, text in read.items()
            if text and text.startswith(self._sent[name]) and len(text) > len(self._sent[name])
        }
        if calls:
            new["tool_calls"] = [
                DeltaToolCall(
                    index=index,
                    id=call.id or make_tool_call_id(),
                    type="function",
                    function=DeltaFunctionCall(name=call.name, arguments=call.arguments),
                )
                for index, call in enumerate(calls)
            ]
        return DeltaMessage(**new)
