"""Guess the number, written with the package openenv-core, on `/ws` of a port: `python openenv_guess.py PORT`."""

from __future__ import annotations

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import field_validator


class GuessAction(Action):
    message: str

    @field_validator("message")
    @classmethod
    def _short(cls, message: str) -> str:
        if len(message) > 20:
            raise ValueError("too long")
        return message


class GuessObservation(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    number = 0

    def reset(self, seed: int = 0) -> GuessObservation:
        self.number = seed % 5
        return GuessObservation(text="Guess.")

    def step(self, action: GuessAction) -> GuessObservation:
        if action.message == "raise":
            raise RuntimeError("it broke")
        if action.message == "unrewarded":
            return GuessObservation(text="No verdict.", done=True)
        right = action.message == str(self.number)
        return GuessObservation(text="Right." if right else "No.", reward=right, done=right)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)


if __name__ == "__main__":
    app = create_app(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=2)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", ws_ping_interval=0.5, ws_ping_timeout=3.0)
