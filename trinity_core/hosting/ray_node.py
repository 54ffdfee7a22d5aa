"""This process's node of a Ray cluster: starting or joining one, and checking that it and the cluster's head are alive.

A head that finds a token asks for it, but `ray.init(address=…)` sends one only with RAY_AUTH_MODE=token,
and tries for 50 s to reach a head that refuses it or does not answer. So we contact the head first.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trinity_core.base.addresses import LOOPBACK, short_folder
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import private_folder
from trinity_core.base.processes import end, family, still_running

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Time for the head of a joined cluster to answer."""
SILENCE_SECONDS = 30.0
"""Time for the head to answer later, on a busy machine. After 60 s without an answer Ray would end this process."""
KEPT_AT = "~/.ray/auth_token"
OBJECT_STORE_BYTES = 512 * 2**20
"""Only batches and eval results pass through the object store, not weights. More would take shared memory from weight
sync."""
AGENT_SECONDS = 180
"""Time for Ray's agents to start: on a busy machine Ray's own 15 s are too few."""
STARTS = 3
"""Attempts to start Ray, which gives its node 30 s each time."""
END_SECONDS = 5.0
SOCKET_BYTES = 68
"""Length of the names in Ray's temporary folder: its own, a session's and a socket's."""


class RayDied(TransientFault):
    """Ray on this machine, or its cluster's head, has died, and no actor answers."""


class ClusterAway(TransientFault):
    """No head answers at `cluster.ray_address`."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """The node that this process is connected to."""

    raylet: str
    """Socket of the node's raylet; empty for a client (`ray://`), which has no node."""
    head: str
    node_id: str
    ours: bool
    """True if this process started Ray: a lost head then does not come back."""

    @classmethod
    def of_this_process(cls, ours: bool) -> RayNode:
        """Return the node of this process, in which Ray must be initialised."""
        import ray

        node = ray._private.worker._global_node
        if node is None:
            return cls("", "", "", ours)
        return cls(node.raylet_socket_name, node.gcs_address, node.node_id, ours)

    def alive(self) -> bool:
        """Return False if the raylet has died, or if the head has died, is silent or has given the node up."""
        import ray

        if not self.raylet:
            return ray.is_initialized()
        if not _listens(self.raylet) or (self.ours and not _listens(self.head)):
            return False
        return has_node(self.head, self.node_id, SILENCE_SECONDS)


