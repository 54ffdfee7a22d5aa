"""vLLM's chat and completion handlers for one model, with recording, and the selection among several models.

`OneAnswer` makes the text and tool calls of an answer independent of whether it is streamed.
vLLM parses streamed answers with other code than whole ones; it takes the beginning of a malformed tool call for a
call. Here a stream's tool calls are those of the whole answer, sent at its end. Text is streamed as it is sampled: text
sent before the end stays, even if the parser, having seen the end, would leave it out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from vllm import AsyncEngineArgs, RequestOutput
from vllm.config import VllmConfig
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelList
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.parser.abstract_parser import Parser
from vllm.renderers import ChatParams
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from trinity_core.base.errors import TrinityError
from trinity_core.data.turns import Message, continued_prompt
from trinity_core.rollout.inference.tool_parsing import Read, parsed
from trinity_core.rollout.openai_api.client import PoolClient
from trinity_core.rollout.openai_api.prompts import Prompts, RequestLog
from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, Exchange, setting_of
from trinity_core.rollout.openai_api.responses import chat_request, event_stream, response_of
from trinity_core.rollout.openai_api.served_model import ServedModel


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


log = logging.getLogger(__name__)

T = TypeVar("T")

GUIDED = (
    "an agent asks for an answer in a grammar (response_format, structured_outputs, tool_choice): the tokens that the "
    "grammar chose carry no loss, as they are not the policy's own choice. Later ones are not logged; the metrics "
    "sessions/guided_answers and sessions/guided_tokens count them. Ask for JSON in the prompt, and use tool_choice "
    "'auto', to train on all tokens"
)
NOT_PARSED = (
    "Tool calls of {} are not read from its answers. Set enable_auto_tool_choice: true and tool_call_parser for it in "
    "the run's configuration, or send tool_choice 'none'."
)
OWN_CHOICE = (None, "auto", "none")
"""Values of `tool_choice` with which the model decides whether it calls a tool."""
MOST_LOGPROBS = 5
"""Limit of `logprobs` of a completion, as in OpenAI's own API."""
MESSAGES = "messages"
"""Key of a request's messages in its state, if they are not those of its body."""
MAX_ANSWERS = 128
"""Limit of `n` of a request, as in OpenAI's own API."""
TOO_LONG = (
    "This model's maximum context length is {} tokens. However, your messages have {} tokens, which leaves none for an "
    "answer. Please reduce the length of the messages."
)
NEW_SEQUENCE = (
    "an agent's request begins a new sequence, so its rollout becomes several: %s. Later ones are not logged; the "
    "metric sequences_per_rollout counts them. A rollout is one sequence if its agent sends its history back unchanged"
)


class Chat(OpenAIServingChat):
    """vLLM's chat handler. Streamed and whole answers are the same, log-probs are written by a thread, and the text of
    messages stays text."""

    def __init__(self, client: PoolClient, *args: Any, **named: Any) -> None:
        super().__init__(client, *args, **named)
        self._prompts = Prompts(client.renderer, self.chat_template)

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: HttpRequest | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """See `OpenAIServingChat`, which tokenises a rendered prompt whole: with control tokens in its messages it gets
        the prompt's tokens."""
        params = self._params(request)
        if raw_request is not None and not request.kv_transfer_params:
            messages = await _messages(raw_request)
            if self._prompts.hold_control_tokens(params, messages):
                if request.echo:
                    raise VLLMValidationError("messages with control tokens cannot be echoed.", parameter="echo")
                self._give(request, await asyncio.to_thread(self._prompts.tokens, params, messages))
        return await super().create_chat_completion(request, raw_request)

    def _params(self, request: ChatCompletionRequest) -> ChatParams:
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(self.chat_template, self.chat_template_content_format)
        return params.with_defaults({**self.default_chat_template_kwargs, "tools": tools, "tokenize": False})

    def _give(self, request: ChatCompletionRequest, prompt: list[int]) -> None:
        """Give vLLM the tokens of a prompt in place of its messages."""
        if len(prompt) >= (longest := self.model_config.max_model_len):
            raise VLLMValidationError(TOO_LONG.format(longest, len(prompt)), parameter="messages")
        request.kv_transfer_params = {"prompt_token_ids": prompt}

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *args: Any, **named: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """See `OpenAIServingChat`. A truncated answer ends with `length`, as in a stream."""
        results = [result async for result in result_generator][-1:]
        writing = super().chat_completion_full_generator(request, each_of(results), *args, **named)
        client: PoolClient = self.engine_client  # type: ignore[assignment]
        response = await (client.in_thread(_completed, writing) if request.logprobs else writing)
        if isinstance(response, ChatCompletionResponse):
            for choice, output in zip(response.choices, results[-1].outputs, strict=True):
                choice.finish_reason = "length" if output.finish_reason == "length" else choice.finish_reason
        return response

    def _make_parser(self, *args: Any, **named: Any) -> Parser:
        parser, exchange = super()._make_parser(*args, **named), EXCHANGE.get()
        another = partial(super()._make_parser, *args, **named)
        OneAnswer(parser, another, 0 if exchange is None else exchange.recorded, self.enable_auto_tools)
        return parser


