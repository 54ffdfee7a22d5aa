"""The explorer on fake engines, with real task sets, rewards, store and weight folders."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from raising import raising
from rollout.exploring import COLUMNS, run_of
from rollout.fakes import FakeEngine

from trinity_core.base.errors import DataError, TransientFault, TrinityError, WeightSyncError
from trinity_core.base.layout import JobLayout
from trinity_core.data.experience import Experience, from_json, to_bytes
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.task import Task
from trinity_core.data.task_queue import queue_of
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync.shared_gpu import SharedGpu
from trinity_core.exchange.sync.versions import TrainerRank, VersionGone, WeightVersions, open_versions, run_versions
from trinity_core.exchange.tracking.metrics_file import metrics_path, read_metrics
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.exchange.tracking.scores import valid_scores
from trinity_core.pipelines.operators import OPERATORS
from trinity_core.results.audit import audit_runs
from trinity_core.rollout.explorer import NEWER_THAN_DUE, Explorer
from trinity_core.rollout.records import StepRecords
from trinity_core.rollout.runner import OVER_ROLLOUT, EvaluationProgress, FailureWatch, Outcome
from trinity_core.run.loop import explore
from trinity_core.training.distributed import Ranks
from trinity_core.training.publish import Publisher
from trinity_core.workflows import WORKFLOWS, Reward, Workflow


@pytest.fixture
def config(tiny_folders, tmp_path):
    """A run of 4 steps of 3 tasks with 2 answers each, on the small data set."""
    data = str(tiny_folders.data)
    held_out = {"name": "small", "path": data, "split": "test", "format": COLUMNS}
    inputs = {"taskset": {"path": data, "format": COLUMNS}, "eval_tasksets": [held_out]}

    def make(buffer=(), explorer=(), synchronizer=(), **sections):
        return run_of(
            tmp_path, tiny_folders.model, {}, **sections, model={"max_response_tokens": 24},
            buffer={"batch_size": 3, "total_steps": 4, "explorer_input": inputs} | dict(buffer),
            explorer={"eval_on_startup": False, "eval_interval": 0, "max_retry_times": 0} | dict(explorer),
            synchronizer={"sync_interval": 1, "sync_timeout": 30} | dict(synchronizer),
        )  # fmt: skip

    return make


@pytest.fixture
def engine(tiny_folder):
    """Answers everything with 7."""
    tokenizer = load_tokenizer(str(tiny_folder), False)
    tokens = tokenizer("#### 7", add_special_tokens=False)["input_ids"]
    return FakeEngine(answer=[*tokens, tokenizer.eos_token_id])


def publish(config, *versions):
    folder = open_versions("checkpoint", config.job_dir)
    for version in versions:
        folder.publish(version, [("w", torch.zeros(1))], keep=99)


def stored(config) -> ExperienceStore:
    return open_run_store(config)


async def waiting(explorer, state) -> dict:
    """The explorer's progress, once it is in `state` and says what it waits for."""
    async with asyncio.timeout(60):
        while (now := await explorer.progress())["state"] != state or not now["waits"]:
            await asyncio.sleep(0.01)
    return now


def after_each_step(explorer, then) -> Explorer:
    """The explorer, which calls `then` (or awaits it) with the rollouts of each step that it has stored."""
    store = explorer.store

    async def store_and_then(rollouts):
        await store(rollouts)
        if (waiting := then(rollouts)) is not None:
            await waiting

    explorer.store = store_and_then
    return explorer


def with_workflow(name, settings, **args):
    (taskset,) = settings.buffer.explorer_input.tasksets
    taskset = taskset.with_values({"default_workflow_type": name, "workflow_args": args})
    return settings.with_values({"buffer.explorer_input.tasksets": [taskset]})


