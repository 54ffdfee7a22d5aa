"""A session: one attempt at one stage. It owns the actors, the tracking thread and the word "stop"."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_core.checkpoints.huggingface import huggingface_folder
from trinity_core.config import Config, public_dict
from trinity_core.runlock import release
from trinity_core.runtime import actors
from trinity_core.runtime.cluster import Cluster, close_cluster
from trinity_core.runtime.faults import result_of
from trinity_core.runtime.placement import Placement, parts_of
from trinity_core.tracking.forwarder import Forwarder, ForwarderThread, open_writer
from trinity_core.tracking.writers import RunInfo, Writer


@dataclass(frozen=True, slots=True)
class Stage:
    """What `resolve` has found out: one run, ready to start."""

    config: Config
    placement: Placement
    stage: str
    """`rft`, `sft`, `evaluate` …, or the stage's name in a pipeline."""
    parent_dir: Path | None = None
    """The pipeline's folder."""
    resumed_step: int = 0
    """The checkpoint that the run goes on from; 0 for a new run."""


def holders(config: Config, parts: set[str]) -> list[str]:
    """Names of the locks that the flow of these parts of a run holds. Explorers of one run have names of their own."""
    names = {"train": "training", "explore": f"explorer_{config.explorer.name}"}
    return [names[part] for part in sorted(parts)]


class Session:
    """The live parts of one attempt. Handed from task to task within one process, never stored."""

    def __init__(self, stage: Stage, cluster: Cluster) -> None:
        self.config = stage.config
        self.placement = stage.placement
        self.cluster = cluster
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._engines: list[Any] = []
        self._auxiliary: list[list[Any]] = []
        self._explorer: Any = None
        self._trainers: list[Any] = []
        self._tracking = Tracking(stage)
        self.engines()

    @property
    def parts(self) -> set[str]:
        """Which of `explore` and `train` this run consists of."""
        return parts_of(self.config, self.placement)

    @property
    def stopping(self) -> bool:
        """Whether the run is to end at the next step boundary."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask everything to save and end."""
        self._stop.set()

    def engines(self) -> list[Any]:
        """The engines, started on first use."""
        with self._lock:
            if not self._engines and self.placement.engines:
                self._engines = actors.start_engines(self.cluster, self.config, self.placement)
                self._auxiliary = actors.start_auxiliary(self.cluster, self.config, self.placement)
            return self._engines

    def explorer(self) -> Any:
        """The explorer, started on first use."""
        with self._lock:
            if self._explorer is None:
                engines = self.engines()
                self._explorer = actors.start_explorer(self.cluster, self.config, engines, self._auxiliary)
            return self._explorer

    def trainers(self) -> list[Any]:
        """The trainer's workers, started on first use."""
        with self._lock:
            if not self._trainers:
                self._trainers = actors.start_trainers(self.cluster, self.config, self.placement)
            return self._trainers

    def huggingface_folder(self, step: int) -> Path:
        """The checkpoint of `step` in Hugging Face format, made by the trainer where there is one.

        The trainer has torch loaded; in this process its import alone takes longer than a small model's conversion.
        """
        if self._trainers:
            return Path(result_of(self._trainers[0].convert.remote(step), lambda: False))
        return huggingface_folder(self.config, step)

    def tracking(self) -> Writer:
        """The tracking system's writer, once it is open; raises why it does not open."""
        return self._tracking.writer()

    def check(self) -> None:
        """Raise what keeps the numbers from ever being tracked. For those who wait, so that it is said at once."""
        self._tracking.check()

    def close(self, succeeded: bool) -> None:
        """Forward the last numbers, and end every actor. Nothing stays behind, whatever fails on the way."""
        try:
            self._tracking.close(succeeded)
        finally:
            try:
                self._end_actors(succeeded)
            finally:
                close_cluster(self.cluster)
                for name in holders(self.config, self.parts):
                    release(self.config.job_dir, name)

    def _end_actors(self, succeeded: bool) -> None:
        explorer = [] if self._explorer is None else [self._explorer]
        auxiliary = [engine for engines in self._auxiliary for engine in engines]
        mine = [*self._engines, *self._trainers]
        kept = (
            actors.keep(self.cluster, self.config, self.placement, self._engines, self._trainers) if succeeded else []
        )
        self.cluster.kill([*explorer, *auxiliary, *(actor for actor in mine if actor not in kept)])
        if "train" in self.parts:
            remove_shared_weights(self.config)


class Tracking:
    """The forwarding thread of a session. MLflow's import and a new database take seconds, in which engines start."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._opened: Future[Writer] = Future()
        self._forwarder: ForwarderThread | None = None
        threading.Thread(target=self._open, name="tracking", daemon=True).start()

    def writer(self) -> Writer:
        """The writer, once it is open; raises why it does not open."""
        return self._opened.result()

    def check(self) -> None:
        """Raise why tracking has been given up. A tracking system that does not answer now is no such reason."""
        if self._opened.done():
            self._opened.result()
        if self._forwarder is not None:
            self._forwarder.check()

    def close(self, succeeded: bool) -> None:
        """Forward what is left, and end the run there."""
        error = self._opened.exception()
        if self._forwarder is not None:
            self._forwarder.close(succeeded)
        elif succeeded and error is not None:
            raise error

    def _open(self) -> None:
        try:
            config = self._stage.config
            info = RunInfo(
                project=config.project,
                name=config.name,
                job_dir=config.job_dir,
                config=public_dict(config),
                parent_dir=self._stage.parent_dir,
                args=config.monitor.monitor_args,
                tags={"stage": self._stage.stage, "algorithm": config.algorithm.algorithm_type},
                keeps_status=config.mode == "bench",
            )
            writer = open_writer(config.monitor.monitor_type, info, Path(config.checkpoint_root_dir))
            self._forwarder = ForwarderThread(Forwarder(config.job_dir, writer, config.mode))
            self._opened.set_result(writer)
        except BaseException as error:  # noqa: BLE001 - for whoever asks
            self._opened.set_exception(error)


def remove_shared_weights(config: Config) -> None:
    """Weights that were handed over through shared memory are of no use to anyone after the run."""
    from trinity_core.sync.methods import run_versions

    run_versions(config).remove()
