"""Starts Ray for a run, or joins a cluster, and ends everything that the run started on it.

A process has at most one cluster. A pipeline opens it for all its stages, because starting Ray takes 6 s.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import psutil

from trinity_core.base.errors import TransientFault, TrinityError, on_failure
from trinity_core.base.processes import cores, die_with_parent, end, families
from trinity_core.base.waits import retry
from trinity_core.config import Config
from trinity_core.hosting.faults import is_cancelled
from trinity_core.hosting.gpus import TakenGpus, survey, take_gpus
from trinity_core.hosting.placement import Machine, Placement, place, weakest
from trinity_core.hosting.ray_node import (
    PROCESSES,
    ClusterAway,
    RayDied,
    RayNode,
    forget_own_token,
    join_ray,
    private_temporary,
    start_ray,
)

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Time for Ray's processes to end with Ray."""
SHUTDOWN_SECONDS = 60.0
"""Time for `ray.shutdown()`, which has no time limit of its own and waits for a raylet that does not answer."""
AGAIN_SECONDS = 300.0
"""Time to wait for the nodes of a joined cluster that an earlier attempt used: a node takes minutes to start."""
LOOK_SECONDS = 5.0
NAME_SECONDS = 30.0
"""Time for Ray to end the actors of a killed process and free their names."""
PLACE_SECONDS = 600.0
"""Time for Ray to start an actor, including a wait for GPUs of another run."""
_lock = threading.Lock()
_current: Cluster | None = None
_had_room: set[str | None] = set()
"""Addresses of joined clusters that have had room for a run of this process."""
T = TypeVar("T")


