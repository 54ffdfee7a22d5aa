"""TextArena's games for one player: `configs/environments/textarena_env.py:TextArena`."""

from __future__ import annotations

from typing import Any

import textarena

Told = tuple[str, float, bool, dict[str, Any]]


class TextArena:
    """`env_id`: a game without wrappers, such as GuessTheNumber-v0-raw, which tells what is new and not all again.

    `kwargs` as of `textarena.make`. The reward comes with the end of a game.
    """

    def __init__(self, env_id: str, kwargs: dict[str, Any] | None = None) -> None:
        self.env = textarena.make(env_id, **(kwargs or {}))

    def reset(self, seed: int) -> Told:
        self.env.reset(num_players=1, seed=seed)
        return self._new(), 0.0, False, {}

    def step(self, action: str) -> Told:
        done, _ = self.env.step(action)
        if not done:
            return self._new(), 0.0, False, {"invalid": self.env.state.error_count > 0}  # the game allows another try
        rewards, games = self.env.close()
        return self._new(), float(rewards[0]), True, {"invalid": bool(games[0]["invalid_move"])}

    def tools(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass

    def _new(self) -> str:
        """What the game has said since the policy last looked."""
        _, said = self.env.get_observation()
        return "\n".join(text for _, text, kind in said if kind is not textarena.ObservationType.PLAYER_ACTION)