def test_each_step_uses_the_version_that_is_due(config, engine):
    settings = config()
    publish(settings, 0, 1, 2, 3)
    summary = asyncio.run(Explorer(settings, [engine]).run(explore))
    assert (summary["step"], summary["version"]) == (4, 3)
    assert [version for _, version in engine.loaded] == [0, 1, 2, 3]
    assert len(engine.calls) == 4 and engine.cache_resets == [], "none where every step loads weights"
    store = stored(settings)
    stats = store.stats()
    assert stats.ready == 4 * 3 * 2
    assert stats.explorers["explorer"].finished
    batch = store.lease(1, 6, 0)
    assert {int(e.versions[0]) for e in batch} == {0}
    assert {e.group for e in batch} == {"explorer/1/0", "explorer/1/1", "explorer/1/2"}
    assert all(e.action_mask.all() and e.reward is not None for e in batch)
    lines = [line for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert [(line.step, line.metrics["version"]) for line in lines] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    spent = {f"timing_s/{part}" for part in ("generate", "reward", "store", "weight_sync")}
    assert {"reward/mean", "response_length/mean"} | spent <= lines[0].metrics.keys()
    source, step, path = rollout_files(settings.job_dir)[-1]
    rollouts = read_rollouts(path)
    assert (source, step, len(rollouts)) == ("explorer", 1, 6)
    assert rollouts[0].response.strip() == "#### 7" and rollouts[0].truth


def test_experiences_carry_the_temperature_of_their_task_set(config, engine):
    settings = config(mode="explore", buffer={"total_steps": 1, "batch_size": 6})
    (taskset,) = settings.buffer.explorer_input.tasksets
    warm = taskset.with_values({"name": "warm", "rollout_args.temperature": 0.6})
    greedy = taskset.with_values({"name": "greedy", "rollout_args.temperature": 0.0})
    usual = taskset.with_values({"weight": 1.0})
    sets = [usual, warm.with_values({"weight": 1.0}), greedy.with_values({"weight": 1.0})]
    asyncio.run(Explorer(settings.with_values({"buffer.explorer_input.tasksets": sets}), [engine]).run(explore))
    sampled = Counter(request.sampling.temperature for call in engine.calls for request in call)
    assert sampled == {1.0: 4, 0.6: 4, 0.0: 4}
    rows = stored(settings).lease(1, 12, 0)
    assert Counter(row.temperature for row in rows) == {1.0: 8, 0.6: 4}, "greedy log-probs are those at 1"


def test_explorer_waiting_to_write_still_answers(config, engine):
    """While it waits for disk space, or here for the file's lock, it must not be taken for dead."""

    async def watch(explorer):
        running = asyncio.create_task(explorer.run(explore))
        while (await explorer.progress())["step"] < 1 and not running.done():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not running.done() and stored(settings).stats().explorers["explorer"].step == 1
        lock.release()
        return await running

    settings = config()
    publish(settings, 0, 1, 2, 3)
    metrics_path(settings.job_dir).parent.mkdir(parents=True)
    lock = FileLock(metrics_path(settings.job_dir).with_suffix(".lock"))
    with lock:
        assert asyncio.run(watch(Explorer(settings, [engine])))["step"] == 4


class Slow(Workflow):
    """Returns some time after its answers, every second task later than the others."""

    async def run(self):
        completions = await self.model.chat(self.task.messages, n=self.task.repeat_times)
        await asyncio.sleep(0.05 * (int(self.task.group.rpartition("/")[2]) % 2))
        return [one.experience(reward=0.0) for one in completions]


def test_engine_batches_do_not_depend_on_workflow_times(config, engine, monkeypatch):
    monkeypatch.setitem(WORKFLOWS, "slow", Slow)
    settings = config(buffer={"batch_size": 5, "total_steps": 2}, explorer={"runner_per_model": 2})
    settings = with_workflow("slow", settings)
    publish(settings, 0, 1)
    asyncio.run(Explorer(settings, [engine]).run(explore))
    assert [len(call) for call in engine.calls] == [4, 4, 2, 4, 4, 2]


def test_each_synchronous_step_begins_with_an_empty_cache(config, engine):
    settings = config(synchronizer={"sync_interval": 2}, explorer={"eval_on_startup": True})
    publish(settings, 0, 2)
    asyncio.run(Explorer(settings, [engine]).run(explore))
    assert len(engine.calls) == 5, "an evaluation and four steps"
    assert engine.cache_resets == [1, 2, 4], "after the evaluation, and before each second step with the same weights"


async def test_it_leaves_a_shared_gpu_before_it_waits_for_the_trainer(config, engine):
    """With interval 2: two steps in a turn. Between turns the trainer has the GPU, and the engine sleeps."""
    sync = {"sync_method": "checkpoint", "sync_interval": 2, "sync_timeout": 30}
    settings = config(synchronizer=sync, cluster={"gpu_per_node": 0, "colocate": True})
    trainer, held = SharedGpu(JobLayout(settings.job_dir).gpu_lock, "trainer"), []
    explorer = Explorer(settings, [engine])
    running = asyncio.create_task(explorer.run(explore))
    await waiting(explorer, "waiting for version 0")
    assert not engine.turns, "a sleeping engine holds no weights, not even those it started with"
    publish(settings, 0)
    while stored(settings).stats().ready < 12:
        await asyncio.sleep(0.02)
    await asyncio.to_thread(trainer.acquire, 10, lambda: False)
    held.append(list(engine.turns))
    publish(settings, 2)
    waits = (await waiting(explorer, "waiting for the GPU"))["waits"]
    held.append(list(engine.turns))
    trainer.release()
    summary = await running
    assert await asyncio.to_thread(trainer.acquire, 0, lambda: False), "at its end it leaves the GPU"
    assert (summary["step"], summary["version"]) == (4, 2)
    turn = ["wake", "generate", "generate", "sleep"]
    assert held == [turn, turn] and engine.turns == [*turn, *turn]
    assert [version for _, version in engine.loaded] == [0, 2]
    assert "trainer (process" in waits
    steps = [line.metrics for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert "timing_s/wake" in steps[0] and "timing_s/sleep" in steps[2]


@pytest.mark.parametrize("end", ["stop", "finish", "rewind", "never"])
def test_a_wait_for_the_shared_gpu_ends(config, engine, end):
    """When the run is stopped, when the trainer has finished or went back, and after `sync_timeout`."""
    timeout = 2 if end == "never" else 30
    sync = {"sync_method": "checkpoint", "sync_timeout": timeout}
    settings = config(synchronizer=sync, cluster={"gpu_per_node": 0, "colocate": True})
    publish(settings, 0)
    trainer = SharedGpu(JobLayout(settings.job_dir).gpu_lock, "trainer")

    async def main():
        await asyncio.to_thread(trainer.acquire, 10, lambda: False)
        explorer = Explorer(settings, [engine])
        running = asyncio.create_task(explorer.run(explore))
        await waiting(explorer, "waiting for the GPU")
        if end == "stop":
            await explorer.stop()
        elif end == "finish":
            with stored(settings) as store:
                store.begin("trainer", 1)
                store.commit(1)
        elif end == "rewind":
            stored(settings).rewind(0)
            await asyncio.sleep(0.5)
            trainer.release()
            while not engine.calls:
                await asyncio.sleep(0.02)
            await explorer.stop()
        return await running

    if end == "never":
        with pytest.raises(TransientFault):
            asyncio.run(main())
    else:
        assert asyncio.run(main())["step"] == int(end == "rewind")


def finished_trainer(settings):
    """A trainer that takes its only step with the available rows, and has then finished."""
    with stored(settings) as store:
        store.begin("trainer", 1)
        store.lease(1, 6, 0)
        store.commit(1)


def test_it_ends_when_its_trainer_has_finished(config, engine):
    settings = config(mode="explore")

    def finish(rollouts):
        if rollouts.step == 2:
            finished_trainer(settings)

    summary = asyncio.run(after_each_step(Explorer(settings, [engine]), finish).run(explore))
    assert (summary["step"], summary["total_steps"], summary["untrained_rows"]) == (2, 4, 6)
    assert summary["ended"] == "the trainer has finished all its 1 steps"
    again = asyncio.run(Explorer(settings, [engine]).run(explore))
    assert again["step"] == 2, "also when it is started again"
    publish(settings, 1)
    longer = asyncio.run(Explorer(settings.with_values({"buffer.total_steps": 5}), [engine]).run(explore))
    assert (longer["step"], longer["ended"]) == (5, "finished"), "a longer trainer is expected"


def test_it_ends_if_its_trainer_ended_for_want_of_rows(config, engine):
    """It starts a moment late; with more steps it continues, for a trainer that restarts with the same number."""
    settings = config(mode="explore", explorer={"name": "explorer_new"})
    with stored(settings) as store:
        store.begin("trainer", 9)
        store.join("explorer_new", 3)
        store.mark_ended("trainer")

    def explored(config):
        return asyncio.run(Explorer(config, [FakeEngine(engine.answer)]).run(explore))

    late = explored(settings.with_values({"buffer.total_steps": 3}))
    assert (late["step"], late["untrained_rows"]) == (0, 0)
    assert late["ended"] == "the trainer has ended at step 0 of 9, as no more experiences came"
    assert explored(settings)["ended"] == "finished"


async def test_a_second_explorer_joins_and_leaves(config, engine):
    """Its steps and metrics are its own; the rows of both are trained on."""
    first, second = config(mode="explore"), config(mode="explore", explorer={"name": "explorer_new"})

    explorers = [Explorer(settings, [FakeEngine(engine.answer)]) for settings in (first, second)]
    after_each_step(explorers[1], lambda rollouts: explorers[1].stop() if rollouts.step == 2 else None)
    stayed, left = await asyncio.gather(*(explorer.run(explore) for explorer in explorers))
    assert (stayed["step"], stayed["ended"], left["step"], left["ended"]) == (4, "finished", 2, "stopped")
    with stored(first) as store:
        assert len(store.lease(1, 36, 0, final=True)) == 36
        assert {name: contribution.rows for name, contribution in store.contributions(1).items()} == {
            "explorer": 24,
            "explorer_new": 12,
        }
    lines = read_metrics(first.job_dir)
    assert Counter(line.source for line in lines) == {"explorer": 4, "explorer_new": 2}
    assert all(line.metrics["experiences_per_second"] > 0 for line in lines)


@pytest.mark.parametrize("ended", ["the trainer has finished all its 1 steps", "stopped"])
async def test_a_wait_for_the_trainer_ends(config, engine, ended):
    settings = config()
    explorer = Explorer(settings, [engine])
    running = asyncio.create_task(explorer.run(explore))
    await waiting(explorer, "waiting for version 1")
    if ended == "stopped":
        await explorer.stop()
    else:
        finished_trainer(settings)
    summary = await running
    assert (summary["ended"], summary["step"]) == (ended, 1)


def test_resumed_run_draws_the_same_tasks(config, engine):
    through = config(name="through")
    publish(through, 0, 1, 2, 3)
    asyncio.run(Explorer(through, [engine]).run(explore))

    broken = config(name="broken")
    publish(broken, 0, 1, 2, 3)
    asyncio.run(stopped_after(2, broken, engine))
    assert not stored(broken).stats().explorers["explorer"].finished
    asyncio.run(Explorer(broken, [engine]).run(explore))
    rows = [[(e.task_index, e.group, e.run) for e in stored(c).lease(1, 24, 9)] for c in (through, broken)]
    assert rows[0] == rows[1]


def test_missing_trainer_is_a_transient_fault(config, engine):
    settings = config(synchronizer={"sync_timeout": 0.2})
    with pytest.raises(TransientFault):
        asyncio.run(Explorer(settings, [engine]).run(explore))


async def test_after_a_rewind_it_starts_over_with_the_trainers_weights(config, engine):
    settings = config()
    publish(settings, 0, 1)
    running = asyncio.create_task(Explorer(settings, [engine]).run(explore))
    store = None
    while store is None or store.stats().ready < 12:
        await asyncio.sleep(0.05)
        if (settings.job_dir / "buffer").exists():
            store = stored(settings)
    store.lease(1, 6, 0)
    store.lease(2, 6, 1)
    open_versions("checkpoint", settings.job_dir).rewind(0)
    store.rewind(0)
    assert store.position("explorer").step == 1
    publish(settings, 1, 2, 3)
    await running
    assert [version for _, version in engine.loaded] == [0, 1, 1, 2, 3]
    assert stored(settings).stats().ready == 24


async def test_base_weights_do_not_stand_for_a_checkpoint(config, engine):
    """A new explorer joins while the trainer is back at checkpoint 2 and has yet to publish it."""
    settings = config(mode="explore", buffer={"total_steps": 2}, synchronizer={"sync_interval": 5})
    with stored(settings) as store:
        store.rewind(2)
        store.begin("trainer", 9)
        store.commit(2)

    explorer = Explorer(settings, [engine])
    running = asyncio.create_task(explorer.run(explore))
    while not running.done() and (await explorer.progress())["state"] != "waiting for version 0":
        await asyncio.sleep(0.02)
    publish(settings, 2)
    assert (await running)["version"] == 2
    assert {int(row.versions[0]) for row in stored(settings).lease(3, 12, 2, final=True)} == {2}


@pytest.mark.parametrize("style", ["fixed", "trainer_driven"])
def test_a_run_that_pushes_weights_resumes_before_its_first_push(config, engine, style):
    """Version 0 is due at step 4 too; nobody pushes it, as the engines start with it."""
    settings = config(synchronizer={"sync_method": "nccl", "sync_style": style, "sync_interval": 10})
    versions, alone = run_versions(settings), Ranks(0, 1, torch.device("cpu"))
    asyncio.run(Explorer(settings.with_values({"buffer.total_steps": 3}), [engine]).run(explore))
    with stored(settings) as store:
        for step in (1, 2, 3):
            assert store.lease(step, 6, step - 1)
        store.commit(3)
    trainer = TrainerRank(0, [], bool, bool, lambda: False)
    publisher = versions.publisher(settings, trainer)
    Publisher(settings, SimpleNamespace(ranks=alone), versions, publisher, lambda: 3).resume(3, settings.job_dir)
    summary = asyncio.run(Explorer(settings, [engine]).run(explore))
    assert (summary["step"], summary["version"]) == (4, 0)


@pytest.mark.parametrize(("changes", "steps"), [({}, 6), ({"train": 3}, 5), ({"train": 12}, 9), ({"repeat": 4}, 6)])
def test_explore_steps_suffice_for_train_steps_of_another_size(config, engine, changes, steps):
    """The trainer is at step 3 of 6, the explorer one step ahead; then the size of train steps changes."""

    def resized(total_steps, train=6, repeat=2):
        sizes = {"total_steps": total_steps, "train_batch_size": train}
        settings = config(
            buffer=sizes, algorithm={"repeat_times": repeat}, synchronizer={"sync_style": "explorer_driven"}
        )
        publish(settings, 0)
        return settings

    asyncio.run(Explorer(resized(4), [engine]).run(explore))
    with stored(config()) as store:
        for step in (1, 2, 3):
            assert store.lease(step, 6, step - 1)
        store.commit(3)
    for _ in range(2):
        summary = asyncio.run(Explorer(resized(6, **changes), [engine]).run(explore))
        assert (summary["ended"], summary["step"], summary["total_steps"]) == ("finished", steps, steps)
    if changes.get("train") == 12:  # steps 2 and 3 are made again, and take twice as many tasks too
        with stored(config()) as store:
            store.rewind(1)
        for _ in range(2):
            summary = asyncio.run(Explorer(resized(6, **changes), [engine]).run(explore))
            assert (summary["ended"], summary["step"], summary["total_steps"]) == ("finished", 11, 11)


@pytest.mark.parametrize("store_first", [True, False])
def test_starts_over_if_its_version_is_removed_during_load(config, engine, store_first):
    """The trainer goes back to checkpoint 1; its store may not show it yet when version 2 turns out to be gone."""

    class Racing(FakeEngine):
        async def load(self, source, version):
            if not open_versions("checkpoint", settings.job_dir).has(version):
                raise VersionGone(f"version {version} is gone")
            if version == 2:
                open_versions("checkpoint", settings.job_dir).rewind(1)
                if store_first:
                    store.rewind(1)
                raise VersionGone("version 2 is gone")
            return await super().load(source, version)

    settings = config(synchronizer={"sync_style": "trainer_driven"})
    publish(settings, 0, 1)
    engine = Racing(engine.answer)

    async def main():
        nonlocal store
        explorer = Explorer(settings, [engine])
        await explorer.prepare()
        store = stored(settings)

        def train(rollouts):
            if rollouts.step == 1:
                store.lease(1, 6, 1)
                publish(settings, 2)

        return await after_each_step(explorer, train).run(explore)

    store = None
    assert asyncio.run(main())["step"] == 4
    assert [version for _, version in engine.loaded] == [1, 1]


@pytest.mark.parametrize("style", ["fixed", "trainer_driven"])
def test_event_loop_does_not_wait_for_the_disk_of_the_weights(config, engine, style, monkeypatch):
    """A network file system may hang; answers and calls of workflows continue."""
    threads = set()

    def noted(look):
        def noting(*args):
            threads.add(threading.current_thread())
            return look(*args)

        return noting

    settings = config(synchronizer={"sync_style": style, "sync_interval": 10})
    publish(settings, 0)
    for name in ("has", "latest"):
        monkeypatch.setattr(WeightVersions, name, noted(getattr(WeightVersions, name)))
    assert asyncio.run(Explorer(settings, [engine]).run(explore))["step"] == 4
    assert threads and threading.main_thread() not in threads


def test_a_newer_version_than_the_due_one_is_a_warning(config, engine, caplog):
    """Version 1 disappears between the wait for it and its load."""

    class Late(FakeEngine):
        async def load(self, source, version):
            if version == 1:
                publish(settings, 2)
                raise VersionGone("version 1 is gone")
            return await super().load(source, version)

    settings = config(buffer={"total_steps": 2})
    publish(settings, 0, 1)
    engine = Late(engine.answer)
    asyncio.run(Explorer(settings, [engine]).run(explore))
    assert [version for _, version in engine.loaded] == [0, 2]
    assert [record.args for record in caplog.records if record.msg == NEWER_THAN_DUE] == [(2, 2, 1)]


def test_an_engine_with_other_weights_ends_the_run(config):
    class Lying(FakeEngine):
        async def load(self, source, version):
            raise WeightSyncError("the engine does not hold the weights")

    settings = config()
    publish(settings, 0)
    with pytest.raises(WeightSyncError):
        asyncio.run(Explorer(settings, [Lying()]).run(explore))


@pytest.mark.parametrize(
    ("mode", "style", "loaded"),
    [
        ("explore", "fixed", [5, 7]),
        ("both", "explorer_driven", [5, 7]),
        ("both", "dynamic_by_explorer", [5, 7]),
        ("both", "trainer_driven", [5, 6, 7, 8]),
        ("explore", "dynamic_by_trainer", [5, 6, 7, 8]),
    ],
)
def test_an_asynchronous_explorer_takes_the_newest_version(config, engine, mode, style, loaded):
    settings = config(mode=mode, synchronizer={"sync_interval": 2, "sync_style": style})
    publish(settings, 5)

    explorer = after_each_step(Explorer(settings, [engine]), lambda rollouts: publish(settings, 5 + rollouts.step))
    asyncio.run(explorer.run(explore))
    assert [version for _, version in engine.loaded] == loaded


async def test_step_with_stale_rows_does_not_begin(config, engine):
    """With max_staleness 1 at most two steps are in progress; each train step admits one more."""
    settings = config(synchronizer={"sync_style": "trainer_driven", "max_staleness": 1})
    publish(settings, 0)
    explorer, states, trained = Explorer(settings, [engine]), [], []
    running = asyncio.create_task(explorer.run(explore))
    for step in range(1, 5):
        while stored(settings).stats().ready < 6 * min(2, 5 - step):
            await asyncio.sleep(0.01)
        if step < 3:
            states.append(await waiting(explorer, f"waiting to begin step {step + 2}"))
        trained.append([int(e.versions[0]) for e in stored(settings).lease(step, 6, step - 1)])
        publish(settings, step)
    summary, states, trained = await running, states, trained
    assert summary["step"] == 4
    assert [state["step"] for state in states] == [2, 3]
    assert "max_staleness 1" in states[0]["waits"]
    assert trained == [[0] * 6, [0] * 6, [1] * 6, [2] * 6]


def test_operators_have_a_limit_that_names_them(config, engine, monkeypatch):
    monkeypatch.setattr("trinity_core.rollout.step_source.OPERATOR_SECONDS", 0.1)
    enough = threading.Event()

    @OPERATORS.register("endless")
    def endless(experiences):
        enough.wait(20)
        return experiences

    settings = config(mode="explore", data_processor={"experience_pipeline": {"operators": [{"name": "endless"}]}})
    publish(settings, 0)
    with pytest.raises(TrinityError, match="endless"):
        asyncio.run(Explorer(settings, [engine]).run(explore))
    enough.set()


async def test_new_weights_are_loaded_in_mid_generation(config, engine):
    class Long(FakeEngine):
        async def generate(self, requests):
            while self.version < 2:
                await asyncio.sleep(0.01)
            return await super().generate(requests)

    settings = config(mode="explore", buffer={"total_steps": 1}, synchronizer={"sync_in_flight": True})
    publish(settings, 0)
    engine = Long(engine.answer)

    explorer = Explorer(settings, [engine])
    running = asyncio.create_task(explorer.run(explore))
    while (await explorer.progress())["state"] != "exploring step 1":
        await asyncio.sleep(0.01)
    publish(settings, 1)
    while engine.version < 1:
        await asyncio.sleep(0.01)
    publish(settings, 2)
    assert (await running)["version"] == 2
    assert [version for _, version in engine.loaded] == [0, 1, 2]
    store = stored(settings)
    assert {e.newest_version for e in store.lease(1, 6, 2)} == {2}
    store.rewind(1)
    assert store.position("explorer").step == 0, "the step used a version newer than the checkpoint"


async def test_a_failed_load_in_mid_generation_ends_the_run(config, engine):
    class Lying(FakeEngine):
        async def load(self, source, version):
            if version:
                raise WeightSyncError("the engine does not hold the weights")
            return await super().load(source, version)

    settings = config(mode="explore", synchronizer={"sync_in_flight": True})
    publish(settings, 0)
    lying = Lying(engine.answer, seconds=5.0)

    with pytest.raises(WeightSyncError):
        running = asyncio.create_task(Explorer(settings, [lying]).run(explore))
        while not lying.calls:
            await asyncio.sleep(0.01)
        publish(settings, 1)
        await running


def test_storage_type_file_writes_what_was_explored(config, engine, tmp_path):
    """Each experience is a line with its tokens; a resumed explorer repairs a file that lost lines.

    Without a trainer, the weights are those that the engines start with.
    """
    settings = config(mode="explore").with_values(
        {"buffer.trainer_input.experience_buffer.storage_type": "file",
         "buffer.trainer_input.experience_buffer.path": str(tmp_path / "out")}
    )  # fmt: skip
    asyncio.run(Explorer(settings, [engine]).run(explore))
    assert engine.loaded == [] and engine.cache_resets == [] and len(engine.calls) == 4
    path = tmp_path / "out/explorer.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step in (1, 2, 3, 4) for _ in range(6)]
    with open_run_store(settings) as store:
        stored = [replace(one, info={}) for step in (1, 2, 3, 4) for one in store.explored("explorer", step)]
    assert [to_bytes([from_json(line)]) for line in lines] == [to_bytes([one]) for one in stored]
    assert lines[0]["response"] == "#### 7" and lines[0]["reward"] in (0.0, 1.0)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    asyncio.run(Explorer(settings, [engine]).run(explore))
    assert path.read_bytes() == whole


class Broken(Workflow):
    async def run(self):
        if self.task.workflow_args.get("only") in (None, self.task.index):
            raise RuntimeError(f"task {self.task.index} is broken")
        [one] = await self.model.chat(self.task.messages)
        return [one.experience(reward=0.0)]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_run_fails_if_all_tasks_fail(config, engine, monkeypatch, steps):
    """Three or six failures may be due to rows, but a run in which nothing succeeds trains nothing."""
    monkeypatch.setitem(WORKFLOWS, "broken", Broken)
    settings = with_workflow("broken", config(mode="explore", buffer={"total_steps": steps}))
    line = Broken.run.__code__.co_firstlineno + 2
    for again in range(2):  # what failed is not taken for a run that has finished
        step = min(steps, 3 + again)
        with pytest.raises(TrinityError, match=rf"step {step} .*{__file__}:{line}"):
            asyncio.run(Explorer(settings, [engine]).run(explore))


class Unjudged(Workflow):
    async def run(self):
        answers = await self.model.chat(self.task.messages, n=2)
        error = Reward(error="KeyError: no box")
        fine = self.task.group.endswith(self.task.workflow_args.get("judged", "none"))
        return [one.experience(1.0 if fine else error) for one in answers]


def test_run_fails_if_no_answer_can_be_judged(config, engine, monkeypatch):
    """A reward function that fails on each answer leaves nothing to learn from, however many steps are taken."""
    monkeypatch.setitem(WORKFLOWS, "unjudged", Unjudged)
    settings = with_workflow("unjudged", config(mode="explore"))
    with pytest.raises(TrinityError):
        asyncio.run(Explorer(settings, [engine]).run(explore))
    [audit] = audit_runs(settings.job_dir).values()
    assert (audit.tasks_drawn, audit.failed) == (6, 0)


def test_run_fails_at_once_if_all_prompts_are_too_long(config, engine):
    """They are truncated and carry no loss. Later, a step of long prompts does not end the run."""
    settings = config(mode="explore").with_values({"model.max_prompt_tokens": 4})
    with pytest.raises(TrinityError, match="max_prompt_tokens"):
        asyncio.run(Explorer(settings, [engine]).run(explore))
    assert not engine.calls
    cut = Experience(np.arange(3), 1, np.zeros(2, bool), versions=np.full(2, -1), reward=0.0, truncated=True)
    FailureWatch(any_succeeded=True).check(1, [outcome(cut)] * 20, is_last=True)


def outcome(one):
    return Outcome(Task(index=3, raw={}, taskset="gsm8k", workflow="w"), [one])


def test_masked_answers_are_not_truncated_prompts():
    long = Experience(np.arange(3), 1, np.zeros(2, bool), versions=np.zeros(2, np.int32), reward=0.0, truncated=True)
    FailureWatch().check(1, [outcome(long)] * 20)


def test_a_verifier_that_fails_after_it_judged_answers_is_a_passing_fault():
    lost = outcome(Experience(np.arange(3), 1, np.zeros(2, bool), metrics={"verifier_errors": 1.0}))
    watch = FailureWatch()
    watch.check(1, [outcome(Experience(np.arange(3), 1, np.ones(2, bool), reward=1.0))])
    with pytest.raises(TransientFault):
        watch.check(2, [lost] * 8)
    with pytest.raises(TrinityError):
        FailureWatch().check(1, [lost] * 8)
    FailureWatch(judged_later=True).check(1, [lost] * 8, is_last=True)


def test_run_fails_if_operators_drop_everything(config, engine):
    """Some steps may be empty; a run of only empty steps trains nothing."""
    nothing = {"operators": [{"name": "zero_variance_group_filter"}]}
    settings = config(mode="explore", data_processor={"experience_pipeline": nothing})
    for _ in range(2):  # again: what was dropped is not taken for a run that has finished
        with pytest.raises(TrinityError):
            asyncio.run(Explorer(settings, [engine]).run(explore))
    assert stored(settings).stats().ready == 0 and stored(settings).position("explorer").step == 3
    lines = [line for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert all(line.metrics["experiences/dropped/zero_variance_group_filter"] for line in lines)


def test_run_may_end_with_a_failed_step(config, engine, monkeypatch):
    """It has rows of earlier steps, even if they were explored before a resume."""
    monkeypatch.setitem(WORKFLOWS, "broken", Broken)
    fine = config(mode="explore", buffer={"total_steps": 1})
    asyncio.run(Explorer(fine, [engine]).run(explore))
    settings = with_workflow("broken", config(mode="explore", buffer={"total_steps": 2}))
    assert asyncio.run(Explorer(settings, [engine]).run(explore))["ended"] == "finished"


def test_few_consecutive_failures_do_not_end_the_run(tmp_path):
    """A run whose steps have one task does not end at a bad row; one in which nothing succeeds any more ends soon."""
    task = Task(index=3, raw={}, taskset="gsm8k", workflow="w", location="train.jsonl:4")
    failed, fine = Outcome(task, error=KeyError("board")), Outcome(task)
    watch = FailureWatch(RejectedRows(folder=tmp_path))
    for step in range(7):
        watch.check(step, [failed])
    watch.check(8, [fine, failed])
    for step in range(7):
        watch.check(step, [failed])
    with pytest.raises(TrinityError, match=r"train\.jsonl:4"):
        watch.check(9, [failed])
    lines = [json.loads(line) for line in (tmp_path / "failed_tasks.jsonl").read_text().splitlines()]
    assert lines == [{"source": "train.jsonl", "line": 4, "reason": "KeyError: 'board'"}] * 16


def test_metrics_of_a_stored_step_survive_a_kill(config, engine, monkeypatch):
    """A stored step is never repeated: the next process writes the metrics that the killed one did not."""
    settings = config()
    publish(settings, 0, 1, 2, 3)

    def die(*_):
        raise SystemExit(-9)

    with monkeypatch.context() as killed:
        killed.setattr(StepRecords, "write", die)
        with pytest.raises(SystemExit):
            asyncio.run(Explorer(settings, [engine]).run(explore))
    asyncio.run(Explorer(settings, [engine]).run(explore))
    lines = [line for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert {"reward/mean", "timing_s/generate"} <= lines[0].metrics.keys()


def test_evaluates_at_the_start_and_every_eval_interval(config, engine):
    settings = config(explorer={"eval_on_startup": True, "eval_interval": 2})
    publish(settings, 0, 1, 2, 3)
    for _ in range(2):  # a resumed run repeats none
        asyncio.run(Explorer(settings, [engine]).run(explore))
    lines = [line for line in read_metrics(settings.job_dir) if line.source == "eval"]
    assert [line.step for line in lines] == [0, 2]
    rows = (Path(settings.buffer.explorer_input.eval_tasksets[0].path) / "test.jsonl").read_text().splitlines()
    truths = [json.loads(row)["answer"].split("####")[1].strip() for row in rows]
    assert lines[0].metrics["eval/small/accuracy"] == pytest.approx(np.mean([t == "7" for t in truths]))


def test_abandoned_weights_leave_no_score(config, engine, monkeypatch):
    """The trainer is back at the start before version 2 is scored: it makes another version 2."""
    settings = config(mode="explore", buffer={"total_steps": 2}, explorer={"eval_interval": 2})
    publish(settings, 0, 2)
    with stored(settings) as store:
        store.position("explorer")
        store.put("explorer", 1, {"step": 1, "evaluated": 0, "lineage": 0, "drawn": 3, "drawn_from": [3]}, [], 0)
        store.begin("trainer", 9)
        assert store.lease(1, 6, 0, final=True) == store.lease(2, 6, 1, final=True) == []
        generate = FakeEngine.generate

        async def generate_late(engine, requests):
            if engine.version == 2 and not store.lineage():
                open_versions("checkpoint", settings.job_dir).rewind(0)
                store.rewind(0)
                publish(settings, 0)
            return await generate(engine, requests)

        monkeypatch.setattr(FakeEngine, "generate", generate_late)
        summary = asyncio.run(Explorer(settings, [engine]).run(explore))
    assert [version for _, version in engine.loaded] == [2, 0] and summary["step"] == 2
    assert valid_scores(settings) == {}


def test_a_checkpoint_is_evaluated_from_its_folder(config, engine, tiny_folder):
    settings = config(mode="bench")
    scores = asyncio.run(Explorer(settings, [engine]).evaluate(8, str(tiny_folder)))
    assert 0 <= scores["eval/small/accuracy"] <= 1
    [(source, version)] = engine.loaded
    assert (source.method, source.path, version) == ("folder", str(tiny_folder), 8)
    assert valid_scores(settings) == {8: scores["eval/small/accuracy"]}
    assert not (settings.job_dir / "buffer").exists(), "an empty store would pass for a run's"


def test_evaluation_reports_progress(config, engine, tiny_folder, monkeypatch):
    explorer, heard = Explorer(config(mode="bench"), [engine]), []
    one_more = EvaluationProgress.one_more

    def overheard(progress: EvaluationProgress) -> None:
        one_more(progress)
        heard.append((progress.done, progress.total, progress.text == explorer._resources.evaluation.text))

    monkeypatch.setattr(EvaluationProgress, "one_more", overheard)
    scores = asyncio.run(explorer.evaluate(8, str(tiny_folder)))
    total = int(scores["eval/small/tasks"])
    assert heard == [(done, total, True) for done in range(1, total + 1)]
    assert asyncio.run(explorer.progress())["waits"] == ""


def test_evaluation_needs_no_task_set_to_explore(config, engine, tiny_folder):
    """As in a stage that trains on a data set; exploring without a task set raises a clear error."""
    tasks = "buffer.explorer_input"
    settings = config(mode="bench").with_values({f"{tasks}.taskset": None, f"{tasks}.tasksets": []})
    explorer = Explorer(settings, [engine])
    scores = asyncio.run(explorer.evaluate(8, str(tiny_folder)))
    assert scores["eval/small/tasks"] == 16
    with raising(DataError, key="buffer.explorer_input.taskset"):
        asyncio.run(Explorer(settings, [engine]).run(explore))


def test_operators_use_columns_of_joined_inputs(config, engine, tiny_folders, tmp_path):
    """A rating of each question is added to the rewards of its answers, and saved with the operators' input."""
    questions = [json.loads(line)["question"] for line in (tiny_folders.data / "train.jsonl").read_text().splitlines()]
    ratings = [{"question": question, "stars": place / 4} for place, question in enumerate(questions)]
    (tmp_path / "ratings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ratings))
    shaping = {"reward_shaping_configs": [{"stats_key": "ratings.stars", "op_type": "ADD"}]}
    pipeline = {
        "inputs": {"ratings": {"path": str(tmp_path / "ratings.jsonl"), "join_key": "question"}},
        "operators": [{"name": "reward_shaping_mapper", "args": shaping}],
        "input_save_path": str(tmp_path / "given.jsonl"),
    }
    asyncio.run(
        Explorer(config(mode="explore", data_processor={"experience_pipeline": pipeline}), [engine]).run(explore)
    )
    rows = stored(config()).lease(1, 24, 0)
    assert [row.reward - row.metrics["unshaped_reward"] for row in rows] == [row.task_index / 4 for row in rows]
    saved = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    assert [line["ratings.stars"] for line in saved] == [row.task_index / 4 for row in rows]


@pytest.fixture
def odd_tasks_are_dropped():
    @OPERATORS.register("even_tasks")
    def even_tasks(experiences):
        return [one for one in experiences if one.task_index % 2 == 0]

    return {"experience_pipeline": {"operators": [{"name": "even_tasks"}]}}


def test_operator_input_is_saved(config, engine, odd_tasks_are_dropped, tmp_path):
    """A step that was written but not stored, because the run was killed in between, is cut off and rewritten."""
    pipeline = odd_tasks_are_dropped["experience_pipeline"] | {"input_save_path": str(tmp_path / "given.jsonl")}
    settings = config(mode="explore", data_processor={"experience_pipeline": pipeline})
    asyncio.run(stopped_after(2, settings, engine))
    path = tmp_path / "given.jsonl"
    two_steps = path.read_text()
    path.write_text(two_steps + two_steps.splitlines()[-1].replace('"step": 2', '"step": 3') + "\n")
    asyncio.run(Explorer(settings, [engine]).run(explore))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.read_text().startswith(two_steps)
    sizes = [line.metrics["experiences"] for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert list(Counter(line["step"] for line in lines).items()) == list(enumerate(sizes, 1))
    assert len({(line["group"], line["run"]) for line in lines}) == len(lines)
    assert stored(settings).stats().ready < len(lines) and len(from_json(lines[0]).tokens) > 1


def test_groups_that_are_dropped_are_replaced(config, engine, odd_tasks_are_dropped):
    settings = config(mode="explore", data_processor=odd_tasks_are_dropped, explorer={"max_refill_rounds": 8})
    explorer = Explorer(settings, [engine])
    summary = asyncio.run(explorer.run(explore))
    assert explorer._open.runner.pace.steps == 4, "rounds of refills are no steps"
    rows = stored(settings).lease(1, 24, 0)
    assert [row.task_index for row in rows] == [2 * number for number in range(12) for _ in range(2)]
    groups = [row.group.split("/")[1:] for row in rows]
    assert Counter(step for step, _ in groups) == {"1": 6, "2": 6, "3": 6, "4": 6}
    assert [slot for step, slot in groups if step == "1"] == ["0", "0", "2", "2", "4", "4"]
    [audit] = audit_runs(settings.job_dir).values()
    assert audit.clean and audit.tasks_drawn == 23 and audit.dropped_by == {"even_tasks": 11}
    tasks = [line.metrics["tasks"] for line in read_metrics(settings.job_dir) if line.source == "explorer"]
    assert tasks == [5, 6, 6, 6]
    assert summary["dropped_experiences"] == audit.experiences_dropped_by == {"even_tasks": 22}


def test_refills_end_after_their_rounds(config, engine, odd_tasks_are_dropped, caplog):
    settings = config(mode="explore", data_processor=odd_tasks_are_dropped, explorer={"max_refill_rounds": 1})
    asyncio.run(Explorer(settings, [engine]).run(explore))
    drawn = Counter(row.group.split("/")[1] for row in stored(settings).lease(1, 24, 0))
    assert drawn == {"1": 4, "2": 4, "3": 4, "4": 4}
    assert "explorer.max_refill_rounds" in caplog.text


@pytest.mark.parametrize("ahead", [False, True])
def test_a_learned_curriculum_resumes_with_the_same_tasks(config, engine, odd_tasks_are_dropped, ahead):
    """Stopped and restarted; with `sync_offset` the explorer was a step ahead and the trainer goes back."""
    sections = {"data_processor": odd_tasks_are_dropped, "explorer": {"max_refill_rounds": 8}}
    rows = []
    for name in ("through", "broken"):
        settings = config(name=name, **sections, synchronizer={"sync_offset": int(ahead)})
        (taskset,) = settings.buffer.explorer_input.tasksets
        selector = {"selector_type": "difficulty_based", "kwargs": {"m": 4, "tau": 0.2, "do_sample": True}}
        taskset = taskset.with_values({"task_selector": selector})
        settings = settings.with_values({"buffer.explorer_input.tasksets": [taskset]})
        publish(settings, 0, 1, 2, 3)
        if name == "broken":
            asyncio.run(stopped_after(3, settings, engine))
            with stored(settings) as store:
                store.rewind(1)
        explorer = Explorer(settings, [engine])
        asyncio.run(explorer.run(explore))
        rows.append([(e.task_index, e.group, e.run) for e in stored(settings).lease(2, 24, 9)])
        positions = stored(settings).positions("explorer")
        assert [position["step"] for position in positions] == [1, 2, 3, 4]
        assert all(len(position["observed"]["taskset"]["rates"]) >= 3 for position in positions)
    assert rows[0] == rows[1] and len(rows[0]) == 24


@pytest.mark.parametrize("mode", ["both", "explore"])
def test_tasks_that_arrive_meanwhile_are_explored(config, engine, mode):
    """It logs what it waits for, continues after a restart, and finishes when the queue has ended."""
    settings = config(mode=mode, buffer={"batch_size": 3, "total_steps": 99})
    (taskset,) = settings.buffer.explorer_input.tasksets
    arriving = taskset.with_values({"storage_type": "queue", "path": "arriving.db"})
    settings = settings.with_values({"buffer.explorer_input.tasksets": [arriving]})
    publish(settings, 0, 1, 2, 3)
    queue = queue_of(settings, arriving)
    queue.create()
    assert queue.path == settings.job_dir / "buffer" / "arriving.db"
    queue.add({"question": str(number), "answer": "#### 7"} for number in range(4))

    async def main(added, *, end):
        explorer = Explorer(settings, [engine])
        running = asyncio.create_task(explorer.run(explore))
        while "tasks" not in (progress := await explorer.progress())["waits"] and not running.done():
            await asyncio.sleep(0.01)
        queue.add({"question": str(number), "answer": "#### 7"} for number in added)
        if end:
            queue.end()
        else:
            await explorer.stop()
        return progress, await running

    progress, summary = asyncio.run(main(range(4, 5), end=False))
    assert "2 more of 'taskset'" in progress["waits"]
    assert summary["ended"] == "stopped" and summary["step"] == 1
    progress, summary = asyncio.run(main(range(5, 8), end=True))
    assert "1 more of 'taskset'" in progress["waits"]
    assert (summary["ended"], summary["step"]) == ("finished", 3)
    rows = stored(settings).lease(1, 99, 9, final=True)
    assert [row.task_index for row in rows] == [number for number in range(8) for _ in range(2)]
    assert stored(settings).stats().explorers["explorer"].finished
    assert asyncio.run(Explorer(settings, [engine]).run(explore))["step"] == 3, "nothing is left for another start"


async def stopped_after(step, settings, engine):
    explorer = Explorer(settings, [engine])
    after_each_step(explorer, lambda rollouts: explorer.stop() if rollouts.step == step else None)
    assert (await explorer.run(explore))["step"] == step


def test_what_other_explorers_left_may_be_enough():
    FailureWatch(has_others=lambda: True).check_left(4, [], ["filter"], True)
    with pytest.raises(TrinityError):
        FailureWatch().check_left(4, [], ["filter"], True)


def test_a_task_that_was_not_waited_for_is_no_success(tmp_path):
    task = Task(index=3, raw={}, taskset="gsm8k", workflow="w")
    failed, left = Outcome(task, error=KeyError("board")), Outcome(task, dropped=OVER_ROLLOUT)
    watch = FailureWatch(RejectedRows(folder=tmp_path))
    watch.check(1, [left, *[failed] * 7])
    with pytest.raises(TrinityError):
        watch.check(2, [left, failed])
