"""Who can use the servers that we start: whoever has the folder's key, from a page of the server itself.

One server of each kind stands in one folder. Another account of the machine, a foreign page and a foreign name try what
was once possible: read the key through MLflow, and start a command with it through Prefect.
"""

from __future__ import annotations

import asyncio
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
from prefect.workers.process import ProcessJobConfiguration

from flows.local.commands import Page, start_page
from flows.local.server import TemporaryServer, UpState, prefect_environment
from flows.local.worker import POOL, make_pool
from flows.quickstart import claim
from trinity_core.base.files import write_json
from trinity_core.base.gate import key_file, server_key
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
HEALTH = {"mlflow": "/health", "studio": "/_stcore/health", "prefect": "/api/health"}
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
    assert [servers.status(kind, path) for path in (HEALTH.get(kind),) if path] in ([200], [])


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


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077])
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
        page = Page("page", "Page", free_port(), [sys.executable, "-c", ""], notes={root / "page/note.json": ""})
        start_page(tmp_path, page, UpState("http://127.0.0.1:1/api", []), print)
        TaskQueue(root / "p/queue.db", "tasks").create()
        ExperienceStore.open(root / "p/store/buffer.db").close()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_dir() or path.suffix == ".db"}
    assert len(modes) == 7
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


pytestmark = pytest.mark.slow
API = ("/api/2.0/mlflow", "/ajax-api/2.0/mlflow")


def places(root: Path) -> list[str]:
    return [
        f"file://{root}/.trinity", str(root / ".trinity"), "file:///tmp", "../../.trinity", "http://127.0.0.1:1/x",
        "s3://bucket/x", "mlflow-artifacts:/../.trinity", "ftp://127.0.0.1/x", f"file://{root}/checkpoints/mlflow_artifacts/1/../../../.trinity",
    ]  # fmt: skip


def test_no_request_names_a_place_for_artifacts(servers: Servers) -> None:
    root = servers.root
    for number, place in enumerate(places(root)):
        for api in API:
            for key in ("artifact_location", "artifactLocation"):
                made = servers.mlflow("POST", f"{api}/experiments/create", {"name": f"e{number}", key: place})
                assert made.status_code == 400, (place, key, made.text)
    run = begin_run(servers, "with versions")
    servers.mlflow("POST", f"{API[0]}/registered-models/create", {"name": "m"})
    for place in places(root):
        for more in ({}, {"run_id": run["run_id"]}):
            version = {"name": "m", "source": place, **more}
            assert servers.mlflow("POST", f"{API[0]}/model-versions/create", version).status_code == 400, place
    own = {"name": "m", "run_id": run["run_id"], "source": f"{run['artifact_uri']}/model"}
    assert servers.mlflow("POST", f"{API[0]}/model-versions/create", own).status_code == 200
    for version in ({"source": f"runs:/{run['run_id']}/model", "run_id": run["run_id"]},):
        assert servers.mlflow("POST", f"{API[0]}/model-versions/create", {"name": "m", **version}).status_code == 200


def begin_run(servers: Servers, experiment: str) -> dict[str, Any]:
    made = servers.mlflow("POST", f"{API[0]}/experiments/create", {"name": experiment}).json()
    begun = servers.mlflow("POST", f"{API[0]}/runs/create", {"experiment_id": made["experiment_id"]}).json()
    return dict(begun["run"]["info"])


def test_links_out_of_the_artifacts_are_not_followed(servers: Servers) -> None:
    run = begin_run(servers, "with links")
    folder = Path(run["artifact_uri"].removeprefix("file://"))
    folder.mkdir(parents=True)
    (folder / "own.txt").write_text("own")
    (folder / "file.key").symlink_to(key_file(servers.root))
    (folder / "folder").symlink_to(servers.root / ".trinity")
    (folder / "traces.json").symlink_to(servers.root / "secret.json")
    write_json(servers.root / "secret.json", {"spans": []})
    read = {
        path: servers.mlflow("GET", "/get-artifact", run_id=run["run_id"], path=path).status_code
        for path in ("own.txt", "file.key", "folder/prefect.key", "../../../../.trinity/prefect.key")
    }
    assert read.pop("own.txt") == 200 and {*read.values()} <= {400, 404}, read
    for path in ("", "folder"):
        listed = servers.mlflow("GET", f"{API[0]}/artifacts/list", run_id=run["run_id"], path=path)
        names = [file["path"] for file in listed.json().get("files", [])]
        assert names in ([], ["own.txt"]), listed.text
    with httpx.Client(base_url=servers.url("mlflow"), headers=servers.login) as client:
        for path in ("folder/new.txt", "file.key"):
            where = f"/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run['run_id']}&path={path}"
            client.post(where, content=b"mine")
    assert not (servers.root / ".trinity/new.txt").exists() and key_file(servers.root).read_text() != "mine"
    assert servers.status("mlflow", "/", **servers.login) == 200, "the key is still the key"


