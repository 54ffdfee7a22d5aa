"""Environments of OpenEnv's protocol whose actions are tool calls (its `MCPEnvironment`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from trinity_core.data.formats import Tool
from trinity_core.workflows.environments.openenv import OpenEnv
from trinity_core.workflows.environments.protocol import ENVIRONMENTS, EnvironmentFailed, Step

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
NO_ACTION = ("tool_not_found", "invalid_args")
"""Errors for wrong calls by the policy; with others the tool itself failed."""


@ENVIRONMENTS.register("openenv_tools")
class OpenEnvTools:
    """A session of an OpenEnv server that offers tools over MCP.

    Its tools are those of the conversation. The policy calls them as `<tool_call>{"name": …, "arguments":
    …}</tool_call>`, several in a turn if it likes, or its whole text is one such object. It sees their results.
    """

    def __init__(self, url: str, reset_args: dict[str, Any] | None = None, send_seed: bool = True) -> None:
        """See `OpenEnv`."""
        self._world = OpenEnv(url, action_key=None, reset_args=reset_args, send_seed=send_seed)
        self._url = url
        self._shown = ""

    async def tools(self) -> list[Tool]:
        """Return the server's tools. Raises EnvironmentFailed if there are none."""
        answer = await self._world.step(json.dumps({"type": "list_tools"}))
        match {} if answer.info.get("invalid") else json.loads(answer.observation):
            case {"tools": [_, *_] as offered}:
                return [schema(tool) for tool in offered]
        raise EnvironmentFailed(f"OpenEnv server {self._url} offers no tools: {answer.observation[:300]}")

    async def reset(self, seed: int) -> Step:
        first = await self._world.reset(seed)
        self._shown = "" if first.observation == "{}" else first.observation
        return first._replace(observation=self._shown, info={**first.info, "state": self._shown})

    async def step(self, action: str) -> Step:
        """Call the tools in the policy's text, until the episode ends."""
        calls = calls_in(action)
        if calls is None:
            return Step("Call a tool.", info={"invalid": True, "rewarded": False, "state": self._shown})
        steps: list[Step] = []
        for call in calls:
            steps.append(heard(await self._world.step(json.dumps(call))))
            if steps[-1].done:
                break
        turn = joined(steps)
        self._shown = turn.observation
        return turn

    async def close(self) -> None:
        await self._world.close()


def schema(tool: Any) -> Tool:
    """Convert a tool to the format of chat templates."""
    match tool:
        case {"name": str(name), "input_schema": dict(parameters)}:
            function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
            return {"type": "function", "function": function}
    raise EnvironmentFailed(f"a tool of OpenEnv has no name or no input_schema: {str(tool)[:200]}")


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """Return the actions in a policy's text; None if there are none, or one is malformed."""
    calls = [action(call) for call in CALL.findall(text) or [text]]
    return None if None in calls else [call for call in calls if call is not None]


def action(call: str) -> dict[str, Any] | None:
    """Parse a call, `{"name": …, "arguments": …}`, or with `parameters`, as some models write."""
    try:
        request = json.loads(call)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or not isinstance(request.get("name"), str):
        return None
    arguments = request.get("arguments", request.get("parameters", {}))
    return {"type": "call_tool", "tool_name": request["name"], "arguments": arguments}


def heard(step: Step) -> Step:
    """Return what the policy sees of a call's answer: the tool's text, or the error."""
    if step.info.get("invalid"):
        return step._replace(observation=step.observation.splitlines()[0])
    seen = json.loads(step.observation)
    error = seen.get("error") if isinstance(seen, dict) else None
    if isinstance(error, dict):
        invalid = error.get("error_type") in NO_ACTION
        text = f"Error: {error.get('message')}"
        return step._replace(observation=text, info={**step.info, "state": text, "invalid": invalid})
    text = result_text(seen.get("result") if isinstance(seen, dict) else seen)
    return step._replace(observation=text, info={**step.info, "state": text})


def result_text(result: Any) -> str:
    """Return the text of a tool's result: its text parts, or if there are none, all of it as JSON."""
    if isinstance(result, str):
        return result
    parts = result.get("content") if isinstance(result, dict) else None
    texts = [part["text"] for part in parts or () if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else json.dumps(result, ensure_ascii=False)


def joined(steps: Iterable[Step]) -> Step:
    """Join the steps of one turn: the observations line by line, and the sum of the rewards."""
    steps = list(steps)
    text = "\n".join(step.observation for step in steps)
    info = {
        "state": text,
        "invalid": any(step.info.get("invalid", False) for step in steps),
        "rewarded": any(step.info.get("rewarded", True) for step in steps),
    }
    return Step(text, sum(step.reward for step in steps), steps[-1].done, info)
