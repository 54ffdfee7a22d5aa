"""Any environment of gymnasium with numbered actions: `configs/environments/gymnasium_env.py:Gymnasium`."""

from __future__ import annotations

import json
import re
from typing import Any

import gymnasium

Told = tuple[str, float, bool, dict[str, Any]]


class Gymnasium:
    """`env_id` and `kwargs` as of `gymnasium.make`. `actions`: words for the first actions; else the numbers of all.

    The policy sees what the environment draws as text (`render_mode: ansi`), or else its observation. Its action is the
    last one that its text names; text without one is invalid, changes nothing and earns 0.
    """

    def __init__(self, env_id: str, actions: list[str] | None = None, kwargs: dict[str, Any] | None = None) -> None:
        kwargs = kwargs or {}
        self.env = gymnasium.make(env_id, **kwargs)
        if "render_mode" not in kwargs and "ansi" in self.env.metadata.get("render_modes", []):
            self.env.close()
            self.env = gymnasium.make(env_id, render_mode="ansi", **kwargs)
        space = self.env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{env_id} takes {space}, not one of a few numbered actions")
        if actions and len(actions) > space.n:
            raise ValueError(f"{env_id} has {space.n} actions, and {len(actions)} words for them were given")
        self.actions = actions or [str(int(space.start) + number) for number in range(int(space.n))]
        self.shown = ""

    def reset(self, seed: int) -> Told:
        observation, info = self.env.reset(seed=seed)
        return self._text(observation), 0.0, False, json.loads(json.dumps(info, default=str))

    def step(self, action: str) -> Told:
        words = sorted(self.actions, key=len, reverse=True)  # "go right" before "go"
        named = re.findall(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", action, re.IGNORECASE)
        if not named:
            return f"Name one of {', '.join(self.actions)}.\n{self.shown}", 0.0, False, {"invalid": True}
        number = [word.lower() for word in self.actions].index(named[-1].lower()) + int(self.env.action_space.start)
        observation, reward, ended, cut, info = self.env.step(number)
        info = json.loads(json.dumps(info, default=str))
        return self._text(observation), float(reward), bool(ended or cut), info

    def tools(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.env.close()

    def _text(self, observation: Any) -> str:
        drawn = self.env.render() if self.env.render_mode == "ansi" else observation
        self.shown = re.sub(r"\x1b\[[0-9;]*m", "*", str(drawn)).strip()  # colours mark where the player is
        return self.shown
