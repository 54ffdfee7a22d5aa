"""`trinity replay`: repeats a train step of a run from what the run has stored, in processes of its own.

The step's batch is in the store (or, for data sets, follows from the step), and the weights before it come from the
nearest earlier checkpoint and the steps since. On the CPU the step gives the same bits; on a GPU kernels may add in
another order. Nothing is written to the run's folders.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from trinity_core.base.children import Worker
from trinity_core.base.errors import DataError, on_failure
from trinity_core.base.files import read_json
from trinity_core.base.plugins import load_plugins
from trinity_core.config import Config, load_config
from trinity_core.data.experience import Experience, to_bytes
from trinity_core.data.schedule import check_order
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics
from trinity_core.exchange.tracking.pauses import read_pauses
from trinity_core.exchange.tracking.run_record import config_path
from trinity_core.hosting.actors import trainer_environment
from trinity_core.hosting.cluster import placement_of
from trinity_core.results.audit import open_store, stored_runs, stores_of
from trinity_core.results.resample import KEPT_ROWS, Resampled, explained, resample

log = logging.getLogger(__name__)
TARGET, WHO = "trinity_core.training.replay:ReplayRank", "the process that repeats the step"
STEP_SECONDS = 7200.0
"""Time for the ranks to load, or to take one step; equal to the limit of a collective."""
SHOWN = {"actor/final_loss": "loss", "actor/grad_norm": "gradient norm", "weights": "weights"}
MACHINE = ("timing_s/", "tokens_per_second", "memory/")
"""Beginnings of the names of metrics that depend on the machine."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A train step as recorded and as replayed. Values are metrics by name, and the digest of the `weights`."""

    step: int
    start: int
    """Step of the checkpoint that the replay began from; 0: the model that the run began with."""
    rows: int
    recorded: Mapping[str, float | str]
    replayed: Mapping[str, float | str]
    differing: Sequence[str]
    """Names of the values that differ."""
    since: int | None
    """The first step since `start` after which weights differ."""

    def text(self) -> str:
        begin = f"the checkpoint of step {self.start}" if self.start else "the first model"
        lines = [f"train step {self.step}, {self.rows} rows, from {begin}"]
        for name, title in SHOWN.items():
            if name in self.replayed:
                pair = self.recorded.get(name, "not recorded"), self.replayed[name]
                lines.append(f"  {title:14} recorded {pair[0]}, replayed {pair[1]}")
        if not self.differing:
            return "\n".join([*lines, f"  equal, as are {len(self.replayed)} values in all"])
        lines += [f"  {name} differs: {self.recorded[name]}, replayed {self.replayed[name]}" for name in self.differing]
        return "\n".join([*lines, *([f"  weights differ from step {self.since} on"] if self.since else [])])

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"equal": not self.differing}


