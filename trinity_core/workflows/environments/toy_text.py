"""gymnasium's text-like environments: what they show as text, and moves read from text.

This file imports nothing of ours, so that a process with an interpreter of its own can load it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

Told = tuple[str, float, bool, dict[str, Any]]


class ToyText:
    """One of gymnasium's environments with a few named moves.

    The move is the last of their names in the policy's text, in any case. Text that names none changes nothing, earns
    `invalid_reward` and takes one turn.
    """

    package: ClassVar[str] = "gymnasium"
    moves: ClassVar[Sequence[str]]
    rules: ClassVar[str]

    def __init__(self, invalid_reward: float, show_rules: bool) -> None:
        self._invalid_reward, self._show_rules = invalid_reward, show_rules
        self._env: Any = None
        self.seen: Any = None
        """gymnasium's observation: the number of the state, for those with `transitions`."""

    @property
    def transitions(self) -> dict[int, dict[int, list[tuple[float, int, float, bool]]]]:
        """state → move → (probability, next state, reward, episode ends); empty where gymnasium does not tell."""
        return self._env.unwrapped.P

    def reset(self, seed: int) -> Told:
        """Begin a new episode."""
        self.seen, _ = self._begin(seed)
        shown = self._shown(self.seen)
        moves = f"Moves: {', '.join(self.moves)}."
        return (f"{self.rules}\n{moves}\n{shown}" if self._show_rules else shown), 0.0, False, self._info(shown)

    def step(self, action: str) -> Told:
        """Do the move that the text names."""
        move = self.move(action)
        if move is None:
            shown = self._shown(self.seen)
            say = f"Name one of {', '.join(self.moves)}.\n{shown}"
            return say, self._invalid_reward, False, {**self._info(shown), "invalid": True}
        self.seen, reward, ended, cut, _ = self._env.step(move)
        shown = self._shown(self.seen)
        return shown, float(reward), bool(ended or cut), self._info(shown)

    def move(self, text: str) -> int | None:
        """The number of the move that the text names last."""
        found = re.findall(rf"\b({'|'.join(map(re.escape, self.moves))})\b", text, re.IGNORECASE)
        return list(self.moves).index(found[-1].lower()) if found else None

    def tools(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def close(self) -> None:
        """Close gymnasium's environment."""
        if self._env is not None:
            self._env.close()

    def _begin(self, seed: int) -> Any:
        return self._env.reset(seed=seed)

    def _info(self, shown: str) -> dict[str, Any]:
        return {"state": shown}

    def _shown(self, seen: Any) -> str:
        raise NotImplementedError


class FrozenLake(ToyText):
    """FrozenLake-v1. Reward 1 on the goal; the episode ends there, in a hole, or after `max_steps`."""

    moves = ("left", "down", "right", "up")
    rules = "You (P) cross a frozen lake (_) to the goal (G). A hole (O) ends the game."

    def __init__(
        self,
        map_name: str = "4x4",
        size: int | None = None,
        p: float = 0.8,
        is_slippery: bool = False,
        max_steps: int = 100,
        invalid_reward: float = 0.0,
        show_rules: bool = True,
    ) -> None:
        """`map_name`: 4x4 or 8x8. With `size` the map is one of that size by chance, drawn with the seed, in which a
        field is frozen with probability `p`."""
        super().__init__(invalid_reward, show_rules)
        import gymnasium

        self._size, self._p = size, p
        self._make = lambda **map: gymnasium.make(
            "FrozenLake-v1", is_slippery=is_slippery, max_episode_steps=max_steps, **map
        )
        if size is None:
            self._env = self._make(map_name=map_name)

    def _begin(self, seed: int) -> Any:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        if self._size is not None:
            self.close()
            self._env = self._make(desc=generate_random_map(self._size, self._p, seed=seed))
        return self._env.reset(seed=seed)

    def _shown(self, seen: Any) -> str:
        rows = self._env.unwrapped.desc.tolist()
        marks = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}
        fields = [[marks[field] for field in row] for row in rows]
        fields[int(seen) // len(rows[0])][int(seen) % len(rows[0])] = "P"
        return "\n".join(map("".join, fields))


class Taxi(ToyText):
    """Taxi-v3. Reward 20 for the passenger delivered, -1 a step, -10 for a wrong pickup or dropoff."""

    moves = ("south", "north", "east", "west", "pickup", "dropoff")
    rules = "You drive a taxi on a grid of 5 by 5 with walls. Fetch the passenger and drop them off at the destination."
    places: ClassVar[dict[str, str]] = {
        "red": "row 0 column 0",
        "green": "row 0 column 4",
        "yellow": "row 4 column 0",
        "blue": "row 4 column 3",
    }

    def __init__(self, max_steps: int = 200, invalid_reward: float = -1.0, show_rules: bool = True) -> None:
        super().__init__(invalid_reward, show_rules)
        import gymnasium

        self._env = gymnasium.make("Taxi-v3", max_episode_steps=max_steps)

    def _shown(self, seen: Any) -> str:
        row, column, passenger, destination = (int(part) for part in self._env.unwrapped.decode(int(seen)))
        places = [f"at {name} ({place})" for name, place in self.places.items()]
        where = [*places, "in the taxi"][passenger]
        return f"Taxi: row {row} column {column}. Passenger: {where}. Destination: {places[destination][3:]}."


class Blackjack(ToyText):
    """Blackjack-v1. Reward 1 for a win, -1 for a loss, 0 for a draw."""

    moves = ("stick", "hit")
    rules = "Blackjack: come closer to 21 than the dealer, and not over it."

    def __init__(
        self, natural: bool = False, sab: bool = False, invalid_reward: float = 0.0, show_rules: bool = True
    ) -> None:
        """`natural` and `sab` as of gymnasium."""
        super().__init__(invalid_reward, show_rules)
        import gymnasium

        self._env = gymnasium.make("Blackjack-v1", natural=natural, sab=sab)

    @property
    def transitions(self) -> dict[int, Any]:
        """Not told."""
        return {}

    def _shown(self, seen: Any) -> str:
        total, dealer, ace = (int(part) for part in seen)
        return f"Your sum: {total}{' with a usable ace' if ace else ''}. Dealer shows {dealer}."
