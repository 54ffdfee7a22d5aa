"""Environments: gymnasium's, separate processes, and workflows in them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from raising import raising
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.timing import UNCOUNTED, BusyTimer
from trinity_core.base.waits import poll
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.rollout import workflow_loops
from trinity_core.rollout.runner import TaskRunner
from trinity_core.rollout.step_source import one_answer_each
from trinity_core.workflows import ENVIRONMENTS, WORKFLOWS, EnvironmentFailed, RewardPool, Workflow, run_workflow
from trinity_core.workflows.environments.process import HOSTS, ProcessEnvironment, Where
from trinity_core.workflows.environments.workflow import EnvArguments, opened, seed_of

pytestmark = pytest.mark.usefixtures("toy_games")
pytest.importorskip("gymnasium", reason="requirements/environments.txt is not installed; make dev installs it")

ODD = '''
import os, subprocess, sys, time

class Odd:
    """Obeys its actions."""

    def __init__(self, started=None):
        self.started = started

    def close(self):
        if self.started:
            open(self.started + ".closed", "w").close()

    async def reset(self, seed):
        return f"seed {seed}", 0.0, False, {}

    def step(self, action):
        print("not for the protocol")
        if action == "die":
            print("my last words", file=sys.stderr)
            os._exit(3)
        if action == "crash":
            os.kill(os.getpid(), 11)
        if action == "numpy":
            import numpy as np
            return action, np.float32(0.5), np.bool_(True), {"state": "s", "count": np.int64(3)}
        if action == "hang":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            open(self.started, "w").write(str(child.pid))
            time.sleep(600)
        if action == "raise":
            raise RuntimeError("no such thing")
        if action == "nan":
            return "x", float("nan"), False, {}
        if action == "nonsense":
            return ["x", "y"]
        if action == "python":
            return sys.executable, 0.0, True, {}
        return action, 1.0, action == "end", {"state": "s" + action}
'''


@pytest.fixture
def odd(tmp_path):
    """Location of the environment with odd behaviour."""
    (tmp_path / "odd.py").write_text(ODD)
    return f"{tmp_path}/odd.py:Odd"


def play(*turns, workflow="env_workflow", raw=None, **args):
    """One rollout with these answers."""
    task = make_task(workflow, raw={"question": "Play.", **(raw or {})}, repeat_times=1, workflow_args=args)
    model = Turns(*turns)
    return asyncio.run(run_workflow(task, model)), model


def test_a_rollout_is_an_episode():
    answers = ["down", "I go DOWN", "up? no: right", "right", "fly", "down", "right"]
    [one], model = play(*answers, environment="frozen_lake", environment_args={"show_rules": False})
    assert one.reward == 1.0 and one.info["state"] == "P___\n_O_O\n___O\nO__G"
    assert one.metrics["turns"] == 7 and one.metrics["invalid_actions"] == 1 and one.metrics["episode_ended"] == 1
    text = model.tokenizer.decode(one.tokens)
    assert text.startswith("<uPlay.\nP___\n_O_O\n___O\nO__G><adown><u____\nPO_O\n___O\nO__G><aI go DOWN>")
    assert "<uName one of left, down, right, up.\n____\n_O_O\n__PO\nO__G>" in text


def test_truncated_turn_does_not_end_the_rollout():
    """If it ended the rollout, Taxi's -1 a turn would teach the policy to be cut off."""
    cut = list(map(ord, "hm"))
    [one], model = play(*[cut] * 3, "south", environment="taxi", max_turns=4)
    assert one.reward == -4.0 and not one.truncated
    assert one.metrics["turns"] == 4 and one.metrics["invalid_actions"] == one.metrics["turns_cut_off"] == 3
    assert model.tokenizer.decode(one.tokens).count("<ahm><uName one of south") == 3
    turns, _ = play(cut, "south", cut, environment="taxi", max_turns=3, step_wise=True)
    assert [(turn.reward, turn.truncated) for turn in turns] == [(-3.0, True), (-2.0, False), (-1.0, True)]


