"""Workflows and judges by name on a real engine, whose small model was taught to answer and to judge one problem."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
import torch
from rollout.taught import FEEDBACK, RIGHT, ROW, WRONG, teach
from transformers import AutoModelForCausalLM

from trinity_core.addresses import rendezvous
from trinity_core.config import config_from_dict, store_url
from trinity_core.inference.engine import Engine
from trinity_core.inference.settings import EngineSettings
from trinity_core.rollout.explorer import Explorer
from trinity_core.runtime.run import explore
from trinity_core.store.store import ExperienceStore
from trinity_core.training.distributed import join
from trinity_core.training.learner import Learner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def taught(tiny_folder, tmp_path_factory):
    """The model's folder and a started engine of it, until the session ends: an engine that stops takes the process
    group away from all trainers of this process that come after it."""
    folder = tmp_path_factory.mktemp("taught")
    teach(tiny_folder, folder)
    engine = Engine(EngineSettings(str(folder), max_model_len=512, max_num_seqs=16, threads=2))
    with mock.patch.dict(os.environ, engine.settings.environment()):
        asyncio.run(engine.start())
    yield folder, engine
    asyncio.run(engine.stop())


def config_of(policy, root, workflow, algorithm="grpo", auxiliary=(), **taskset):
    data = root / "train.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    given = {"path": str(data), "format": {"prompt_key": "question", "response_key": "answer"}, **taskset}
    return config_from_dict({
        "project": "p",
        "name": workflow,
        "checkpoint_root_dir": str(root),
        "mode": "explore",
        "algorithm": {"algorithm_type": algorithm, "repeat_times": 2},
        "model": {"model_path": str(policy), "max_model_len": 512, "max_response_tokens": 24},
        "buffer": {"batch_size": 1, "total_steps": 6, "explorer_input": {
            "taskset": given, "default_workflow_type": workflow}},
        "explorer": {"eval_interval": 0, "auxiliary_models": [{"model_path": str(each)} for each in auxiliary]},
        "synchronizer": {"sync_method": "checkpoint"},
    })  # fmt: skip


def explored(config, engine, *auxiliary):
    asyncio.run(Explorer(config, [engine], [[each] for each in auxiliary]).run(explore))
    with closing(ExperienceStore.open(store_url(config), str(config.job_dir))) as store:
        return store.lease(1, 64, 1)


JUDGED = [
    ("rubric_judge_workflow", {}, (1.0, 0.0)),
    ("simple_workflow", {"default_reward_fn_type": "llm_judge", "reward_fn_args": {"mode": "pairwise"}}, (1.0, 0.0)),
    ("simple_workflow", {"default_reward_fn_type": "llm_judge", "reward_fn_args": {"mode": "group"}}, (0.75, 0.0)),
    ("math_ruler_workflow", {}, (0.75, 0.0)),
]


@pytest.mark.parametrize(("workflow", "taskset", "worth"), JUDGED, ids=["rubric", "pairwise", "group", "ruler"])
def test_an_engine_judges_the_answers_of_an_engine(taught, tmp_path, workflow, taskset, worth):
    folder, engine = taught
    config = config_of(folder, tmp_path, workflow, auxiliary=[folder], **taskset)
    groups = defaultdict(list)
    for row in explored(config, engine, engine):
        groups[row.group].append(row)
    different = [rows for rows in groups.values() if {row.info["response"] for row in rows} == {RIGHT, WRONG}]
    assert len(groups) == 6 and different
    for row in (row for rows in different for row in rows):
        right = row.info["response"] == RIGHT
        assert row.reward == worth[not right] and row.metrics["verifier_errors"] == 0
        assert row.metrics.get("gold_reward", right) == right and row.action_mask.all()


def test_an_engine_answers_in_a_box(taught, tmp_path):
    rows = explored(config_of(taught[0], tmp_path, "math_boxed_workflow"), taught[1])
    assert len(rows) == 12 and {row.info["response"] for row in rows} == {"\\boxed{1}"}
    assert {row.reward for row in rows} == {1.0} and {row.metrics["accuracy"] for row in rows} == {1.0}


def test_an_engine_tries_again(taught, tmp_path):
    given = {"workflow_args": {"feedback": FEEDBACK, "max_turns": 2}}
    rows = explored(config_of(taught[0], tmp_path, "multi_turn_workflow", **given), taught[1])
    assert len(rows) == 12 and {row.reward for row in rows} == {1.0}
    turns = [row.info["response"].startswith(WRONG) + 1 for row in rows]
    assert [row.metrics["turns"] for row in rows] == turns and set(turns) == {1, 2}


def test_a_teachers_logprobs_reach_the_loss(taught, tiny_folder, tiny_engine, tmp_path):
    """Loss and gradient are those of float64 models: the mean of -(log teacher - log student), over sampled tokens."""
    config = config_of(
        tiny_folder, tmp_path, "on_policy_distill_math_workflow", algorithm="on_policy_distill", auxiliary=[taught[0]]
    ).with_values({"model.max_model_len": 200})
    rows = explored(config, tiny_engine, taught[1])
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64) for each in (tiny_folder, taught[0])
    )
    total, count, gaps = torch.zeros((), dtype=torch.float64), 0, []
    for row in rows:
        tokens = torch.tensor(row.tokens[None].astype(np.int64))
        ours, theirs = (
            model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[row.prompt_length - 1 :, 0]
            for model in (student, teacher)
        )
        np.testing.assert_allclose(row.teacher_logprobs, theirs.detach().numpy(), atol=1e-4)
        gap = (theirs - ours).detach()
        assert row.metrics["kl_divergence"] == pytest.approx(-float(gap.sum()), rel=1e-3)
        total, count, gaps = total - (gap * ours).sum(), count + len(gap), [*gaps, *gap.tolist()]
    (total / count).backward()
    norm = float(torch.stack([weight.grad.norm() for weight in student.parameters()]).norm())
    learner = Learner(config.with_values({"mode": "train"}), 1, join(0, 1, *rendezvous(), use_gpu=False))
    metrics = learner.step(rows, 1)
    assert len(rows) == 12 and abs(np.mean(gaps)) > 1.0
    assert metrics["actor/pg_loss"] == pytest.approx(-np.mean(gaps), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
