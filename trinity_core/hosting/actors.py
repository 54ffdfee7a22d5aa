"""The actors of a run: engines, explorer, trainer workers. Ray finds each by its name.

The trainer's workers are a unit: when one is lost, all of them restart from the latest checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.errors import TransientFault, TrinityError, on_failure
from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.config.paths import actor_prefix, engine_name, trainer_name
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.exchange.tracking.logs import log_environment
from trinity_core.exchange.tracking.progress import ActorWaits, ProgressReport
from trinity_core.hosting.cluster import Cluster
from trinity_core.hosting.faults import (
    AGAIN,
    POLL_SECONDS,
    SILENCE_SECONDS,
    ProcessLost,
    Stopped,
    answering,
    get,
    result_of,
    results_of,
    starting,
    within,
)
from trinity_core.hosting.placement import Placement
from trinity_core.hosting.ray_node import RayDied

if TYPE_CHECKING:
    from trinity_core.rollout.inference.settings import EngineSettings

log = logging.getLogger(__name__)

SAVE_SECONDS = 20.0
"""Time for the trainer to save at the next step boundary. Prefect kills a cancelled run 30 s after asking it to end."""
EXPLORER_SECONDS = 2.0
"""Time for the explorer to end. Its rollouts are in the store, so it has nothing to save."""
LOAD_SECONDS = 3600.0
"""Time for an engine kept from an earlier stage to load a model."""
CALLS_AT_ONCE = 100_000
"""An engine is an asynchronous actor in which the call of each group waits, and calls that load or watch pass them."""
KEPT_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_ARENA_MAX": "2",
}  # fmt: skip
"""Makes a CPU trainer keep freed memory, because the next step needs as much again. Otherwise glibc returns most of it,
and clearing 4,500 pages a step of the small model costs 8 ms of each core. Two arenas, because with the default of
eight per core, the threads of a save each keep freed memory in their own arena: a trainer grew by 170 MiB in 46 saves
of a model of 0.5 MiB."""
KERNELS = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Limits the compiled half-precision matrix products that torch and oneDNN cache on the CPU (default 1,024 each).
Micro-batches differ in size, so hardly any is reused: PPO on a model of 1 million parameters grew by 130 MiB a step, to
1.6 GiB after 8. With these limits it stays below 840 MiB (after 6 steps), at the same speed."""

MAX_RESTARTS = 3
"""Restarts of the workers before the attempt fails. Workers that keep dying (too little memory) will die again."""
ANSWER_SECONDS = 10.0
"""Time for a worker to answer after another one has failed."""
REMOVE_SECONDS = 3.0
"""Time for rank 0 to remove the weights it has published. Prefect kills a cancelled run 30 s after asking it to end."""