class RecordedChat(Chat):
    """In a session, requests that continue a recorded answer are served on the recorded tokens."""

    def __init__(self, client: PoolClient, *args: Any, **named: Any) -> None:
        super().__init__(client, *args, **named)
        self._told: set[str] = set()
        """Messages already logged: most requests of an agent are alike, so the first one is enough."""

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: HttpRequest | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        exchange = EXCHANGE.get()
        if exchange is None or raw_request is None:
            return await super().create_chat_completion(request, raw_request)
        _apply_terms(request, exchange)
        request.parallel_tool_calls = None  # False would return fewer calls than are recorded and trained on
        exchange.guided = request.extract_structured_outputs() is not None or request.tool_choice not in OWN_CHOICE
        if exchange.guided:
            self._log_once(GUIDED)
        if request.add_generation_prompt and not request.echo:
            await self._continue(request, await _messages(raw_request), exchange)
        result = await super().create_chat_completion(request, raw_request)
        if isinstance(result, ChatCompletionResponse):
            exchange.keep({choice.index: choice.message.model_dump() for choice in result.choices})
            return result
        return result if isinstance(result, ErrorResponse) else _kept_stream(result, exchange, request.n or 1)

    async def _continue(self, request: ChatCompletionRequest, messages: Sequence[Message], exchange: Exchange) -> None:
        """Record the prompt's messages and setting; if it continues a recorded answer, give vLLM the tokens."""
        params = self._params(request)
        exchange.messages, exchange.setting = messages, setting_of(params.chat_template_kwargs)
        continued = exchange.session.continued(exchange.setting, messages)
        if (departure := exchange.session.departure(exchange.setting, messages)) is not None:
            self._log_once(NEW_SEQUENCE, departure)
        if continued is None:
            return
        call, count = continued
        rest = await asyncio.to_thread(self._prompts.tokens_after_answer, params, messages, count)
        if rest is None:
            self._log_once(NEW_SEQUENCE, "the chat template does not show where the answer before it ends")
        else:
            exchange.recorded = len(call.tokens)
            self._give(request, continued_prompt(call, rest).tolist())

    def _log_once(self, message: str, *arguments: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message, *arguments)


