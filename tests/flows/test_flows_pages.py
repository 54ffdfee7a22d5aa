"""Pages beside Prefect's: MLflow opens the charts of the run that a link leads to, and `down` ends its server."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
from ports import free_port

from flows.local.commands import down, status, up
from flows.local.pages import Page, mlflow_page, port_is_free, start_page, wait_for_page
from flows.local.server import Process, UpState, answers
from trinity_core.addresses import LOOPBACK
from trinity_core.errors import TrinityError
from trinity_core.tracking.forwarder import open_writer
from trinity_core.tracking.metrics_file import MetricLine
from trinity_core.tracking.writers import RunInfo, RunOutcome

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import opened

API = "http://127.0.0.1:1/api"


@pytest.mark.slow
def test_a_runs_link_leads_to_the_mlflow_that_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", "runs")
    page = mlflow_page(tmp_path, free_port())
    said: list[str] = []
    state = UpState(API, [])
    assert start_page(tmp_path, page, state, said.append) and said == [f"Starting MLflow on port {page.port} …"]
    [server] = state.processes
    try:
        wait_for_page(tmp_path, page, server, said.append)
        info = RunInfo("project", "name", tmp_path / "runs" / "project" / "name")
        writer = open_writer("mlflow", info, tmp_path / "runs")
        writer.log([MetricLine(step, "trainer", 0.0, {"actor/final_loss": 1 / step}) for step in (1, 2, 3)])
        writer.close(RunOutcome.FINISHED)
        asyncio.run(see_charts(writer.link, tmp_path))
        # What `up` notes of it, `down` ends and removes.
        state.save(tmp_path)
        assert f"mlflow    {page.url}" in status(tmp_path)
        assert down(tmp_path, said.append)
        assert not server.alive() and not answers(f"{page.url}/health") and port_is_free(page.port)
        assert writer.link.startswith(f"{sys.executable} -m mlflow ui"), "nobody serves it any more"
        assert len(said) == 2, said
    finally:
        server.stop()


async def see_charts(link: str, folder: Path) -> None:
    """A browser that has never been there shows the run among training runs, with a chart of its metric."""
    async with opened(link, folder) as page:
        await page.until("!!document.querySelector('.js-plotly-plot')")
        shown = await page.text("body")
        assert all(word in shown for word in ("project", "name", "Model metrics", "final_loss"))
        assert "Model registry" in shown and "Judges" not in shown, "the view of training runs, not that of agents"


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
        with pytest.raises(TrinityError, match="--port N"):
            up(tmp_path, taken.getsockname()[1], said.append)
    assert said == [] and [path.name for path in tmp_path.iterdir()] == ["prefect.yaml"]


def test_a_page_that_ends_at_once_is_said(tmp_path: Path) -> None:
    page = Page("studio", "Studio", free_port(), [sys.executable, "-c", "raise SystemExit('no such module')"])
    said: list[str] = []
    state = UpState(API, [])
    assert start_page(tmp_path, page, state, said.append)
    wait_for_page(tmp_path, page, state.processes[0], said.append)
    assert "does not answer" in said[-1] and "studio.log" in said[-1]


def test_up_serves_a_page_that_has_ended_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real page, beside a server that is taken to be up."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", LOOPBACK]
    page, said = Page("files", "Files", port, command), list[str]()
    state = UpState(API, [Process.of(name, os.getpid()) for name in ("worker", "supervisor")])
    assert start_page(tmp_path, page, state, said.append)
    [first] = state.named("files")
    state.save(tmp_path)
    monkeypatch.setattr("flows.local.commands.is_healthy", lambda api_url: True)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    try:
        assert up(tmp_path, free_port(), said.append, pages=[page]).named("files")[0].pid == first.pid
        first.stop()
        second: Process = up(tmp_path, free_port(), said.append, pages=[page]).named("files")[0]
        assert second.pid != first.pid and answers(page.url)
    finally:
        monkeypatch.setattr("flows.local.commands.is_healthy", lambda api_url: False)
        first.stop()
        second.stop()
    assert not second.alive()