READ_AT_START = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that Python and the loader read at process start. No secrets."""


@dataclass(frozen=True)
class Actors:
    """Starts a stage's actors on a cluster, each at its place, and keeps them for the next stage."""

    cluster: Cluster
    config: Config
    placement: Placement

    def start_engines(self) -> list[Any]:
        """Start the policy's engines. They load in the background; the explorer waits for them.

        Engines kept from an earlier stage that differ only in the model's path are reused with the new weights.
        """
        settings, nodes, cluster = self.engine_settings(), self.placement.nodes, self.cluster
        start = settings.adapter_path or ("" if settings.lora_rank else settings.model_path)
        engines = cluster.take("engines", self.engine_key())
        if engines and _are_ready(cluster, engines, lambda: take_over(engines, self.config, start, cluster.check)):
            return engines
        return [
            self._start_engine(
                engine_name(self.config, index), settings, self.placement.engine_gpus, nodes.engine(index)
            )
            for index in range(self.placement.engines)
        ]

    def start_auxiliary(self) -> list[list[Any]]:
        """Start the engines of each auxiliary model: vLLM's, or for a reward model transformers'."""
        from trinity_core.rollout.inference.reward_engine import is_reward_model
        from trinity_core.rollout.inference.settings import auxiliary_engine

        config, placement, handles = self.config, self.placement, list[list[Any]]()
        for model, gpus in zip(config.explorer.auxiliary_models, placement.auxiliary_gpus, strict=False):
            number = len(handles)
            engines = [
                (f"{actor_prefix(config)}/auxiliary_{number}_{index}", placement.nodes.auxiliary(number, index))
                for index in range(model.engine_num)
            ]
            if is_reward_model(model.model_path):
                handles.append([self._start_reward_engine(model, *engine) for engine in engines])
                continue
            settings = auxiliary_engine(config, model, placement.on_gpu, placement.engine_threads)
            handles.append([self._start_engine(name, settings, gpus, where) for name, where in engines])
        return handles

    def start_explorer(self, engines: list[Any], auxiliary: list[list[Any]]) -> Any:
        """Start the explorer, on several nodes on the first one. It drives the engines and holds no model itself."""
        from trinity_core.rollout.explorer import Explorer

        config, name = self.config, actor_prefix(self.config)
        # Its own `env_vars` may contain keys: Ray would write variables passed to it into a world-readable log.
        env_vars, where = config.explorer.env_vars, self.placement.nodes.first()
        env = log_environment(config, name) | {key: env_vars[key] for key in READ_AT_START if key in env_vars}
        return self.cluster.actor(Explorer, name, config, engines, auxiliary, env=env, concurrency=8, where=where)

    def start_trainers(self) -> list[Any]:
        """Return the trainer's workers, one per rank, reusing those of an earlier stage if they fit."""
        from trinity_core.training.worker import TrainerActor

        config, placement, cluster = self.config, self.placement, self.cluster
        trainers = cluster.take("trainers", trainer_key(placement))
        threads = placement.trainer_threads
        if trainers and _are_ready(cluster, trainers, lambda: renew(trainers, config, threads, cluster.check)):
            return trainers
        environment = trainer_environment(placement)
        return [
            cluster.actor(
                TrainerActor, name, config, rank, placement.trainers, threads,
                gpus=placement.trainer_gpus,
                env=environment | log_environment(config, name),
                concurrency=4,
                where=placement.nodes.trainer(rank),
            )
            for rank, name in enumerate(trainer_name(config, rank) for rank in range(placement.trainers))
        ]  # fmt: skip

    def keep(self, engines: list[Any], trainers: list[Any]) -> list[Any]:
        """Keep engines and trainers for a later stage if one may follow, and return the kept actors.

        Their processes have imported vLLM, torch and DeepSpeed, which takes longer than a small model's whole stage. On
        GPUs nothing is kept, because it would occupy memory that another stage needs. Sleeping engines are not kept
        either.
        """
        if self.placement.on_gpu or self.placement.colocated or not self.cluster.shared:
            return []
        if engines:
            self.cluster.leave("engines", self.engine_key(), engines)
        if trainers:
            self.cluster.leave("trainers", trainer_key(self.placement), trainers)
        return [*engines, *trainers]

    def engine_settings(self) -> EngineSettings:
        from trinity_core.rollout.inference.settings import policy_engine

        return policy_engine(self.config, self.placement.on_gpu, self.placement.engine_threads)

    def engine_key(self) -> Hashable:
        """Return the key of the engines: stages with the same key can share them. With an adapter, the base model is
        part of it."""
        settings = self.engine_settings()
        return settings if settings.lora_rank else replace(settings, model_path=""), self.placement.engines

    def _start_engine(self, name: str, settings: EngineSettings, gpus: float, where: Any) -> Any:
        from trinity_core.rollout.inference.remote import engine_class

        env = settings.environment() | log_environment(self.config, name)
        cls = engine_class(settings)
        engine = self.cluster.actor(cls, name, settings, gpus=gpus, env=env, concurrency=CALLS_AT_ONCE, where=where)
        engine.start.remote()
        return engine

    def _start_reward_engine(self, model: AuxiliaryModelConfig, name: str, where: Any) -> Any:
        from trinity_core.rollout.inference.reward_engine import ON_ONE_GPU, RewardEngine

        config, placement = self.config, self.placement
        if model.tensor_parallel_size > 1:
            key = f"explorer.auxiliary_models[{config.explorer.auxiliary_models.index(model)}].tensor_parallel_size"
            raise TrinityError(f"{key}: {ON_ONE_GPU}", key=key)
        env = {"OMP_NUM_THREADS": str(placement.engine_threads), "TOKENIZERS_PARALLELISM": "false"}
        env |= log_environment(config, name)
        arguments = (model.model_path, model.max_model_len, placement.on_gpu, model.dtype, model.trust_remote_code)
        engine = self.cluster.actor(RewardEngine, name, *arguments, gpus=float(placement.on_gpu), env=env, where=where)
        engine.start.remote()
        return engine


def trainer_key(placement: Placement) -> Hashable:
    """Return the key of the trainer processes. Stages with the same key can share them, even with different thread
    counts."""
    return placement.trainers, tuple(trainer_environment(replace(placement, trainer_threads=0)).items())


