"""Ordinary Ray clusters on this machine, as users start them; benchmarks use them too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_core.base.addresses import LOOPBACK, reserve_port

BIN = Path(sys.executable).parent
OWN_MEMORY = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")


@contextmanager
def ray_cluster(
    folder: Path, nodes: int = 2, cpus: int = 2, own_memory: bool = False, tls: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
    """An ordinary Ray cluster on this machine: its address, and the environment of a user who has its token.

    With `own_memory`, for which one must be root, each node has a /dev/shm of its own. With `tls` all connections are
    encrypted, with a certificate that is its own authority.
    """
    (folder / "home/.ray").mkdir(parents=True)
    (folder / "home/.ray/auth_token").write_text(os.urandom(32).hex())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PREFECT_"))}
    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")}
    environment = kept | cache | {"HOME": str(folder / "home"), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= _certificates(folder) if tls else {}
    holders = [reserve_port() for _ in range(1 + nodes)]
    ports = [holder.getsockname()[1] for holder in holders]
    address = f"{LOOPBACK}:{ports[0]}"
    started = []
    try:
        for number in range(nodes):
            place = [f"--address={address}"] if number else ["--head", f"--port={ports[0]}"]
            command = [
                *(OWN_MEMORY if own_memory else ()),
                str(BIN / "ray"), "start", *place, "--block", f"--num-cpus={cpus}", f"--node-ip-address={LOOPBACK}",
                f"--temp-dir={folder}/ray{number}", f"--dashboard-agent-listen-port={ports[1 + number]}",
                "--object-store-memory=100000000", *([] if number else ["--include-dashboard=false"]),
            ]  # fmt: skip
            log = folder / f"node_{number}.log"
            with log.open("w") as output:
                started.append(subprocess.Popen(
                    command, env=environment | ({"RAY_AUTH_MODE": "token"} if number else {}), stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                ))  # fmt: skip
            _wait_for_node(started[-1], log)
        yield address, environment
    finally:
        for process in reversed(started):
            end(process)
        for holder in holders:
            holder.close()


def _certificates(folder: Path) -> dict[str, str]:
    from ray._common.tls_utils import generate_self_signed_tls_certs

    files = {"RAY_TLS_SERVER_CERT": folder / "server.crt", "RAY_TLS_SERVER_KEY": folder / "server.key"}
    for path, text in zip(files.values(), generate_self_signed_tls_certs(), strict=True):
        path.write_text(text)
    files["RAY_TLS_CA_CERT"] = files["RAY_TLS_SERVER_CERT"]
    return {"RAY_USE_TLS": "1"} | {name: str(path) for name, path in files.items()}


def _wait_for_node(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Ray did not start:\n{log.read_text()}")
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has a session of its own, with all that it has started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
