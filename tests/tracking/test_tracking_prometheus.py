"""What Prometheus gets when it asks a run, over HTTP and read by its own parser."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from test_tracking_forwarder import Recorder

from trinity_core.base.addresses import LOOPBACK
from trinity_core.config import config_from_dict
from trinity_core.exchange.tracking.forwarder import Forwarder
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.prometheus import PrometheusPage
from trinity_core.exchange.tracking.writers import RunOutcome
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.stage import Stage
from trinity_core.run.tracking_thread import TrackingThread


def scraped(port: int) -> dict[str, tuple[float, dict[str, str]]]:
    with urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}


def test_a_scrape_gives_the_newest_metrics_of_each_source(tmp_path: Path) -> None:
    port = free_port()
    page = PrometheusPage(port, "project", "name")
    forwarder = Forwarder(tmp_path, Recorder(), page=page)
    try:
        MetricsFile(tmp_path, "trainer").write(3, {"actor/loss": 0.5, "broken": float("nan")})
        MetricsFile(tmp_path, "explorer").write(4, {"pass@4": 0.25})
        forwarder.poll()
        MetricsFile(tmp_path, "trainer").write(4, {"actor/loss": 0.25})
        forwarder.poll()
        labels = {"project": "project", "run": "name"}
        assert scraped(port) == {
            "trinity_actor_loss": (0.25, labels), "trinity_trainer_step": (4.0, labels),
            "trinity_explorer_pass_4": (0.25, labels), "trinity_explorer_step": (4.0, labels),
        }  # fmt: skip
    finally:
        page.close()
    PrometheusPage(port, "project", "the next stage").close()  # the port is free again


def test_a_taken_port_is_warned_of_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        page = PrometheusPage(taken.getsockname()[1], "project", "name")
    MetricsFile(tmp_path, "trainer").write(1, {"loss": 0.5})
    assert Forwarder(tmp_path, Recorder(), page=page).poll() == 1
    page.close()
    assert "monitor.prometheus_port" in caplog.text


def test_a_run_serves_its_metrics_at_the_port_that_is_set(tmp_path: Path) -> None:
    port = free_port()
    config = config_from_dict({
        "project": "p", "name": "n", "mode": "train", "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "m", "max_response_tokens": 8, "max_model_len": 16},
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"trainer_input": {"experience_buffer": {"path": "data.jsonl"}}},
        "monitor": {"monitor_type": "tensorboard", "prometheus_port": port},
    })  # fmt: skip
    tracking = TrackingThread(Stage(config, place(config, Machine(1, 0)), "sft"))
    assert tracking.writer() is not None
    MetricsFile(config.job_dir, "trainer").write(1, {"actor/loss": 0.5})
    deadline = time.monotonic() + 60
    while "trinity_actor_loss" not in (page := scraped(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert page["trinity_actor_loss"] == (0.5, {"project": "p", "run": "n"})
    tracking.close(RunOutcome.FINISHED)
    with pytest.raises(URLError):
        scraped(port)
