"""Pages beside Prefect's: how they are served, and the warning if they are not."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from ports import free_port
from raising import raising

from flows.local.commands import Page, down, mlflow_page, port_is_free, serve_studio, start_page, status, up
from flows.local.server import Process, UpState, answers, comes_up
from trinity_core.base.addresses import LOOPBACK, page_address
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import file_digest
from trinity_core.base.gate import state_dir

API = "http://127.0.0.1:1/api"


def test_a_port_that_is_used_is_said_and_nothing_is_started(tmp_path: Path) -> None:
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not start_page(tmp_path, mlflow_page(tmp_path, port), UpState(API, []), said.append)
    [warning] = said
    assert str(port) in warning and "--mlflow-port" in warning
    assert not (tmp_path / "checkpoints").exists()


def test_a_used_port_of_prefect_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").touch()
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        with raising(TrinityError, key="--port"):
            up(tmp_path, taken.getsockname()[1], said.append)
    assert said == [] and [path.name for path in state_dir(tmp_path).iterdir()] == ["up.lock"]


def test_studio_needs_the_port_of_the_host_that_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr("os.execve", lambda *_: None)
    other = "127.0.0.2"
    with socket.create_server((other, 0)) as taken:
        port = taken.getsockname()[1]
        assert port_is_free(port) and not port_is_free(port, other) and not port_is_free(port, "0.0.0.0")
        with pytest.raises(TrinityError) as refused:
            serve_studio(tmp_path, tmp_path / "run.yaml", None, other, port)
    assert refused.value.key == "--port"


def test_studio_begins_in_a_folder_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect makes its own home, but no folder above it."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    monkeypatch.setattr("os.execve", lambda program, command, env: Path(env["PREFECT_HOME"]).iterdir())
    serve_studio(tmp_path, tmp_path / "run.yaml", None, LOOPBACK, free_port())


def test_a_folder_keeps_the_note_of_a_page_that_another_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both show the same runs, whose links lead to the page of the note."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "checkpoints"))
    urls, folders = list[str](), [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        port, state = free_port(), UpState(API, [])
        command = [sys.executable, "-m", "http.server", str(port), "--bind", LOOPBACK]
        page = Page("files", "Files", port, command)
        assert start_page(folder, page, state, print)
        assert comes_up(page.url, state.named("files")[0].alive, 60)
        urls.append(page.url)
    try:
        assert page_address(tmp_path / "checkpoints", "files") == urls[0]
    finally:
        down(folders[1], print)
        kept = page_address(tmp_path / "checkpoints", "files")
        down(folders[0], print)
    assert kept == urls[0] and not page_address(tmp_path / "checkpoints", "files")
    assert not any(answers(url) for url in urls)


def test_up_serves_a_page_that_has_ended_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real page, beside a server that is taken to be up."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", LOOPBACK]
    page, said = Page("files", "Files", port, command), list[str]()
    (tmp_path / "prefect.yaml").touch()
    running = [Process.of(name, os.getpid()) for name in ("server", "worker", "supervisor")]
    state = UpState(API, running, deployed=file_digest(tmp_path / "prefect.yaml"))
    assert start_page(tmp_path, page, state, said.append)
    [first] = state.named("files")
    monkeypatch.setattr("flows.local.commands.is_healthy", lambda api_url: True)
    monkeypatch.setattr("flows.local.commands.set_notifications", lambda *_: "")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    try:
        assert up(tmp_path, free_port(), said.append, pages=[page]).named("files")[0].pid == first.pid
        first.stop()
        second: Process = up(tmp_path, free_port(), said.append, pages=[page]).named("files")[0]
        assert second.pid != first.pid and answers(page.url)
        assert ["files", page.url] in [line.split() for line in status(tmp_path)]
    finally:
        monkeypatch.setattr("flows.local.commands.is_healthy", lambda api_url: False)
        first.stop()
        second.stop()
    assert not second.alive()
