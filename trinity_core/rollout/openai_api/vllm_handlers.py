"""vLLM's routes and handlers for the models of a server. In a session, the answers that clients get are recorded."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models import api_router as models_routes
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses import api_router as responses_routes
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelList
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.parser.abstract_parser import Parser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from trinity_core.base.errors import TrinityError
from trinity_core.data.turns import Message
from trinity_core.rollout.inference.tool_parsing import CallBuffer, Read, parsed
from trinity_core.rollout.openai_api.client import PoolClient
from trinity_core.rollout.openai_api.middleware import COMPLETIONS
from trinity_core.rollout.openai_api.prompts import RequestLog, SessionRenderer
from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, Exchange
from trinity_core.rollout.openai_api.served_model import ServedModel

log = logging.getLogger(__name__)

AnyRequest = ChatCompletionRequest | CompletionRequest | ResponsesRequest
Answers = dict[int, Sequence[Message]]
"""The messages of each choice."""
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
MAX_ANSWERS = 128
"""Limit of `n` of a request, as in OpenAI's own API."""


class ModelHandlers:
    """vLLM's handlers of the requests to one model, whose pool is used in the event loop `explorer_loop`."""

    def __init__(self, model: ServedModel, explorer_loop: asyncio.AbstractEventLoop) -> None:
        self.model = model
        self._has_logged = False
        client = PoolClient(
            _front(model), model.pool, explorer_loop, model.stop_token_ids, model.names[0], model.recorded
        )
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
        renderer = SessionRenderer(client.model_config, client.renderer, **shared, **parsing, recorded=model.recorded)
        renderer.parser = renderer.parser and session_parser(renderer.parser)
        self.chat = OpenAIServingChat(client, self.models, "assistant", online_renderer=renderer, **shared, **parsing)
        self.completion = OpenAIServingCompletion(
            client, self.models, online_renderer=renderer, request_logger=requests
        )
        self.responses = OpenAIServingResponses(client, self.models, renderer, **shared, **parsing)
        self.chat.parser_cls = self.responses.parser = renderer.parser
        for handler in (self.chat, self.completion, self.responses):
            handler.default_sampling_params = dict(model.sampling)

    async def answer(
        self, create: Callable[[Any, HttpRequest], Awaitable[Any]], request: AnyRequest, raw_request: HttpRequest
    ) -> Any:
        """Return what vLLM's `create` returns for a request. In a session the answers are recorded."""
        refuse(request, self.model)
        exchange = EXCHANGE.get()
        if exchange is not None and (task := asyncio.current_task()) is not None:
            exchange.runs_in(task)
        if exchange is None or not self.model.recorded:
            return await create(request, raw_request)
        await self._apply_terms(request, exchange, raw_request)
        exchange.guided = _asks_for_grammar(request)
        if exchange.guided and not self._has_logged:
            self._has_logged = True
            log.warning(GUIDED)
        result = await create(request, raw_request)
        if isinstance(result, ChatCompletionResponse | CompletionResponse | ResponsesResponse):
            exchange.keep(_answers(result))
        elif not isinstance(result, ErrorResponse):
            return _kept_stream(result, exchange, _choice_count(request))
        return result

    async def _apply_terms(self, request: AnyRequest, exchange: Exchange, raw_request: HttpRequest) -> None:
        """Set the session's sampling arguments and seed in a request."""
        if getattr(request, "use_beam_search", False):
            raise VLLMValidationError("a session samples; leave out use_beam_search", parameter="use_beam_search")
        terms = exchange.session.terms
        requested = {name for name in request.model_fields_set if getattr(request, name) is not None}
        defaults = {name: value for name, value in terms.defaults.items() if name not in requested}
        for name, value in {**defaults, **terms.pinned}.items():
            if name in type(request).model_fields:
                setattr(request, name, value)
        request.seed = exchange.seed(request.seed)
        if isinstance(request, CompletionRequest):
            if (await raw_request.json()).get("max_tokens") is None:  # vLLM would set 16
                exchange.max_tokens = terms.max_tokens or self.model.max_model_len
        elif not {"max_tokens", "max_completion_tokens", "max_output_tokens"} & requested:
            exchange.max_tokens = terms.max_tokens
        if not isinstance(request, CompletionRequest):
            request.parallel_tool_calls = None  # False would return fewer calls than are recorded and trained on


