"""The environments of skyrl-gym: `environment: configs/environments/skyrl_gym_env.py:SkyRLGym`."""

import json

import skyrl_gym


class SkyRLGym:
    """`id` and `env_config` as of `skyrl_gym.make`; the rest are columns of its data sets.

    An episode begins with the row's prompt, to which the environment adds nothing.
    """

    def __init__(self, id: str, reward_spec=None, extra_info=None, max_turns=None, env_config=None) -> None:
        extras = {"reward_spec": reward_spec, "extra_info": extra_info, "max_turns": max_turns}
        extras = {name: value for name, value in extras.items() if value is not None}
        self.make = lambda: skyrl_gym.make(id, env_config=env_config, extras=extras)
        self.env = None

    def reset(self, seed):
        self.close()
        self.env = self.make()
        self.env.init([])
        return "", 0.0, False, {}

    def step(self, action):
        said = self.env.step(action)
        text = "\n".join(str(message["content"]) for message in said["observations"])
        info = json.loads(json.dumps(said["metadata"] or {}, default=str))
        return text, float(said["reward"]), bool(said["done"]), info

    def tools(self):
        return []

    def close(self):
        if self.env is not None:
            self.env.close()
