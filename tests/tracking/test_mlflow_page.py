"""MLflow's page in Chromium, at the address that `trinity up` prints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import opened

from flows.local.server import comes_up
from trinity_core.base.gate import server_key
from trinity_core.exchange.tracking.forwarder import Forwarder, open_writer
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.mlflow_root import default_uri
from trinity_core.exchange.tracking.mlflow_server import HEALTH, RUNS
from trinity_core.exchange.tracking.mlflow_writer import serve_command
from trinity_core.exchange.tracking.writers import RunInfo, RunOutcome

SECONDS = 120.0


@pytest.mark.slow
def test_the_page_shows_pipelines_with_their_stages(root: Path, tmp_path: Path) -> None:
    info = RunInfo("p", "whole_rft", root / "p/whole_rft", parent_dir=root / "p/whole", tags={"stage": "rft"})
    MetricsFile(info.job_dir, "explorer").write(1, {"reward/mean": 0.75})
    Forwarder(info.job_dir, open_writer("mlflow", info, root)).close(RunOutcome.FINISHED)
    port = free_port()
    command = [*serve_command(default_uri(root), root), "--port", str(port)]
    server = subprocess.Popen(command, cwd=root)
    try:
        assert comes_up(f"http://127.0.0.1:{port}{HEALTH}", lambda: server.poll() is None, SECONDS)
        asyncio.run(_look(f"http://{server_key(root)}@127.0.0.1:{port}{RUNS}", tmp_path))
    finally:
        server.terminate()
        server.wait(30)


async def _look(address: str, folder: Path) -> None:
    async with opened(address, folder, SECONDS, is_ours=False) as page:
        names = "[...document.querySelectorAll('a[href*=\"/runs/\"]')].map(e => e.innerText.trim())"
        shown = f"(names => names.includes('whole') && names.includes('whole_rft'))({names})"
        await page.until(shown, "the pipeline and its stage are listed", SECONDS)
        await page.until("document.body.innerText.includes('Achieved')", "the charts begin with the results", SECONDS)
