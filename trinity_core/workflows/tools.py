"""Tools that a policy may call: Python functions, described by JSON schemas and called with checked arguments.

Any error of a tool or in a call becomes a message to the model that begins with `error:`; a tool never ends a run. The
functions are the user's own: nothing here runs code that a model wrote.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from trinity_core.base.errors import InputError, faults_text
from trinity_core.base.registry import Registry
from trinity_core.base.threads import InterruptibleThreads
from trinity_core.data.formats import Message, Tool

log = logging.getLogger(__name__)

ToolFn = Callable[..., Any]
TOOLS: Registry[ToolFn] = Registry("tool", recipe="configs/tools")
"""Tools, by the name used in a task set's `workflow_args.tools` and by the model: `@TOOLS.register("add")`."""
ERROR = "error: "
CALLS, ERRORS = "tool_calls", "tool_errors"
KINDS = ("unknown", "arguments", "raised", "timeout", "limit")
"""Kinds of errors; each is a metric, `tool_errors/KIND`."""
_PARAMETER = re.compile(r"^(?::param\s+(?:[^:]*\s)?)?\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s+(.*)$")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    function: ToolFn
    arguments: type[BaseModel]
    schema: Tool
    """As in a request to an OpenAI API."""


def tool_spec(function: ToolFn, name: str | None = None) -> ToolSpec:
    """Describe a function as a tool: parameters from its signature, texts from its docstring.

    The docstring's first part describes the tool, its `Args:` (or `:param name:`) the parameters. Raises InputError for
    a function that cannot be called with only named JSON values.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    text, docs = described(inspect.getdoc(function) or "")
    try:
        hints = get_type_hints(function, include_extras=True)
        fields = {
            parameter.name: (hints.get(parameter.name, Any), _field(parameter, docs.get(parameter.name), name))
            for parameter in inspect.signature(function).parameters.values()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Field name", UserWarning)  # a parameter may be called `copy`
            arguments = create_model(name, __base__=_ToolArguments, **fields)  # type: ignore[call-overload]
        parameters = arguments.model_json_schema(schema_generator=_Untitled)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError, ValueError) as error:
        raise InputError(f"'{name}' cannot be a tool: {error}", key=name) from error
    parameters.pop("title", None)
    parameters.pop("description", None)
    described_as = {"name": name, "description": text, "parameters": {"properties": {}, **parameters}}
    return ToolSpec(name, function, arguments, {"type": "function", "function": described_as})


class _ToolArguments(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _field(parameter: inspect.Parameter, doc: str | None, name: str) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise InputError(
            f"'{name}' cannot be a tool: its parameter '{parameter}' has no name to give a value by", key=name
        )
    default = ... if parameter.default is parameter.empty else parameter.default
    return Field(default, description=doc)


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text before any section, and the text of each parameter (Google or Sphinx style)."""
    text: list[str] = []
    docs: dict[str, str] = {}
    inside, name = None, ""
    for line in docstring.splitlines():
        word = line.strip()
        if word in ("Args:", "Arguments:", "Parameters:", "Returns:", "Raises:", "Yields:", "Examples:", "Example:"):
            inside = word
        elif word.startswith(":"):
            inside = "Args:" if word.startswith(":param") else "Returns:"
        if inside is None:
            text.append(line)
        elif inside in ("Args:", "Arguments:", "Parameters:") and word and word != inside:
            if found := _PARAMETER.match(word):
                name = found[1]
                docs[name] = found[2]
            elif name:
                docs[name] += " " + word
    return "\n".join(text).strip(), docs