def test_a_full_context_ends_a_rollout():
    args = {"environment": "taxi", "environment_args": {"show_rules": False}, "max_turns": 4}
    task = make_task("env_workflow", raw={"question": "Play."}, repeat_times=1, workflow_args=args)
    [one] = asyncio.run(run_workflow(task, Turns(list(map(ord, "hm")), max_model_len=100)))
    assert one.truncated and one.reward == -1.0 and one.metrics["turns"] == 1 and one.metrics["episode_ended"] == 0


def test_a_task_whose_first_prompt_is_too_long_is_logged_and_not_judged(caplog):
    args = {"environment": "taxi", "max_turns": 4}
    task = make_task("env_workflow", raw={"question": "Play."}, repeat_times=2, workflow_args=args)
    rows = asyncio.run(run_workflow(task, Turns(max_model_len=20)))
    assert [(row.is_unscored, row.metrics["turns"]) for row in rows] == [(True, 0.0)] * 2
    assert len([record for record in caplog.records if "max_prompt_tokens" in record.getMessage()]) == 1


def test_turns_get_the_returns_that_follow_them():
    args = {"environment": "frozen_lake", "step_wise": True, "discount": 0.5}
    rows, _ = play("down", "down", "right", "right", "down", "right", **args)
    assert [(row.turn, row.reward) for row in rows] == [(turn, 0.5 ** (5 - turn)) for turn in range(6)]
    assert [row.info["state"].replace("\n", "").index("P") for row in rows] == [0, 4, 8, 9, 10, 14]
    assert [row.state for row in rows] == [row.info["state"] for row in rows]


def test_turns_may_have_the_rollouts_reward():
    """Needed by `multi_step_grpo`: the last turn's own reward says nothing about earlier moves."""
    args = {"environment": "frozen_lake", "step_wise": True, "turn_rewards": "rollout"}
    rows, _ = play("down", "down", "right", "right", "down", "right", **args)
    assert [row.reward for row in rows] == [1.0] * 6 and {row.metrics["return"] for row in rows} == {1.0}


def test_turns_and_moves_are_limited():
    assert play(*["left"] * 9, environment="frozen_lake", max_turns=3)[0][0].metrics["turns"] == 3
    [one], _ = play(*["left"] * 9, workflow="frozen_lake_workflow", env_max_steps=4, agent_max_steps=6)
    assert one.metrics["turns"] == 4 and one.metrics["episode_ended"] == 1


def test_columns_of_a_task_are_arguments_and_seed():
    lakes = {}
    for seed in (1, 2):
        row = {"size": 3, "p": 0.6, "seed": seed}
        lakes[seed] = play("left", workflow="frozen_lake_workflow", raw=row, agent_max_steps=1)[0][0].info["state"]
        assert len(lakes[seed]) == 11
    assert lakes[1] != lakes[2]


@pytest.mark.parametrize("seed", ["one", 0.5, True, float("nan"), [1]])
def test_a_seed_that_is_no_number_is_named(seed):
    with raising(DataError, key="seed"):
        play("left", environment="frozen_lake", raw={"seed": seed})


def test_repeats_of_an_external_model_play_one_environment():
    """Like the repeats of our own models, which are one task; otherwise scores could not be compared."""
    task = make_task("env_workflow", raw={}, repeat_times=3)
    answers = one_answer_each([task])
    assert [seed_of(one) for one in answers] == [seed_of(task)] * 3
    assert len({one.rollout_seed(0) for one in answers}) == 3, "their answers draw noise of their own"
    assert seed_of(replace(task, index=task.index + 1)) != seed_of(task)


def test_a_row_without_a_seed_has_one_of_the_run():
    assert (
        seed_of(make_task("env_workflow", raw={"seed": 3.0}))
        == seed_of(make_task("env_workflow", raw={"seed": "3"}))
        == 3
    )
    assert play("left", environment="frozen_lake", max_turns=1, raw={"seed": None})[0][0].metrics["turns"] == 1


