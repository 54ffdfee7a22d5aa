"""Rollouts of an earlier run as answers to imitate (SFT, expert data) or pairs to prefer (DPO), by their rewards.

Their tokens are taken as they were sampled; no text is tokenised again. The earlier run is only read.
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

from trinity_core.config.paths import BACKUPS, DATABASES
from trinity_core.config.public import without_password
from trinity_core.config.schema.buffer import EarlierRolloutsConfig, ExperienceBufferConfig
from trinity_core.data.chat import ChatEncoder, EncodedConversation
from trinity_core.data.experience import Experience, from_bytes, from_json
from trinity_core.data.files import RejectedRow, RowLocation, read_rows
from trinity_core.data.supervised import Kind, SupervisedRows, read_supervised, too_long
from trinity_core.errors import DataError
from trinity_core.local_paths import expanded
from trinity_core.store.database import Database, namespaces
from trinity_core.store.schema import tables

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlierRollout:
    """A rollout, where it was found, and its text if that is known."""

    location: RowLocation
    experience: Experience
    text: str | None

    @property
    def reward(self) -> float:
        """The reward of a rollout that was judged."""
        assert self.experience.reward is not None, "only judged rollouts are chosen from"
        return self.experience.reward

    @property
    def prompt(self) -> bytes:
        """The tokens before the answer."""
        return self.experience.tokens[: self.experience.prompt_length].tobytes()

    @property
    def conversation(self) -> EncodedConversation:
        """Its tokens, with the policy's own as the answer."""
        before = np.zeros(self.experience.prompt_length, dtype=np.bool_)
        return EncodedConversation(self.experience.tokens, np.concatenate([before, self.experience.action_mask]))


def read_answers(
    config: ExperienceBufferConfig, encoder: ChatEncoder, kind: Kind = "demonstrations", max_tokens: int | None = None
) -> SupervisedRows:
    """`read_supervised`, also for `storage_type: rollouts`. Raises DataError if the data set cannot be read."""
    if config.storage_type != "rollouts":
        return read_supervised(config, encoder, kind, max_tokens)
    rejected: list[RejectedRow] = []
    groups: dict[str, list[EarlierRollout]] = defaultdict(list)
    for found in find_rollouts(config.path or "", config.subset_name):
        if isinstance(found, RejectedRow):
            rejected.append(found)
        elif found.experience.reward is not None and not found.experience.is_unscored:
            groups[found.experience.group].append(found)
    _check_tokenizer(groups, encoder, config)
    rows: list[list[EncodedConversation]] = []
    locations: list[RowLocation] = []
    mark = hashlib.blake2b(digest_size=6)
    for chosen in _chosen(groups, config.rollouts, kind):
        conversations = [each.conversation for each in chosen]
        if problem := next(filter(None, (too_long(each, max_tokens) for each in conversations)), None):
            rejected.append(RejectedRow(chosen[0].location, str(problem)))
            continue
        rows.append(conversations)
        locations.append(chosen[0].location)
        for each in conversations:
            mark.update(each.tokens.tobytes())
    count = sum(map(len, groups.values()))
    log.info("%d rows from %d judged rollouts of %d tasks in %s", len(rows), count, len(groups), config.path)
    return SupervisedRows(rows, locations, rejected, mark.hexdigest())


def _chosen(
    groups: dict[str, list[EarlierRollout]], wanted: EarlierRolloutsConfig, kind: Kind
) -> Iterator[list[EarlierRollout]]:
    """For each row of the data set its rollouts: one, or the preferred and the other one of a task.

    An answer that was cut off at its length limit is never imitated or preferred.
    """
    for group in groups.values():
        whole = sorted((each for each in group if not each.experience.truncated), key=lambda each: -each.reward)
        if kind == "preferences":
            yield from _pair(whole[:1], group, wanted.min_gap)
        elif wanted.min_reward is not None:
            yield from ([each] for each in whole if each.reward >= wanted.min_reward)
        elif whole and whole[0].reward > min(each.reward for each in group):
            yield [whole[0]]


def _pair(
    best: Sequence[EarlierRollout], group: Sequence[EarlierRollout], min_gap: float
) -> Iterator[list[EarlierRollout]]:
    for chosen in best:
        others = [each for each in group if each.prompt == chosen.prompt and chosen.reward - each.reward > min_gap]
        if others:
            yield [chosen, min(others, key=lambda each: each.reward)]


def _check_tokenizer(
    groups: dict[str, list[EarlierRollout]], encoder: ChatEncoder, config: ExperienceBufferConfig
) -> None:
    """Raise DataError if the tokens are not those of this model: they would be other text."""
    for each in (each for group in groups.values() for each in group):
        one, text = each.experience, each.text
        if text is None or not one.action_mask.all():
            continue
        known = int(one.tokens.max()) < len(encoder.tokenizer)
        if not known or encoder.tokenizer.decode(one.tokens[one.prompt_length :], skip_special_tokens=True) != text:
            raise DataError(f"the rollouts of {config.path} were made with another tokenizer than the model's")
        return


def find_rollouts(path: str, subset: str | None) -> Iterator[EarlierRollout | RejectedRow]:
    """The rollouts of an earlier run: of its folder, its database, or a file that was written by an explorer."""
    local = expanded(path)
    if local.suffix in BACKUPS:
        yield from _in_file(path)
    elif "://" in path or local.suffix in DATABASES:
        yield from _in_store(path if "://" in path else f"sqlite:///{local.absolute()}", subset)
    else:
        stores = [file for file in sorted((local / "buffer").glob("*")) if file.suffix in DATABASES]
        if len(stores) != 1:
            many = f"several stores ({', '.join(map(str, stores))})" if stores else "no store"
            raise DataError(f"{path} is no folder of a run with a store: its buffer folder has {many}")
        yield from _in_store(f"sqlite:///{stores[0].absolute()}", subset)


def _in_file(path: str) -> Iterator[EarlierRollout | RejectedRow]:
    """Those that an explorer with `storage_type: file` wrote."""
    read = read_rows(path)
    yield from read.rejected
    for row, location in zip(read.rows, read.locations, strict=True):
        try:
            yield EarlierRollout(location, from_json(row), row.get("response"))
        except DataError as error:
            yield RejectedRow(location, str(error))


def _in_store(url: str, subset: str | None) -> Iterator[EarlierRollout]:
    """Those in the store of a run: of a database with several runs, of the one whose folder ends with `subset`."""
    known = namespaces(url)
    names = [name for name in known if subset is None or Path(name).name == subset or name == subset]
    if len(names) != 1:
        where, runs = without_password(url), ", ".join(known) or "none"
        raise DataError(f"{where} has the runs {runs}: name one as subset_name")
    database = Database(url, tables(names[0]), names[0], read_only=True)
    try:
        g, e = database.tables.groups.c, database.tables.experiences
        query = select(g.name, e.c.blob).join(database.tables.groups, g.id == e.c.group_id).order_by(g.id)
        with database.read() as connection:
            for name, blob in connection.execute(query.execution_options(yield_per=64)):
                for number, each in enumerate(from_bytes(blob), 1):
                    text = each.info.get("response")
                    yield EarlierRollout(RowLocation(f"{names[0]} {name}", number), each, text)
    finally:
        database.close()
