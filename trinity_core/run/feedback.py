"""Feedback as data: what users (`mode: serve`) and people (`human_verdicts`) have judged, in folders of their own.

Each round of improvement has a folder, named by the digest of its champion and rollouts, next to the runs of the
project: `rollouts.jsonl`, which `storage_type: rollouts` reads, `manifest.json`, and at its end `result.json`. A
rollout is used by one round, or by several until one of them has an answer of the gate.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trinity_core.base.files import expanded, read_json
from trinity_core.data.experience import Experience, rollouts_of
from trinity_core.exchange.store.archive import whole_line
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, find_rollouts
from trinity_core.exchange.tracking.rollouts import write_rows

ROLLOUTS, MANIFEST, RESULT = "rollouts.jsonl", "manifest.json", "result.json"
UNDECIDED = "not shown"
"""The gate's verdict after which a round's rollouts are used again, together with new ones."""


@dataclass(frozen=True)
class Round:
    """A data set of feedback, and what came of it."""

    folder: Path

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """`champion` that training begins from, `since` when it is the champion, when the round was `made` (Unix
        seconds), number of `rollouts` and `rows`, `sources` (rollouts, first and last group of each), and `ids`."""
        return read_json(self.folder / MANIFEST)

    @property
    def data(self) -> Path:
        return self.folder / ROLLOUTS

    @property
    def verdict(self) -> str | None:
        """The gate's verdict; None while the round is in progress."""
        return read_json(self.folder / RESULT).get("verdict")


@dataclass(frozen=True)
class JudgedRollout:
    """All rows of a conversation or an answer that somebody has judged."""

    source: str
    place: str
    """Its group in the source."""
    rows: Sequence[Experience]

    @cached_property
    def id(self) -> str:
        """A digest of place, tokens and reward: the same in each reading, also after its source was moved."""
        mark = hashlib.blake2b(self.place.encode(), digest_size=8)
        for row in self.rows:
            mark.update(f"{row.run} {row.turn} {row.total_reward}".encode() + row.tokens.tobytes())
        return mark.hexdigest()


def rounds(folder: Path) -> list[Round]:
    """Return the rounds that have begun, oldest first."""
    begun = [Round(path.parent) for path in folder.glob(f"*/{MANIFEST}")]
    return sorted(begun, key=lambda begun_round: begun_round.manifest["made"])


def judged_rollouts(source: str) -> Iterator[JudgedRollout]:
    """Yield the judged rollouts of a run's folder (a person's verdicts, if it asked for them, else its store), of a
    store's URL or of a .jsonl file, in the order in which they came. Raises DataError if there are none to read."""
    verdicts = expanded(source) / "human" / "verdicts.jsonl"
    groups: dict[str, list[Experience]] = defaultdict(list)
    for found in find_rollouts(str(verdicts) if verdicts.is_file() else source, None):
        if isinstance(found, EarlierRollout) and found.experience.sampled.any():
            groups[found.experience.group].append(found.experience)
    for name, group in groups.items():
        rollouts: dict[str, list[Experience]] = defaultdict(list)
        for row, rollout in zip(group, rollouts_of(group), strict=True):
            if row.total_reward is not None:
                rollouts[rollout].append(row)
        for rows in rollouts.values():
            yield JudgedRollout(source, name, sorted(rows, key=lambda row: row.turn))


def used(past: Iterable[Round]) -> set[str]:
    """Return the ids of the rollouts that these rounds took."""
    return {rollout for each in past for rollout in each.manifest["ids"]}


def write_rollouts(
    folder: Path, rollouts: Sequence[JudgedRollout], champion: str, since: float | None
) -> tuple[Round, dict[str, Any]]:
    """Write the data set of a round; return the round, which begins once it has its manifest, and that manifest."""
    ids, rows = [rollout.id for rollout in rollouts], list(_by_prompt(rollouts))
    digest = hashlib.blake2b("\n".join([champion, *ids]).encode(), digest_size=6).hexdigest()
    written = Round(folder / digest)
    write_rows(written.data, (whole_line(number, row) for number, row in enumerate(rows, 1)), durable=True)
    spans: dict[str, dict[str, Any]] = {}
    for rollout in rollouts:
        span = spans.setdefault(rollout.source, {"rollouts": 0, "first": rollout.place})
        span |= {"rollouts": span["rollouts"] + 1, "last": rollout.place}
    return written, {
        "champion": champion, "since": since, "made": time.time(), "rollouts": len(ids), "rows": len(rows),
        "sources": spans, "ids": ids,
    }  # fmt: skip


def _by_prompt(rollouts: Sequence[JudgedRollout]) -> Iterator[Experience]:
    """Yield the rows with the first prompt as their group, so that answers to one question are compared, whoever asked
    it and when."""
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        first = rollout.rows[0]
        prompt = first.tokens[: first.prompt_length].tobytes()
        group = hashlib.blake2b(prompt, digest_size=8).hexdigest()
        for row in rollout.rows:
            origin = {"source": rollout.source, "place": rollout.place}
            yield replace(row, group=group, run=counts[group], info=row.info | origin)
        counts[group] += 1