def test_taxi_and_blackjack_are_told_in_words():
    taxi = ENVIRONMENTS["taxi"](show_rules=False)
    said = "Taxi 3,0. Passenger 4,3. Destination 4,0."
    assert taxi.reset(0)[:3] == (said, 0.0, False)
    _, reward, *_ = taxi.step("south, then pickup")
    assert reward == -10
    cards = ENVIRONMENTS["blackjack"]()
    assert "Dealer shows" in cards.reset(3)[0]
    assert cards.step("I would rather not play")[1:3] == (-1.0, False)
    assert cards.step("hit or stick? Stick")[2] is True
    assert cards.move("sticky") is None


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"environment": "frozen_lak"}, "frozen_lake"),
        ({"environment": "frozen_lake", "turn_rewards": "rolout"}, "turn_rewards"),
        ({"environment": "frozen_lake", "environment_args": {"slippery": True}}, "slippery"),
        ({"environment": "frozen_lake", "discount": 0.5}, "discount"),
        ({"environment": "frozen_lake", "turn_rewards": "rollout"}, "turn_rewards"),
        ({"environment": "frozen_lake", "processes": 2}, "processes"),
        (
            {"environment": "frozen_lake", "step_wise": True, "turn_rewards": "rollout", "discount": 0.5},
            "discount",
        ),
        ({"environment": "frozen_lake", "environment_args": {"p": "much"}}, "p: "),
    ],
)
def test_wrong_arguments_are_refused(args, key):
    with pytest.raises(ValueError, match=key):
        EnvArguments.model_validate(args)


def test_an_episode_that_ends_at_its_reset_is_a_failure(monkeypatch):
    class Over:
        def reset(self, seed):
            return "", 0.0, True, {}

        def step(self, action):
            raise AssertionError("the episode is over")

        def tools(self):
            return []

        def close(self):
            pass

    monkeypatch.setitem(ENVIRONMENTS, "over", Over)
    with pytest.raises(EnvironmentFailed, match="reset"):
        play("x", environment="over")


def test_an_environment_without_a_method_is_refused_before_the_run(monkeypatch):
    class Half:
        def reset(self, seed):
            return "", 0.0, True, {}

        step = reset

    class Wrapper(Half):
        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setitem(ENVIRONMENTS, "half", Half)
    monkeypatch.setitem(ENVIRONMENTS, "wrapper", Wrapper)
    with pytest.raises(ValueError):
        EnvArguments.model_validate({"environment": "half"})
    EnvArguments.model_validate({"environment": "wrapper"})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(ENVIRONMENTS["taxi"].__mro__[1], "package", "not_installed_here")  # as taxi inherits it
    with raising(TrinityError, key="not_installed_here"):
        play("x", environment="taxi")


def test_gymnasium_in_a_process_is_the_same():
    here, there = (
        play("down", "right", "down", environment="frozen_lake", process=process)[0][0] for process in (False, True)
    )
    assert here.tokens.tolist() == there.tokens.tolist() and here.reward == there.reward
    [kept] = next(hosts for hosts in HOSTS.idle.values() if hosts)
    play("down", "right", "down", environment="frozen_lake", process=True)
    assert [kept] == next(hosts for hosts in HOSTS.idle.values() if hosts) and kept.alive
    HOSTS.close()
    assert not kept.alive


def test_a_process_may_have_its_own_interpreter(odd, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    [one], _ = play("go", "python", environment=odd, python=python)
    assert one.reward == 1.0 and one.metrics["turns"] == 2
    environment = ProcessEnvironment(Where("odd", odd, python), 10.0)
    environment.make({}, {})
    assert environment.step("python").observation == python
    environment.close()


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (["go", "die"], "ended with exit code 3: my last words"),
        (["crash"], r"ended with signal 11 \(SIGSEGV\)"),
        (["raise"], "RuntimeError: no such thing"),
        (["nan"], "nan"),
        (["nonsense"], r"\['x', 'y'\]"),
    ],
)
def test_a_broken_environment_is_an_error_never_a_reward(odd, turns, message):
    with pytest.raises(EnvironmentFailed, match="(?s)environment '.*odd.py:Odd': .*" + message):
        play(*turns, environment=odd)
    assert not any(HOSTS.idle.values())
    assert play("go", "end", environment=odd)[0][0].reward == 2.0


