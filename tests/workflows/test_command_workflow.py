"""Agents that are commands: what they see, their limits, and their reports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.timing import UNCOUNTED, BusyTimer
from trinity_core.base.waits import poll
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.workflows import RewardPool, run_workflow
from trinity_core.workflows.agent import CommandFailed


class Session:
    """A session in which two tokens were sampled."""

    base_url, api_key, model_name = "http://127.0.0.1:1/v1", "sk-1", "policy"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended = True

    def experiences(self, reward=None, **fields):
        value, metrics = (reward.value, reward.metrics) if hasattr(reward, "value") else (reward, {})
        return [Experience([1, 2, 3], 1, [True, True], reward=value, metrics=metrics, **fields)]


class Model:
    """A model that opens such sessions."""

    def session(self, run=0):
        return Session()


def run(tmp_path, script, reward_fn=None, truth="#### 4", raw=None, **args):
    agent = tmp_path / "agent.py"
    agent.write_text(f"import json, os\n{script}\n")
    args = {"command": [sys.executable, str(agent)], **args}
    raw = raw or {"prompt": "2 + 2?", "response": truth}
    task = Task(0, raw, "set", "command_workflow", 2, reward_fn, workflow_args=args, group="g")
    pool = RewardPool(1)
    try:
        return asyncio.run(run_workflow(task, Model(), rewards=pool))
    finally:
        pool.close()


SAYS = "json.dump({}, open(os.environ['TRINITY_REPORT'], 'w'))"


def test_an_answer_is_scored_here(tmp_path):
    rows = run(tmp_path, SAYS.format("{'answer': '#### 4'}"), "math_reward")
    assert [(row.run, row.reward, row.metrics["accuracy"]) for row in rows] == [(0, 1.0, 1.0), (1, 1.0, 1.0)]


def test_it_sees_its_task_and_address_and_little_else(tmp_path, monkeypatch):
    monkeypatch.setenv("PASSWORD", "secret")
    script = """
task = json.load(open(os.environ['TRINITY_TASK']))
seen = [os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], os.environ['OPENAI_MODEL'], os.environ['MINE']]
assert seen == ['http://127.0.0.1:1/v1', 'sk-1', 'policy', 'yes'], seen
assert 'PASSWORD' not in os.environ and '#### 4' not in json.dumps(task)
assert task['messages'][-1]['content'] == '2 + 2?' and os.listdir() == []
"""
    rows = run(tmp_path, script + SAYS.format("{'answer': '#### 4'}"), "math_reward", env={"MINE": "yes"})
    assert [row.reward for row in rows] == [1.0, 1.0]


def test_without_a_verdict_there_is_no_loss(tmp_path):
    assert all(row.is_unscored for row in run(tmp_path, SAYS.format("{'reward': None}")))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('no idea')", "exit code 1: no idea"),
        ("os.kill(os.getpid(), 11)", r"signal 11 \(SIGSEGV\)"),
        ("raise SystemExit(os.environ['OF_ANOTHER_SERVICE'])", r"exit code 1: \*\*\*"),
        ("raise SystemExit(f'with {os.environ}')", r"'OPENAI_API_KEY': '\*\*\*'"),
        ("raise SystemExit(os.environ['MINE'] + ' at 1' + os.environ['EMPTY'])", r"exit code 1: \*\*\* at 1$"),
        ("raise SystemExit('a' * 300 + os.environ['OF_ANOTHER_SERVICE'] + 'b' * 495)", r"exit code 1: a?\*\*\*b{495}$"),
        ("os.mkfifo(os.environ['TRINITY_REPORT'])", "no report"),
        ("pass", "no report"),
        ("open(os.environ['TRINITY_REPORT'], 'w').write('{')", "not JSON"),
        ("bytearray(1 << 31)", "MemoryError"),
        ("open('big', 'wb').write(bytes(1 << 25))", "exit code 1"),
        ("while True: print('x' * 100_000)", "output"),
        (SAYS.format("{}"), "no answer"),
    ],
)
def test_a_command_that_fails_says_why(tmp_path, monkeypatch, script, message):
    monkeypatch.setenv("OF_ANOTHER_SERVICE", "sk-other")
    monkeypatch.setenv("EMPTY", "")
    limits = {"memory_gib": 1.0, "file_gib": 1 / 64}
    variables = {"secrets": ["OF_ANOTHER_SERVICE", "EMPTY"], "env": {"MINE": "token of mine", "FLAG": "1"}}
    with pytest.raises(CommandFailed, match=message):
        run(tmp_path, script, "math_reward", **limits, **variables)


def test_command_of_an_abandoned_attempt_is_ended(tmp_path):
    """From another thread: the workflow's own may be blocked."""
    attempt, started = BusyTimer(), tmp_path / "started"

    def rollouts():
        UNCOUNTED.set(attempt)
        return run(tmp_path, f"open({str(started)!r}, 'w').close()\nimport time; time.sleep(3600)")

    running = DaemonThreads("rollout").submit(rollouts)
    assert any(started.exists() for _ in poll(60, 0.05))
    attempt.give_up()
    with pytest.raises(CommandFailed):
        running.result(60)


