"""The explorer with a real engine and a fake trainer."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from inference.holding import held_midway
from rollout.exploring import config_of, explored, logprobs_of

from trinity_core.config.paths import api_address_file
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.audit import audit_runs
from trinity_core.rollout.explorer import Explorer
from trinity_core.run.loop import explore
from trinity_core.workflows import WORKFLOWS, AgentWorkflow

pytestmark = pytest.mark.slow


def test_stored_rollouts_are_trainable_and_the_seed_repeats_them(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after
):
    configs = [config_of(tiny_folders, tmp_path, name) for name in ("one", "two")]
    first, second = [explored(config, tiny_engine, tiny_model) for config in configs]
    assert len(first) == 32
    for e in first:
        expected = logprobs_of(tiny_model, e.tokens)[e.prompt_length - 1 :]
        np.testing.assert_allclose(e.logprobs, expected, atol=1e-5)
    assert [int(e.versions[0]) for e in first] == [0] * 16 + [1] * 16
    assert len({tuple(e.tokens.tolist()) for e in first}) > 16
    assert [e.tokens.tolist() for e in first] == [e.tokens.tolist() for e in second]
    gaps = [line.metrics["weight_sync/check_gap"] for line in read_metrics(configs[0].job_dir)]
    assert max(gaps) < 1e-4


class Doubting(AgentWorkflow):
    """An agent of three turns; in every second rollout it repeats the second question."""

    async def rollout(self, session, run):
        client, messages = session.openai_async_client, list(self.task.messages)
        for question in ("Sure?", "Why?"):
            for _ in range(1 + run % 2):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": question}]
        stream = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        return float(len(text) % 2)


def test_agents_are_trained_on_what_was_sampled(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after, monkeypatch
):
    monkeypatch.setitem(WORKFLOWS, "doubting", Doubting)
    config = config_of(tiny_folders, tmp_path, "agents").with_values({"explorer.rollout_model.enable_openai_api": True})
    taskset = config.buffer.explorer_input.tasksets[0].with_values({"default_workflow_type": "doubting"})
    config = config.with_values({"buffer.explorer_input.tasksets": [taskset]})
    rows = explored(config, tiny_engine, tiny_model)
    assert {e.run for e in rows} == {0, 1, 2, 3} and {int(e.versions.max()) for e in rows} == {0, 1}
    for e in rows:
        expected = logprobs_of(tiny_model, e.tokens)[e.prompt_length - 1 :]
        np.testing.assert_allclose(e.logprobs[e.action_mask], expected[e.action_mask], atol=1e-5)
    turns = Counter((e.group, e.run) for e in rows)
    assert {run: {turns[group, run] for group, _ in turns} for run in range(4)} == {0: {1}, 1: {3}, 2: {1}, 3: {3}}
    [audit] = audit_runs(config.job_dir).values()
    assert not [problem for problem in audit.problems if "session" in problem]
    assert audit.sampled_tokens == sum(int(e.action_mask.sum()) for e in rows)
    numbers = read_metrics(config.job_dir)[-1].metrics
    assert numbers["sessions"] == 16 and numbers["sessions/discarded_tokens"] == 0
    address = api_address_file(config)
    key = json.loads(address.read_text())["api_key"]
    assert address.stat().st_mode & 0o777 == 0o600
    others = [path for path in config.job_dir.rglob("*") if path.is_file() and path != address]
    assert not [path for path in others if key.encode() in path.read_bytes()]


class Failing(AgentWorkflow):
    """Agents of three turns. Of four tasks the second hangs in its third turn the first time, the third hangs there
    each time, and the fourth crashes there each time."""

    seen: ClassVar[Counter[int]] = Counter()

    async def rollout(self, session, run):
        kind = self.task.index % 4
        Failing.seen[kind] += 1
        client, messages = session.openai_async_client, list(self.task.messages)
        for turn in range(3):
            if turn == 2 and (kind == 2 or (kind == 1 and Failing.seen[1] <= self.task.repeat_times)):
                await asyncio.Event().wait()
            if turn == 2 and kind == 3:
                raise RuntimeError("the agent crashed")
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Sure?"}]
        return float(run % 2)


def test_agents_that_hang_or_crash_cost_only_themselves(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after, monkeypatch
):
    monkeypatch.setitem(WORKFLOWS, "failing", Failing)
    Failing.seen.clear()
    config = config_of(tiny_folders, tmp_path, "failing").with_values({
        "explorer.rollout_model.enable_openai_api": True, "buffer.total_steps": 1,
        "explorer.max_timeout": 5, "explorer.max_retry_times": 1,
    })  # fmt: skip
    taskset = config.buffer.explorer_input.tasksets[0].with_values({"default_workflow_type": "failing"})
    config = config.with_values({"buffer.explorer_input.tasksets": [taskset]})
    rows = explored(config, tiny_engine, tiny_model)
    assert sorted({e.task_index % 4 for e in rows}) == [0, 1] and len(rows) == 8
    assert Failing.seen == {0: 4, 1: 8, 2: 8, 3: 8}
    numbers = read_metrics(config.job_dir)[-1].metrics
    assert (numbers["retries"], numbers["failed_tasks"], numbers["sessions"]) == (3, 2, 28)
    sampled = sum(int(e.action_mask.sum()) for e in rows)
    assert numbers["sessions/tokens"] - numbers["sessions/discarded_tokens"] == sampled > 0
    [audit] = audit_runs(config.job_dir).values()
    assert (audit.tasks_drawn, audit.failed, audit.sampled_tokens) == (4, 2, sampled)
    why = " ".join(audit.failed_because)
    assert "longer than 5 s (explorer.max_timeout)" in why and "RuntimeError: the agent crashed" in why
    assert not [problem for problem in audit.problems if "session" in problem]


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_answers_in_flight_take_up_new_weights(
    tiny_folders, tiny_engine, tiny_model, tmp_path, own_weights_after, method
):
    """Each log-prob is that of the version that sampled its token, over the whole sequence before it."""
    import torch

    length = 150
    config = config_of(tiny_folders, tmp_path, method).with_values({
        "buffer.total_steps": 1,
        "model.max_response_tokens": length,
        "model.min_response_tokens": length,
        "synchronizer": {"sync_style": "trainer_driven", "sync_in_flight": True, "sync_method": method},
    })  # fmt: skip
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    versions = open_versions(method, config.job_dir)

    def publish(version, model):
        tokens = np.arange(3, 40, 4)
        check = WeightCheck(tuple(tokens.tolist()), tuple(logprobs_of(model, tokens).tolist()))
        versions.publish(version, model.state_dict().items(), check)

    async def main():
        publish(0, tiny_model)
        with held_midway(tiny_engine, 16 * 20) as midway:
            running = asyncio.create_task(Explorer(config, [tiny_engine]).run(explore))
            while not midway.is_set() and not running.done():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(publish, 1, other)
            return await running

    assert asyncio.run(main())["version"] == 1
    rows = open_run_store(config).lease(1, 64, 1)
    versions.remove()
    assert {int(version) for e in rows for version in e.versions} == {0, 1}
    for e in rows:
        assert (np.diff(e.versions) >= 0).all(), "no token is of older weights than the one before it"
        by_version = [logprobs_of(model, e.tokens)[e.prompt_length - 1 :] for model in (tiny_model, other)]
        np.testing.assert_allclose(e.logprobs, np.where(e.versions == 1, by_version[1], by_version[0]), atol=1e-4)