def test_places_that_stand_in_the_store_are_not_served(servers: Servers) -> None:
    """Such as those that were once named by a request, and a folder of the artifacts that is a link."""
    checkpoints = servers.root / "checkpoints"
    client = open_client(default_uri(checkpoints), None, None, checkpoints)
    for number, place in enumerate(
        ((servers.root / ".trinity").as_uri(), (checkpoints / "mlflow_artifacts/link").as_uri())
    ):
        run = client.create_run(client.create_experiment(f"stored {number}", place)).info
        target = Path(run.artifact_uri.removeprefix("file://"))
        if number == 0:
            target.mkdir(parents=True)
        else:
            target.parents[1].symlink_to(servers.root / ".trinity")
            target.mkdir(parents=True)
        (target / "x.txt").write_text("x")
        assert servers.mlflow("GET", "/get-artifact", run_id=run.run_id, path="x.txt").status_code == 400
        assert servers.mlflow("GET", f"{API[0]}/artifacts/list", run_id=run.run_id).status_code == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("PUT", f"{api}/2.0/mlflow-artifacts/artifacts/x.txt") for api in ("/api", "/ajax-api")),
        ("GET", "/api/2.0/mlflow-artifacts/artifacts/x.txt"),
        ("DELETE", "/api/2.0/mlflow-artifacts/artifacts/x.txt"),
        ("POST", "/ajax-api/3.0/mlflow/assistant/message"),
        ("GET", "/ajax-api/3.0/mlflow/assistant/config"),
        ("POST", "/ajax-api/3.0/jobs/"),
        ("POST", "/api/2.0/mlflow/webhooks"),
        ("POST", "/ajax-api/2.0/mlflow/webhooks/1/test"),
        ("POST", "/ajax-api/3.0/mlflow/gateway/secrets/create"),
        ("POST", "/gateway/mlflow/v1/chat/completions"),
        ("POST", "/gateway/proxy/x/y"),
        ("POST", "/ajax-api/2.0/mlflow/gateway-proxy"),
    ],
)
def test_parts_of_mlflow_that_run_commands_or_call_out_are_closed(servers: Servers, method: str, path: str) -> None:
    assert servers.mlflow(method, path, {}).status_code in (403, 501, 503)


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


