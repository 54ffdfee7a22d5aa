"""Rollouts of an earlier run as demonstrations (SFT, expert data) or preference pairs (DPO), chosen by reward.

Tokens are used as sampled; no text is tokenised again. The earlier run is only read.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import select

from trinity_core.base.errors import DataError
from trinity_core.base.files import expanded
from trinity_core.config.paths import BACKUPS, DATABASES
from trinity_core.config.schema.buffer import EarlierRolloutsConfig, ExperienceBufferConfig
from trinity_core.config.secrets import without_password
from trinity_core.data.chat import ChatEncoder, EncodedConversation
from trinity_core.data.experience import Experience, from_bytes, from_json, rollout_rewards, rollouts_of
from trinity_core.data.files import RejectedRow, RowLocation, read_rows
from trinity_core.data.supervised import Kind, SupervisedRows, read_supervised, too_long
from trinity_core.exchange.store.database import Database, namespaces, stores_in
from trinity_core.exchange.store.schema import tables

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlierRollout:
    """A rollout, or one of its rows (turns, sequences), with its location and, if known, its text."""

    location: RowLocation
    experience: Experience
    text: str | None

    @property
    def prompt(self) -> bytes:
        return self.experience.tokens[: self.experience.prompt_length].tobytes()

    @property
    def conversation(self) -> EncodedConversation:
        """The tokens, with all sampled tokens as the answer, including those without a loss."""
        prompt = np.zeros(self.experience.prompt_length, dtype=np.bool_)
        return EncodedConversation(self.experience.tokens, np.concatenate([prompt, self.experience.sampled]))


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The scored rows of one rollout."""

    rows: list[EarlierRollout]
    reward: float
    """Mean of the rows' rewards, as in the run that sampled them."""

    @property
    def is_whole(self) -> bool:
        """True if no row was truncated."""
        return not any(row.experience.truncated for row in self.rows)


def read_answers(
    config: ExperienceBufferConfig, encoder: ChatEncoder, kind: Kind = "demonstrations", max_tokens: int | None = None
) -> SupervisedRows:
    """Like `read_supervised`, with support for `storage_type: rollouts`. Raises DataError for an unreadable data
    set."""
    if config.storage_type != "rollouts":
        return read_supervised(config, encoder, kind, max_tokens)
    groups, rejected = _judged(config)
    _check_tokenizer(groups, encoder, config)
    rows: list[list[EncodedConversation]] = []
    locations: list[RowLocation] = []
    mark = hashlib.blake2b(digest_size=6)
    for answers in _chosen(groups, config.rollouts, kind):
        conversations = [answer.conversation for answer in answers]
        if problem := next(filter(None, (too_long(conversation, max_tokens) for conversation in conversations)), None):
            rejected.append(RejectedRow(answers[0].location, str(problem)))
            continue
        rows.append(conversations)
        locations.append(answers[0].location)
        for conversation in conversations:
            mark.update(conversation.tokens.tobytes())
    count = sum(map(len, groups.values()))
    log.info("%d rows from %d judged answers of %d tasks in %s", len(rows), count, len(groups), config.path)
    return SupervisedRows(rows, locations, rejected, mark.hexdigest())


def chosen_rollouts(config: ExperienceBufferConfig, kind: Kind) -> list[list[EarlierRollout]]:
    """Return the rollouts that a data set with `storage_type: rollouts` trains on, for preferences as pairs, the
    preferred one first. Raises DataError if they cannot be read."""
    return list(_chosen(_judged(config)[0], config.rollouts, kind))


def _judged(config: ExperienceBufferConfig) -> tuple[dict[str, list[EarlierRollout]], list[RejectedRow]]:
    """Return the judged rows by group, and the unusable ones."""
    rejected: list[RejectedRow] = []
    groups: dict[str, list[EarlierRollout]] = defaultdict(list)
    for rollout in find_rollouts(config.path or "", config.subset_name):
        if isinstance(rollout, RejectedRow):
            rejected.append(rollout)
        elif rollout.experience.total_reward is not None:
            if rollout.experience.sampled.any():
                groups[rollout.experience.group].append(rollout)
            else:
                rejected.append(RejectedRow(rollout.location, "no token of the answer is known to be sampled"))
    return groups, rejected


def _chosen(
    groups: dict[str, list[EarlierRollout]], rollouts: EarlierRolloutsConfig, kind: Kind
) -> Iterator[list[EarlierRollout]]:
    """Yield each data-set row: one row of a rollout, or a preferred row and another one with the same prompt.

    Rollouts are ranked by reward, and all rows of a chosen one are used. A truncated rollout is never imitated or
    preferred.
    """
    for group in groups.values():
        runs = _runs(group)
        whole = sorted((run for run in runs if run.is_whole), key=lambda run: -run.reward)
        if kind == "preferences":
            yield from _pairs(whole[:1], runs, rollouts.min_gap)
            continue
        if rollouts.min_reward is not None:
            selected = [run for run in whole if run.reward >= rollouts.min_reward]
        else:
            least = min(run.reward for run in runs)
            selected = [run for run in whole[:1] if run.reward > least]
        yield from ([row] for run in selected for row in run.rows)


