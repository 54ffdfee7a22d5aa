"""OpenAI's Responses API on top of chat completions: stateless, function tools only. Pure; without vLLM.

A request becomes a chat request, whose answer is recorded as usual and becomes a response. Nothing is stored: clients
send the whole conversation each time. A stream's events are sent together, once the answer is complete.
https://platform.openai.com/docs/api-reference/responses defines the fields.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from trinity_core.rollout.openai_api.session_auth import Refusal

STATE = ("previous_response_id", "conversation", "prompt", "background")
"""Parameters that need a stateful server."""
NO_STATE = (
    "Responses are not stored here, so {} has nothing to refer to: send the whole conversation as `input`, as agent "
    "frameworks do by default."
)
RENAMED = {"max_output_tokens": "max_completion_tokens"}
CONVERTED = ("input", "instructions", "tools", "tool_choice", "text", "stream")
UNUSED = (
    "store", "metadata", "include", "reasoning", "truncation", "service_tier", "max_tool_calls", "top_logprobs",
    "stream_options", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
"""Parameters without effect on an answer here."""
ECHOED = ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "reasoning", "text", "truncation")
Fields = dict[str, Any]


def chat_request(body: Mapping[str, Any]) -> Fields:
    """Return the chat completion request for a Responses request. Raises Refusal for unsupported parameters."""
    for name in STATE:
        if body.get(name):
            raise Refusal(400, "unsupported_parameter", NO_STATE.format(f"`{name}`"), name)
    left_out = {*STATE, *CONVERTED, *UNUSED}
    chat = {RENAMED.get(name, name): value for name, value in body.items() if name not in left_out}
    chat["messages"] = _messages(body)
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _objects(tools, "tools")]
        if (choice := body.get("tool_choice")) is not None:
            chat["tool_choice"] = _tool_choice(choice)
    kind = _object(_object(body.get("text") or {}, "text").get("format") or {}, "text")
    if kind.get("type") == "json_schema":
        schema = {name: value for name, value in kind.items() if name != "type"}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind:
        chat["response_format"] = kind
    return chat


def _object(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refusal(400, "invalid_type", f"{param}: an object is wanted, not {value!r:.80}.", param)
    return value


def _objects(value: Any, param: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise Refusal(400, "invalid_type", f"{param}: a list is wanted, not {value!r:.80}.", param)
    return [_object(item, param) for item in value]


def _tool(tool: Mapping[str, Any]) -> Fields:
    if tool.get("type") != "function":
        message = f"tools of type {tool.get('type')!r} are not served here; give functions."
        raise Refusal(400, "unsupported_value", message, "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if _object(choice, "tool_choice").get("type") != "function":
        message = "tool_choice is 'auto', 'none', 'required' or a function here."
        raise Refusal(400, "unsupported_value", message, "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _messages(body: Mapping[str, Any]) -> list[Fields]:
    """Return the conversation. The items of one answer (thoughts, text, calls) become one assistant message."""
    messages: list[Fields] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    if not isinstance(items, str | list):
        raise Refusal(400, "missing_required_parameter", "input is a text or a list of items.", "input")
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _content(item.get("content"))})
        elif kind in ("message", "function_call", "reasoning"):
            _add(_answer_of(messages), kind, item)
        else:
            message = f"items of type {kind!r} are not served in `input`."
            raise Refusal(400, "unsupported_value", message, "input")
    return messages


def _answer_of(messages: list[Fields]) -> Fields:
    """Return the assistant's message that an item belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add(answer: Fields, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        answer["content"] += _text(item.get("content"))
    elif kind == "reasoning":
        answer["reasoning"] = answer.get("reasoning", "") + _text(item.get("content") or [])
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _text(content: Any) -> str:
    parts = [{"text": content}] if isinstance(content, str) else _objects(content or [], "input")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _content(content: Any) -> Any:
    """Return the content of a message: a string if all of it is text, else the parts of a chat message."""
    if not isinstance(content, list):
        return content
    if all("text" in part for part in _objects(content, "input")):
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.get("image_url")}}
        if part.get("type") == "input_image"
        else {**part, "type": str(part.get("type")).removeprefix("input_")}
        for part in content
    ]


def response_of(body: Mapping[str, Any], completion: Mapping[str, Any]) -> Fields:
    choice, usage = completion["choices"][0], completion.get("usage") or {}
    cut = choice["finish_reason"] == "length"
    details = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "id": _name("resp"),
        "object": "response",
        "created_at": completion.get("created", int(time.time())),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": completion["model"],
        "output": _items(choice["message"], "incomplete" if cut else "completed"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "store": False,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "usage": {
            "input_tokens": usage.get("prompt_tokens", 0),
            "input_tokens_details": {"cached_tokens": details, "cache_write_tokens": 0},
            "output_tokens": usage.get("completion_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.get("total_tokens", 0),
        },
        **{name: body.get(name) for name in ECHOED},
    }


def _items(message: Mapping[str, Any], status: str) -> list[Fields]:
    items: list[Fields] = []
    if message.get("reasoning"):
        thoughts = [{"type": "reasoning_text", "text": message["reasoning"]}]
        items.append({"id": _name("rs"), "type": "reasoning", "summary": [], "content": thoughts, "status": status})
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        text: list[Fields] = [
            {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
        ]
        items.append({"id": _name("msg"), "type": "message", "role": "assistant", "content": text, "status": status})
    for call in calls:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        names = {"id": _name("fc"), "type": "function_call", "call_id": call["id"]}
        items.append({**names, **function, "status": status})
    return items


def _name(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def event_stream(response: Fields) -> Iterator[str]:
    """Return the response as the events of a stream, in wire format."""
    for number, event in enumerate(_events(response)):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"


def _events(response: Fields) -> Iterator[Fields]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        here = {"output_index": index, "item_id": item["id"]}
        empty: Fields = {"content": []} if "content" in item else {"arguments": ""}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty}}
        if item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", **here, "delta": arguments}
            yield {"type": f"{kind}.done", **here, "name": item["name"], "arguments": arguments}
        for place, part in enumerate(item.get("content", ())):
            kind, there = f"response.{part['type']}", {**here, "content_index": place}
            logprobs: Fields = {"logprobs": []} if item["type"] == "message" else {}
            yield {"type": "response.content_part.added", **there, "part": {**part, "text": ""}}
            yield {"type": f"{kind}.delta", **there, "delta": part["text"], **logprobs}
            yield {"type": f"{kind}.done", **there, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **there, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
