"""Best play in an environment whose transitions are known: value iteration over a finite number of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""state → move → (probability, next state, reward, episode ends), as gymnasium's `P`."""


def move_values(transitions: Transitions, moves_left: int, discount: float = 1.0) -> dict[int, list[float]]:
    """state → the expected return of each move, of best play with so many moves left.

    Bellman's recursion (Puterman 1994, doi 10.1002/9780470316887, section 4.3); exact for `discount` 1.
    """
    values = dict.fromkeys(transitions, 0.0)
    found: dict[int, list[float]] = {}
    for _ in range(moves_left):
        found = {
            state: [
                sum(p * (reward + (0.0 if ends else discount * values[after])) for p, after, reward, ends in outcomes)
                for outcomes in moves.values()
            ]
            for state, moves in transitions.items()
        }
        values = {state: max(of_moves) for state, of_moves in found.items()}
    return found
