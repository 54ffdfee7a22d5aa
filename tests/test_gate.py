"""Who can use the servers that we start: whoever has the folder's key, from a page of the server itself.

One server of each kind stands in one folder. Another account of the machine, a foreign page and a foreign name try what
was once possible: read the key through MLflow, and start a command with it through Prefect.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port

from flows.local.commands import Page, start_page
from flows.local.server import TemporaryServer, UpState, prefect_environment
from flows.quickstart import claim
from trinity_core.base.errors import TrinityError
from trinity_core.base.gate import asked_for, key_file, make_state_dir, server_key
from trinity_core.base.layout import JobLayout
from trinity_core.data.task_queue import TaskQueue
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.mlflow_writer import default_uri, open_client, serve_command
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts

NOBODY = 65534
START_SECONDS = 240.0
KINDS = ("mlflow", "studio", "view", "prefect")
PAGES = {"mlflow": "/", "studio": "/runs", "view": "/api/runs", "prefect": "/api/admin/version"}
"""A path of each server that needs the key."""
OPEN = {"mlflow": ["/health"], "studio": ["/_stcore/health"], "prefect": ["/api/health", "/ico/site.webmanifest"]}
UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip
AS_STRANGER = """
import http.client, json, os, sys
import encodings.idna
os.setgroups([]), os.setgid(65534), os.setuid(65534)
wanted = json.load(sys.stdin)
statuses = []
for port, path, headers in wanted["requests"]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    statuses.append(connection.getresponse().status)
files = []
for path in wanted["files"]:
    try:
        open(path, "rb").read()
        files.append(path)
    except OSError:
        pass
