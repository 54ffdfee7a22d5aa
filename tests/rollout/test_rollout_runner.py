"""Workflows under the runner: limits, retries, order."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from weakref import WeakSet

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.fakes import FakeEngine

from trinity_core.base.errors import DataError, RewardError, TransientFault
from trinity_core.compat import workflow as compat
from trinity_core.config.schema import OverRolloutConfig
from trinity_core.config.schema.explorer import DynamicTimeoutConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.rollout import workflow_loops
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Sampling
from trinity_core.rollout.metrics import answers_by_task, dropped_whole, eval_numbers, step_numbers, task_answers
from trinity_core.rollout.openai_api.model import ApiModel, SessionCounts
from trinity_core.rollout.records import drawn_tasks
from trinity_core.rollout.runner import OVER_ROLLOUT, Pace, TaskRunner
from trinity_core.rollout.workflow_loops import LoopBlocked, WorkflowLoop, WorkflowTimeout
from trinity_core.workflows import WORKFLOWS, ConversationWorkflow, RewardItem, RewardPool, Workflow
from trinity_core.workflows.base import all_rollouts

ASK = [{"role": "user", "content": "Tom has 3 apples."}]


class Scripted(Workflow):
    """Does what `workflow_args["does"]` says, one entry for each attempt."""

    attempts: dict[int, int] = {}  # noqa: RUF012 - shared by the test's workflows on purpose
    running = most = 0

    async def run(self):
        script = self.task.workflow_args["does"]
        attempt = Scripted.attempts[self.task.index] = Scripted.attempts.get(self.task.index, -1) + 1
        what = script[min(attempt, len(script) - 1)]
        Scripted.running += 1
        Scripted.most = max(Scripted.most, Scripted.running)
        try:
            if callable(what):
                what()
            await asyncio.sleep(what if isinstance(what, float) else 0)
        finally:
            Scripted.running -= 1
        if isinstance(what, BaseException):
            raise what
        if what is None:
            return None
        return [Experience(np.arange(4), 2, np.ones(2, bool), reward=1.0)]


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setitem(WORKFLOWS, "scripted", Scripted)
    monkeypatch.setitem(WORKFLOWS, "rollouts", Rollouts)
    Scripted.attempts, Scripted.running, Scripted.most = {}, 0, 0


def run(*scripts, at_once=8, timeout=5.0, retries=1):
    tasks = [Task(i, {}, "set", "scripted", workflow_args={"does": s}, group=f"g{i}") for i, s in enumerate(scripts)]
    runner = TaskRunner(None, RewardPool(1), at_once, timeout, retries)
    return asyncio.run(runner.run(tasks))


def test_outcomes_are_in_the_order_of_the_tasks():
    outcomes = run([0.03], [0.0], [0.01])
    assert [outcome.experiences[0].group for outcome in outcomes] == ["g0", "g1", "g2"]


def test_concurrency_limit_is_kept():
    run(*[[0.005]] * 9, at_once=3)
    assert Scripted.most == 3


def run_step(*scripts, timeout=5.0, **settings):
    """Run one explore step; return its outcomes and the runner."""
    tasks = [Task(i, {}, "set", "scripted", workflow_args={"does": s}, group=f"g{i}") for i, s in enumerate(scripts)]
    runner = TaskRunner(None, RewardPool(1), 8, timeout, **settings)

    async def main():
        try:
            return await runner.run_step(tasks)
        finally:
            async with asyncio.timeout(5):  # what was cancelled ends in the workflows' own loop
                while Scripted.running:
                    await asyncio.sleep(0.01)

    return asyncio.run(main()), runner


def test_a_step_does_not_wait_for_its_slowest_tasks():
    over_rollout = OverRolloutConfig(ratio=0.5, wait_after_min=0.05)
    outcomes, _ = run_step([30.0], [0.0], [30.0], [ValueError("ended too")], over_rollout=over_rollout)
    assert [outcome.dropped for outcome in outcomes] == [OVER_ROLLOUT, "", OVER_ROLLOUT, ""]
    assert [outcome.failed for outcome in outcomes] == [False, False, False, True]
    drawn = drawn_tasks(outcomes, dropped_whole(outcomes))
    assert [(one.failure is None, dict(one.dropped)) for one in drawn[:2]] == [(True, {OVER_ROLLOUT: 1}), (True, {})]


@pytest.mark.parametrize(
    ("seconds", "over_rollout"),
    [((0.1, 0.0), OverRolloutConfig(ratio=0.9, wait_after_min=5.0)), ((0.0, 0.0), OverRolloutConfig(ratio=0.5))],
    ids=["within the patience", "at once"],
)
def test_tasks_that_end_soon_are_kept(seconds, over_rollout):
    outcomes, _ = run_step(*([one] for one in seconds), over_rollout=over_rollout)
    assert [len(outcome.experiences) for outcome in outcomes] == [1, 1]


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(1.1, 10), st.integers(0, 3), st.integers(0, 3))
def test_the_dynamic_limit_is_a_multiple_of_the_mean_time(seconds, ratio, warmup, steps):
    pace = Pace(DynamicTimeoutConfig(enable=True, ratio=ratio, warmup_min_steps=warmup), steps=steps)
    assert pace.limit == math.inf
    for one in seconds:
        pace.add(one)
    expected = ratio * sum(seconds) / len(seconds) if steps >= warmup else math.inf
    assert pace.limit == pytest.approx(expected)


def test_the_dynamic_limit_ends_workflows_of_a_step_alone():
    pace = Pace(DynamicTimeoutConfig(enable=True, warmup_min_steps=0), succeeded=1, seconds=0.01)
    [outcome], _ = run_step([30.0], pace=pace)
    assert isinstance(outcome.error, WorkflowTimeout) and "dynamic_timeout" in str(outcome.error)
    task = Task(0, {}, "set", "scripted", workflow_args={"does": [0.2]}, group="g", is_eval=True)
    runner = TaskRunner(None, RewardPool(1), 8, 5.0, pace=pace)
    assert not asyncio.run(runner.run([task]))[0].failed


class Rollouts(ConversationWorkflow):
    """Rollout r fails in the first `workflow_args["fails"][r]` attempts."""

    async def rollout(self, run):
        await asyncio.sleep(0.01 * (3 - run))
        if self.task.attempt < self.task.workflow_args["fails"][run]:
            raise ValueError(f"rollout {run}")
        tokens = np.array([1, 2, 3, self.task.rollout_seed(run) % 1000])
        return [Experience(tokens, 3, np.ones(1, bool), reward=1.0, run=run, turn=turn) for turn in range(2)]


def rollouts(*fails, is_eval=False, repeat_times=3):
    args = {"fails": fails}
    task = Task(0, {}, "set", "rollouts", repeat_times, workflow_args=args, group="g", is_eval=is_eval)
    [outcome] = asyncio.run(TaskRunner(None, RewardPool(1), 8, 5.0, 2).run([task]))
    seeds = {one.run: int(one.tokens[-1]) for one in outcome.experiences}
    return outcome, task, [(one.run, one.turn) for one in outcome.experiences], seeds


def test_only_failed_rollouts_are_retried_with_other_noise():
    outcome, task, turns, seeds = rollouts(0, 2, 1)
    assert turns == [(run, turn) for run in range(3) for turn in range(2)]
    assert (outcome.error, outcome.failed_runs, outcome.retries) == (None, (), 2)
    assert {one.group for one in outcome.experiences} == {"g"}
    again = [replace(task, attempt=attempt) for attempt in range(3)]
    assert seeds == {run: again[attempt].rollout_seed(run) % 1000 for run, attempt in ((0, 0), (1, 2), (2, 1))}
    assert len({one.rollout_seed(1) for one in again}) == 3 and len({one.environment_seed for one in again}) == 1


def test_a_group_goes_on_without_a_rollout_that_keeps_failing(caplog):
    outcome, _, turns, _ = rollouts(0, 9, 1)
    assert turns == [(0, 0), (0, 1), (2, 0), (2, 1)] and not outcome.failed and outcome.failed_runs == (1,)
    numbers = step_numbers([outcome])
    assert (numbers["failed_rollouts"], numbers["failed_tasks"], numbers["retries"]) == (1, 0, 2)
    assert "rollout 1" in caplog.text and "too small" not in caplog.text


def test_a_task_fails_if_all_its_rollouts_do():
    outcome, _, turns, _ = rollouts(9, 9, repeat_times=2)
    assert outcome.failed and not turns and isinstance(outcome.error, ValueError)
    assert step_numbers([outcome])["failed_rollouts"] == 0


def test_failed_rollouts_of_an_evaluation_count_as_wrong():
    outcome, *_ = rollouts(0, 9, 0, is_eval=True)
    assert answers_by_task([outcome]) == [[1.0, 0.0, 1.0]]
    [stored] = task_answers([outcome])
    assert len(stored.answers) == 3 and eval_numbers("set", [outcome])["eval/set/accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("fault", [DataError("no"), TransientFault("lost")])
def test_an_error_that_no_attempt_can_avoid_ends_the_other_rollouts(fault):
    ended = []

    async def rollout(run):
        try:
            if run:
                raise fault
            await asyncio.sleep(30)
        finally:
            ended.append(run)

    async def main():
        with pytest.raises(type(fault)):
            await all_rollouts(Task(0, {}, "set", "w", repeat_times=2), rollout)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert sorted(ended) == [0, 1]


def test_failing_task_does_not_affect_others():
    bad, good = run([ValueError("always")], [0.0], retries=2)
    assert (bad.retries, bad.failed, str(bad.error)) == (2, True, "always")
    assert not good.failed


def test_a_workflow_that_takes_too_long_is_ended():
    [outcome] = run([30.0, 0.0], timeout=0.02, retries=0)
    assert isinstance(outcome.error, WorkflowTimeout)
    assert Scripted.running == 0


def test_permanent_errors_are_not_retried():
    [outcome] = run([DataError("wrong for good"), 0.0], retries=3)
    assert (outcome.retries, outcome.failed) == (0, True)


def test_a_fault_of_the_run_ends_it():
    with pytest.raises(TransientFault):
        run([0.2], [TransientFault("engines are gone")])
    with pytest.raises(RewardError):
        run([0.2], [RewardError("the accuracy is -1")])


def sleep_for_ever():
    time.sleep(3600)


TEST_IS_OVER = threading.Event()


def loop_for_ever():
    """Until the end of the test: on the loop of the workflows nothing can end it, and it would take a core from all
    later tests."""
    while not TEST_IS_OVER.is_set():
        try:
            sum(range(1000))
        except Exception:  # noqa: BLE001 - as users write it
            continue


@pytest.mark.parametrize("hang", [sleep_for_ever, loop_for_ever])
def test_a_workflow_that_blocks_the_others_ends_the_attempt(hang, monkeypatch):
    monkeypatch.setattr(workflow_loops, "YIELD_SECONDS", 0.2)
    TEST_IS_OVER.clear()
    try:
        with pytest.raises(LoopBlocked, match=hang.__name__):
            run([hang], [0.05], [0.05], [0.0], timeout=1.0, retries=1)
    finally:
        TEST_IS_OVER.set()


def test_a_plain_workflow_that_loops_for_ever_is_ended(monkeypatch):
    class Plain(Scripted):
        def run(self):
            loop_for_ever()

    monkeypatch.setitem(WORKFLOWS, "scripted", Plain)
    TEST_IS_OVER.clear()
    before = threading.enumerate()
    [outcome] = run([0.0], timeout=0.2, retries=0)
    assert isinstance(outcome.error, WorkflowTimeout)
    deadline = time.monotonic() + 60
    while workflows_since(before):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workflows_since(before):
    """The threads of workflows that have begun since the list `before`."""
    return [thread for thread in threading.enumerate() if thread.name == "workflow" and thread not in before]


QUEUED = """
import time
from trinity_core.workflows import REWARD_FNS