class Toolbox:
    """The tools of one rollout: describes, calls and counts them.

    Plain functions run in their own threads, so they may block; after `time_limit` seconds a call is abandoned and its
    thread interrupted. Answers are truncated to `most_characters`.
    """

    def __init__(
        self, *tools: ToolFn | str, time_limit: float = 10.0, most_characters: int = 10_000, most_calls: int = 16
    ) -> None:
        """`tools`: functions, or names in `TOOLS`. `most_calls`: limit of calls in one turn.

        Raises InputError for two tools of one name, or one that cannot be described.
        """
        specs = [
            tool_spec(TOOLS.resolve(tool), tool.rpartition(".")[2]) if isinstance(tool, str) else tool_spec(tool)
            for tool in tools
        ]
        if twice := [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]:
            raise InputError(f"two tools are called '{twice[0]}'", key=twice[0])
        self._specs = {spec.name: spec for spec in specs}
        self._time_limit, self._most_characters, self._most_calls = time_limit, most_characters, most_calls
        self._counts: Counter[str] = Counter()

    @property
    def schemas(self) -> list[Tool]:
        """For the chat template."""
        return [spec.schema for spec in self._specs.values()]

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of calls and errors so far, for the experiences."""
        names = (CALLS, ERRORS, *(f"{ERRORS}/{kind}" for kind in KINDS))
        return {name: float(self._counts[name]) for name in names}

    async def answers(self, message: Message) -> list[Message]:
        """Return a message with the result of each tool call of an assistant's message, in order."""
        results: list[Message] = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            if number < self._most_calls:
                text = await self.call(function["name"], function.get("arguments"))
            else:
                self._counts[CALLS] += 1
                text = self._error("limit", f"at most {self._most_calls} calls at once")
            results.append({"role": "tool", "tool_call_id": call.get("id"), "name": function["name"], "content": text})
        return results

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None) -> str:
        """Return the result as text, or an error. `arguments`: an object, or its JSON text."""
        self._counts[CALLS] += 1
        spec = self._specs.get(name)
        if spec is None:
            return self._error("unknown", f"there is no tool '{name}'; there are {', '.join(self._specs) or 'none'}")
        try:
            checked = _checked(spec, arguments)
        except ValidationError as error:
            return self._error("arguments", f"wrong arguments of '{name}': {faults_text(error.errors())}")
        except ToolFailed as error:
            return self._error("arguments", f"wrong arguments of '{name}': {error}")
        try:
            text = await _within(self._time_limit, _called(spec.function, checked))
        except TimeoutError:
            return self._error("timeout", f"'{name}' took longer than {self._time_limit:g} s")
        except ToolFailed as error:
            log.info("tool '%s' failed", name, exc_info=error.__cause__)
            return self._error("raised", f"'{name}' failed: {error}")
        return self._cut(text)

    def _error(self, kind: str, text: str) -> str:
        self._counts[ERRORS] += 1
        self._counts[f"{ERRORS}/{kind}"] += 1
        return self._cut(ERROR + text)

    def _cut(self, text: str) -> str:
        most = self._most_characters
        return text if len(text) <= most else f"{text[:most]} … (cut to {most} of {len(text)} characters)"


class ToolFailed(Exception):
    """A tool failed, with the error as its cause."""


def _checked(spec: ToolSpec, arguments: Mapping[str, Any] | str | None) -> dict[str, Any]:
    try:
        if isinstance(arguments, str):
            return dict(spec.arguments.model_validate_json(arguments or "{}"))
        return dict(spec.arguments.model_validate({} if arguments is None else arguments))
    except ValidationError:
        raise
    except Exception as error:  # a tool's own validator may raise anything
        raise ToolFailed(f"{type(error).__name__}: {error}") from error


async def _called(function: ToolFn, arguments: Mapping[str, Any]) -> str:
    """Return the function's result as text. Raises ToolFailed for anything it raises, SystemExit included."""
    try:
        if inspect.iscoroutinefunction(function):
            result = await function(**arguments)
        else:
            threads = InterruptibleThreads("tool")
            result = await asyncio.get_running_loop().run_in_executor(threads, lambda: _plain(function, arguments))
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
    except ToolFailed:
        raise
    except (Exception, SystemExit) as error:  # anything a tool raises becomes a message to the model
        raise ToolFailed(f"{type(error).__name__}: {error}") from error


def _plain(function: ToolFn, arguments: Mapping[str, Any]) -> Any:
    """Called in a thread; converts exceptions that would end the thread's loop or process to ToolFailed."""
    try:
        return function(**arguments)
    except (SystemExit, StopIteration, KeyboardInterrupt) as error:
        raise ToolFailed(f"{type(error).__name__}: {error}") from error


async def _within(seconds: float, coroutine: Coroutine[Any, Any, str]) -> str:
    """Return a coroutine's result. Raises TimeoutError after `seconds`, even if the coroutine ignores cancellation."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise ToolFailed("it was cancelled")
        return task.result()
    finally:
        task.cancel()