def refuse(request: AnyRequest, model: ServedModel) -> None:
    """Raise for requests that cannot be served; before an answer begins, as a stream already has status 200 then."""
    count = getattr(request, "n", None) or 1
    if count > MAX_ANSWERS:
        raise VLLMValidationError(f"n is at most {MAX_ANSWERS}, not {count}.", parameter="n", value=count)
    if isinstance(request, CompletionRequest):
        if (request.logprobs or 0) > MOST_LOGPROBS:
            message = f"logprobs of a completion is at most {MOST_LOGPROBS}; chat completions give up to 20."
            raise VLLMValidationError(message, parameter="logprobs", value=request.logprobs)
        return
    calls = bool(request.tools) and request.tool_choice not in (None, "none")
    if calls and not (model.enable_auto_tool_choice and model.tool_call_parser):
        raise VLLMValidationError(NOT_PARSED.format(model.names[0]), parameter="tools")


def _asks_for_grammar(request: AnyRequest) -> bool:
    if getattr(request, "tool_choice", None) not in OWN_CHOICE:
        return True
    return request.extract_structured_outputs() is not None


def _answers(result: ChatCompletionResponse | CompletionResponse | ResponsesResponse) -> Answers | None:
    """Return the messages that a client will send back; None for a completion, which is no conversation."""
    if isinstance(result, ChatCompletionResponse):
        return {choice.index: [choice.message.model_dump()] for choice in result.choices}
    if isinstance(result, ResponsesResponse):
        return {0: construct_chat_messages_with_tool_call([*result.output])}
    return None


def _choice_count(request: AnyRequest) -> int:
    prompt = getattr(request, "prompt", None)
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (getattr(request, "n", None) or 1)


async def _kept_stream(chunks: AsyncIterator[Any], exchange: Exchange, count: int) -> AsyncGenerator[Any, None]:
    """Pass on the chunks; keep the answers before the client learns that the last of `count` has ended. A stream that
    is cut before is dropped."""
    messages: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()
    async for chunk in chunks:
        if isinstance(chunk, str):
            for choice in _choices(chunk):
                add_delta(messages.setdefault(choice["index"], {"role": "assistant"}), choice.get("delta") or {})
                if choice.get("finish_reason"):
                    ended.add(choice["index"])
            if len(ended) == count and not exchange.kept:
                exchange.keep({index: [message] for index, message in messages.items()})
        elif chunk.type in ("response.completed", "response.incomplete"):
            exchange.keep(_answers(chunk.response))
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


