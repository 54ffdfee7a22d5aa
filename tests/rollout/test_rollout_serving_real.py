"""Serving while learning with real parts: users, an endpoint and a trainer, each in its own process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import yaml
from ports import free_port

from trinity_core.config import config_from_dict
from trinity_core.config.paths import api_address_file
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.audit import audit_runs
from trinity_core.run.preflight.checks import busy_port

pytestmark = pytest.mark.slow

STEPS, ROWS = 4, 8
SECONDS = 240


def config_of(mode, folders, root):
    return {
        "project": "p",
        "name": "serving",
        "mode": mode,
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "optimizer": {"lr": 1e-4}},
        "model": {"model_path": str(folders.model), "max_model_len": 256, "max_response_tokens": 24},
        "cluster": {"gpu_per_node": 0},
        "monitor": {"monitor_type": "tensorboard"},
        "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1},
    }


@contextmanager
def running(settings, path):
    """A run started like `trinity run`, with a log next to its file."""
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "trinity_core.run", "--config", str(path)]
    with path.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ})
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def until(what, condition, *processes):
    deadline = time.monotonic() + SECONDS
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        assert all(process.poll() is None for process in processes), what
        time.sleep(0.1)
    return outcome


class Over(Exception):
    """The service has ended."""


class Users:
    """Users of the endpoint with `openai` clients: two turns, then feedback. Two conversations share a task. Unanswered
    requests are repeated."""

    def __init__(self, address):
        self.root, self.key = address["base_url"].removesuffix("/v1"), address["api_key"]
        self.numbers, self.confirmed, self.asked_again, self.faults = itertools.count(), set(), 0, []
        self.enough = threading.Event()
        kept = httpx.Limits(max_keepalive_connections=0)  # one kept open may be closed as it is used again
        self.http = httpx.Client(timeout=60, limits=kept)

    def again(self, call, *args):
        while True:
            try:
                return call(*args)
            except (httpx.TransportError, openai.APIConnectionError):
                if self.enough.is_set():
                    raise Over from None
                self.asked_again += 1
                time.sleep(0.2)

    def post(self, path, value):
        headers = {"Authorization": f"Bearer {self.key}"}
        return self.http.post(self.root + path, json=value, headers=headers)

    def talk(self):
        opened = self.again(self.post, "/sessions", {"task": f"task {next(self.numbers) // 2}"}).json()
        client = openai.OpenAI(base_url=opened["base_url"], api_key=self.key, max_retries=0, http_client=self.http)
        messages = []
        for question in ("2 + 3?", "Sure?"):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": self.again(streamed, client, messages)})
        length = len(messages[1]["content"])
        feedback = {"reward": float(length % 2), "metrics": {"length": length}, "comment": "ok"}
        answer = self.again(self.post, "/feedback", {"session_id": opened["session_id"], **feedback})
        assert answer.status_code in (200, 409), "409: the first try had arrived"
        self.confirmed.add(opened["session_id"])

    def keep_talking(self):
        try:
            while not self.enough.wait(0.1):  # who never pauses takes the core from the trainer
                self.talk()
        except Over:
            return
        except Exception as error:  # noqa: BLE001 - the test says that there was none
            self.faults.append(error)


def streamed(client, messages):
    chunks = client.chat.completions.create(model="policy", messages=messages, max_tokens=24, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_users_are_served_while_a_trainer_learns_from_them(tiny_folders, tmp_path):
    """No request fails while weights change. A server killed in the middle of conversations loses none of them."""
    serve, train = (config_of(mode, tiny_folders, tmp_path) for mode in ("serve", "train"))
    serve |= {"explorer": {"rollout_model": {"enable_openai_api": True}, "api_port": free_port()}}
    serve["buffer"] = {"batch_size": 4}
    train["buffer"] = {"train_batch_size": ROWS, "total_steps": STEPS}
    settings = config_from_dict(serve)
    trained = lambda: [line.step for line in read_metrics(settings.job_dir) if line.source == "trainer"]  # noqa: E731
    with running(train, tmp_path / "train.yaml") as trainer:
        with running(serve, tmp_path / "serve.yaml") as server:
            path = api_address_file(settings)
            until("the address", path.exists, server, trainer)
            assert path.stat().st_mode & 0o777 == 0o600
            users = Users(json.loads(path.read_text()))
            threads = [threading.Thread(target=users.keep_talking) for _ in range(3)]
            for thread in threads:
                thread.start()
            until("train steps", lambda: max(trained(), default=0) >= 2 or users.faults, server, trainer)
            assert not users.asked_again
            server.kill()
        until("the port, which the killed server's explorer holds a while", lambda: not [*busy_port(settings)], trainer)
        with running(serve, tmp_path / "serve_again.yaml") as server:
            until("the trainer's end", lambda: trainer.poll() is not None or server.poll())
            assert not server.poll(), (tmp_path / "serve_again.log").read_text()
            assert trainer.poll() == 0 and server.wait(SECONDS) == 0
            users.enough.set()
            for thread in threads:
                thread.join(60)
    assert not users.faults and users.asked_again
    summary = json.loads((settings.job_dir / "summary_explorer.json").read_text())
    assert summary["results"]["explore"]["ended"] == f"the trainer has finished all its {STEPS} steps"
    assert summary["results"]["explore"]["version"] >= 1
    [audit] = audit_runs(settings.job_dir).values()
    assert audit.clean, audit.problems
    assert audit.trained >= STEPS and audit.lost == audit.failed == audit.duplicated == 0 and audit.sampled_tokens > 0
    waiting = {path.stem for path in (settings.job_dir / "buffer/serving-explorer").glob("*.jsonl")}
    stored = len(users.confirmed - waiting)
    assert 0 <= 2 * audit.tasks_drawn - stored <= len(threads), "each session with feedback is in one group"
    numbers = [line.metrics for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert {line["version"] for line in numbers} != {0.0}
    assert all(line["feedback/length/mean"] >= 0 for line in numbers) and sum(line["tokens"] for line in numbers) > 0