NO_CLIENT: Any = object()
JOB_VARIABLES: list[tuple[dict[str, Any], bool]] = [
    ({"env.TRINITY_MODEL_PATH": "/models/qwen"}, True),
    ({"env": {"TRINITY_MODEL_PATH": "/models/qwen", "CUDA_VISIBLE_DEVICES": "0", "OPENAI_API_KEY": "k"}}, True),
    ({}, True),
    ({"command": "touch /tmp/x"}, False),
    ({"working_dir": "/tmp"}, False),
    ({"job_configuration": {"command": "touch /tmp/x"}}, False),
    *(({"env": {name: "/tmp/x"}}, False) for name in ("PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "BASH_ENV")),
    *(({f"env.{name}": "/tmp/x"}, False) for name in ("PATH", "LD_LIBRARY_PATH", "PREFECT_API_URL", "MY_TRINITY_X")),
    ({"env": {"TRINITY_X": "1", "PATH": "/tmp/x"}}, False),
    ({"env.TRINITY_X.PATH": "1"}, False),
    ({"env": "PATH=/tmp/x"}, False),
]


@pytest.fixture(scope="module")
def deployment(servers: Servers) -> str:
    """A deployment in the pool of `trinity up`: its id."""
    make_pool(servers.root, servers.url("prefect") + "/api")
    with servers.prefect() as prefect:
        flow = prefect.post("flows/", json={"name": "f"}).json()["id"]
        wanted = {"name": "d", "flow_id": flow, "work_pool_name": "trinity", "entrypoint": "f.py:f"}
        return str(prefect.post("deployments/", json=wanted).raise_for_status().json()["id"])


@pytest.mark.parametrize(("variables", "is_taken"), JOB_VARIABLES)
def test_no_request_sets_what_makes_a_command(
    servers: Servers, deployment: str, variables: dict[str, Any], is_taken: bool
) -> None:
    with servers.prefect() as prefect:
        where = f"deployments/{deployment}"
        assert prefect.post(f"{where}/create_flow_run", json={"job_variables": variables}).is_success == is_taken
        prefect.patch(where, json={"job_variables": variables})
        assert prefect.post(f"{where}/create_flow_run", json={}).is_success == is_taken, "those of the deployment"
        prefect.patch(where, json={"job_variables": {}})
        template = prefect.get("work_pools/trinity").json()["base_job_template"]
    run = (
        asyncio.run(ProcessJobConfiguration.from_template_and_values(template, variables, client=NO_CLIENT))
        if is_taken
        else None
    )
    assert run is None or (run.command is None and run.working_dir is None)


def test_a_command_among_the_job_variables_has_no_effect(servers: Servers, deployment: str) -> None:
    """Also where nobody has checked them, as with a deployment that is older than its pool."""
    with servers.prefect() as prefect:
        template = prefect.get("work_pools/trinity").json()["base_job_template"]
    values = {"command": "touch /tmp/x", "working_dir": "/tmp", "env": {"TRINITY_X": "1"}}
    job = asyncio.run(ProcessJobConfiguration.from_template_and_values(template, values, client=NO_CLIENT))
    assert (job.command, job.working_dir, job.env) == (None, None, {"TRINITY_X": "1"})


def test_a_trace_reads_no_place_that_a_request_names(servers: Servers) -> None:
    """Where a trace's spans are is a tag of it."""
    (servers.root / "traces.json").write_text('{"spans": [], "secret": 1}')
    experiment = begin_run(servers, "with traces")["experiment_id"]
    place = {"key": "mlflow.artifactLocation", "value": servers.root.as_uri()}
    info = {
        "trace_id": "tr-" + "1" * 32, "request_time": "2026-01-01T00:00:00Z", "state": "OK",
        "tags": {place["key"]: place["value"]},
        "trace_location": {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}},
    }  # fmt: skip
    assert not servers.mlflow("POST", "/api/3.0/mlflow/traces", {"trace": {"trace_info": info}}).is_success
    begun = servers.mlflow("POST", "/api/3.0/mlflow/traces", {"trace": {"trace_info": info | {"tags": {}}}})
    assert begun.is_success, begun.text
    for version in ("2.0", "3.0"):
        for _ in range(2):
            read = servers.mlflow("GET", f"/ajax-api/{version}/mlflow/get-trace-artifact", request_id=info["trace_id"])
            assert "secret" not in read.text and not (read.is_success and "spans" in read.text), read.text
            servers.mlflow("PATCH", f"/api/2.0/mlflow/traces/{info['trace_id']}/tags", place)


def test_links_in_a_logged_models_folder_are_not_followed(servers: Servers) -> None:
    experiment = begin_run(servers, "with models")["experiment_id"]
    made = servers.mlflow("POST", f"{API[0]}/logged-models", {"experiment_id": experiment, "name": "m"})
    model = made.json()["model"]["info"]
    folder = Path(model["artifact_uri"].removeprefix("file://"))
    folder.mkdir(parents=True)
    (folder / "MLmodel").write_text("own")
    (folder / "key").symlink_to(key_file(servers.root))
    url = f"/ajax-api/2.0/mlflow/logged-models/{model['model_id']}/artifacts/files"
    assert servers.mlflow("GET", url, artifact_file_path="MLmodel").text == "own"
    assert servers.mlflow("GET", url, artifact_file_path="key").status_code in (400, 404)


def test_an_earlier_releases_template_is_replaced(servers: Servers) -> None:
    api_url = servers.url("prefect") + "/api"
    make_pool(servers.root, api_url)
    with servers.prefect() as client:
        template = client.get(f"/work_pools/{POOL}").json()["base_job_template"]
        earlier = {**template, "job_configuration": {**template["job_configuration"], "command": "other"}}
        assert client.patch(f"/work_pools/{POOL}", json={"base_job_template": earlier}).is_success
        make_pool(servers.root, api_url)
        assert client.get(f"/work_pools/{POOL}").json()["base_job_template"] == template