class RecordedCompletion(OpenAIServingCompletion):
    """vLLM's completion handler. In a session its answers are recorded; a prompt of token ids may continue one."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: HttpRequest | None = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        exchange = EXCHANGE.get()
        if exchange is None or raw_request is None:
            return await super().create_completion(request, raw_request)
        _apply_terms(request, exchange)
        if (await raw_request.json()).get("max_tokens") is None:  # vLLM would set 16
            limit = exchange.session.terms.max_tokens
            exchange.max_tokens = self.model_config.max_model_len if limit is None else limit
        exchange.guided = request.extract_structured_outputs() is not None
        result = await super().create_completion(request, raw_request)
        if isinstance(result, CompletionResponse):
            exchange.keep()
            return result
        prompt = request.prompt
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        count = prompts * (request.n or 1)
        return result if isinstance(result, ErrorResponse) else _kept_stream(result, exchange, count)


async def _messages(raw_request: HttpRequest) -> list[Message]:
    """Return a request's messages as they were sent: vLLM's are read once."""
    return getattr(raw_request.state, MESSAGES, None) or (await raw_request.json())["messages"]


async def each_of(items: Iterable[T]) -> AsyncGenerator[T, None]:
    for item in items:
        yield item


def _completed(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise TrinityError("a response could not be written at once")


def refuse(request: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> None:
    """Raise for requests that cannot be served; before an answer begins, as a stream already has status 200 then."""
    if (request.n or 1) > MAX_ANSWERS:
        raise VLLMValidationError(f"n is at most {MAX_ANSWERS}, not {request.n}.", parameter="n", value=request.n)
    if isinstance(request, CompletionRequest) and (request.logprobs or 0) > MOST_LOGPROBS:
        message = f"logprobs of a completion is at most {MOST_LOGPROBS}; chat completions give up to 20."
        raise VLLMValidationError(message, parameter="logprobs", value=request.logprobs)
    calls = isinstance(request, ChatCompletionRequest) and request.tool_choice not in (None, "none")
    if calls and not (model.enable_auto_tool_choice and model.tool_call_parser):
        raise VLLMValidationError(NOT_PARSED.format(model.names[0]), parameter="tools")


def _apply_terms(request: ChatCompletionRequest | CompletionRequest, exchange: Exchange) -> None:
    if request.use_beam_search:
        raise VLLMValidationError("a session samples; leave out use_beam_search", parameter="use_beam_search")
    terms = exchange.session.terms
    for name, value in terms.defaults.items():
        if name not in request.model_fields_set:
            setattr(request, name, value)
    for name, value in terms.pinned.items():
        setattr(request, name, value)
    if not {"max_tokens", "max_completion_tokens"} & request.model_fields_set:
        exchange.max_tokens = terms.max_tokens
    request.seed = exchange.seed(request.seed)


async def _kept_stream(chunks: AsyncIterator[str], exchange: Exchange, count: int) -> AsyncGenerator[str, None]:
    """Pass on the chunks; keep the answers before the client learns that the last of `count` has ended."""
    answers: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()
    async for chunk in chunks:
        for choice in _choices(chunk):
            add_delta(answers.setdefault(choice["index"], {"role": "assistant"}), choice.get("delta") or {})
            if choice.get("finish_reason"):
                ended.add(choice["index"])
        if (len(ended) == count and count) or "[DONE]" in chunk[:16]:
            count = 0
            if not exchange.kept and ended:
                exchange.keep(answers)
        yield chunk


def _choices(chunk: str) -> list[dict[str, Any]]:
    data = chunk.removeprefix("data: ").strip()
    return json.loads(data).get("choices", []) if data.startswith("{") else []


def add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= part["index"]:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call["id"] = part.get("id") or call.get("id")
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""


class ModelHandlers:
    """vLLM's handlers of the requests to one model, whose pool is used in the event loop `there`."""

    def __init__(self, model: ServedModel, there: asyncio.AbstractEventLoop) -> None:
        self.model = model
        client = PoolClient(_front(model), model.pool, there, model.stop_token_ids, model.names[0], model.recorded)
        # An engine that speculates refuses some arguments, and with them all requests of a call; vLLM checks only here.
        client.input_processor.speculative_config = model.speculative_config
        paths = [BaseModelPath(name=name, model_path=model.path) for name in model.names]
        self.models = OpenAIServingModels(client, paths)
        requests = RequestLog(client.renderer.get_tokenizer()) if model.log_requests else None
        parsing: dict[str, Any] = {
            "enable_auto_tools": model.enable_auto_tool_choice,
            "tool_parser": model.tool_call_parser,
            "reasoning_parser": model.reasoning_parser or "",
        }
        shared: dict[str, Any] = {
            "request_logger": requests,
            "chat_template": model.chat_template,
            "chat_template_content_format": "auto",
            "default_chat_template_kwargs": dict(model.template_args),
        }
        renderer = OnlineRenderer(client.model_config, client.renderer, **shared, **parsing)
        renderer.parser = renderer.parser and pinning(renderer.parser)
        chat = RecordedChat if model.recorded else Chat
        completion = RecordedCompletion if model.recorded else OpenAIServingCompletion
        self.chat = chat(client, self.models, "assistant", online_renderer=renderer, **shared, **parsing)
        self.completion = completion(client, self.models, online_renderer=renderer, request_logger=requests)
        self.chat.default_sampling_params = self.completion.default_sampling_params = dict(model.sampling)