def start_ray(namespace: str, cpus: int, gpus: int) -> None:
    """Start our own Ray on this machine and connect to it.

    Raises Ray's error after three attempts whose node was not up in time.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(AGENT_SECONDS * 1000))
    # Prestarted workers cannot become our actors, which have their own environment.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "false")
    # By default workers have niceness 15, and a busy thread of another process would leave them 3 % of a shared core.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _ensure_token()
    with _as_ours():
        for left in reversed(range(STARTS)):
            before = _ray_processes()
            try:
                _init(namespace, cpus, gpus)
                return
            except Exception as error:
                started = _ray_processes() - before
                end([process for child in started for process in family(child)], 0)
                still_running([*started], END_SECONDS)
                if not left or type(error) is not Exception:  # the bare class means that the node was not up in time
                    raise
                log.warning("Ray did not start and is started again: %s", error)


def _ensure_token() -> None:
    """Create the token of this user's Rays, which nobody else may read; only for this Ray if there is no home or it
    cannot be written."""
    from ray._private.authentication.authentication_token_setup import generate_and_save_token
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    loader = AuthenticationTokenLoader.instance()
    kept = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or KEPT_AT).expanduser()
    if not loader.has_token(ignore_auth_mode=True):
        try:
            private_folder(kept.parent)
            generate_and_save_token()
        except (OSError, RuntimeError):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        loader.reset_cache()
    with suppress(OSError):
        kept.chmod(0o600)  # Ray leaves this to the umask


def _ray_processes() -> set[psutil.Process]:
    """Return our children that are Ray programs; another thread may start other children meanwhile."""
    import ray

    programs = str(Path(ray.__file__).parent)
    children = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(part.startswith(programs) for part in child.cmdline()):
                children.add(child)
    return children


def _init(namespace: str, cpus: int, gpus: int) -> None:
    import ray

    ray.init(
        address="local",
        namespace=namespace,
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"py_executable": shlex.quote(sys.executable)},  # Ray hands it to a shell
        _node_ip_address=LOOPBACK,
        _temp_dir=str(_private_temporary() / "ray"),
    )


def _private_temporary() -> Path:
    """Return this user's own folder for Ray's, in which any account may replace sockets and packages of its workers."""
    name = f"trinity-{os.geteuid()}"
    folder = short_folder(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), SOCKET_BYTES + len(name) + 1)
    own = private_folder(Path(folder, name).absolute())
    if own.is_symlink() or own.stat().st_uid != os.geteuid():  # another account was there first
        return Path(tempfile.mkdtemp(dir=folder, prefix="t"))
    own.chmod(0o700)
    return own


@contextmanager
def _as_ours() -> Iterator[None]:
    """Within this block Ray starts for this machine and this run only, for which `ray.init` has no settings."""
    from ray._private import parameter, ray_constants, services, utils

    in_group = partial(services.ConsolePopen, process_group=0)
    params: Any = parameter.RayParams
    light = partial(params, no_monitor=True, include_log_monitor=False)
    with (
        # No process listens on another interface. On Linux Ray replaces 127.0.0.1 by the machine's outer address; with
        # multi-node clusters disabled it leaves the address alone. Its environment variable is read when ray is
        # imported, which may have happened.
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        # A signal to the run's process group, such as that of `timeout`, does not reach them: the run saves first.
        _replaced(services, "ConsolePopen", in_group),
        # The autoscaler has no nodes to add, the log monitor serves only drivers with `log_to_driver`, and the
        # dashboard collects data for a page that is not served: two seconds of CPU time, and constant polling of logs
        # and processes. A node needs the dashboard's agent, but in its minimal form.
        _replaced(parameter, "RayParams", light),
        _replaced(services, "start_api_server", lambda *_, **__: (None, None)),
        _replaced(utils, "get_dashboard_dependency_error", lambda: "not wanted"),
    ):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def reach(address: str) -> None:
    """Check that the head at `address` answers this process, which sends Ray's token from now on if the head needs one.

    Raises TrinityError if the token is missing or wrong, ClusterAway if no head answers.
    """
    import grpc
    from ray._private.authentication.authentication_token_setup import _enable_token_auth
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if "://" in address:  # Ray's client server, which is not a head
        return
    try:
        head = canonicalize_bootstrap_address(address) or address
        if not _admits(head):
            source = _token_source(address)
            AuthenticationTokenLoader.instance().reset_cache()
            _enable_token_auth()
            if not _admits(head):
                raise TrinityError(
                    f"The Ray cluster at {address} (cluster.ray_address) refuses the token of {source}. Copy "
                    f"{KEPT_AT} from its head node, or set RAY_AUTH_TOKEN."
                )
    except (grpc.RpcError, OSError, ValueError) as error:
        reason = error.code().name if isinstance(error, grpc.Call) else str(error)
        raise ClusterAway(
            f"No Ray cluster answers at {address} (cluster.ray_address): {reason}. Start its head (`ray start --head "
            "--port=…`), or correct the address."
        ) from error


def has_node(head: str, node_id: str, timeout: float) -> bool:
    """True if the head answers within `timeout` seconds and lists the node (hexadecimal id) as alive."""
    import grpc

    try:
        return all(_ask(head, [bytes.fromhex(node_id)], timeout))
    except grpc.RpcError:
        return False


def _admits(head: str) -> bool:
    """Return False if the head refuses our token or the lack of one. Raises grpc.RpcError if no head answers."""
    import grpc

    try:
        _ask(head, [], ANSWER_SECONDS)
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return False
        raise
    return True


def _ask(head: str, node_ids: Sequence[bytes], timeout: float) -> Sequence[bool]:
    """Ask the head whether each node is alive. Sends the token if this process has token authentication on."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest  # type: ignore[attr-defined]
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    with init_grpc_channel(head, [("grpc.enable_http_proxy", 0)]) as channel:  # as Ray's own
        ask = NodeInfoGcsServiceStub(channel).CheckAlive
        alive: Sequence[bool] = ask(
            CheckAliveRequest(node_ids=node_ids), timeout=timeout, wait_for_ready=True
        ).raylet_alive
        return alive


def _token_source(address: str) -> str:
    """Return where Ray finds the token of this process. Raises TrinityError if there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or KEPT_AT).expanduser()
    if not path.is_file():
        raise TrinityError(
            f"The Ray cluster at {address} (cluster.ray_address) asks for a token, and {path} does not exist. Copy "
            f"{KEPT_AT} from its head node, or set RAY_AUTH_TOKEN."
        )
    return str(path)


def _listens(address: str) -> bool:
    """True if a process of this machine listens on this socket: a file, or `host:port`."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET if port.isdigit() else socket.AF_UNIX) as end:
        try:
            end.connect((host, int(port)) if port.isdigit() else address)
        except OSError:
            return False
    return True