class Cluster:
    """A connection to Ray. `close` ends everything that this process has started on it."""

    def __init__(self, config: Config, machine: Machine) -> None:
        self.nodes = [machine]
        self.address = config.cluster.ray_address
        self._started: list[Any] = []
        self._users = 0
        self._kept: dict[str, tuple[Any, list[Any]]] = {}
        """Actors kept for a later stage: kind → (the key they fit, actors)."""
        self._reserved: list[tuple[list[Any], Callable[[], None]]] = []
        """Nodes reserved for kept actors: the actors, and a function that releases the nodes."""
        self._placing: dict[Any, tuple[str, float]] = {}
        """Actors that Ray has not started yet: reference that becomes ready on start → (name, time of the request)."""
        self._namespace = config.ray_namespace or "trinity"
        self._node: RayNode | None = None
        self._gpus = TakenGpus()
        """GPUs of a Ray that this process has started."""
        self._looked_at = 0.0

    def open(self) -> None:
        """Start Ray, or join the cluster at `cluster.ray_address`.

        Raises TrinityError if the cluster to join does not answer or refuses us; TransientFault if Ray does not start.
        """
        try:
            self._connect()
        except ClusterAway as error:
            raise TrinityError(str(error), key="cluster.ray_address") from error.__cause__

    def reopen(self) -> None:
        """Start or join Ray again after it has died, without its previous actors.

        Raises as `open`, but TransientFault if the cluster does not answer, because it did before.
        """
        log.warning("Ray has died: it is %s again", "joined" if self.address else "started")
        self.close()
        self._kept.clear()
        self._connect()

    def alive(self) -> bool:
        """Return False if Ray on this machine has died, or if its head does not answer or no longer lists this
        machine."""
        return self._node is not None and self._node.alive()

    def check(self) -> None:
        """Check, at most every `LOOK_SECONDS`, that waiting still makes sense. Call this while waiting.

        Raises RayDied, or TransientFault if Ray has not started an actor within `PLACE_SECONDS`.
        """
        import ray

        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        if not self.alive():
            raise RayDied("Ray has died, and the processes of the run with it.")
        self._looked_at = now
        placing = list(self._placing)  # other threads also wait, and remove started actors
        if not placing:
            return
        for started in ray.wait(placing, num_returns=len(placing), timeout=0)[0]:
            self._placing.pop(started, None)
        late = [name for name, asked_at in list(self._placing.values()) if now - asked_at > PLACE_SECONDS]
        if late:
            raise TransientFault(f"Ray has not started {', '.join(late)} within {PLACE_SECONDS:.0f} s.")

    def unplaced(self) -> list[str]:
        """Return the names of actors that had not answered at the last `check`: they are being placed, or are
        importing."""
        return [name for name, _ in list(self._placing.values())]

    def _connect(self) -> None:
        try:
            with _keeping_sigterm():
                if self.address:
                    join_ray(self.address, self._namespace)
                    self.nodes = _nodes_of_ray()
                else:
                    [machine] = self.nodes
                    self._gpus = take_gpus(machine.gpus, private_temporary())
                    start_ray(self._namespace, max(machine.cpus, 1), machine.gpus, self._gpus.shown)
                self._node = RayNode.of_this_process(is_own=not self.address)
        except (TrinityError, TransientFault):
            raise
        except Exception as error:  # the bare class, from Ray
            self.close()
            raise TransientFault(f"Ray did not start: {error}") from error

    def actor(
        self,
        cls: type,
        name: str,
        *args: Any,
        gpus: float = 0,
        env: dict[str, str] | None = None,
        concurrency: int | None = None,
        where: Any = "DEFAULT",
        **kwargs: Any,
    ) -> Any:
        """Start a named actor that uses `gpus` GPUs. It is never restarted, because it has state.

        `where` is Ray's scheduling strategy, such as one of `placement.nodes`.
        """
        import ray

        hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}  # Ray would show it all GPUs
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": 0,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": where,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **hidden, **(env or {})}},
        }
        if concurrency:
            options["max_concurrency"] = concurrency
        remote: Any = ray.remote(cls).options(**options)
        handle = self._when_free(name, lambda: remote.remote(*args, **kwargs))
        self._started.append(handle)
        # A busy worker would notice only after a minute that its raylet was killed, and hold the run's locks until
        # then.
        self._placing[handle.__ray_call__.remote(_end_with_raylet)] = name, time.monotonic()
        return handle

    def _when_free(self, name: str, start: Callable[[], Any]) -> Any:
        """Call `start` once no other actor of the run has this name, and return its result."""
        from ray.exceptions import ActorAlreadyExistsError

        def is_taken(error: Exception) -> bool:
            return isinstance(error, ActorAlreadyExistsError)

        try:
            return retry(start, is_taken, NAME_SECONDS, 1.0, f"an earlier {name} has yet to end")
        except ActorAlreadyExistsError:
            raise TrinityError(
                f"{name} is already running in the namespace {self._namespace} of the Ray cluster: the same run, "
                "another evaluation of it, or a run of the same project and name in another folder is in progress. "
                "Wait for it, stop it or set ray_namespace."
            ) from None

    def check_room(self, gpus: float) -> None:
        """Check that `gpus` GPUs exist before actors start: an actor that never fits would wait forever."""
        import ray

        if not gpus:
            return
        total, free = (resources.get("GPU", 0) for resources in (ray.cluster_resources(), ray.available_resources()))
        if gpus > total:
            raise TrinityError(
                f"The run needs {gpus:g} GPUs, but the Ray cluster has {total:g} ({free:g} free). Let it use fewer "
                f"engines, trainer workers or nodes, or let more nodes join."
            )
        if self.address and gpus > free:
            log.warning("the run needs %g GPUs and waits until they are free: now %g of %g are", gpus, free, total)

    def kill(self, handles: Sequence[Any]) -> None:
        """End these actors now. A dead Ray is not asked, which would take a minute; its actors died with it."""
        import ray

        for handle in self._started if self.alive() else ():
            if handle in handles:
                ray.kill(handle, no_restart=True)
        self._started = [handle for handle in self._started if handle not in handles]
        self._release_unused()

    def release_after(self, actors: Sequence[Any], release: Callable[[], None]) -> None:
        """Call `release`, which gives up a stage's nodes, once these actors have ended.

        Actors kept from an earlier stage are on that stage's nodes and do not count.
        """
        earlier = [actor for placed, _ in self._reserved for actor in placed]
        self._reserved.append(([actor for actor in actors if actor not in earlier], release))
        self._release_unused()

    def _release_unused(self) -> None:
        """Release the nodes whose actors have ended. A dead Ray has released all nodes itself."""
        reserved, self._reserved = self._reserved, []
        for actors, release in reserved:
            if any(actor in self._started for actor in actors):
                self._reserved.append((actors, release))
            elif self.alive():
                release()

    @property
    def shared(self) -> bool:
        return self._users > 1

    def leave(self, what: str, key: Any, actors: list[Any]) -> None:
        """Keep one stage's actors for the next; previously kept ones of the same kind end."""
        self.kill(self._kept.pop(what, (None, []))[1])
        self._kept[what] = (key, actors)

    def take(self, what: str, key: Any) -> list[Any]:
        """Return the kept actors of this kind if they fit the key. Otherwise they end, and an empty list is
        returned."""
        fits, actors = self._kept.pop(what, (None, []))
        if fits == key:
            return actors
        self.kill(actors)
        return []

    def close(self) -> None:
        """End all our actors, and Ray itself if we started it."""
        import ray

        self.kill(self._started)
        self._started, self._placing, self._node = [], {}, None
        if ray.is_initialized():
            ours = [] if self.address else families(PROCESSES)
            _shut_down(ours)
            if killed := end(ours, END_SECONDS):
                log.warning("did not end with Ray and were killed: %s", ", ".join(killed))
        self._gpus.release()
        if not self.address:
            forget_own_token()


