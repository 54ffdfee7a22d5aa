"""The command line: what it prints, how it fails, how soon it answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from errno import EACCES
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest import mock

import pytest
import typer
from commands import called
from ports import free_port
from prefect.utilities.engine import capture_sigterm
from typer.testing import CliRunner

from flows.cli import app, main
from flows.local.connection import PrefectConnection, known_server
from trinity_core import __version__
from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.program import TERMINATED, ending_on_sigterm, raise_dropped, run_app
from trinity_core.config.findings import ConfigError
from trinity_core.run.attempt import wait_for_all

ROOT = Path(__file__).parent.parent
VALIDATE = ["validate", "--offline", "--config", str(ROOT / "configs/quickstart/quickstart.yaml")]


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in (
        "run", "evaluate", "quickstart", "up", "down", "status", "tiny", "validate", "convert", "audit", "doctor",
        "log", "studio", "version", "import-verl",
    ):  # fmt: skip
        assert f" {command} " in result.output, command


def test_help_is_not_cut_at_80_columns() -> None:
    commands = [([name], command) for name, command in typer.main.get_command(app).commands.items()]  # type: ignore[attr-defined]
    for path, command in commands:
        commands += [([*path, name], below) for name, below in getattr(command, "commands", {}).items()]
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
        assert not re.search(r"\S…\s*│", shown), path


def test_usage_errors_say_what_to_write() -> None:
    for arguments, words in ((["doctor", "folder"], "--checkpoint-dir DIR"), (["run", "--lr", "3"], "key=value")):
        refused = CliRunner().invoke(app, arguments)
        assert refused.exit_code == 2 and words in refused.output


def test_a_folder_that_is_no_configuration_or_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/one.yaml").touch()
    for command, option, folder, code, words in (
        ("validate", "--config", "recipes", 2, "recipes/one.yaml"),
        ("validate", "--config", "empty", 2, "is a folder"),
        ("chat", "--checkpoint-dir", "empty", 1, "there is no run in"),
    ):
        done = called(main, command, option, str(tmp_path / folder))
        assert done.returncode == code and words in done.stderr and "Errno" not in done.stderr


def test_version() -> None:
    for arguments in (["version"], ["--version"]):
        assert CliRunner().invoke(app, arguments).output.strip() == __version__
    assert CliRunner().invoke(app, ["run", "-h"]).output == CliRunner().invoke(app, ["run", "--help"]).output


def test_validate_reports_all_problems_without_a_traceback(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("nmae: x\nalgorithm:\n  repeat_times: many\n")
    done = called(main, "validate", "--config", str(bad))
    assert done.returncode == 2
    assert "nmae" in done.stderr and "repeat_times" in done.stderr and "Did you mean 'name'" in done.stderr
    assert "Traceback" not in done.stderr


def test_import_verl_writes_a_file_that_validates(tmp_path: Path) -> None:
    script, out = ROOT / "tests/import_verl/documents/verl_grpo.sh", tmp_path / "run.yaml"
    done = called(main, "import-verl", str(script), "trainer.total_epochs=2", "-o", str(out))
    assert done.returncode == 0 and done.stdout == f"wrote {out}\n"
    assert "data_source" in done.stderr
    assert "total_epochs: 2  # trainer.total_epochs\n" in out.read_text()
    assert called(main, "validate", "--offline", "--config", str(out)).returncode == 0
    again = called(main, "import-verl", str(script), "-o", str(out))
    assert again.returncode == 1 and str(out) in again.stderr


def test_import_verl_takes_a_command_or_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "hydra.yaml").write_text(
        "data: {train_batch_size: 512}\nactor_rollout_ref: {model: {path: org/model}}\n"
    )
    command = ["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=512"]
    for words in (["--", *command], ["--yaml", str(tmp_path / "hydra.yaml"), "trainer.nnodes=1"]):
        done = called(main, "import-verl", *words)
        assert done.returncode == 0 and "sync_interval: 2" in done.stdout
    assert called(main, "import-verl").returncode == 2
    assert called(main, "import-verl", "--yaml", str(tmp_path / "run.sh")).returncode == 2
    other = called(main, "import-verl", "--", "python3", "-m", "other.trainer", "a=b")
    assert other.returncode == 2 and "starts a veRL training" in other.stderr


@pytest.mark.parametrize("text", ["nmae: x\n", None])
def test_run_refuses_a_wrong_or_missing_file_at_once(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.local.connection.PrefectConnection", nullcontext)
    file = tmp_path / "nmae.yaml"
    if text is not None:
        file.write_text(text)
    done = called(main, "run", "--config", str(file))
    assert done.returncode == 2 and "nmae" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "key"),
    [(["--which", "best"], "--which"), (["--which", "-1"], "--which"), (["--stage", "nope"], "stage"), ([], "stage")],
)
def test_evaluate_refuses_an_unknown_choice_before_ray_starts(
    given: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = mock.MagicMock()
    monkeypatch.setattr("flows.local.connection.PrefectConnection", connection)
    result = CliRunner().invoke(app, ["evaluate", "--config", str(ROOT / "configs/quickstart/quickstart.yaml"), *given])
    assert isinstance(result.exception, TrinityError) and result.exception.key == key
    connection().__enter__().flow.assert_not_called()


def test_a_user_without_an_account_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any user: Prefect asks for it at import."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    homes: list[Path] = []
    run_app(lambda: homes.append(Path.home()))
    assert homes == [Path("/")]


def test_no_file_takes_the_place_of_a_closed_output(tmp_path: Path) -> None:
    """As where a program starts it without any: what children print would stand in a store or a lock."""
    program = (
        "import os, sys; from trinity_core.base.program import run_app\n"
        "run_app(lambda: open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{fd}') for fd in (1, 2))))"
    )
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", program, str(tmp_path / "file")]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "/dev/null /dev/null"


def test_a_command_that_loads_triton_ends_without_its_list_of_objects() -> None:
    """As `trinity convert` does."""
    program = "from trinity_core.base.program import run_app; run_app(lambda: __import__('triton'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/api", "localhost:4200", "4200"])
def test_a_prefect_server_that_does_not_answer_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url.format(port=free_port())
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(TrinityError):
        known_server(Path.cwd())


def test_a_prefect_server_that_wants_a_key_is_left_to_prefect() -> None:
    """Its client knows the key."""

    class Closed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server, mock.patch.dict(os.environ):
        Thread(target=server.serve_forever, daemon=True).start()
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{server.server_port}/api"
        with PrefectConnection():
            pass
        server.shutdown()


def test_validate_shows_the_stages_with_overrides(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*VALIDATE, "name=other", f"checkpoint_root_dir={tmp_path}"])
    assert result.exit_code == 0, result.output
    assert "other_sft: sft" in result.output and f"{tmp_path}/Trinity-Flows/other_rft" in result.output


@pytest.mark.parametrize(
    ("given", "raised", "code"),
    [
        ([], None, 0),
        ([], DataError("row 7"), 1),
        ([], PermissionError(EACCES, "denied", "row 7"), 1),
        ([], ConfigError([]), 2),
        (["--nope"], None, 2),
        ([], KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_tell_what_ended_a_command(
    given: list[str],
    raised: BaseException | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        if raised:
            raise raised

    monkeypatch.setattr(sys, "argv", ["trinity", *given])
    with pytest.raises(SystemExit) as ended:
        run_app(failing)
    assert ended.value.code == code
    if code == 1:
        error = capsys.readouterr().err
        assert error.startswith("error: row 7") and error.count("\n") == 1, "one line, no traceback"


def test_tasks_are_added_counted_and_ended(tmp_path: Path) -> None:
    config, rows = tmp_path / "run.yaml", tmp_path / "rows.jsonl"
    config.write_text(
        f"checkpoint_root_dir: {tmp_path}\nmodel: {{model_path: m, max_model_len: 64}}\n"
        "buffer: {total_steps: 5, explorer_input: {taskset: {name: asked, storage_type: queue}}}\n"
    )
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def tasks(*args: str, **options: str) -> str:
        result = CliRunner().invoke(app, ["tasks", args[0], "--config", str(config), *args[1:]], **options)
        return result.output if result.exit_code == 0 else f"{result.exit_code}: {result.exception}"

    assert "added 2 tasks to 'asked' in " in tasks("add", "--file", str(rows))
    assert "added 1 tasks" in tasks("add", "--file", "-", input='{"prompt": "c"}\n')
    half = tasks("add", "--file", "-", input='{"prompt": "half of a character: \\ud83d"}\n')
    assert "line 1" in half and "nothing was added" in half
    refused = tasks("add", "--file", "-", input='{"prompt": "d"}\n\n3\n')
    assert "nothing was added, as line 3 of the input is not a task: the task is not a JSON object" in refused
    rows.write_text('{"prompt": "a"}\n{"prompt":\n')
    assert "nothing was added" in tasks("add", "--file", str(rows))
    assert "'asked' has 3 tasks (" in tasks("count")
    assert "no task set called 'other' of storage_type: queue" in tasks("end", "--taskset", "other")
    assert "'asked' ends after 3 tasks" in tasks("end") and "has ended" in tasks("count")
    assert "has ended after 3 tasks" in tasks("add", "--file", "-", input='{"prompt": "d"}\n')


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_closes_open_contexts_and_is_then_ignored(first: signal.Signals) -> None:
    """So does the end of its terminal."""
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    closed = []
    with pytest.raises(SystemExit) as ended, ending_on_sigterm():
        try:
            os.kill(os.getpid(), first)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append(True)
    assert ended.value.code == TERMINATED and closed
    assert signal.getsignal(signal.SIGTERM) is before[0]
    assert signal.signal(signal.SIGHUP, before[1]) is signal.SIG_DFL


class Finalized:
    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_in_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    """Python drops what a signal's handler raises there."""
    hangup, term = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended, ending_on_sigterm():
            raise_dropped()
            Finalized(number)
            raise_dropped()
        assert ended.value.code == TERMINATED
        raise_dropped()
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert signal.getsignal(signal.SIGTERM) is term


def test_cancellation_in_a_finalizer_stops_a_run() -> None:
    """The handler is Prefect's."""
    stopped = threading.Event()
    run = SimpleNamespace(check=lambda: Finalized(signal.SIGTERM), stop=stopped.set)
    with pytest.raises(SystemExit) as ended, ending_on_sigterm(), capture_sigterm(), ThreadPoolExecutor() as threads:
        wait_for_all(run, [threads.submit(stopped.wait, 60)], lambda future: False)
    assert ended.value.code == TERMINATED and stopped.is_set()


def test_a_command_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ending_on_sigterm():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