class Replay:
    """Repeats steps of one run. A context: its processes end with the block.

    `config`, `overrides` and `url` name the run's store if it is not in the run's folder (`results.audit.stores_of`).
    Settings are those that the run has recorded.
    """

    def __init__(
        self, folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
    ) -> None:
        self.folder = folder.resolve()
        if (runs := stored_runs(folder)) != [self.folder]:
            stages = ", ".join(run.name for run in runs)
            raise DataError(f"{folder} is a pipeline's: give the folder of a stage, {stages}", key=str(folder))
        recorded = load_config(config_path(self.folder), (), load_plugins)
        here = {"checkpoint_root_dir": str(self.folder.parent.parent), "project": self.folder.parent.name}
        self.config = recorded.with_values(here | {"name": self.folder.name})
        self._lines = {line.step: line for line in read_metrics(self.folder) if line.source == "trainer"}
        self._stores = partial(stores_of, self.folder, config, overrides, url)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, step: int) -> Repeated:
        """Repeat train step `step`. Raises DataError if the run has no such step, or no longer what it takes."""
        line, start = self._line(step), max((s for s in whole_steps(self.folder) if s < step), default=0)
        changed = max((pause.step for pause in read_pauses(self.folder) if pause.decided.settings), default=0)
        if start < changed:
            others = f"settings were changed at the pause after step {changed}, and only the later ones are recorded"
            raise DataError(f"train step {step} cannot be repeated: {others}", key="--step")
        batches = {number: self.batch(number) for number in range(start + 1, step + 1)}
        for number, batch in batches.items():
            if batch is None:
                gone = (
                    f"the rows of train step {number}, which step {step} needs, are no longer in the store: {KEPT_ROWS}"
                )
                raise DataError(gone, key="trainer.max_checkpoints_to_keep")
        assert line.total_steps is not None
        self._ranks.load(start, line.total_steps)
        since, outcome = None, dict[str, Any]()
        for number, batch in batches.items():
            outcome = self._ranks.take(number, batch or [])
            if since is None and outcome["weights"] != self._line(number).weights:
                since = number
        return _compared(line, start, len(batches[step] or []), outcome, since)

    def rollout(self, name: str) -> Resampled:
        """Sample a stored rollout again, `GROUP:RUN` or `GROUP:RUN:TURN`. Raises what `resample` raises."""
        with closing(open_store(self.folder, self._url())) as database:
            return resample(self.config, database, name)

    def _line(self, step: int) -> MetricLine:
        line = self._lines.get(step)
        if line is None:
            there = f"its steps are {min(self._lines)} to {max(self._lines)}" if self._lines else "it has none"
            raise DataError(f"{self.folder} has no train step {step}: {there}", key="--step")
        if not line.weights:
            raise DataError(f"train step {step} was taken by an older release, which recorded no weights", key="--step")
        return line

    @cached_property
    def _ranks(self) -> Ranks:
        ranks = Ranks(self.config)
        self._stack.callback(ranks.close)
        return ranks

    @cached_property
    def batch(self) -> Callable[[int], list[Experience] | None]:
        """Returns the rows of a train step in their order; None if some of them are gone.

        The store is open, or the data sets, whose rejected rows are listed in a temporary folder.
        """
        from trinity_core.training.sources import SupervisedSource, open_expert, open_source

        scratch = self._stack.enter_context(tempfile.TemporaryDirectory())
        config = self.config.with_values({"checkpoint_root_dir": scratch})
        order = read_json(self.config.layout.trainer_meta).get("order", {})
        if config.is_supervised:
            source = open_source(config)
            assert isinstance(source, SupervisedSource)
            check_order(order, source.order)
            return lambda step: source.draw(step, lambda: False, log.info)
        store = self._stack.enter_context(ExperienceStore(open_store(self.folder, self._url())))
        expert, expert_order = open_expert(config)
        check_order(order, expert_order)
        return lambda step: store.whole_batch(step, expert)

    def _url(self) -> str:
        url = self._stores().get(self.folder.name)
        if url is None:
            raise DataError(f"{self.folder} has no experience store: name it by --config or --store", key="--store")
        return url


def _compared(line: MetricLine, start: int, rows: int, outcome: Mapping[str, Any], since: int | None) -> Repeated:
    steady = {n: v for n, v in outcome["metrics"].items() if n in line.metrics and not n.startswith(MACHINE)}
    recorded = {name: line.metrics[name] for name in steady} | {"weights": line.weights}
    replayed = steady | {"weights": outcome["weights"]}
    differing = [name for name, value in replayed.items() if repr(value) != repr(recorded[name])]
    return Repeated(line.step, start, rows, recorded, replayed, differing, since)


class Ranks:
    """The trainer's workers of a replay, on this machine, as many as the run had and with as many threads."""

    def __init__(self, config: Config) -> None:
        meta, placement = read_json(config.layout.trainer_meta), placement_of(config)
        threads, count = meta.get("threads", placement.trainer_threads), meta.get("world_size", placement.trainers)
        environment = os.environ | trainer_environment(replace(placement, trainer_threads=threads))
        self._threads = ThreadPoolExecutor(count)
        self._workers = [
            Worker(TARGET, environment=environment | {"CUDA_VISIBLE_DEVICES": visible}, keep_output=True)
            for visible in (map(str, range(count)) if placement.on_gpu else [""] * count)
        ]
        with on_failure(self.close):
            for rank, worker in enumerate(self._workers):
                with explained(worker, WHO):
                    worker.make({"config": config, "rank": rank, "world_size": count, "threads": threads})
            self._master = self._ask(self._workers[0], "rendezvous")

    def close(self) -> None:
        for worker in self._workers:
            worker.kill(daemons=False)
        self._threads.shutdown()

    def load(self, step: int, total_steps: int) -> None:
        """Load the checkpoint of `step` (0: the run's first model). Raises what a trainer raises for it."""
        self._all("load", step, total_steps, tuple(self._master))

    def take(self, step: int, batch: Sequence[Experience]) -> dict[str, Any]:
        """Take a step on every rank; return the metrics and weights of rank 0."""
        outcome: dict[str, Any] = self._all("take", step, to_bytes(list(batch)) if batch else b"")[0]
        return outcome

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        calls = [self._threads.submit(self._ask, worker, method, *arguments) for worker in self._workers]
        return [call.result(STEP_SECONDS) for call in calls]

    def _ask(self, worker: Worker, method: str, *arguments: Any) -> Any:
        with explained(worker, WHO):
            return worker.call(method, *arguments, seconds=STEP_SECONDS)