def _runs(group: Sequence[EarlierRollout]) -> list[JudgedRun]:
    """Return the rollouts of a group in order of their first rows, each with its rows in order of turns."""
    experiences = [row.experience for row in group]
    rows: dict[str, list[EarlierRollout]] = defaultdict(list)
    rewards: dict[str, float] = {}
    for row, rollout, reward in zip(group, rollouts_of(experiences), rollout_rewards(experiences), strict=True):
        assert reward is not None, "only judged rows are chosen from"
        rows[rollout].append(row)
        rewards[rollout] = reward
    return [
        JudgedRun(sorted(of_run, key=lambda row: row.experience.turn), rewards[rollout])
        for rollout, of_run in rows.items()
    ]


def _pairs(best: Sequence[JudgedRun], runs: Sequence[JudgedRun], min_gap: float) -> Iterator[list[EarlierRollout]]:
    """Pair each row of the best rollouts with the row of the worst rollout that answers the same prompt, if any."""
    for better in best:
        worse = sorted((run for run in runs if better.reward - run.reward > min_gap), key=lambda run: run.reward)
        for row in better.rows:
            others = [other for run in worse for other in run.rows if other.prompt == row.prompt]
            if others:
                yield [row, others[0]]


def _check_tokenizer(
    groups: dict[str, list[EarlierRollout]], encoder: ChatEncoder, config: ExperienceBufferConfig
) -> None:
    """Raise DataError if the tokens come from another tokenizer: they would decode to other text."""
    for answer in (answer for group in groups.values() for answer in group):
        experience, text = answer.experience, answer.text
        if text is None or not experience.sampled.all():
            continue
        in_vocabulary = int(experience.tokens.max()) < len(encoder.tokenizer)
        answer_tokens = experience.tokens[experience.prompt_length :]
        # Sessions keep the text with its control tokens.
        if not in_vocabulary or all(
            encoder.tokenizer.decode(answer_tokens, skip_special_tokens=skipped) != text for skipped in (True, False)
        ):
            raise DataError(f"the rollouts of {config.path} were made with another tokenizer than the model's")
        return


def find_rollouts(path: str, subset: str | None) -> Iterator[EarlierRollout | RejectedRow]:
    """Yield the rollouts of an earlier run, given its folder, its database, or a file written by an explorer."""
    local = expanded(path)
    if local.suffix in BACKUPS:
        yield from _in_file(path)
    elif "://" in path or local.suffix in DATABASES:
        yield from _in_store(path if "://" in path else f"sqlite:///{local.absolute()}", subset)
    else:
        stores = stores_in(local / "buffer")
        if len(stores) != 1:
            many = f"several stores ({', '.join(map(str, stores))})" if stores else "no store"
            raise DataError(f"{path} is no folder of a run with a store: its buffer folder has {many}", key=str(path))
        yield from _in_store(f"sqlite:///{stores[0].absolute()}", subset)


def _in_file(path: str) -> Iterator[EarlierRollout | RejectedRow]:
    """Yield rollouts that an explorer with `storage_type: file` wrote."""
    read = read_rows(path)
    yield from read.rejected
    for row, location in zip(read.rows, read.locations, strict=True):
        try:
            texts = {name: row[name] for name in ("prompt", "response") if name in row}
            yield EarlierRollout(location, from_json(row | {"info": texts}), row.get("response"))
        except DataError as error:
            yield RejectedRow(location, str(error))


def _in_store(url: str, subset: str | None) -> Iterator[EarlierRollout]:
    """Yield the rollouts in a run's store. `subset` selects a run of a shared database by its folder or folder name."""
    stored = namespaces(url)
    names = [name for name in stored if subset is None or Path(name).name == subset or name == subset]
    if len(names) != 1:
        where, runs = without_password(url), ", ".join(stored) or "none"
        raise DataError(f"{where} has the runs {runs}: name one as subset_name")
    database = Database(url, tables(names[0]), names[0], read_only=True)
    try:
        g, e = database.tables.groups.c, database.tables.experiences
        query = select(g.name, e.c.blob).join(database.tables.groups, g.id == e.c.group_id).order_by(g.id)
        with database.read() as connection:
            for name, blob in connection.execute(query.execution_options(yield_per=64)):
                for number, experience in enumerate(from_bytes(blob), 1):
                    text = experience.info.get("response")
                    yield EarlierRollout(RowLocation(f"{names[0]} {name}", number), experience, text)
    finally:
        database.close()
