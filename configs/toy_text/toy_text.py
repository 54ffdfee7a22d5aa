"""gymnasium's text-like environments: what they show as text, and moves read from text.

This file imports nothing from this project, so that a process with another interpreter can load it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, ClassVar

Told = tuple[str, float, bool, dict[str, Any]]
Outcome = tuple[float, Any, float, bool]
"""Probability, next state, reward, whether the episode ends: as in gymnasium's `P`."""


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
        """gymnasium's observation: the state of `transitions`."""

    @property
    def transitions(self) -> dict[Any, dict[int, list[Outcome]]]:
        """state → move → its outcomes; empty where they are not known."""
        return self._env.unwrapped.P

    @property
    def starts(self) -> dict[Any, float]:
        """state → the probability that an episode begins in it."""
        chances = self._env.unwrapped.initial_state_distrib
        return {state: float(chance) for state, chance in enumerate(chances) if chance > 0}

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
        names = re.findall(rf"\b({'|'.join(map(re.escape, self.moves))})\b", text, re.IGNORECASE)
        return list(self.moves).index(names[-1].lower()) if names else None

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
    rules = (
        "You drive a taxi on a grid of 5 by 5 with walls. Fetch the passenger and drop them off at the destination. "
        "Places are row,column."
    )
    places = ("0,0", "0,4", "4,0", "4,3")

    def __init__(self, max_steps: int = 200, invalid_reward: float = -1.0, show_rules: bool = True) -> None:
        super().__init__(invalid_reward, show_rules)
        import gymnasium

        self._env = gymnasium.make("Taxi-v3", max_episode_steps=max_steps)

    def _shown(self, seen: Any) -> str:
        row, column, passenger, destination = (int(part) for part in self._env.unwrapped.decode(int(seen)))
        where = (*self.places, "in taxi")[passenger]
        return f"Taxi {row},{column}. Passenger {where}. Destination {self.places[destination]}."


class Blackjack(ToyText):
    """Blackjack-v1. Reward 1 for a win, -1 for a loss, 0 for a draw."""

    moves = ("stick", "hit")
    rules = "Blackjack: come closer to 21 than the dealer, and not over it."

    def __init__(
        self, natural: bool = False, sab: bool = False, invalid_reward: float = -1.0, show_rules: bool = True
    ) -> None:
        """`natural` and `sab` as of gymnasium. An answer without a move counts as a loss: 0 is more than play earns, so
        a policy would learn not to play."""
        super().__init__(invalid_reward, show_rules)
        import gymnasium

        self._env = gymnasium.make("Blackjack-v1", natural=natural, sab=sab)
        self._plain = not natural and not sab

    @property
    def transitions(self) -> dict[Any, dict[int, list[Outcome]]]:
        """Worked out from an infinite deck; empty with `natural` or `sab`, whose rewards the state does not tell."""
        return dict(_hands()) if self._plain else {}

    @property
    def starts(self) -> dict[Any, float]:
        """See `ToyText`."""
        chances: defaultdict[Any, float] = defaultdict(float)
        for first, second, dealer in product(CARDS, repeat=3):
            total, ace = _with_card(*_with_card(0, 0, first), second)
            chances[total, dealer, ace] += CARDS[first] * CARDS[second] * CARDS[dealer]
        return dict(chances)

    def _shown(self, seen: Any) -> str:
        total, dealer, ace = (int(part) for part in seen)
        return f"Your sum: {total}{' with a usable ace' if ace else ''}. Dealer shows {dealer}."


CARDS = {**dict.fromkeys(range(1, 10), 1 / 13), 10: 4 / 13}
"""card → its chance in gymnasium's deck, from which cards are drawn with replacement; an ace is 1."""


def _with_card(total: int, ace: int, card: int) -> tuple[int, int]:
    """The sum of a hand and whether it has a usable ace (one that counts as 11), after another card."""
    total += card - 10 * ace
    usable = int((ace or card == 1) and total <= 11)
    return total + 10 * usable, usable


@cache
def _dealer_ends(total: int, ace: int) -> dict[int, float]:
    """final sum → its chance, 0 for more than 21: the dealer draws below 17."""
    if total >= 17:
        return {total if total <= 21 else 0: 1.0}
    ends: defaultdict[int, float] = defaultdict(float)
    for card, chance in CARDS.items():
        for end, after in _dealer_ends(*_with_card(total, ace, card)).items():
            ends[end] += chance * after
    return dict(ends)


def _hands() -> Iterator[tuple[Any, dict[int, list[Outcome]]]]:
    """Every state of Blackjack (sum, the dealer's card, usable ace) with the outcomes of `stick` and `hit`."""
    for dealer, (total, ace) in product(CARDS, [(n, 0) for n in range(4, 22)] + [(n, 1) for n in range(12, 22)]):
        state = (total, dealer, ace)
        stick: defaultdict[float, float] = defaultdict(float)
        hit: list[Outcome] = []
        for end, chance in _dealer_ends(*_with_card(0, 0, dealer)).items():
            stick[float(total > end) - float(total < end)] += chance
        for card, chance in CARDS.items():
            after, usable = _with_card(total, ace, card)
            hit.append((chance, state, -1.0, True) if after > 21 else (chance, (after, dealer, usable), 0.0, False))
        yield state, {0: [(chance, state, reward, True) for reward, chance in stick.items()], 1: hit}