json.dump([statuses, files], sys.stdout)
"""


@dataclass(frozen=True)
class Servers:
    root: Path
    ports: Mapping[str, int]

    def url(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.ports[kind]}"

    @property
    def login(self) -> dict[str, str]:
        return {"Authorization": "Basic " + base64.b64encode(server_key(self.root).encode()).decode()}

    def status(self, kind: str, path: str, **headers: str) -> int:
        with httpx.Client(base_url=self.url(kind), timeout=60) as client:
            return client.get(path, headers=headers).status_code

    def prefect(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url('prefect')}/api", headers=self.login, timeout=60)

    def mlflow(self, method: str, url: str, body: Any = None, **params: str) -> httpx.Response:
        with httpx.Client(base_url=self.url("mlflow"), headers=self.login, timeout=60) as client:
            return client.request(method, url, json=body, params=params)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("servers")
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:  # of a server of other tests
        monkeypatch_module.delenv(name)
    checkpoints, job_dir = root / "checkpoints", JobLayout(root / "checkpoints/p/one").create().root
    save_rollouts(job_dir, "eval/test", 1, [SampledRollout("2 + 2?", "4", 1.0, {}, task_index=0)])
    ports = {kind: free_port() for kind in KINDS[:-1]}
    view = [sys.executable, "-m", "trinity_core.cli", "view", "--checkpoint-dir", str(job_dir), "--no-browser"]
    commands = {
        "mlflow": [*serve_command(default_uri(checkpoints), checkpoints), "--port", str(ports["mlflow"])],
        "studio": [sys.executable, "-m", "studio", "--port", str(ports["studio"])],
        "view": [*view, "--port", str(ports["view"])],
    }
    prefect = TemporaryServer(root)
    env = {**os.environ, **prefect_environment(root)}
    started = [subprocess.Popen(command, cwd=root, env=env) for command in commands.values()]
    try:
        prefect.wait()
        running = Servers(root, ports | {"prefect": int(prefect.api_url.split(":")[2].removesuffix("/api"))})
        for kind in ports:
            wait_for(running, kind)
        yield running
    finally:
        for process in started:
            process.terminate()
        prefect.stop()
        for process in started:
            process.wait(30)


def wait_for(servers: Servers, kind: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            servers.status(kind, "/")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{kind} does not answer")


@pytest.mark.parametrize("kind", KINDS)
def test_every_server_asks_for_the_key(servers: Servers, kind: str) -> None:
    wrong = {"Authorization": "Basic " + base64.b64encode(b"trinity:guess").decode()}
    assert servers.status(kind, PAGES[kind]) == 401
    assert servers.status(kind, "/") == 401, "the browser asks before anything is drawn"
    assert servers.status(kind, PAGES[kind], **wrong) == 401
    assert servers.status(kind, PAGES[kind], **servers.login) == 200
    assert {servers.status(kind, path) for path in OPEN.get(kind, ())} <= {200, 404}, (
        "a server without pages has no file"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_page_or_name_is_refused_with_the_key_too(servers: Servers, kind: str) -> None:
    """A browser sends the key that it knows along with the requests of other sites' pages."""
    port = servers.ports[kind]
    same_port, same_host = f"http://evil.example:{port}", f"http://127.0.0.1:{port + 1}"
    for origin in (same_port, same_host, f"https://127.0.0.1:{port}0", "null", "http://["):
        assert servers.status(kind, PAGES[kind], **servers.login, Origin=origin) == 403, origin
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", "127.0.0.2"):
        assert servers.status(kind, PAGES[kind], **servers.login, Host=host) == 400, host
    for site in ("cross-site", "same-site"):  # another host; another port of this one
        for what in ("iframe", "image", "script", "websocket", "empty"):
            foreign = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": what}
            assert servers.status(kind, PAGES[kind], **servers.login, **foreign) == 403, (site, what)
        link = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": "document"}
        assert servers.status(kind, PAGES[kind], **servers.login, **link) == 200, site
    frame = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "iframe"}
    assert servers.status(kind, PAGES[kind], **servers.login, **frame) == 200, "Studio's frame of the rollouts"
    for name in ("127.0.0.1", "localhost"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert servers.status(kind, PAGES[kind], **servers.login, **own) == 200, name


def test_studios_web_socket_needs_key_and_origin(servers: Servers) -> None:
    here = f"127.0.0.1:{servers.ports['studio']}"
    tries = {
        101: {**servers.login, "Origin": f"http://{here}"},
        401: {"Origin": f"http://{here}"},
        403: {**servers.login, "Origin": "http://127.0.0.1:1"},
        400: {**servers.login, "Host": "evil.example", "Origin": "http://evil.example"},
    }
    for status, headers in tries.items():
        with httpx.stream(
            "GET",
            f"http://{here}/_stcore/stream",
            headers={**UPGRADE, "Sec-WebSocket-Protocol": "streamlit", **headers},
        ) as answer:
            assert answer.status_code == status
    assert servers.status("studio", "/rollouts/api/runs") == 401
    with httpx.Client(base_url=servers.url("studio"), headers=servers.login) as client:
        assert client.get("/rollouts/api/runs").json() == ["p/one"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
def test_another_account_gets_nothing(servers: Servers) -> None:
    open_client(default_uri(servers.root / "checkpoints"), None, None, servers.root / "checkpoints")
    for folder in (servers.root, *servers.root.parents):  # pytest's own folders are closed to others
        if folder.is_relative_to(servers.root.parent.parent):
            folder.chmod(0o755)
    secrets = [path for path in servers.root.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {"prefect.key", "prefect.db", "mlflow.db"} <= {path.name for path in secrets}
    requests = [(servers.ports[kind], path, UPGRADE if upgrade else {}) for kind, path, upgrade in [
        *((kind, path, False) for kind, path in PAGES.items()),
        ("studio", "/_stcore/stream", True), ("prefect", "/api/events/in", True), ("prefect", "/api/events/out", True),
        ("mlflow", "/get-artifact?path=prefect.key&run_id=1", False), ("view", "/static/../app.py", False),
    ]]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", AS_STRANGER],
        input=json.dumps({"requests": requests, "files": [str(path) for path in secrets]}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    statuses, read = json.loads(done.stdout)
    assert {*statuses} <= {401, 403} and read == []


@pytest.mark.parametrize("umask", [0o002, 0o077])
@pytest.mark.parametrize(("shared", "group"), [(0o755, 0), (0o2755, 0o050), (0o2770, 0o070), (0o2700, 0)])
def test_what_commands_create_is_for_their_owner_and_the_group_of_a_shared_folder(
    tmp_path: Path, umask: int, shared: int, group: int
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    root.chmod(shared)
    before = os.umask(umask)
    try:
        claim(tmp_path / "quickstart", 1, [root / "quick/run"])
        page = Page("page", "Page", free_port(), [sys.executable, "-c", ""])
        start_page(tmp_path, page, UpState("http://127.0.0.1:1/api", []), print)
        TaskQueue(root / "p/queue.db", "tasks").create()
        ExperienceStore.open(root / "p/store/buffer.db").close()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_dir() or path.suffix == ".db"}
    assert len(modes) == 6
    for path, mode in modes.items():
        assert mode == ((0o700 | group) if path.is_dir() else (0o600 | group & 0o060)) & ~umask, path
    assert (tmp_path / "quickstart").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / ".trinity").stat().st_mode & 0o777 == 0o700


def test_the_key_of_another_account_is_not_used(tmp_path: Path) -> None:
    """It could have been put there, in a folder that all may write to, by somebody who then knows the key."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    server_key(tmp_path)
    os.chown(key_file(tmp_path), NOBODY, NOBODY)
    os.seteuid(1)
    try:
        with pytest.raises(Exception, match=r"prefect\.key"):
            server_key(tmp_path)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("text", "key"), [("me:secret\n", "me:secret"), ("a:b:c", "a:b:c")])
def test_a_key_of_ones_own_may_end_its_line(tmp_path: Path, text: str, key: str) -> None:
    make_state_dir(tmp_path)
    key_file(tmp_path).write_text(text)
    assert server_key(tmp_path) == key


@pytest.mark.parametrize("text", ["", "\n", "secret", ":secret", "me:", "me:a b", "me:a\nyou:b"])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    """No server could ask for it, nor any client send it."""
    make_state_dir(tmp_path)
    key_file(tmp_path).write_text(text)
    with pytest.raises(TrinityError):
        server_key(tmp_path)


pytestmark = pytest.mark.slow


def test_a_plain_mlflow_client_works_with_the_key(servers: Servers) -> None:
    script = """
import mlflow
mlflow.set_experiment("of a user")
with mlflow.start_run():
    mlflow.log_metric("loss", 0.5)
    mlflow.log_text("hello", "hello.txt")
print(mlflow.search_runs(experiment_names=["of a user"])["metrics.loss"].tolist())
"""
    user, _, password = server_key(servers.root).partition(":")
    client = {"MLFLOW_TRACKING_URI": servers.url("mlflow"), "MLFLOW_TRACKING_USERNAME": user}
    env = os.environ | client | {"MLFLOW_TRACKING_PASSWORD": password, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[0.5]"


def test_a_log_has_the_command_that_prints_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    key = server_key()
    password = key.partition(":")[2]
    text = asked_for(key)
    assert password not in text
    printed = subprocess.check_output(["sh", "-c", text.split("`")[1]], text=True)
    assert printed.strip() == password
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert password in asked_for(key)
