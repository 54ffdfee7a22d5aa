"""The games for one player of TextArena: `environment: configs/environments/textarena_env.py:TextArena`."""

import textarena


class TextArena:
    """`id`: a game without wrappers, such as GuessTheNumber-v0-raw, which tells what is new and not all again.

    `kwargs` as of `textarena.make`. The reward comes with the end of a game.
    """

    def __init__(self, id: str, kwargs: dict | None = None) -> None:
        self.env = textarena.make(id, **(kwargs or {}))

    def reset(self, seed):
        self.env.reset(num_players=1, seed=seed)
        return self._new(), 0.0, False, {}

    def step(self, action):
        done, _ = self.env.step(action)
        if not done:
            return self._new(), 0.0, False, {}
        rewards, games = self.env.close()
        return self._new(), float(rewards[0]), True, {"invalid": bool(games[0]["invalid_move"])}

    def tools(self):
        return []

    def close(self):
        pass

    def _new(self):
        """What the game has said since the policy last looked."""
        _, said = self.env.get_observation()
        return "\n".join(text for _, text, kind in said if kind is not textarena.ObservationType.PLAYER_ACTION)
