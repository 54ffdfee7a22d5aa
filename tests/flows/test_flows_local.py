"""`trinity up`'s own bookkeeping: what was started is known again, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from ports import free_port

from flows.local.commands import down, remove_settings, status, up, write_settings
from flows.local.connection import PrefectConnection, ServerLost, known_server
from flows.local.prefect_app import leave_out_the_new_page
from flows.local.server import (
    Process,
    TemporaryServer,
    UpState,
    client_environment,
    is_healthy,
    prefect_environment,
)
from flows.local.worker import Supervisor
from flows.project import NO_SERVER, SETTINGS_FILE
from trinity_core.base import files
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import file_digest, write_json
from trinity_core.base.gate import key_file, server_key, state_dir
from trinity_core.base.layout import MANIFEST, JobLayout
from trinity_core.base.runlock import one_at_a_time
from trinity_core.config import config_from_dict, stages
from trinity_core.exchange.tracking.run_record import record_end, record_start
from trinity_core.exchange.tracking.writers import RunOutcome
from trinity_core.run.stage import in_fresh_folder


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most servers here are processes that answer nobody."""
    monkeypatch.setattr("flows.local.commands.BUSY_SECONDS", 0.1)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)


def test_down_names_the_runs_that_it_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline and its stage are one process."""
    monkeypatch.delenv("TRINITY_CHECKPOINT_ROOT_DIR", raising=False)
    for name in ("all", "all_sft", "over"):
        own = record_start(job := tmp_path / "checkpoints/p" / name, {}, "rft")
    record_end(job, own, RunOutcome.FINISHED)
    said: list[str] = []
    assert not down(tmp_path, said.append)
    [line] = said
    assert "p/all, p/all_sft." in line and f"kill {os.getpid()}`" in line


def test_down_stops_exactly_what_is_recorded(tmp_path: Path) -> None:
    ours, other = sleeper(), sleeper()
    UpState("http://127.0.0.1:1/api", [Process.of("server", ours.pid)]).save(tmp_path)
    write_settings(tmp_path, "http://127.0.0.1:1/api")
    said: list[str] = []
    assert any(f"pid {ours.pid} running" in line for line in status(tmp_path))
    assert down(tmp_path, said.append)
    assert ours.poll() is not None and other.poll() is None
    assert said == ["Stopping the server …"]
    assert (tmp_path / SETTINGS_FILE).read_text() == NO_SERVER and UpState.load(tmp_path) is None
    assert not down(tmp_path, said.append)
    other.kill()
    other.wait()


def test_down_lets_a_run_save_also_where_no_server_answers(tmp_path: Path) -> None:
    """A worker waits for its run, to which nobody but `down` says that it is to end."""
    run = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))\n"
        "print(flush=True); time.sleep(60)"
    )
    worker = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    )
    command = [sys.executable, "-c", worker, run, str(tmp_path / "saved")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None and child.stdout.readline()
    UpState(f"http://127.0.0.1:{free_port()}/api", [Process.of("worker", child.pid)]).save(tmp_path)
    assert down(tmp_path, print)
    assert (tmp_path / "saved").exists() and child.wait(timeout=5) == 0


def test_down_ignores_the_runs_of_another_server_on_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the machine the record is of processes that are no more."""
    gone = sleeper()
    known = [Process.of(name, gone.pid) for name in ("server", "worker")]
    known[0].stop()
    UpState("http://127.0.0.1:1/api", known).save(tmp_path)
    monkeypatch.setattr("flows.local.commands.is_healthy", lambda api_url: True)
    monkeypatch.setattr("flows.local.commands.api_client", lambda *_: pytest.fail("it is another's"))
    said: list[str] = []
    assert down(tmp_path, said.append)
    assert not said


