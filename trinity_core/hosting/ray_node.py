"""Starts Ray on this machine, or joins the cluster of a head, and tells whether this process's node is alive."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trinity_core.base.addresses import LOOPBACK, short_folder
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import private_folder
from trinity_core.base.processes import end, families
from trinity_core.base.waits import poll

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Time for the head of a joined cluster to answer."""
SILENCE_SECONDS = 30.0
"""Time for it to come back later. After 60 s without a head Ray would end this process."""
OWN_TOKEN = secrets.token_hex(32)
"""The token of a Ray that this process starts."""
TOKEN_FILE = "~/.ray/auth_token"  # noqa: S105 - a path
OBJECT_STORE_BYTES = 512 * 2**20
"""Only batches and eval results pass through the object store, not weights. More would take shared memory from weight
sync."""
AGENT_SECONDS = 180
"""Time for Ray's agents to start: on a busy machine Ray's own 15 s are too few."""
SOCKET_BYTES = 68
"""Length of the names in Ray's temporary folder: its own, a session's and a socket's."""
PROCESSES = ("raylet", "gcs_server")
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Method of a head that answers an empty request with an empty reply."""


class RayDied(TransientFault):
    """Ray on this machine, or its cluster's head, has died, and no actor answers."""


class ClusterAway(TransientFault):
    """No head answers at `cluster.ray_address`."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """The node that this process is connected to."""

    raylet: str
    """Socket of the node's raylet; "" for a client (`ray://`), which has no node."""
    head: str
    is_own: bool
    """True if this process started Ray: a lost head then does not come back."""

    @classmethod
    def of_this_process(cls, is_own: bool) -> RayNode:
        """Return the node of this process, in which Ray must be initialised."""
        import ray

        if ray.util.client.ray.is_connected():
            return cls("", "", is_own)
        context = ray.get_runtime_context()
        sockets = {node["NodeID"]: node["RayletSocketName"] for node in ray.nodes()}
        return cls(sockets[context.get_node_id()], context.gcs_address, is_own)

    def alive(self) -> bool:
        """Return False if the raylet has died (it does once its head has given the node up) or the head has."""
        import ray

        if not self.raylet:
            return ray.is_initialized()
        if not _listens(self.raylet):
            return False
        return any(_listens(self.head) for _ in poll(0.0 if self.is_own else SILENCE_SECONDS, 1.0))


def start_ray(namespace: str, cpus: int, gpus: int, shown: str | None = None) -> None:
    """Start our own Ray on this machine and connect to it. On failure, everything that was started ends.

    Its GPUs are the first `gpus` of `shown`, by default of this process's `CUDA_VISIBLE_DEVICES`. It answers on the
    loopback interface only, and only to who has its token.
    """
    settings = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_agent_register_timeout_ms": str(AGENT_SECONDS * 1000),
        "RAY_AUTH_TOKEN": OWN_TOKEN,
        # Prestarted workers cannot become our actors, which have their own environment.
        "RAY_prestart_worker_first_driver": "false",
        # By default workers have niceness 15, and a busy thread of another process would leave them 3 % of a core.
        "RAY_worker_niceness": "0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # numbers as in nvidia-smi
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    import ray

    try:
        with _light(), _showing(shown):
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
                _temp_dir=str(private_temporary() / "ray"),
            )
    except Exception:
        end(families(PROCESSES), 0.0)  # a late node would start in vain, and stay
        raise


@contextmanager
def _light() -> Iterator[None]:
    """Within this block Ray starts without what one machine does not use, for which `ray.init` has no settings.

    Without the replaced parameters and server a start takes 4.8 instead of 2.5 core-seconds (Ray 2.60, two cores).
    """
    from ray._private import parameter, ray_constants, services

    params: Any = parameter.RayParams
    replaced: tuple[tuple[Any, str, Any], ...] = (
        # No process listens on another interface: for a cluster Ray replaces 127.0.0.1 by the outer address. The
        # switch's environment variable is read when ray is imported, which may have happened.
        (ray_constants, "ENABLE_RAY_CLUSTER", False),
        # The autoscaler has no nodes to add, and the log monitor serves only drivers with `log_to_driver`.
        (parameter, "RayParams", partial(params, no_monitor=True, include_log_monitor=False)),
        # Serves the dashboard.
        (services, "start_api_server", lambda *_, **__: (None, None)),
        # A signal to the run's process group, such as that of `timeout`, does not reach Ray: the run saves first.
        (services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)),
    )
    originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


