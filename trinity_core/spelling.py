"""The known word that a misspelt one stands for."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that this one may be a typo of, or an empty string.

    One edit for every four letters is allowed, one in shorter words, none in those of fewer than three letters.
    """
    near = [(distance(word.lower(), other.lower()), abs(len(word) - len(other)), other) for other in known]
    edits, _, nearest = min(near, key=lambda entry: entry[:2], default=(len(word), 0, ""))
    return nearest if len(word) > 2 and edits <= max(min(len(word), len(nearest)) // 4, 1) else ""


def distance(one: str, other: str) -> int:
    """Letters to add, drop, replace or swap with the next one to make `other` of `one` (optimal string alignment)."""
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            best = min(row[j - 1] + 1, last[j] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and (one[i - 2], letter) == (wanted, other[j - 2]):
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return last[-1]