def test_one_up_or_down_at_a_time_works_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that began together would each start a server, a worker and a supervisor, and record those of one."""
    monkeypatch.setattr("flows.local.commands.UP_SECONDS", 0.1)
    (tmp_path / "prefect.yaml").touch()
    server = sleeper()
    UpState(f"http://127.0.0.1:{free_port()}/api", [Process.of("server", server.pid)]).save(tmp_path)
    with one_at_a_time(state_dir(tmp_path) / "up.lock"):
        for command in (lambda: up(tmp_path, free_port(), print), lambda: down(tmp_path, print)):
            with pytest.raises(TransientFault):
                command()
    assert server.poll() is None
    assert down(tmp_path, print) and server.poll() is not None


def test_up_leaves_the_supervisor_where_the_port_of_an_ended_server_is_taken(tmp_path: Path) -> None:
    """Its worker continues, and needs it."""
    supervisor = sleeper()
    ended = Process("server", 2**22 + 1, 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}/api"
        UpState(url, [ended, Process.of("supervisor", supervisor.pid)]).save(tmp_path)
        (tmp_path / "prefect.yaml").touch()
        with pytest.raises(TrinityError, match="Free the port"):
            up(tmp_path, free_port(), print)
    assert supervisor.poll() is None
    assert down(tmp_path, print) and supervisor.poll() is not None


def test_a_damaged_record_is_warned_of_and_taken_as_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state_dir(tmp_path).mkdir()
    (state_dir(tmp_path) / "up.json").write_text('{"api_url": "http:')
    assert "Nothing is running" in status(tmp_path)[0]
    assert "up.json is damaged" in caplog.text
    assert not down(tmp_path, print)


def test_a_worker_that_ended_is_started_again_at_most_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, started = [time.time()], list[float]()

    def start_worker(root: Path, api_url: str) -> Process:
        started.append(now[0])
        return Process("worker", 2**22 + len(started), now[0])

    UpState("http://127.0.0.1:1/api", [Process("worker", 2**22, now[0])]).save(tmp_path)
    monkeypatch.setattr("flows.local.worker.start_worker", start_worker)
    monkeypatch.setattr("flows.local.worker.time", SimpleNamespace(time=lambda: now[0]))
    supervisor = Supervisor(SimpleNamespace(), tmp_path, datetime.now(UTC), 0)  # type: ignore[arg-type]
    for _ in range(200):
        now[0] += 1
        supervisor._keep_worker()
    assert [round(later - earlier) for earlier, later in pairwise(started)] == [61, 61]
    assert str(tmp_path / ".trinity/log/worker.log") in caplog.text


TERMINATED_UP = """
import subprocess, sys, time
import flows.local.commands
from flows.local.server import Process

def start(root, state, say):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    state.record(Process.of("server", child.pid), root)
    print(child.pid, flush=True)
    time.sleep(60)

flows.local.commands._start_server = start
sys.argv = ["trinity", "up", "--port", sys.argv[1]]
from flows.cli import main
main()
"""


@pytest.mark.campaign
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_an_ended_up_has_started_is_ended(tmp_path: Path, end: signal.Signals) -> None:
    """By itself, or by `down` where it was killed."""
    (tmp_path / "prefect.yaml").touch()
    command = [sys.executable, "-c", TERMINATED_UP, str(free_port())]
    child = subprocess.Popen(command, cwd=tmp_path, env=with_our_path(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    server = Process.of("server", int(child.stdout.readline()))
    child.send_signal(end)
    assert child.wait(timeout=60) == (143 if end == signal.SIGTERM else -signal.SIGKILL)
    assert down(tmp_path, print) == (end == signal.SIGKILL) and not server.alive()


def with_our_path() -> dict[str, str]:
    """For a child that works in another folder."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}


def test_a_folder_has_one_key_which_only_its_owner_reads(tmp_path: Path) -> None:
    state_dir(tmp_path).mkdir(mode=0o755)  # as earlier releases made it
    write_settings(tmp_path, "http://127.0.0.1:1/api")
    key, kept = server_key(tmp_path), (key_file(tmp_path), tmp_path / SETTINGS_FILE)
    assert [path.stat().st_mode & 0o777 for path in (state_dir(tmp_path), *kept)] == [0o700, 0o600, 0o600]
    assert all(key in path.read_text() for path in kept) and server_key(tmp_path) == key
    assert client_environment("", tmp_path)["PREFECT_API_AUTH_STRING"] == key != server_key(tmp_path / "other")


@pytest.mark.campaign
def test_another_server_does_not_get_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even from our `prefect.toml`, if PREFECT_API_URL names it."""
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    ask = (
        "from prefect.client.orchestration import get_client; print(get_client()._client.headers.get('authorization'))"
    )
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for host, is_ours in (("127.0.0.1", True), ("localhost", True), ("127.0.0.1", False)):
            own = f"http://127.0.0.1:{server.server_port}/api"
            UpState(own if is_ours else "http://127.0.0.1:1/api", []).save(tmp_path)
            write_settings(tmp_path, own)
            monkeypatch.setenv("PREFECT_API_URL", f"http://{host}:{server.server_port}/api")
            env = os.environ | known_server(tmp_path)
            said = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert (said.stdout != "None\n") == is_ours, said.stderr
        server.shutdown()


@pytest.mark.slow
def test_while_nothing_is_up_prefect_starts_no_server_of_its_own(tmp_path: Path) -> None:
    """It would take a minute, and have no deployments. A server of the user's is still found."""
    write_settings(tmp_path, "http://127.0.0.1:1/api")
    remove_settings(tmp_path)
    script = "from prefect import get_client; print(get_client(sync_client=True).api_url)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    theirs = {"PREFECT_API_URL": "http://127.0.0.1:2/api"}
    alone, served = (
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment | more, capture_output=True)
        for more in ({}, theirs)
    )
    assert alone.returncode and b"PREFECT_API_URL" in alone.stderr
    assert served.stdout.startswith(b"http://127.0.0.1:2/api")