@pytest.mark.parametrize("process", [False, True])
def test_numpys_numbers_are_numbers(odd, process):
    [one], _ = play("go", "numpy", environment=odd, process=process)
    assert one.reward == 1.5 and one.metrics["turns"] == 2


def test_one_that_hangs_ends_with_what_it_started(odd, tmp_path):
    started = tmp_path / "child"
    with pytest.raises(EnvironmentFailed):
        play("hang", environment=odd, environment_args={"started": str(started)}, time_limit=0.5)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{started.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_one_that_hangs_here_is_given_up(monkeypatch):
    class Sleeper(ENVIRONMENTS["frozen_lake"]):
        def step(self, action):
            time.sleep(1.0)
            return super().step(action)

    monkeypatch.setitem(ENVIRONMENTS, "sleeper", Sleeper)
    with pytest.raises(EnvironmentFailed):
        play("down", environment="sleeper", time_limit=0.2)


def test_rollouts_wait_for_a_free_process(odd):
    where = Where("odd", odd)
    first = HOSTS.take(where, 10.0, 1, 1.0)
    with pytest.raises(EnvironmentFailed):
        HOSTS.take(where, 10.0, 1, 0.1)
    HOSTS.give(first, True)
    assert HOSTS.take(where, 10.0, 1, 1.0) is first
    HOSTS.give(first, False)
    assert not first.alive


@pytest.mark.parametrize("turn_has_come", [False, True])
def test_process_of_a_rollout_given_up_while_it_waits_is_free(odd, turn_has_come):
    where, queueing = Where(odd, odd), BusyTimer()
    first = HOSTS.take(where, 60.0, 1, 1.0)

    async def waits():
        UNCOUNTED.set(queueing)
        async with opened(EnvArguments(environment=odd, processes=1), {}):
            raise AssertionError("it is cancelled")

    async def main():
        waiting = asyncio.create_task(waits())
        while not queueing.seconds:
            await asyncio.sleep(0.01)
        if turn_has_come:  # which the loop does not hear of before it is closed
            HOSTS.give(first, True)
            wait_until_closed(queueing)
        waiting.cancel()
        await asyncio.sleep(0)  # the rollout's last turn

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    wait_until_closed(queueing)
    if not turn_has_come:
        HOSTS.give(first, True)
    assert HOSTS.take(where, 60.0, 1, 5.0) is first
    HOSTS.give(first, False)


def wait_until_closed(timer):
    """Wait until none of the timer's blocks is open."""
    deadline = time.monotonic() + 20
    while timer.seconds != timer.seconds:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rollout_of_an_attempt_that_is_over_takes_no_process(odd):
    where, queueing = Where("odd", odd), BusyTimer()
    first = HOSTS.take(where, 10.0, 1, 1.0)
    waiting = DaemonThreads("rollout").submit(HOSTS.take, where, 10.0, 1, 600.0, queueing)
    while not queueing.seconds:
        time.sleep(0.01)
    queueing.give_up()
    HOSTS.give(first, True)
    with pytest.raises(EnvironmentFailed):
        waiting.result(20)
    assert HOSTS.take(where, 10.0, 1, 1.0) is first
    HOSTS.give(first, False)


def test_the_process_of_a_workflow_that_blocks_for_ever_is_ended(odd, monkeypatch):
    """The workflow's own code never gets that far; another rollout gets the only allowed process."""
    held = []

    class Blocks(Workflow):
        async def run(self):
            async with opened(EnvArguments(environment=odd, processes=1), {}) as environment:
                held.append(environment)
                time.sleep(3600)

    monkeypatch.setattr(workflow_loops, "YIELD_SECONDS", 0.2)
    monkeypatch.setitem(WORKFLOWS, "blocks", Blocks)
    play("end", environment=odd, processes=1)  # its process has started then
    tasks = [Task(0, {}, "set", "blocks", group="g")]
    with pytest.raises(workflow_loops.LoopBlocked):
        asyncio.run(TaskRunner(None, RewardPool(1), 8, 3.0).run(tasks))
    HOSTS.give(HOSTS.take(held[0].where, 10.0, 1, 60.0), True)
    assert any(not any(environment.alive for environment in held) for _ in poll(60, 0.05))


def test_waiting_for_a_process_does_not_count(odd, monkeypatch):
    """Eight rollouts of 0.3 s share one process, and a workflow may take 2 s."""

    class Plays(Workflow):
        async def run(self):
            async with opened(EnvArguments(environment=odd, processes=1), {}):
                await asyncio.sleep(0.3)
            return [Experience(np.arange(4), 2, np.ones(2, bool), reward=1.0)]

    monkeypatch.setitem(WORKFLOWS, "plays", Plays)
    play("end", environment=odd, processes=1)  # its process has started then
    tasks = [Task(i, {}, "set", "plays", group=f"g{i}") for i in range(8)]
    outcomes = asyncio.run(TaskRunner(None, RewardPool(1), 8, 2.0).run(tasks))
    assert [outcome.error for outcome in outcomes] == [None] * 8


def test_rows_give_arguments_and_share_processes(odd, tmp_path):
    """A column named like an argument is one; the previous environment is closed; one process serves all rows."""
    for name in "abb":
        play("end", environment=odd, environment_args={"started": "none"}, raw={"started": f"{tmp_path}/{name}"})
    assert sum(map(len, HOSTS.idle.values())) == 1
    assert (tmp_path / "a.closed").exists() and not (tmp_path / "b.closed").exists()


def test_the_documented_environment_works():
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known = dict(ENVIRONMENTS)
    exec(code, {})
    [one], _ = play("1", "3", environment="guess", environment_args={"largest": 5}, raw={"seed": 8})
    assert one.reward == 1.0 and one.metrics["turns"] == 2 and one.info["state"] == "Guess my number."
    with pytest.raises(ValueError):
        EnvArguments.model_validate({"environment": "guess", "environment_args": {"largest": "many"}})
    ENVIRONMENTS.clear()
    ENVIRONMENTS.update(known)


def test_tools_of_an_environment_are_shown(monkeypatch):
    class Toolbox(ENVIRONMENTS["frozen_lake"]):
        def tools(self):
            return [{"type": "function", "function": {"name": "go"}}]

    monkeypatch.setitem(ENVIRONMENTS, "toolbox", Toolbox)
    [one], model = play("down", environment="toolbox", max_turns=1)
    assert model.tokenizer.decode(one.tokens).startswith("[1]<uPlay.")
    monkeypatch.setattr(Toolbox, "tools", lambda self: "hammer")
    with pytest.raises(EnvironmentFailed):
        play("down", environment="toolbox")


@pytest.mark.parametrize(("step", "message"), [("raise", "RuntimeError: no such thing"), ("nonsense", "nonsense")])
def test_a_broken_environment_in_the_explorer_is_named(monkeypatch, step, message):
    class Broken(ENVIRONMENTS["frozen_lake"]):
        def step(self, action):
            if step == "raise":
                raise RuntimeError("no such thing")
            return step

    monkeypatch.setitem(ENVIRONMENTS, "broken", Broken)
    with pytest.raises(EnvironmentFailed, match=f"Broken.step: .*{message}"):
        play("down", environment="broken")


def test_a_missing_package_of_a_process_is_named(tmp_path):
    (tmp_path / "needs.py").write_text("import not_installed_here\n")
    with pytest.raises(TrinityError, match="not_installed_here"):
        play("x", environment=f"{tmp_path}/needs.py:Needs")