def take_over(engines: list[Any], config: Config, model_path: str, check: Callable[[], None]) -> None:
    """Move running engines to another stage: with its logs, and the weights of a Hugging Face folder as version 0. An
    empty `model_path` removes an adapter."""
    from trinity_core.rollout.inference.requests import WeightSource

    source = WeightSource("folder", str(Path(model_path).absolute()) if model_path else "")
    weights = model_path or "the model without an adapter"
    timed = within(LOAD_SECONDS, f"the engines kept from an earlier stage have not loaded {weights}", check)
    logs = [log_environment(config, engine_name(config, index)) for index in range(len(engines))]
    results_of([engine.move_log.remote(log_folder) for engine, log_folder in zip(engines, logs, strict=True)], timed)
    results_of([engine.load.remote(source, 0) for engine in engines], timed)


def renew(workers: list[Any], config: Config, threads: int, check: Callable[[], None]) -> None:
    timed = within(SILENCE_SECONDS, "the trainer's workers kept from an earlier stage have not let it go", check)
    results_of([worker.renew.remote(config, threads) for worker in workers], timed)


def connect_trainers(workers: list[Any], check: Callable[[], None], stopped: Callable[[], bool]) -> dict[str, Any]:
    """Connect the workers at rank 0's address, load and resume; return rank 0's progress."""
    address, port = result_of(workers[0].rendezvous.remote(), check, stopped)
    return results_of([worker.start.remote(address, port) for worker in workers], check, stopped)[0]


def _are_ready(cluster: Cluster, kept: list[Any], prepare: Callable[[], None]) -> bool:
    """Prepare kept actors for another stage. Return False if one of them has died. On any failure they are ended."""
    from trinity_core.rollout.inference.requests import EngineLost

    try:
        with on_failure(lambda: cluster.kill(kept)):
            prepare()
    except (ProcessLost, EngineLost) as loss:
        log.info("new processes are started: %s", loss.reason if isinstance(loss, ProcessLost) else loss)
        return False
    return True


def run_until_done(
    runs: list[Any],
    stop: Callable[[], Any],
    stopping: Callable[[], bool],
    grace: float,
    check: Callable[[], None],
    report: ProgressReport,
    has_enough: Callable[[], bool],
) -> list[Any]:
    """Wait for `runs` (references to results of `run`), report progress, and return their results.

    The first failure is raised. Once `has_enough()` is true, `stop` is called, and the runs take the time that they
    need to save and return.

    Once `stopping()` is true, `stop` is called, which makes the runs save and return. Raises Stopped if they do not
    return within `grace` seconds. If `check` raises, they save and return before its error is raised, unless it is
    RayDied.
    """
    import ray

    asked_at: float | None = None
    is_ending, waiting = False, list(runs)
    with closing(report):
        while waiting:
            try:
                ready, waiting = ray.wait(waiting, num_returns=1, timeout=0)
            except ValueError as error:  # another part of the run has started Ray again, which does not know these
                raise RayDied("Ray has died, and the processes of the run with it.") from error
            if ready:
                get(ready[0])
                continue
            if asked_at is None and stopping():
                asked_at = time.monotonic()
                stop()
            if not is_ending and has_enough():
                is_ending = True
                stop()
            if asked_at is not None and time.monotonic() - asked_at > grace:
                raise Stopped("The run was stopped before its next step boundary.")
            try:
                check()
                report.report()
            except RayDied:
                raise
            except BaseException:
                stop()
                ray.wait(waiting, num_returns=len(waiting), timeout=grace)
                raise
            time.sleep(POLL_SECONDS)
        report.finish()
    return [get(ref) for ref in runs]


def trainer_environment(placement: Placement) -> dict[str, str]:
    from trinity_core.rollout.inference.settings import PASSIVE_THREADS

    common = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(placement.trainer_threads)}
    if placement.on_gpu:
        # Micro-batches vary in size: expandable segments avoid fragmentation.
        return common | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return common | {"DS_ACCELERATOR": "cpu"} | PASSIVE_THREADS | KEPT_MEMORY | KERNELS


