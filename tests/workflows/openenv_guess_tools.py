"""Guess the number by a tool over MCP, written with openenv-core: `python openenv_guess_tools.py PORT`, as
`openenv_guess.py`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessByTool(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("guess")
        self.number, self.right = 0, False

        @tools.tool
        def guess(number: int) -> str:
            """Guess the number."""
            self.right = number == self.number
            return "Right." if self.right else "No."

        super().__init__(tools)

    def reset(self, seed: int = 0) -> Observation:
        self.number = seed % 5
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise RuntimeError("no other actions")

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        seen = await super().step_async(action, timeout_s)
        seen.reward, seen.done = float(self.right), self.right
        return seen

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)


if __name__ == "__main__":
    app = create_app(GuessByTool, CallToolAction, CallToolObservation, max_concurrent_envs=2)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
