"""An OpenEnv server with a small game, Nim with one heap: `python configs/openenv/nim_server.py --port 8765`."""

from __future__ import annotations

import argparse
import random
import re
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

STARTS = (5, 6, 7, 9)
"""Heaps that best play wins: it leaves a multiple of four each time."""
MOST = 3
"""Sticks that a player may take at once."""


class Take(Action):
    """What the policy says; the last number in it is what it takes."""

    message: str


class Heap(Observation):
    """The observation's text."""

    text: str = ""


class Nim(Environment[Take, Heap, State]):
    """Two players take one, two or three sticks in turn; the last stick wins. Reward 1 for a game won, 0 for one lost.

    The seed draws the heap and the moves of the other player, who plays at random.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._left, self._state, self._random = 0, State(), random.Random()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heap:
        """Draw a heap."""
        self._random = random.Random(seed)
        self._left = self._random.choice(STARTS)
        self._state = State(episode_id=episode_id)
        return Heap(text=f"Left: {self._left}")

    def step(self, action: Take, timeout_s: float | None = None, **_: Any) -> Heap:
        """Take the policy's sticks, then the other player's. What is no move changes nothing."""
        self._state.step_count += 1
        numbers = re.findall(r"\d+", action.message)
        taken = int(numbers[-1]) if numbers else 0
        if not 1 <= taken <= min(MOST, self._left):
            return Heap(text=f"Take 1, 2 or 3. Left: {self._left}", reward=0.0)
        self._left -= taken
        if self._left == 0:
            return Heap(text="You win.", reward=1.0, done=True)
        answer = self._random.randint(1, min(MOST, self._left))
        self._left -= answer
        if self._left == 0:
            return Heap(text=f"I take {answer} and win.", reward=0.0, done=True)
        return Heap(text=f"I take {answer}. Left: {self._left}", reward=0.0)

    @property
    def state(self) -> State:
        """The number of moves so far."""
        return self._state


def main() -> None:
    """Serve on loopback until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--sessions", type=int, default=256, help="most at once; the recipe plays 128 rollouts at once")
    args = parser.parse_args()
    app = create_app(Nim, Take, Heap, max_concurrent_envs=args.sessions)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
