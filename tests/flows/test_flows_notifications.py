"""A webhook hears how runs have ended: Prefect's server with its services, and a server that plays the webhook."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from ports import free_port
from raising import raising

from flows.local.notifications import NAME, _settings, set_notifications
from flows.local.server import client_environment, serve_command, server_environment, wait_until_healthy
from tasks.prefect_api import WITH_FINDINGS, api_client
from trinity_core.base.errors import TrinityError
from trinity_core.base.gate import server_key


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[str]]]:
    """Its address, and the texts that it was sent."""
    texts: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Webhook)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", texts
    server.shutdown()


@pytest.mark.campaign
def test_a_webhook_hears_of_failures_and_findings_of_deployments(
    tmp_path: Path, webhook: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.states import Completed, Failed, Running

    address, texts = webhook
    root, port = tmp_path, free_port()
    api_url = f"http://127.0.0.1:{port}/api"
    monkeypatch.setenv("TRINITY_WEBHOOK", address)
    (root / "prefect.yaml").write_text('notify:\n  url: "{{ $TRINITY_WEBHOOK }}"\n  when: [failed, findings]\n')
    server = subprocess.Popen(
        serve_command("--port", str(port), "--log-level", "error"), cwd=root, env=server_environment(api_url, root) |
        {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    try:
        wait_until_healthy(api_url, lambda: server.poll() is None, root / "prefect.yaml")
        for name, value in client_environment(api_url, root).items():
            monkeypatch.setenv(name, value)
        for _ in range(2):  # `trinity up` again
            assert set_notifications(root, api_url) == "failed, findings"
        with api_client(api_url, server_key(root)) as client:
            assert [automation.name for automation in client.read_automations_by_name(NAME)] == [NAME]
            deployment = client.create_deployment(client.create_flow_from_name("rft"), name="mine")
            states = [
                Completed(),
                Completed(name=WITH_FINDINGS, message="cut-off"),
                Failed(message="a wrong key"),
            ]
            for state in states:
                run = client.create_flow_run_from_deployment(deployment, name="p/mine", state=Running())
                client.set_flow_run_state(run.id, state, force=True)
            deadline = time.monotonic() + 90
            while len(texts) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
            (root / "prefect.yaml").write_text("name: mine\n")
            assert set_notifications(root, api_url) == "" and client.read_automations_by_name(NAME) == []
    finally:
        server.terminate()
        server.wait(30)
    assert len(texts) == 2 and any("cut-off" in text for text in texts) and any("a wrong key" in text for text in texts)
    assert all(text.startswith("p/mine: ") and "/runs/flow-run/" in text for text in texts)


@pytest.mark.parametrize(
    ("notify", "key"),
    [
        ("https://a", "notify"),
        ("{url: 3}", "notify"),
        ("{url: https://a, which: now}", "notify"),
        ("{url: '{{ $TRINITY_NONE }}'}", "notify.url"),
        ("{url: a}", "notify.url"),
        ("{url: https://a, when: [began]}", "notify.when"),
        ("{url: https://a, when: []}", "notify.when"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, notify: str, key: str) -> None:
    (tmp_path / "prefect.yaml").write_text(f"notify: {notify}\n")
    with raising(TrinityError, key=key):
        _settings(tmp_path)
