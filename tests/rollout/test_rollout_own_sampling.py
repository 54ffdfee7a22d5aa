"""Answers sampled with a workflow's own arguments: the trainer computes log-probs of the same distribution."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout.fakes import FakeEngine

from trinity_core.base.errors import InputError, TrinityError
from trinity_core.config.schema.buffer import RolloutArgs
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.experience import from_bytes, to_bytes
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Sampling
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.rollout.runner import TaskRunner
from trinity_core.rollout.workflow_loops import WorkflowLoop
from trinity_core.training.batch import make_batch
from trinity_core.training.distributed import Ranks
from trinity_core.training.policy import Policy, find_fast_paths, load_causal_lm
from trinity_core.training.update import MicroBatchLimits, forward_batch, micro_batches
from trinity_core.workflows import WORKFLOWS, RewardPool, Workflow
from trinity_core.workflows.trajectory import Trajectory

ASK = [{"role": "user", "content": "Tom has 3 apples."}]
USUAL = 1.2
"""The model's temperature; the task set's is 0.8."""


class OwnSampling(Workflow):
    """Answers with `workflow_args["calls"]`, or a conversation with a temperature for each turn."""

    async def run(self):
        if "turns" in self.task.workflow_args:
            trajectory = Trajectory(self.model, ASK, seed=self.task.rollout_seed, **self.task.sampling)
            for temperature in self.task.workflow_args["turns"]:
                await trajectory.act(temperature=temperature, max_tokens=12)
                trajectory.add({"role": "user", "content": "and then?"})
            return [trajectory.experience(1.0)]
        answers = await self.model.chat(ASK, 4, seeds=[1, 2, 3, 4], **self.task.workflow_args["call"])
        return [answer.experience(1.0, run=run) for run, answer in enumerate(answers)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(WORKFLOWS, "own_sampling", OwnSampling)


def outcome_of(tiny_folder, engine, settings=None, is_eval=False, **workflow_args):
    tokenizer = load_tokenizer(str(tiny_folder), False)

    async def main():
        pool = EnginePool([engine], str(tiny_folder))
        await pool.start()
        limits = Limits(200, 100, 20, Sampling(20, USUAL, stop_token_ids=(tokenizer.eos_token_id,)), engine=settings)
        workflow_loop = WorkflowLoop()
        model = EngineModel(pool, ChatEncoder(tokenizer), limits, outside=workflow_loop.outside)
        runner = TaskRunner(model, RewardPool(1), 8, 60.0, 1, workflow_loop=workflow_loop)
        args = RolloutArgs(temperature=0.8)
        task = Task(0, {}, "set", "own_sampling", 4, workflow_args=workflow_args, rollout_args=args, is_eval=is_eval)
        [outcome] = await runner.run([task])
        return outcome

    return asyncio.run(main())


def trainer_logprobs(tiny_folder, rows, temperature):
    """[B, T] by the trainer's own batching, packing and forward, and the batch."""
    lm = load_causal_lm(str(tiny_folder), torch.float32)
    paths, ranks = find_fast_paths(lm), Ranks(0, 1, torch.device("cpu"))
    policy, batch = Policy(lm, paths), make_batch(rows, ranks.device)
    micros = micro_batches(batch, MicroBatchLimits(8192, packing=paths.packing), ranks)
    with torch.no_grad():
        return forward_batch(batch, micros, lambda micro: policy(micro, temperature, False)[0], ranks), batch


CALLS = {
    "cooler": ({"temperature": 0.4}, 0.4),
    "hotter": ({"temperature": 2.0}, 2.0),
    "greedy": ({"temperature": 0.0}, 1.0),
    "raised by vLLM": ({"temperature": 1e-7}, 0.01),
    "without the task's": ({}, USUAL),
    "restricted": ({"temperature": 0.6, "top_p": 0.7, "top_k": 30}, 0.6),
    "penalised": ({"temperature": 0.6, "repetition_penalty": 1.8}, 0.6),
    "a least length": ({"temperature": 0.6, "min_tokens": 5}, 0.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_trainer_computes_the_rollouts_logprobs(tiny_engine, tiny_folder, call):
    args, temperature = CALLS[call]
    rows = from_bytes(to_bytes(outcome_of(tiny_folder, tiny_engine, call=args).experiences))
    assert [row.temperature for row in rows] == [temperature] * 4
    logprobs, batch = trainer_logprobs(tiny_folder, rows, 0.8)
    tolerance = 1e-4 if temperature > 0.1 else 1e-2  # logits are divided by it, and so are their rounding errors
    assert (batch.rollout_logprobs - logprobs)[batch.mask].abs().max() < tolerance


@pytest.mark.slow
def test_turns_of_one_sequence_have_their_own_temperatures(tiny_engine, tiny_folder):
    outcome = outcome_of(tiny_folder, tiny_engine, turns=[0.5, 2.0, None])
    rows = from_bytes(to_bytes(outcome.experiences))
    [row] = rows
    sampled = np.unique(row.temperature[row.action_mask])
    np.testing.assert_allclose(sampled, [0.5, USUAL, 2.0])
    logprobs, batch = trainer_logprobs(tiny_folder, rows * 2, 0.8)
    gaps = (batch.rollout_logprobs - logprobs)[batch.mask].abs()
    assert gaps.max() < 1e-4 and gaps.mean() < 1e-5
    wrong, batch = trainer_logprobs(tiny_folder, [replace(row, temperature=0.8)], 0.8)
    assert (batch.rollout_logprobs - wrong)[batch.mask].abs().mean() > 100 * gaps.mean()


@pytest.mark.parametrize(
    "call",
    [
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -7},
        {"repetition_penalty": 0.0},
    ],
)
def test_sampling_that_engines_do_not_do_is_refused(tiny_folder, call):
    """Before a request is sent, and without a retry."""
    engine = FakeEngine()
    outcome = outcome_of(tiny_folder, engine, call=call)
    assert isinstance(outcome.error, InputError) and next(iter(call)) in str(outcome.error)
    assert not engine.calls and outcome.retries == 0


GPU = EngineSettings("model", 200, on_gpu=True)


@pytest.mark.parametrize(
    ("raw", "call", "is_known"),
    [
        (False, {"temperature": 0.5}, True),
        (False, {"top_p": 0.9}, False),
        (False, {"top_k": 10}, False),
        (False, {"min_tokens": 5}, False),
        (False, {"repetition_penalty": 1.2}, False),
        (True, {"temperature": 1.0, "top_p": 0.9}, True),
        (True, {"temperature": 0.0, "top_p": 0.9}, True),
        (True, {"temperature": 0.5}, False),
    ],
)
@pytest.mark.parametrize("is_eval", [False, True])
def test_gpu_engine_cannot_report_every_distribution(tiny_folder, raw, call, is_known, is_eval):
    """Such answers are not trained on; an evaluation needs no log-probs."""
    settings = replace(GPU, raw_logprobs=raw)
    outcome = outcome_of(tiny_folder, FakeEngine(), settings, is_eval, call=call)
    if is_known or is_eval:
        assert outcome.error is None and len(outcome.experiences) == 4
        assert all((row.temperature is None) != is_known for row in outcome.experiences)
    else:
        assert isinstance(outcome.error, TrinityError) and "top_p" in str(outcome.error)
        assert outcome.experiences == [], "what failed is neither stored nor trained on"
