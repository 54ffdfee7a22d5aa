"""The environments of skyrl-gym: `configs/environments/skyrl_gym_env.py:SkyRLGym`."""

from __future__ import annotations

import json
from typing import Any

import skyrl_gym
from omegaconf import OmegaConf

Told = tuple[str, float, bool, dict[str, Any]]


class SkyRLGym:
    """`env_class` and `env_config` as of `skyrl_gym.make`; the rest are columns of its data sets.

    An episode begins with the row's prompt, to which the environment adds nothing.
    """

    def __init__(
        self,
        env_class: str,
        reward_spec: Any = None,
        reward_model: Any = None,
        extra_info: Any = None,
        max_turns: int | None = None,
        db_id: Any = None,
        data: Any = None,
        env_config: dict[str, Any] | None = None,
    ) -> None:
        columns = {"reward_spec": reward_spec, "reward_model": reward_model, "extra_info": extra_info}
        columns |= {"max_turns": max_turns, "db_id": db_id, "data": data}
        extras = {name: value for name, value in columns.items() if value is not None}
        self.make = lambda: skyrl_gym.make(env_class, env_config=OmegaConf.create(env_config or {}), extras=extras)
        self.env: Any = None

    def reset(self, seed: int) -> Told:
        self.close()
        self.env = self.make()
        self.env.init([])
        return "", 0.0, False, {}

    def step(self, action: str) -> Told:
        said = self.env.step(action)
        text = "\n".join(str(message["content"]) for message in said["observations"])
        info = json.loads(json.dumps(said["metadata"] or {}, default=str))
        return text, float(said["reward"]), bool(said["done"]), info

    def tools(self) -> list[Any]:
        return []

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