def test_a_settings_file_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / SETTINGS_FILE
    own.write_text("[api]\n")
    with pytest.raises(TrinityError):
        write_settings(tmp_path, "http://127.0.0.1:1/api")
    remove_settings(tmp_path)
    assert own.read_text() == "[api]\n"
    own.write_text(f'[api]\nurl = "http://127.0.0.1:1/api"\nauth_string = "{server_key(tmp_path)}"\n')
    write_settings(tmp_path, "http://127.0.0.1:1/api")


def test_up_wants_a_prefect_yaml(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(TrinityError):
        up(tmp_path, free_port(), said.append)
    assert said == [], "nothing was started"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for everything, and nobody there."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_another_command_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Not one that still answers: then the fault is another's."""
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        monkeypatch.setattr("flows.local.connection.prefect_environment", lambda _: {})
        with pytest.raises(httpx.ConnectError if answers else ServerLost), PrefectConnection(tmp_path):
            if not answers:
                server.shutdown()
                server.server_close()
            raise httpx.ConnectError("gone")
        if answers:
            server.shutdown()


def test_a_proxy_is_not_asked_for_this_machine(proxy: None) -> None:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert is_healthy(f"http://127.0.0.1:{server.server_port}/api")


@pytest.mark.parametrize(
    ("given", "lower", "upper"),
    [
        ({}, "127.0.0.1,localhost", "127.0.0.1,localhost"),
        ({"NO_PROXY": "hub, localhost"}, "hub,localhost,127.0.0.1", "hub,localhost,127.0.0.1"),
        ({"NO_PROXY": "hub", "no_proxy": "here"}, "here,127.0.0.1,localhost", "hub,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*", "*"),
    ],
)
def test_what_we_start_asks_no_proxy_for_this_machine(
    given: dict[str, str], lower: str, upper: str, proxy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = prefect_environment(Path.cwd())
    assert (environment["no_proxy"], environment["NO_PROXY"]) == (lower, upper)


def test_nobody_answers_where_something_else_does() -> None:
    """SSH, say, which greets whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connected, _ = server.accept()
            with connected:
                connected.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=greet, daemon=True).start()
        assert not is_healthy(f"http://127.0.0.1:{server.getsockname()[1]}/api")


def test_prefect_keeps_pictures_of_reports_for_an_hour_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each update of the learning curve comes an event that holds all of it."""
    from prefect.settings.models.server.services import ServerServicesDBVacuumSettings

    default = ServerServicesDBVacuumSettings().event_retention_overrides
    for name, value in prefect_environment(Path.cwd()).items():
        monkeypatch.setenv(name, value)
    ours = ServerServicesDBVacuumSettings()
    assert "events" in ours.enabled_vacuum_types and ours.loop_seconds <= 3600
    assert ours.event_retention_overrides == default | {"prefect.artifact.updated": timedelta(hours=1)}


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_SERVER_MEMO_STORE_PATH", raising=False)  # a command in this process sets it
    for given, home in (("/elsewhere", "/elsewhere"), (None, str(tmp_path / ".trinity" / "prefect"))):
        if given:
            monkeypatch.setenv("PREFECT_HOME", given)
        else:
            monkeypatch.delenv("PREFECT_HOME", raising=False)
        ours = prefect_environment(tmp_path)
        assert (ours["PREFECT_HOME"], ours["PREFECT_SERVER_MEMO_STORE_PATH"]) == (home, f"{home}/memo_store.toml")


@pytest.mark.campaign
def test_a_temporary_server_does_not_outlive_a_killed_run(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from flows.local.server import start_process\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = start_process('x', sleeps, {}, Path(sys.argv[1]), False)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Process.of("x", int(parent.stdout.readline()))
    assert child.alive()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while child.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.alive()
    assert os.getpid() != child.pid


@pytest.mark.parametrize(
    ("flow", "changes", "is_resumed"),
    [
        ("rft", {}, True),
        ("rft", {"continue_from_checkpoint": False}, True),
        ("pipeline", {"continue_from_checkpoint": False, "stages": [{"stage_name": "tune"}]}, True),
        ("rft", {"mode": "explore"}, False),
        ("evaluate", {}, False),
    ],
)
def test_a_command_that_a_signal_ends_promises_a_resume_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flow: str,
    changes: dict[str, object], is_resumed: bool,
) -> None:  # fmt: skip
    """At once: the contents of checkpoints, which may be hundreds of gigabytes, are not read. A run begun anew, beside
    another one of its name, is resumed by the name of its folder."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def unreadable(path: Path) -> str:
        raise OSError(errno.EIO, "not now", str(path))

    config = config_from_dict({
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "m", "max_response_tokens": 8, "max_model_len": 16},
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        **changes,
    })  # fmt: skip
    JobLayout(config.job_dir).create()
    run = in_fresh_folder(config, "")
    (own,) = stages(run)
    write_json(JobLayout(run.job_dir).stages, {})
    record_start(run.job_dir, {}, flow)
    for step, manifest in {3: '{"files": {"weights": {"size": 1, "sha256": "0"}}}', 5: None}.items():
        folder = JobLayout(own.job_dir).step(step)
        folder.mkdir(parents=True)
        (folder / "weights").write_text("w")
        if manifest:
            (folder / MANIFEST).write_text(manifest)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr("flows.local.connection.known_server", lambda _: {"PREFECT_API_URL": "http://127.0.0.1:1/api"})
    monkeypatch.setattr("flows.local.connection.prefect_environment", lambda _: {})
    monkeypatch.setattr("flows.loaded.run_flow", interrupted)
    monkeypatch.setattr("trinity_core.exchange.checkpoints.commit.READ_SECONDS", 0.0)
    monkeypatch.setattr("trinity_core.exchange.checkpoints.commit.file_digest", unreadable)
    with pytest.raises(KeyboardInterrupt), PrefectConnection(tmp_path) as prefect:
        prefect.run(flow, config, tmp_path / "run.yaml", [])
    told = capsys.readouterr().err
    assert ("of n" in told) == (f"step 3 of {own.name}." in told) == is_resumed
    resumes = f"name={run.name} continue_from_checkpoint=true" in told
    assert resumes == (run.name != config.name) == ("continue_from_checkpoint" in changes)


@pytest.mark.parametrize(
    ("given", "warned"), [("http://there:4200/api", True), ("http://localhost:4200/api/", False), ("", False)]
)
def test_up_says_that_prefect_commands_go_to_another_server(
    given: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up already, it sets the notifications that prefect.yaml names by now."""
    running = [Process.of(name, os.getpid()) for name in ("server", "worker", "supervisor")]
    monkeypatch.setattr("flows.local.commands.set_notifications", lambda root, api_url: f"failed, at {api_url}")
    (tmp_path / "prefect.yaml").touch()
    UpState("http://127.0.0.1:4200/api", running, deployed=file_digest(tmp_path / "prefect.yaml")).save(tmp_path)
    monkeypatch.setattr("flows.local.commands.deploy", lambda *_: pytest.fail("prefect.yaml has not changed"))
    monkeypatch.setenv("PREFECT_API_URL", given)
    said: list[str] = []
    up(tmp_path, 4200, said.append)
    assert any("unset PREFECT_API_URL" in line and "http://there" in line for line in said) == warned
    assert any(line.endswith("failed, at http://127.0.0.1:4200/api") for line in said)


@pytest.mark.parametrize(
    ("deployed", "wanted"), [("", ["pool", "deployments"]), ("of another file", ["deployments"]), (None, [])]
)
def test_up_again_deploys_a_changed_prefect_yaml(
    deployed: str | None, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And completes what an `up` that was killed has begun."""
    (tmp_path / "prefect.yaml").touch()
    running = [Process.of(name, os.getpid()) for name in ("server", "worker", "supervisor")]
    digest, made = file_digest(tmp_path / "prefect.yaml"), list[str]()
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api_url = f"http://127.0.0.1:{server.server_port}/api"
        UpState(api_url, running, deployed=digest if deployed is None else deployed).save(tmp_path)
        monkeypatch.setattr("flows.local.commands.make_pool", lambda *_: made.append("pool"))
        monkeypatch.setattr("flows.local.commands.deploy", lambda *_: made.append("deployments"))
        monkeypatch.setattr("flows.local.commands.set_notifications", lambda *_: "")
        for _ in range(2):
            up(tmp_path, 4200, print)
        server.shutdown()
    state = UpState.load(tmp_path)
    assert made == wanted and state is not None and state.deployed == digest
    assert (tmp_path / SETTINGS_FILE).exists() == (deployed == "")


def full_disk(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_up_leaves_nothing_where_it_cannot_write_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prefect.yaml").touch()
    children: list[subprocess.Popen[bytes]] = []

    def start(root: Path, state: UpState, say: object) -> None:
        children.append(sleeper())
        state.record(Process.of("server", children[0].pid), root)

    def started_sleeper(name: str) -> Process:
        if name == "supervisor":
            monkeypatch.setattr(os, "fsync", full_disk)
        children.append(sleeper())
        return Process.of(name, children[-1].pid)

    monkeypatch.setattr("flows.local.commands._start_server", start)
    monkeypatch.setattr("flows.local.commands._deploy_changes", lambda *_: None)
    monkeypatch.setattr("flows.local.commands._mark_left_runs", lambda *args, **_: None)
    monkeypatch.setattr("flows.local.commands.set_notifications", lambda *_: "")
    monkeypatch.setattr("flows.local.commands.start_worker", lambda *_: started_sleeper("worker"))
    monkeypatch.setattr("flows.local.commands.start_supervisor", lambda *_: started_sleeper("supervisor"))
    monkeypatch.setattr(files, "ROOM_SECONDS", 0.0)
    with pytest.raises(TrinityError, match="no space left"):
        up(tmp_path, free_port(), print, restarts=0)
    assert [child.wait(timeout=10) is not None for child in children] == [True, True, True]
    assert not (tmp_path / SETTINGS_FILE).exists() and UpState.load(tmp_path) is None


@pytest.mark.slow
def test_commands_that_start_together_in_a_new_folder_have_a_server_each(tmp_path: Path) -> None:
    """The servers share a database, which one of them makes."""
    servers = [TemporaryServer(tmp_path) for _ in range(3)]
    try:
        for server in servers:
            server.wait()
    finally:
        for server in servers:
            server.stop()


def test_only_who_has_the_key_reaches_a_temporary_server(prefect_api: str) -> None:
    """Neither other accounts of this machine nor sites in a browser, whose runs could be any command."""
    user, password = os.environ["PREFECT_API_AUTH_STRING"].split(":")
    answers = [
        httpx.post(f"{prefect_api}/deployments/filter", json={}, headers=headers, auth=auth, timeout=60).status_code
        for headers in ({}, {"Origin": "https://evil.example"}, {"Host": "evil.example"})
        for auth in (None, (user, "guess"), (user, password))
    ]
    assert answers == [401, 401, 200, *[403] * 3, *[400] * 3]


def test_a_supervisor_survives_what_keeps_it_from_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, killed runs would not be started again, and nobody would notice."""
    UpState("http://127.0.0.1:1/api", [Process("worker", 2**22 + 1, 0.0)]).save(tmp_path)
    monkeypatch.setattr("flows.local.worker.start_worker", lambda *_: full_disk(0))
    looks = Supervisor(SimpleNamespace(), tmp_path, datetime.now(UTC), 0)  # type: ignore[arg-type]
    looks.look()
    assert "No space left" in caplog.text


def test_what_runs_here_leads_the_list_of_deployments(prefect_api: str) -> None:
    """In the order in which Prefect's page asks for them at first."""
    from prefect.client.schemas.sorting import DeploymentSort

    from tasks.prefect_api import api_client

    with api_client(prefect_api) as client:
        flow_id = client.create_flow_from_name("of_a_list")
        for name, tags in (("b", []), ("a", ["async", "GPUs"]), ("quickstart", []), ("c", ["no GPU"])):
            client.create_deployment(flow_id, name=name, tags=tags)
        response = client.request(
            "POST", "/deployments/filter",
            json={"flows": {"name": {"any_": ["of_a_list"]}}, "sort": DeploymentSort.NAME_ASC.value},
        )  # fmt: skip
    assert [deployment["name"] for deployment in response.json()] == ["quickstart", "b", "c", "a"]


def test_prefects_page_does_not_lead_to_the_one_that_refuses_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prefect
    from prefect.server.api.server import create_ui_app
    from prefect.settings import PREFECT_UI_ENABLED, PREFECT_UI_STATIC_DIRECTORY, temporary_settings
    from starlette.testclient import TestClient

    monkeypatch.setattr(prefect, "__ui_v2_static_path__", prefect.__ui_v2_static_path__)
    leave_out_the_new_page()
    with temporary_settings({PREFECT_UI_ENABLED: True, PREFECT_UI_STATIC_DIRECTORY: str(tmp_path)}):
        page = TestClient(create_ui_app(ephemeral=False), follow_redirects=False)
    assert page.get("/ui-settings").json()["available_uis"] == ["v1"]
    assert page.get("/v2/login", headers={"Accept": "text/html"}).headers["location"] == "/login"
