"""Best play in an environment whose transitions are known: value iteration over a finite number of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Transitions = Mapping[Any, Mapping[int, Sequence[tuple[float, Any, float, bool]]]]
"""state → move → (probability, next state, reward, episode ends), as gymnasium's `P`."""


def best_return(transitions: Transitions, starts: Mapping[Any, float], moves: int) -> float:
    """The expected return of best play in a number of moves, from states that begin an episode with these chances."""
    values = move_values(transitions, moves)
    return sum(chance * max(values[state]) for state, chance in starts.items())


def move_values(transitions: Transitions, moves_left: int, discount: float = 1.0) -> dict[Any, list[float]]:
    """state → the expected return of each move, of best play with that many moves left.

    Bellman's recursion (Puterman 1994, doi 10.1002/9780470316887, section 4.3); exact for `discount` 1.
    """
    values = dict.fromkeys(transitions, 0.0)
    returns: dict[Any, list[float]] = {}
    for _ in range(moves_left):
        returns = {
            state: [
                sum(p * (reward + (0.0 if ends else discount * values[after])) for p, after, reward, ends in outcomes)
                for outcomes in moves.values()
            ]
            for state, moves in transitions.items()
        }
        values = {state: max(of_moves) for state, of_moves in returns.items()}
    return returns