def pinning(parser: type[Parser]) -> type[Parser]:
    """Return a parser whose grammar for forced tool calls, and no others, follows the tools' schemas. By default it
    follows those of strict tools only, and takes any JSON for a tool without parameters."""

    class Pinning(parser):  # type: ignore[valid-type, misc]
        def adjust_request(self, request: Any) -> Any:
            is_forced = request.tool_choice not in OWN_CHOICE
            self.tool_strict_level = ToolStrictLevel.PARAMETER if is_forced else parser.tool_strict_level
            for function in (getattr(tool, "function", tool) for tool in request.tools or () if is_forced):
                if not getattr(function, "parameters", True):
                    function.parameters = {"type": "object", "properties": {}}
            return super().adjust_request(request)

    return Pinning


def _front(model: ServedModel) -> VllmConfig:
    """Return vLLM's configuration of a process that renders prompts and decodes answers but computes nothing."""
    arguments = AsyncEngineArgs(
        model=model.path,
        max_model_len=model.max_model_len,
        dtype=model.dtype,  # type: ignore[arg-type]
        trust_remote_code=model.trust_remote_code,
        generation_config="vllm",
    )
    config = arguments.create_model_config()
    config.quantization = None
    return VllmConfig(model_config=config)


class ServedModels:
    """All models of a server; acts as vLLM's three handlers, and passes a request to those of its model."""

    def __init__(self, served: Sequence[ModelHandlers]) -> None:
        names = [name for one in served for name in one.model.names]
        if len(set(names)) != len(names):
            raise TrinityError(f"several models are served by one name: {', '.join(names)}; give each a name")
        self._served = served

    def _of(self, name: str | None) -> ModelHandlers:
        """Return the model of that name, or the first if a request names none. Raises VLLMNotFoundError."""
        if name is None:
            return self._served[0]
        served = next((one for one in self._served if name in one.model.names), None)
        if served is None:
            raise VLLMNotFoundError(f"The model `{name}` does not exist.")
        return served

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: HttpRequest) -> Any:
        served = self._of(request.model)
        refuse(request, served.model)
        return await served.chat.create_chat_completion(request, raw_request)

    async def create_response(self, body: Mapping[str, Any], raw_request: HttpRequest) -> Any:
        """Return the response by a chat completion, or the stream of its events; see `responses`. Raises Refusal."""
        chat = chat_request(body)
        try:
            request = ChatCompletionRequest.model_validate(chat)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        setattr(raw_request.state, MESSAGES, chat["messages"])
        result = await self.create_chat_completion(request, raw_request)
        if not isinstance(result, ChatCompletionResponse):
            return result
        response = response_of(body, result.model_dump())
        return each_of(event_stream(response)) if body.get("stream") else response

    async def create_completion(self, request: CompletionRequest, raw_request: HttpRequest) -> Any:
        served = self._of(request.model)
        refuse(request, served.model)
        return await served.completion.create_completion(request, raw_request)

    async def show_available_models(self) -> ModelList:
        lists = [await one.models.show_available_models() for one in self._served]
        return ModelList(data=[card for listed in lists for card in listed.data])
