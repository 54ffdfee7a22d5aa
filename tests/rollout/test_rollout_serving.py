"""An explorer in mode `serve` on a fake engine, with its real server, store and audit."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import httpx
import torch
from rollout.fakes import FakeEngine

from trinity_core.config import config_from_dict
from trinity_core.config.paths import api_address_file
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.tracking.champions import go_back, promote
from trinity_core.results.audit import audit_runs
from trinity_core.rollout.explorer import Explorer
from trinity_core.run.feedback import judged_rollouts
from trinity_core.run.loop import explore

HELLO = [{"role": "user", "content": "hello"}]
SECONDS = 120


def config_of(tiny_folders, root, **explorer):
    return config_from_dict({
        "project": "p",
        "name": "n",
        "mode": "serve",
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "reinforceplusplus"},
        "model": {"model_path": str(tiny_folders.model), "max_model_len": 128},
        "buffer": {"batch_size": 2},
        "explorer": {"rollout_model": {"enable_openai_api": True}, **explorer},
    })  # fmt: skip


async def until(condition):
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


class Serving:
    """An explorer that serves in this event loop, and its client."""

    def __init__(self, settings, engine):
        self.settings, self.explorer = settings, Explorer(settings, [engine])

    async def __aenter__(self):
        await self.explorer.prepare()
        address = json.loads(api_address_file(self.settings).read_text())
        root, headers = address["base_url"].removesuffix("/v1"), {"Authorization": f"Bearer {address['api_key']}"}
        self.http = httpx.AsyncClient(base_url=root, headers=headers, timeout=SECONDS)
        self.run = asyncio.create_task(self.explorer.run(explore))
        self.store = open_run_store(self.settings)
        return self

    async def __aexit__(self, *_):
        await self.explorer.stop()
        self.summary = await asyncio.wait_for(self.run, SECONDS)
        await self.http.aclose()
        await self.explorer.close()
        self.store.close()

    async def ask(self, session=None):
        headers = {} if session is None else {"x-trinity-session": session}
        asked = {"model": "policy", "messages": HELLO}
        answer = await self.http.post("/v1/chat/completions", json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-trinity-session"]

    async def judge(self, session, reward=1.0):
        return (await self.http.post("/feedback", json={"session_id": session, "reward": reward})).status_code


def test_feedback_reaches_the_store_after_restarts(tiny_folders, tiny_folder, tmp_path):
    tokenizer = load_tokenizer(str(tiny_folder))
    engine = FakeEngine(answer=[*tokenizer.encode("hi", add_special_tokens=False), tokenizer.eos_token_id])
    settings = config_of(tiny_folders, tmp_path)

    async def before_the_end():
        async with Serving(settings, engine) as serving:
            first, second, later = [await serving.ask() for _ in range(3)]
            assert [await serving.judge(one) for one in (first, second)] == [200, 200]
            await until(lambda: serving.store.stats().ready == 2)
            assert await serving.judge(first) == 409
        assert serving.summary["ended"] == "stopped" and serving.summary["step"] >= 1
        return first, later

    async def after_it(first, later):
        async with Serving(settings, engine) as serving:
            await serving.ask(later)
            assert [await serving.judge(one) for one in (first, later)] == [409, 200]
            await until(lambda: serving.store.stats().ready == 4)
            serving.store.begin("trainer", 1)
            assert len(serving.store.lease(1, 4, 0)) == 4
            serving.store.commit(1)
            await asyncio.wait_for(serving.run, SECONDS)
        assert serving.summary["ended"] == "the trainer has finished all its 1 steps"
        assert serving.summary["untrained_rows"] == 0

    first, later = asyncio.run(before_the_end())
    asyncio.run(after_it(first, later))
    [audit] = audit_runs(settings.job_dir).values()
    assert not [problem for problem in audit.problems if "archive" not in problem and "checkpoint" not in problem]
    assert (audit.tasks_drawn, audit.trained, audit.lost) == (3, 3, 0)
    assert audit.sampled_tokens == 4 * len(engine.answer)
    assert not list((settings.job_dir / "buffer/serving-explorer").iterdir())


async def test_an_endpoint_without_a_trainer_follows_the_champion(tiny_folders, tmp_path):
    """Sessions continue; a step back is a version of its own. A restarted endpoint begins with the champion."""
    settings = config_of(tiny_folders, tmp_path).with_values({"synchronizer.sync_method": "champion"})
    project, models = settings.job_dir.parent, [str(tmp_path / name) for name in "ab"]
    async with Serving(settings, FakeEngine()) as serving:
        session = await serving.ask()
        for model, before in zip(models, [None, *models], strict=False):
            promote(project, model, before, {})
        await until(lambda: serving.explorer.version == 2)
        go_back(project)
        await until(lambda: serving.explorer.version == 3)
        assert [await serving.judge(one) for one in (session, await serving.ask())] == [200, 200]
        await until(lambda: serving.store.stats().ready == 2)
    async with Serving(settings, engine := FakeEngine()) as serving:
        await until(lambda: serving.explorer.version == 3)
    assert {version for _, version in engine.loaded} == {3}
    versions = [rollout.rows[0].versions for rollout in judged_rollouts(str(settings.job_dir))]
    assert [set(of_tokens) for of_tokens in versions] == [{0}, {3}]


def publish_zeros(weights, *versions):
    for version in versions:
        weights.publish(version, [("w", torch.zeros(1))], keep=99)


async def asked_at_version_2(serving, publish):
    """A session of version 2, after a train step on another one."""
    publish(0)
    assert await serving.judge(await serving.ask()) == 200
    await until(lambda: serving.store.stats().ready == 1)
    assert len(serving.store.lease(1, 1, 0)) == 1
    publish(1, 2)
    await until(lambda: serving.explorer.version == 2)
    return await serving.ask()


async def test_retrained_versions_are_not_mistaken_for_old_ones(tiny_folders, tmp_path):
    settings = config_of(tiny_folders, tmp_path)
    weights = open_versions("checkpoint", settings.job_dir)
    publish = partial(publish_zeros, weights)
    async with Serving(settings, FakeEngine()) as serving:
        old = await asked_at_version_2(serving, publish)
        weights.rewind(0)
        serving.store.rewind(0)
        publish(0)
        await until(lambda: serving.explorer.version == 0)
        publish(1, 2, 3)
        await until(lambda: serving.explorer.version == 3)
        new = await serving.ask()
        assert [await serving.judge(one) for one in (old, new)] == [200, 200]
        await until(lambda: serving.store.stats().ready == 2)
    [audit] = audit_runs(settings.job_dir).values()
    assert audit.clean, audit.problems
    assert dict(audit.dropped_by) == {"weights_taken_back": 1} and audit.pending == 2


def test_a_trainer_that_went_back_and_on_takes_sessions_back_too(tiny_folders, tmp_path):
    """It had trained again and saved before the explorer was back: versions 1 and 2 are other weights."""
    settings = config_of(tiny_folders, tmp_path)
    weights = open_versions("checkpoint", settings.job_dir)
    publish = partial(publish_zeros, weights)

    async def before():
        async with Serving(settings, FakeEngine()) as serving:
            return await asked_at_version_2(serving, publish)

    async def after(session):
        async with Serving(settings, FakeEngine()) as serving:
            await until(lambda: serving.explorer.version == 2)
            assert await serving.judge(session) == 200
            assert await serving.judge(await serving.ask()) == 200
            await until(lambda: serving.store.stats().ready == 1)

    session = asyncio.run(before())
    weights.rewind(0)
    with open_run_store(settings) as store:
        store.rewind(0)
        for step in (1, 2):
            store.lease(step, 1, step - 1, final=True)
        store.commit(2)
    publish(0, 1, 2)
    asyncio.run(after(session))
    [audit] = audit_runs(settings.job_dir).values()
    assert dict(audit.dropped_by) == {"weights_taken_back": 1} and audit.pending == 1
