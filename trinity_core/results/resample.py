"""`trinity replay --rollout`: samples a stored rollout again, by the version that sampled it.

A token depends on its seed, its place and the logits (`rollout.inference.seeded_sampler`), and seeds follow from the
run's seed and the rollout's place: an engine with the same weights gives the same tokens. Covers answers of the
workflows that take their seeds from the task and its turns; an agent's sessions have seeds of their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sqlalchemy import select

from trinity_core.base.children import CallFailed, NoAnswer, Worker
from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config
from trinity_core.data.experience import Experience, from_bytes
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import policy_encoder, stop_tokens
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.store.database import Database
from trinity_core.hosting.cluster import placement_of
from trinity_core.rollout.inference.engine_model import policy_limits
from trinity_core.rollout.inference.remote import engine_class
from trinity_core.rollout.inference.requests import Request, Sampling, WeightSource
from trinity_core.rollout.inference.settings import EngineSettings, policy_engine

TARGET = "trinity_core.results.resample:Resampler"
SAMPLE_SECONDS = 3600.0
"""Time for an engine to start and to sample one rollout."""
KEPT_ROWS = (
    "it keeps those of the last 100 train steps and of all steps since the oldest checkpoint that is kept. trainer."
    "max_checkpoints_to_keep: null keeps every checkpoint and every row"
)
CONVERSATIONS = ("", "trajectory 0")
"""Parts of a rollout's seeds, by its workflow: one answer or an environment's turns; the first conversation."""


@dataclass(frozen=True, slots=True)
class Resampled:
    """A rollout as stored and as sampled again."""

    rollout: str
    version: int
    tokens: int
    first_difference: int | None
    """Index in the response of the first sampled token that differs; None: all are equal."""
    stored: int | None
    sampled: int | None
    """The two tokens there; None: the rollout has none there."""
    texts: Sequence[str]
    """Both tokens as text."""

    def text(self) -> str:
        head = f"rollout {self.rollout}, {self.tokens} tokens, sampled by version {self.version}"
        if self.first_difference is None:
            return f"{head}\n  equal"
        stored, now = (f"{token} {text!r}" for token, text in zip((self.stored, self.sampled), self.texts, strict=True))
        return f"{head}\n  token {self.first_difference} differs: stored {stored}, sampled now {now}"

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.first_difference is None}


def resample(config: Config, database: Database, rollout: str) -> Resampled:
    """Sample `rollout`, `GROUP:RUN` or `GROUP:RUN:TURN` as `trinity view` shows them, again.

    Raises DataError if its rows, or the weights that sampled it, are gone.
    """
    row, task = _stored(config, database, rollout)
    if row.versions is None or row.newest_version < 0:
        raise DataError(f"no policy sampled the rollout {rollout}", key="--rollout")
    version = int(row.versions[row.versions >= 0][0])
    mask = row.versions == version  # without what a newer version sampled after a load in the middle of the rollout
    spans, encoder = list(_spans(mask)), policy_encoder(config.model)
    usual = policy_limits(config, stop_tokens(config.model.model_path, encoder)).sampling
    requests = [
        _request(config, replace(usual, **task.sampling), row, span, task.rollout_seed(row.run, row.turn + i, name))
        for name in CONVERSATIONS
        for i, span in enumerate(spans)
    ]
    answers = _sampled(config, requests, version)
    differences = [_difference(row, spans, half) for half in (answers[: len(spans)], answers[len(spans) :])]
    index, stored, sampled = max(differences, key=lambda found: np.inf if found[0] is None else found[0])
    texts = [encoder.tokenizer.decode([token]) if token is not None else "" for token in (stored, sampled)]
    return Resampled(rollout, version, int(mask.sum()), index, stored, sampled, texts)


Difference = tuple[int | None, int | None, int | None]


def _difference(row: Experience, spans: Sequence[tuple[int, int]], answers: Sequence[Sequence[int]]) -> Difference:
    """Return the place of the first token that differs, the stored and the new token there; None for equal ones."""
    response = row.tokens[row.prompt_length :].tolist()
    for (begin, end), answer in zip(spans, answers, strict=True):
        for index in range(begin, end):
            now = answer[index - begin] if index - begin < len(answer) else None
            if response[index] != now:
                return index, response[index], now
    if end == len(response) and not row.truncated and len(answer) > end - begin:  # it ended there of its own accord
        return end, None, answer[end - begin]
    return None, None, None


def _spans(sampled: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of sampled tokens in the response."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _request(config: Config, usual: Sampling, row: Experience, span: tuple[int, int], seed: int) -> Request:
    prompt = row.tokens[: row.prompt_length + span[0]]
    assert config.model.max_model_len is not None
    most = min(usual.max_tokens, config.model.max_model_len - len(prompt))
    sampling = replace(usual, max_tokens=most, min_tokens=min(usual.min_tokens, most))
    return Request(f"replay/{seed}/{span[0]}", prompt, sampling, seed)


def _stored(config: Config, database: Database, rollout: str) -> tuple[Experience, Task]:
    """Return the stored row, and its task as far as sampling depends on it."""
    group, *numbers = rollout.split(":")
    if not 1 <= len(numbers) <= 2 or not all(number.isdigit() for number in numbers):
        raise DataError(f"{rollout!r} names no rollout: write GROUP:RUN or GROUP:RUN:TURN", key="--rollout")
    run_and_turn = (*map(int, numbers), 0)[:2]
    g, e = database.tables.groups.c, database.tables.experiences.c
    query = select(g.task, e.blob).join_from(database.tables.groups, database.tables.experiences, g.id == e.group_id)
    with database.read() as connection:
        for name, blob in connection.execute(query.where(g.name == group)):
            for row in from_bytes(blob):
                if (row.run, row.turn) == run_and_turn:
                    taskset, _, index = (name or "/-1").rpartition("/")
                    task = Task(int(index), {}, taskset, "", seed=config.seed, group=group)
                    sets = [entry for entry in config.buffer.explorer_input.tasksets if entry.name == taskset]
                    return row, replace(task, rollout_args=sets[0].rollout_args) if sets else task
    raise DataError(f"the store has no rows of rollout {rollout} (any more): {KEPT_ROWS}", key="--rollout")


def _sampled(config: Config, requests: Sequence[Request], version: int) -> list[list[int]]:
    placement = placement_of(config)
    settings = policy_engine(config, placement.on_gpu, max(1, placement.engine_threads))
    with TemporaryDirectory() as scratch:
        adapter = ""
        if version:
            folder = _weights(config, version, Path(scratch), merge=not settings.lora_rank)
            adapter = str(folder) if settings.lora_rank else ""
            settings = settings if adapter else replace(settings, model_path=str(folder))
        worker = Worker(TARGET, environment=os.environ | settings.environment(), keep_output=True)
        try:
            with explained(worker, "the engine that samples the rollout"):
                worker.make({"settings": settings})
                sampled: list[list[int]] = worker.call("sample", requests, adapter, version, seconds=SAMPLE_SECONDS)
                return sampled
        finally:
            worker.kill(daemons=False)


class Resampler:
    """In a process of its own: starts an engine, samples once, and ends it."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = engine_class(settings)(settings)

    async def sample(self, requests: Sequence[Request], adapter: str, version: int) -> list[list[int]]:
        """Return the tokens of each request; `adapter` is the folder of an adapter to load first, or ""."""
        await self._engine.start()
        try:
            if adapter:
                await self._engine.load(WeightSource("folder", adapter), version)
            batch = await self._engine.generate(requests)
        finally:
            await self._engine.stop()
        return [sample.tokens.tolist() for sample in batch.unpack()]


@contextmanager
def explained(worker: Worker, who: str) -> Iterator[None]:
    """Turn a worker's failure into TransientFault if it died, else TrinityError, with the end of its output."""
    try:
        yield
    except NoAnswer as error:
        raise TransientFault(f"{who} {error}: {worker.output(1000)}") from error
    except CallFailed as error:
        raise TrinityError(str(error) if error.is_for_users else f"{error}: {worker.output(1000)}") from error


def _weights(config: Config, version: int, scratch: Path, merge: bool) -> Path:
    """Return a folder with the weights of `version`, converted in `scratch` from its checkpoint."""
    layout = JobLayout(config.job_dir)
    there = whole_steps(layout.root)
    if version not in there:
        raise DataError(
            f"version {version}, which sampled the rollout, is not kept: there are checkpoints of the steps "
            f"{', '.join(map(str, there)) or 'none'}, and version 0. trainer.save_interval: 1 with "
            "trainer.max_checkpoints_to_keep: null keeps every version",
            key="trainer.save_interval",
        )
    linked = scratch / layout.step(version).name
    shutil.copytree(layout.step(version), linked, copy_function=os.symlink)
    return convert(linked, Path(config.model.model_path), merge)
