"""GiGPO from an environment to a gradient step: a real engine plays, DeepSpeed trains."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter, defaultdict

import pytest
from workflows.workflow_helpers import make_task

from trinity_core.config.schema.buffer import RolloutArgs
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Sampling
from trinity_core.run.loop import train
from trinity_core.training import learner
from trinity_core.training.worker import TrainerWorker
from trinity_core.workflows import ENVIRONMENTS, run_workflow

pytestmark = pytest.mark.slow
GAMMA, EPSILON = 0.5, 1e-6


@pytest.fixture
def any_text_moves(monkeypatch, toy_games):
    """FrozenLake in which any text is a move, so that an untrained policy moves too."""
    own = type("Lake", (ENVIRONMENTS["frozen_lake"],), {"move": lambda self, text: len(text) % 4})
    monkeypatch.setitem(ENVIRONMENTS, "lake", own)


def played(engine, folder):
    """The turns of two tasks with eight rollouts each, on a 2x2 lake without holes."""
    tokenizer = load_tokenizer(str(folder), False)
    sampling = Sampling(4, stop_token_ids=tuple(token for token in range(len(tokenizer)) if token % 4 == 0))
    tasks = [
        make_task(
            "env_workflow",
            index=index,
            group=f"1/{index}",
            raw={"question": "Go.", "seed": index},
            repeat_times=8,
            rollout_args=RolloutArgs(),
            workflow_args={
                "environment": "lake",
                "environment_args": {"size": 2, "p": 1.0, "show_rules": False},
                "max_turns": 5,
                "step_wise": True,
                "discount": 0,
            },
        )
        for index in range(2)
    ]

    async def main():
        pool = EnginePool([engine], str(folder))
        await pool.start()
        model = EngineModel(pool, ChatEncoder(tokenizer), Limits(250, 240, 4, sampling, True))
        return [row for task in tasks for row in await run_workflow(task, model)]

    return asyncio.run(main())


def by_hand(rows):
    """The advantage of each turn: its run's in the group, plus its return's among turns in the same state."""
    rewards = {(row.group, row.run, row.turn): row.reward for row in rows}
    totals, returns, states = defaultdict(dict), {}, defaultdict(list)
    for row in rows:
        later = [turn for group, run, turn in rewards if (group, run) == (row.group, row.run) and turn >= row.turn]
        totals[row.group].setdefault(row.run, 0.0)
        totals[row.group][row.run] += row.reward
        discounted = sum(GAMMA ** (turn - row.turn) * rewards[row.group, row.run, turn] for turn in later)
        returns[row.group, row.run, row.turn] = discounted
        states[row.group, row.state].append(discounted)

    def scaled(value, among):
        if len(among) < 2:
            return 0.0
        return (value - statistics.mean(among)) / (statistics.stdev(among) + EPSILON)

    return {
        turn: scaled(totals[row.group][row.run], list(totals[row.group].values()))
        + scaled(returns[turn], states[row.group, row.state])
        for row in rows
        for turn in [(row.group, row.run, row.turn)]
    }


@pytest.mark.usefixtures("any_text_moves")
def test_turns_of_a_lake_are_trained(make_config, tiny_engine, tiny_folder, monkeypatch):
    from trinity_core.exchange.store.run_store import open_run_store

    rows = played(tiny_engine, tiny_folder)
    won = Counter(row.metrics["return"] for row in rows if row.turn == 0)
    assert set(won) == {0.0, 1.0} and len({row.state for row in rows}) >= 3, won
    config = make_config(
        "gigpo", model__model_path=tiny_folder, model__max_prompt_tokens=200, model__max_response_tokens=56,
        buffer__total_steps=1, buffer__batch_size=2, buffer__train_batch_size=len(rows), algorithm__repeat_times=8,
        algorithm__advantage_fn_args={"gamma": GAMMA, "epsilon": EPSILON},
    )  # fmt: skip
    with open_run_store(config) as store:
        store.put("explorer", 1, {}, rows, 0)
    trained = []

    def seen(*args):
        prepared, metrics = prepare(*args)
        trained.append((prepared, metrics))
        return prepared, metrics

    prepare = learner.prepare
    monkeypatch.setattr(learner, "prepare", seen)
    worker = TrainerWorker(config)
    worker.start()
    assert worker.run(train)["ended"] == "finished"
    [(prepared, metrics)] = trained
    expected, batch = by_hand(rows), prepared.batch
    assert len(batch.experiences) == len(rows) and metrics["gigpo/shared_states"] > 0.5
    for row, advantages, mask in zip(batch.experiences, prepared.advantages, batch.mask, strict=True):
        assert advantages[mask].tolist() == pytest.approx(
            [expected[row.group, row.run, row.turn]] * int(mask.sum()), abs=1e-4
        )
    assert any(abs(value) > 0.1 for value in expected.values())