def test_a_secret_that_is_not_there_is_named(tmp_path):
    with raising(TrinityError, key="workflow_args.secrets"):
        run(tmp_path, "pass", secrets=["NOT_SET"])


def test_self_scoring_command_gets_the_row(tmp_path):
    """Its seed differs between rollouts, and repeats with the task."""
    script = """
task = json.load(open(os.environ['TRINITY_TASK']))
reward = task['run'] + task['seed'] / 2**31 if task['row'] == {'target': 7} else None
"""
    agent = run(tmp_path, script + SAYS.format("{'reward': reward}"), raw={"target": 7})
    again = run(tmp_path, script + SAYS.format("{'reward': reward}"), raw={"target": 7})
    rewards = [row.reward for row in agent]
    assert [int(reward) for reward in rewards] == [0, 1] and rewards[0] != rewards[1] - 1
    assert rewards == [row.reward for row in again]
    assert [row.info["truth"] for row in agent] == [None, None], "the row has no reference answer"


@pytest.mark.parametrize("how", ["", ", start_new_session=True"])
def test_a_command_is_ended_with_all_its_processes(tmp_path, how):
    """Including those that left its process group."""
    pid = tmp_path / "pid"
    script = f"""
import subprocess, time
open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']{how}).pid))
time.sleep(60)
"""
    began = time.monotonic()
    with pytest.raises(CommandFailed):
        run(tmp_path, script, time_limit=2.0)
    assert time.monotonic() - began < 30
    is_gone(int(pid.read_text()))


def test_a_command_does_not_outlive_an_explorer_that_is_killed(tmp_path):
    pid = tmp_path / "pid"
    explorer = f"""
import asyncio
from pathlib import Path
from trinity_core.workflows import agent
arguments = agent.CommandArguments(command=["sh", "-c", "echo $$ > {pid}; sleep 60"])
asyncio.run(agent.run_command(arguments, Path({str(tmp_path)!r}), {{"PATH": "/usr/bin:/bin"}}))
"""
    running = subprocess.Popen([sys.executable, "-c", explorer])
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.kill()
    running.wait()
    is_gone(int(pid.read_text()))


def is_gone(child):
    for _ in range(500):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the command's child is alive")


def test_a_reward_needs_a_source(tmp_path):
    with raising(TrinityError, key="default_reward_fn_type"):
        run(tmp_path, SAYS.format("{'answer': '4'}"))


def test_what_a_command_leaves_behind_is_ended(tmp_path):
    pid = tmp_path / "pid"
    script = f"""
import subprocess
child = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)
open({str(pid)!r}, 'w').write(str(child.pid))
"""
    assert [row.reward for row in run(tmp_path, script + SAYS.format("{'reward': 1}"))] == [1.0, 1.0]
    is_gone(int(pid.read_text()))