class Trainers:
    """The workers of one trainer. `check` raises if waiting is pointless; `stopping` is true once the run must end.

    The explorer is not restarted: going back rewinds the store, which makes the explorer start over.
    """

    def __init__(
        self,
        actors: Actors,
        check: Callable[[], None],
        stopping: Callable[[], bool],
        make_room: Callable[[], None] = lambda: None,
        has_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """`make_room` is called before the workers start, and waits for what must not start at the same time.
        `has_enough` is true once the run must save and end, in its own time."""
        self.workers: list[Any] = []
        self._connected = 0
        """Number of times that the workers became ready for a step."""
        self._actors, self._cluster, self._config = actors, actors.cluster, actors.config
        self._check, self._stopping, self._make_room, self._has_enough = check, stopping, make_room, has_enough
        self._ended = threading.Event()

    def train(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        """Run the workers with `loop` until the last step or until the run is stopping; return rank 0's summary.

        Raises a worker's error, and ProcessLost if workers were lost more than `MAX_RESTARTS` times.
        """
        try:
            return self._train(loop, report)
        finally:
            self._ended.set()

    def _train(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        for restart in range(1, MAX_RESTARTS + 2):
            try:
                return self._attempt(loop, report)
            except Exception as error:
                loss = self._loss(error)
                if loss is None:
                    raise
                if restart > MAX_RESTARTS or not self._can_return():
                    raise loss from error
                log.warning(
                    "the trainer returns to its latest checkpoint (%d of %d): %s", restart, MAX_RESTARTS, loss.reason
                )
                self._cluster.kill(self.workers)
                self.workers = []
        raise AssertionError("the last restart returns or raises")

    @property
    def has_ended(self) -> bool:
        """True once the workers have trained their last step, or have failed."""
        return self._ended.is_set()

    @property
    def rewinds(self) -> int:
        """Number of times the trainer has gone back to a checkpoint and is ready again."""
        return max(0, self._connected - 1)

    def wait_for_rewind(self, seen: int) -> bool:
        """Wait until the trainer has ended or the run is stopping; return True if it has gone back more than `seen`
        times.

        A finished explorer then has steps to explore again.
        """
        while self.rewinds == seen:
            if self._ended.is_set() or self._stopping():
                return False
            self._check()
            time.sleep(POLL_SECONDS)
        return True

    def convert(self, step: int, merge: bool = True) -> Path:
        """Return the checkpoint of `step` in Hugging Face format, see `checkpoints.convert`."""
        worker = self.workers[0]
        check = answering({trainer_name(self._config, 0): worker}, self._check)
        return Path(result_of(worker.convert.remote(step, merge), check))

    def remove_shared_weights(self) -> None:
        """Let rank 0 remove the weights in its machine's shared memory; it may be on another node than the flow."""
        if not self.workers or not self._cluster.address or not self._cluster.alive():
            return
        try:
            get(self.workers[0].remove_shared_weights.remote(), REMOVE_SECONDS)
        except TransientFault as fault:
            log.warning("weights may be left in shared memory on the node of trainer rank 0: %s", fault)

    def _attempt(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        self._make_room()
        self.workers = self._actors.start_trainers()
        names = {trainer_name(self._config, rank): worker for rank, worker in enumerate(self.workers)}
        check = answering(names, self._check)
        loading = starting("the trainer's workers", self._cluster.unplaced, check)
        progress = connect_trainers(self.workers, loading, self._stopping)
        self._connected += 1
        report.total_steps = progress["total_steps"]
        report.actor = ActorWaits(lambda: self.workers[0].progress.remote().future())

        def stop() -> None:
            for worker in self.workers:
                worker.stop.remote()

        runs = [worker.run.remote(loop) for worker in self.workers]
        summaries = run_until_done(runs, stop, self._stopping, SAVE_SECONDS, check, report, self._has_enough)
        if summaries[0].get("stopped") and not self._has_enough():
            if not self._stopping():
                raise Stopped(f"The trainer got SIGTERM and has saved step {summaries[0]['step']}. {AGAIN}")
            if step := summaries[0]["step"]:
                again = "; started again, the run resumes from there" if self._config.continue_from_checkpoint else ""
                log.info("stopped after step %d, which is saved%s", step, again)
        return summaries[0]

    def _loss(self, error: Exception) -> ProcessLost | None:
        """Return the loss of a worker if it caused `error`, such as a broken connection to the lost worker."""
        if isinstance(error, ProcessLost):
            return error
        if isinstance(error, TrinityError | TransientFault):
            return None
        import ray

        answers = [worker.progress.remote() for worker in self.workers]
        for answer in ray.wait(answers, num_returns=len(answers), timeout=ANSWER_SECONDS)[0]:
            try:
                get(answer)
            except ProcessLost as loss:
                return loss
        return None

    def _can_return(self) -> bool:
        """Return False if engines would wait for a connection of the lost worker, or if Ray itself has died."""
        method = SYNC_METHODS[self._config.synchronizer.sync_method]
        connected = bool(self._actors.placement.engines) and bool(method.vllm_backend)
        return not connected and not self._stopping() and self._cluster.alive()
