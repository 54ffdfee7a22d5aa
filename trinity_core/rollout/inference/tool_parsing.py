"""Parses tool calls in an answer with vLLM's own parsers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, RolloutModelConfig

if TYPE_CHECKING:
    from vllm.entrypoints.generate.base.protocol import FunctionCall
    from vllm.parser.abstract_parser import Parser

    from trinity_core.data.chat import ChatEncoder
    from trinity_core.data.formats import Message, Tool
    from trinity_core.workflows.rollout_model import Completion

log = logging.getLogger(__name__)

XML_BEGIN = "<function="
XML_CALL = re.compile(r"<function=[^>\n]+>(?>\s*<parameter=[^>\n]+>.*?</parameter>)*+\s*</function>", re.DOTALL)
"""A whole call in the form of Qwen3-Coder."""

BEGUN_CALL = re.compile(r"<tool_call>\s*(.*)|(<function=.*)", re.DOTALL)
"""The beginning of a call, with what follows the mark."""

Read = tuple[str | None, str | None, "list[FunctionCall] | None"]
"""Reasoning, content and tool calls of an answer."""


PARSERS = {
    "<arg_key>": "", "<seed:tool_call>": "seed_oss", "<function=": "qwen3_coder", "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json", "<tool_call>": "hermes",
}  # fmt: skip
"""Text in a chat template -> parser of its calls, "" if ambiguous; the first match counts."""


def parser_of(encoder: ChatEncoder) -> str:
    """Return the parser of a model with this chat template. Raises TrinityError if the template does not determine
    it."""
    template = str(encoder.template or encoder.tokenizer.chat_template)
    parser = next((parser for text, parser in PARSERS.items() if text in template), "")
    if not parser:
        raise TrinityError(
            "the chat template does not tell which parser reads the model's tool calls: set "
            "explorer.rollout_model.tool_call_parser (hermes for Qwen 2.5 and 3, glm45 or glm47 for GLM)",
            key="explorer.rollout_model.tool_call_parser",
        )
    return parser


def asks_template(config: Config) -> bool:
    """True if the policy's parser must be derived from the chat template: for `toolcall_workflow`, if none is
    configured."""
    flows = {taskset.default_workflow_type for taskset in config.buffer.explorer_input.all_tasksets}
    return config.explorer.rollout_model.tool_call_parser is None and "toolcall_workflow" in flows


class ToolCallReader:
    """Converts answers to messages, by `tool_call_parser` and `reasoning_parser`."""

    def __init__(
        self, tokenizer: Any, parser: type[Parser] | TrinityError, template_args: Mapping[str, Any] | None = None
    ) -> None:
        """`parser`: vLLM's, or the error why there is none, which `message` then raises: only some workflows need a
        parser. `template_args`: arguments of the chat template, which tell some parsers whether the policy thinks."""
        from vllm.tokenizers.hf import get_cached_tokenizer

        self._tokenizer = get_cached_tokenizer(tokenizer)
        self._parser, self._template_args = parser, dict(template_args or {})

    @classmethod
    def of(
        cls, model: RolloutModelConfig, tokenizer: Any, model_path: str, template_args: Mapping[str, Any] | None = None
    ) -> ToolCallReader | None:
        """Return the reader of a model's answers; None without `tool_call_parser`. Imports vLLM."""
        if model.tool_call_parser is None:
            return None
        from vllm.parser.parser_manager import ParserManager

        try:
            parser = ParserManager.get_parser(
                model.tool_call_parser, model.reasoning_parser, True, model_path, tokenizer=tokenizer
            )
        except TypeError as error:
            return cls(
                tokenizer,
                TrinityError(
                    f"explorer.rollout_model.tool_call_parser: {error}", key="explorer.rollout_model.tool_call_parser"
                ),
            )
        assert parser is not None
        return cls(tokenizer, parser, template_args)

    def message(self, answer: Completion, tools: Sequence[Tool]) -> Message:
        """Return the answer as an assistant's message with `content` and, if present, `reasoning_content` and
        `tool_calls`.

        Raises TrinityError if the parser does not work with the tokenizer.
        """
        if isinstance(self._parser, TrinityError):
            raise self._parser
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools), "tool_choice": "auto"})
        parser = self._parser(self._tokenizer, request.tools, chat_template_kwargs=self._template_args)  # type: ignore[arg-type]
        parser.adjust_request(request)  # in place: some parsers need special tokens in the text
        tokens = answer.tokens.tolist()
        if answer.finish_reason == "stop":
            tokens = tokens[:-1]  # the end of the turn
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=request.skip_special_tokens))
        reasoning, content, calls = parsed(parser.parse, text, request, True, tokens, unread=answer.text)
        message: Message = {"role": "assistant", "content": content or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": _object(call.arguments)},
                }
                for number, call in enumerate(calls)
            ]
        return message


def parsed(
    parse: Callable[..., Read], text: str, request: Any, auto_tools: bool, tokens: Sequence[int],
    unread: str | None = None,
) -> Read:  # fmt: skip
    """Return what a vLLM parser finds in an answer; its text, or `unread`, if the parser fails or the call is
    malformed: its parser would leave out a parameter that is not closed, and a call that is not XML altogether."""
    try:
        reasoning, content, calls = parse(text, request, auto_tools, tokens)
    except Exception as error:  # parsers raise anything for unexpected text of the model
        log.warning("no tool call can be read from an answer", exc_info=error)
        return None, text if unread is None else unread, []
    cut = calls and XML_BEGIN in text and len(XML_CALL.findall(text)) < len(calls)
    if cut or not (reasoning or content or calls):
        return None, text if unread is None else unread, []
    return reasoning, content, calls


@dataclass
class CallBuffer:
    """Holds back an XML call of a stream until it is whole: a parser would stream the parts of a malformed one."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)

    def add(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, list[int], bool] | None:
        """Return the text and tokens to pass on, and whether they hold a malformed call, which is text; None while a
        call has no end."""
        self.text, self.tokens = self.text + text, [*self.tokens, *tokens]
        call = (begun[1] or begun[2] or "") if (begun := BEGUN_CALL.search(self.text)) else None
        begins = call is not None and XML_BEGIN.startswith(call[: len(XML_BEGIN)])
        number = self.text.count(XML_BEGIN)
        if begins and not finished and (not number or self.text.count("</function>") < number):
            return None
        passed_on = self.text, self.tokens, begins and len(XML_CALL.findall(self.text)) < number
        self.text, self.tokens = "", []
        return passed_on


def _object(arguments: str) -> Any:
    """Return the arguments of a call as chat templates take them, or their text if they are not a JSON object."""
    try:
        value = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