def session_parser(parser: type[Parser]) -> type[Parser]:
    """Return a parser with three differences. It ignores the recorded part of a prompt, whose thoughts would end the
    new ones. An answer that it cannot parse is text. Its grammar for forced tool calls, and no others, follows the
    tools' schemas; by default that holds for strict tools only, and a tool without parameters takes any JSON."""

    class SessionParser(parser):  # type: ignore[valid-type, misc]
        is_text = False
        """True after a malformed call: the rest of a streamed answer is text."""

        @cached_property
        def call_buffer(self) -> CallBuffer:
            return CallBuffer()

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
            super().set_prompt_token_ids(prompt_token_ids[_recorded() :])

        def parse(
            self,
            model_output: str,
            request: Any,
            enable_auto_tools: bool = False,
            model_output_token_ids: Sequence[int] = (),
        ) -> Read:
            return parsed(super().parse, model_output, request, enable_auto_tools, model_output_token_ids)

        def parse_delta(
            self,
            delta_text: str,
            delta_token_ids: list[int],
            request: Any,
            prompt_token_ids: list[int] | None = None,
            *,
            finished: bool,
        ) -> DeltaMessage | None:
            prompt = prompt_token_ids and prompt_token_ids[_recorded() :]
            parse: Callable[..., DeltaMessage | None] = super().parse_delta
            if (passed_on := self.call_buffer.add(delta_text, delta_token_ids, finished)) is None:
                return None
            delta_text, delta_token_ids, is_malformed = passed_on
            self.is_text = self.is_text or is_malformed
            if self.is_text:
                return DeltaMessage(content=delta_text) if delta_text else None
            try:
                return parse(delta_text, delta_token_ids, request, prompt, finished=finished)
            except Exception as error:  # parsers raise anything for unexpected text of the model
                log.warning("part of a stream cannot be parsed", exc_info=error)
                return DeltaMessage(content=delta_text)

        def adjust_request(self, request: Any) -> Any:
            is_forced = request.tool_choice not in OWN_CHOICE
            self.tool_strict_level = ToolStrictLevel.PARAMETER if is_forced else parser.tool_strict_level
            for function in (getattr(tool, "function", tool) for tool in request.tools or () if is_forced):
                if not getattr(function, "parameters", True):
                    function.parameters = {"type": "object", "properties": {}}
            return super().adjust_request(request)

    return SessionParser


def _recorded() -> int:
    exchange = EXCHANGE.get()
    return 0 if exchange is None else exchange.recorded


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
    """All models of a server; acts as vLLM's handlers, and passes a request to those of its model."""

    def __init__(self, served: Sequence[ModelHandlers]) -> None:
        names = [name for handlers in served for name in handlers.model.names]
        if len(set(names)) != len(names):
            raise TrinityError(f"several models are served by one name: {', '.join(names)}; give each a name")
        self._served = served

    def of(self, name: str | None) -> ModelHandlers:
        """Return the model of that name, or the first if a request names none. Raises VLLMNotFoundError."""
        for handlers in self._served:
            if name is None or name in handlers.model.names:
                return handlers
        raise VLLMNotFoundError(f"The model `{name}` does not exist.")

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: HttpRequest) -> Any:
        handlers = self.of(request.model)
        return await handlers.answer(handlers.chat.create_chat_completion, request, raw_request)

    async def create_completion(self, request: CompletionRequest, raw_request: HttpRequest) -> Any:
        handlers = self.of(request.model)
        return await handlers.answer(handlers.completion.create_completion, request, raw_request)

    async def create_responses(self, request: ResponsesRequest, raw_request: HttpRequest) -> Any:
        handlers = self.of(request.model)
        return await handlers.answer(handlers.responses.create_responses, request, raw_request)

    async def show_available_models(self) -> ModelList:
        lists = [await handlers.models.show_available_models() for handlers in self._served]
        return ModelList(data=[card for listed in lists for card in listed.data])


def model_application(models: ServedModels) -> FastAPI:
    """Return an application with vLLM's routes and error handlers, on these models."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)  # read by vLLM's error handlers
    app.state.openai_serving_chat = app.state.openai_serving_completion = models
    app.state.openai_serving_responses = app.state.openai_serving_models = models
    routers = (chat_routes.router, completion_routes.router, responses_routes.router, models_routes.router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    app.router.routes += [route for route in routes if route.path in (*COMPLETIONS, "/v1/models")]

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        cards = {card.id: card for card in (await models.show_available_models()).data}
        models.of(name)
        return cards[name].model_dump()

    @app.exception_handler(RecursionError)
    async def too_deep(_: HttpRequest, error: RecursionError) -> JSONResponse:
        """The arguments of a tool call are JSON within JSON, whose depth only its parser sees."""
        kind = {"type": "invalid_request_error", "param": None, "code": "invalid_json"}
        return JSONResponse({"error": {"message": f"JSON is nested too deeply: {error}", **kind}}, 400)

    return app