@REWARD_FNS.register("slowly")
def slowly(*, prompt, response, truth, task):
    time.sleep(0.6)
    return 1.0
"""


class Scored(Workflow):
    async def run(self):
        [reward] = await self.rewards.score("slowly", [RewardItem("")])
        return [Experience(np.arange(4), 2, np.ones(2, bool), reward=reward.value)]


class ScoredPlain(Workflow):
    def run(self):
        [reward] = self.rewards.score_sync("slowly", [RewardItem("")])
        return [Experience(np.arange(4), 2, np.ones(2, bool), reward=reward.value)]


@pytest.mark.parametrize("kind", [Scored, ScoredPlain])
def test_verifier_time_does_not_count_as_workflow_time(kind, monkeypatch, tmp_path):
    """Four answers of 0.6 s wait for one worker, and a workflow may take 2 s."""
    monkeypatch.setitem(WORKFLOWS, "scored", kind)
    (tmp_path / "runner_test_rewards.py").write_text(QUEUED)
    pool = RewardPool(1, 30.0, str(tmp_path))
    tasks = [Task(i, {}, "set", "scored", group=f"g{i}") for i in range(4)]
    outcomes = asyncio.run(TaskRunner(None, pool, 8, 2.0).run(tasks))
    pool.close()
    assert [(one.error, [row.reward for row in one.experiences]) for one in outcomes] == [(None, [1.0])] * 4


class AsksPlain(Workflow):
    def run(self):
        return self.model.chat_sync(ASK)


class AsksPorted(compat.Workflow):
    def run(self):
        return self.model.chat(ASK)


class AsksPortedAsync(compat.Workflow):
    is_async = True

    async def run_async(self):
        return await self.model.chat_async(ASK)


@pytest.mark.parametrize("kind", [AsksPlain, AsksPorted, AsksPortedAsync])
async def test_requests_of_a_thread_are_cancelled_with_its_workflow(kind, monkeypatch, tiny_folder):
    monkeypatch.setitem(WORKFLOWS, "asks", kind)
    engine = FakeEngine(seconds=600)
    encoder = ChatEncoder(load_tokenizer(str(tiny_folder), False))

    before = threading.enumerate()
    pool, workflow_loop = EnginePool([engine], "model"), WorkflowLoop()
    await pool.start()
    model = EngineModel(pool, encoder, Limits(64, 48, 8, Sampling(8)), outside=workflow_loop.outside)
    runner = TaskRunner(model, RewardPool(1), 4, 600.0, workflow_loop=workflow_loop)
    running = asyncio.create_task(runner.run([Task(i, {}, "set", "asks", group=f"g{i}") for i in range(2)]))
    async with asyncio.timeout(60):
        while sum(map(len, engine.calls)) < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        while len(engine.aborted) < 2 or workflows_since(before):
            await asyncio.sleep(0.01)
    workflow_loop.close()
    assert len(engine.aborted) == 2


class _Result:
    """Stands for the experiences of a workflow."""


async def test_workflow_results_are_not_kept_in_memory():
    """An explorer lives for days: references to each rollout would fill its memory."""
    kept: WeakSet[_Result] = WeakSet()

    async def returns():
        await asyncio.gather(asyncio.sleep(0), asyncio.create_task(asyncio.sleep(0)))
        kept.add(result := _Result())
        return result

    workflow_loop = WorkflowLoop()
    for _ in range(4):
        await workflow_loop.run(returns(), 60.0)
    gc.collect()
    workflow_loop.close()
    assert len(kept) <= 1, "the last one may still be somebody's result"


@pytest.mark.parametrize("given", [ValueError("first"), None, SystemExit(3), KeyboardInterrupt()])
def test_a_workflow_that_fails_or_has_no_result_is_retried(given):
    [outcome] = run([given, 0.0])
    assert (outcome.retries, outcome.failed) == (1, False)
    [outcome] = run([given])
    assert outcome.failed and outcome.error is not None


def test_tokens_of_a_task_that_was_not_waited_for_are_discarded():
    class Asked(ApiModel):
        def __init__(self):
            """Its one session has ended, with 5 tokens."""

        def end(self):
            return SessionCounts(sessions=1, taken=5, sampled=5)

    api, over_rollout = SimpleNamespace(model=lambda *_: Asked()), OverRolloutConfig(ratio=0.5, wait_after_min=0.05)
    outcomes, _ = run_step([30.0], [0.0], api=api, over_rollout=over_rollout)
    assert [outcome.sessions.discarded for outcome in outcomes] == [5, 0]


def test_wave_begins_after_all_tasks_before_it_end():
    scripts = [[0.03], [0.0], [0.0], [0.02], [0.0]]
    tasks = [Task(i, {}, "set", "scripted", workflow_args={"does": s}, group=f"g{i}") for i, s in enumerate(scripts)]
    begun, done = [], []

    async def main():
        runner = TaskRunner(None, RewardPool(1), 2, 5.0)
        with_retries = runner._with_retries

        async def watched(outcome, gate):
            begun.append((outcome.task.index, len(done)))
            await with_retries(outcome, gate)
            done.append(outcome.task.index)
            return outcome

        runner._with_retries = watched
        return await runner.run(tasks, in_waves=True)

    outcomes = asyncio.run(main())
    assert [outcome.task.index for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert begun == [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4)]