@contextmanager
def _showing(gpus: str | None) -> Iterator[None]:
    """Within this block `CUDA_VISIBLE_DEVICES`, which Ray's processes inherit, has this value; None changes nothing."""
    if gpus is None:
        yield
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # not set so far: see `take_gpus`
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]


def private_temporary() -> Path:
    """Return this user's own folder for Ray's, in which any account may replace sockets and packages of its workers."""
    name = f"trinity-{os.geteuid()}"
    folder = short_folder(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), SOCKET_BYTES + len(name) + 1)
    private = private_folder(Path(folder, name).absolute())
    if private.is_symlink() or private.stat().st_uid != os.geteuid():  # another account was there first
        return Path(tempfile.mkdtemp(dir=folder, prefix="t"))
    private.chmod(0o700)
    return private


def forget_own_token() -> None:
    """After our own Ray's end: other clusters would refuse its token, and a node started from here would demand it."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if os.environ.get("RAY_AUTH_TOKEN") == OWN_TOKEN:
        del os.environ["RAY_AUTH_TOKEN"]
        AuthenticationTokenLoader.instance().reset_cache()


def join_ray(address: str, namespace: str) -> None:
    """Connect to the cluster whose head is at `address`, with Ray's token if the head asks for one.

    The head is asked first: `ray.init` sends a token only with RAY_AUTH_MODE=token, and tries for 50 s to reach a head
    that refuses it or does not answer. Raises TrinityError if the token is missing or wrong, ClusterAway if no head
    answers.
    """
    from ray._raylet import Config  # type: ignore[attr-defined]

    is_head = address != "auto" and "://" not in address  # else one of this machine, or Ray's client server
    if is_head and not _admits(address, ""):
        token, source = _token(address)
        if not _admits(address, token):
            raise TrinityError(
                f"The Ray cluster at {address} (cluster.ray_address) refuses the token of {source}. Copy {TOKEN_FILE} "
                "from its head node, or set RAY_AUTH_TOKEN."
            )
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # Ray has read the mode when it was imported
    import ray

    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)


def _admits(head: str, token: str) -> bool:
    """Return False if the head refuses the token or, with "", the lack of one. Raises ClusterAway."""
    import grpc

    with _channel(head) as channel:
        ask = channel.unary_unary(CHECK_ALIVE)
        try:
            ask(
                b"", timeout=ANSWER_SECONDS, wait_for_ready=True,
                metadata=[("authorization", f"Bearer {token}")] if token else None,
            )  # fmt: skip
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise ClusterAway(
                f"No Ray cluster answers at {head} (cluster.ray_address): {error.code().name}. Start its head (`ray "
                "start --head --port=…`), or correct the address."
            ) from error
    return True


def _channel(head: str) -> Any:
    """Return a gRPC channel to the head, over TLS where Ray uses it. Raises TrinityError without its certificates."""
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(head, options)
    from ray._common.tls_utils import load_certs_from_env

    try:
        chain, key, authority = load_certs_from_env()
    except (RuntimeError, OSError) as error:
        raise TrinityError(f"RAY_USE_TLS is set, but its certificates cannot be read: {error}") from error
    return grpc.secure_channel(head, grpc.ssl_channel_credentials(authority, key, chain), options)


def _token(address: str) -> tuple[str, str]:
    """Return the token that Ray finds for this process, and where. Raises TrinityError if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token, "RAY_AUTH_TOKEN"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE).expanduser()
    if not path.is_file():
        raise TrinityError(
            f"The Ray cluster at {address} (cluster.ray_address) asks for a token, and {path} does not exist. Copy "
            f"{TOKEN_FILE} from its head node, or set RAY_AUTH_TOKEN."
        )
    return path.read_text().strip(), str(path)


def _listens(address: str) -> bool:
    """True if a process listens on this socket: a file of this machine, or `host:port`."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET if port.isdigit() else socket.AF_UNIX) as end:
        end.settimeout(ANSWER_SECONDS)
        try:
            end.connect((host, int(port)) if port.isdigit() else address)
        except OSError:
            return False
    return True