def _shut_down(ours: Sequence[psutil.Process]) -> None:
    """Shut Ray down. Its own processes are killed after `SHUTDOWN_SECONDS`; a joined cluster's are not ours to kill."""
    import ray

    def kill() -> None:
        log.warning("Ray's node does not answer, %g s after it was to end", SHUTDOWN_SECONDS)
        end(ours, 0.0)

    limit = threading.Timer(SHUTDOWN_SECONDS, kill)
    limit.daemon = True
    if ours:
        limit.start()
    try:
        with _keeping_sigterm():
            ray.shutdown()
    finally:
        limit.cancel()


def _end_with_raylet(actor: object) -> None:
    """End this actor's process with its parent, the raylet of its node."""
    die_with_parent()


def _nodes_of_ray() -> list[Machine]:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Machine(int(has.get("CPU", 1)), int(has.get("GPU", 0))) for has in resources]


def machine(gpus: int | None) -> Machine:
    """Return this process's cores and the GPUs that it may use; they are not looked at if 0 are wanted."""
    return Machine(cores(), 0 if gpus == 0 else len(survey()))


def placement_of(config: Config) -> Placement:
    """Place a run's processes on this machine, or on the Ray cluster that it joins."""
    cluster = config.cluster
    return wait_for_cluster(cluster.ray_address, lambda: place(config, weakest(_nodes(config), cluster.node_num)))


def _nodes(config: Config) -> list[Machine]:
    """Return the nodes of the open cluster, or of the one that the run will use, which is joined to count them."""
    if not config.cluster.ray_address:
        return _current.nodes if _current else [machine(config.cluster.gpu_per_node)]
    joined = _opened(config, 0)
    try:
        return joined.nodes
    finally:
        close_cluster(joined)


def open_cluster(config: Config, gpu_per_node: int) -> Cluster:
    """Return the process's cluster, opening it if needed. Each call needs a matching `close_cluster`.

    Raises TrinityError if a run of this configuration needs more GPUs than the cluster has. A configuration with stages
    is not checked, because each stage calls this itself.
    """
    opened = wait_for_cluster(config.cluster.ray_address, lambda: _opened_with_room(config, gpu_per_node))
    _had_room.add(config.cluster.ray_address)
    return opened


def _opened_with_room(config: Config, gpu_per_node: int) -> Cluster:
    opened = _opened(config, gpu_per_node)
    if config.stages:
        return opened
    with on_failure(partial(close_cluster, opened)):
        opened.check_room(placement_of(config).gpus)
    return opened


def _opened(config: Config, gpu_per_node: int) -> Cluster:
    global _current
    with _lock:
        if _current is None:
            opened = Cluster(config, Machine(cores(), gpu_per_node))
            opened.open()
            _current = opened
        elif not _current.alive():
            _current.reopen()
        _current._users += 1
        return _current


def close_cluster(cluster: Cluster) -> None:
    """Undo one `open_cluster`; the last one ends Ray."""
    global _current
    with _lock:
        cluster._users -= 1
        if cluster._users == 0:
            _current = None
            cluster.close()


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the main thread's SIGTERM handler, which Ray replaces: Prefect needs its own to notice a cancellation."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)


def wait_for_cluster(address: str | None, work: Callable[[], T]) -> T:
    """Call `work`, which needs the Ray at `address`, and return its result.

    A joined cluster that had room for this process before is waited for, for at most `AGAIN_SECONDS`; then
    TransientFault is raised.
    """
    had_room = address is not None and address in _had_room

    def may_return(fault: Exception) -> bool:
        return had_room and isinstance(fault, TrinityError | TransientFault) and not is_cancelled()

    notice = "the cluster has no room, though it had some before"
    try:
        return retry(work, may_return, AGAIN_SECONDS, LOOK_SECONDS, notice)
    except TrinityError as fault:
        if not had_room:
            raise
        raise TransientFault(str(fault)) from fault
