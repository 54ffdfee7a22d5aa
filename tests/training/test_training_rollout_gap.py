"""The first step's rollout gap: plausible values by number format, and gaps that end a run."""

from __future__ import annotations

import math
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from batches import make_batch
from raising import raising

from trinity_core.algorithms import ADVANTAGES
from trinity_core.base.errors import TrinityError
from trinity_core.training.batch import make_batch as lay_out
from trinity_core.training.distributed import join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.training.sources import BatchSource
from trinity_core.training.trainer import Progress, Trainer, check_first_gap
from trinity_core.training.update import forward_batch, micro_batches

FP8 = {"explorer__rollout_model__extra_engine_args__quantization": "fp8", "cluster__gpu_per_node": 1}


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "plausible", "implausible"),
    [
        ({}, False, 1e-4, 0.02),
        ({}, True, 0.02, 0.2),
        ({"trainer__dtype": "bfloat16"}, False, 0.02, 0.2),
        (FP8, True, 0.2, 0.5),
        ({"algorithm__max_rollout_gap": 2}, False, 1.9, 2.1),
        ({}, False, 0.0, math.nan),
    ],
)
def test_an_implausible_gap_ends_the_run(make_config, overrides, on_gpu, plausible, implausible):
    config = make_config(**{"algorithm__max_rollout_gap": "null"} | overrides)
    check_first_gap({"rollout_gap/mean": plausible, "staleness/max": 0.0}, 1, config, on_gpu)
    with raising(TrinityError, key="algorithm.max_rollout_gap"):
        check_first_gap({"rollout_gap/mean": implausible, "staleness/max": 0.0}, 1, config, on_gpu)


def test_gap_check_ignores_other_versions_and_missing_gaps(make_config):
    config = make_config(algorithm__max_rollout_gap="null")
    for step, staleness in ((1, 1.0), (3, 3.0)):
        check_first_gap({"rollout_gap/mean": 9.0, "staleness/max": staleness}, step, config, False)
    check_first_gap({"rollout_gap/mean": 9.0}, 1, config, False)
    check_first_gap({"skipped_step": 1.0}, 1, config, False)


@pytest.mark.parametrize(("algorithm", "steps_before"), [("ppo", 2), ("grpo", 0)])
def test_the_gap_of_the_first_update_ends_the_run(make_config, algorithm, steps_before):
    """Also after critic-only steps and after a step without rows; later updates are not checked."""
    overrides = {"trainer__trainer_config__trainer__critic_warmup": steps_before} if steps_before else {}
    config = make_config(algorithm, algorithm__max_rollout_gap=0.1, **overrides)
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    progress = Progress(0, 9, "ready", 0)
    trainer = Trainer(
        config, Learner(config, 9, ranks), ranks, BatchSource(), None, SimpleNamespace(), progress, Event()
    )
    for step in range(1, steps_before + 1):
        trainer.update(make_batch(step))
    trainer.update([])
    implausible = make_batch(steps_before + 2)  # the log-probs of nobody
    with raising(TrinityError, key="algorithm.max_rollout_gap"):
        trainer.update(implausible)
    progress.step += 1
    trainer.update(make_batch(steps_before + 3))


@pytest.mark.parametrize("algorithm", ["opmd", "raft", "grpo"])
def test_the_gap_is_that_before_the_first_of_several_updates(make_config, algorithm):
    config = make_config(
        algorithm,
        algorithm__max_rollout_gap="null",
        algorithm__optimizer__lr=0.02,
        trainer__trainer_config__actor_rollout_ref__actor__ppo_epochs=2,
    )
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    learner = Learner(config, 9, ranks)
    rows = make_batch(1)
    batch = lay_out(rows, ranks.device)
    micros = micro_batches(batch, learner.cut, ranks)
    policy = forward_batch(batch, micros, lambda micro: learner.engine(micro, 1.0, "none")[0], ranks).numpy()
    exact = [replace(row, logprobs=policy[i, : row.response_length]) for i, row in enumerate(rows)]
    trainer = Trainer(config, learner, ranks, BatchSource(), None, SimpleNamespace(), Progress(0, 9), Event())
    trainer.update(exact)
    metrics = trainer.progress.metrics
    assert metrics is not None and metrics["rollout_gap/mean"] < 1e-4


def test_an_advantage_that_takes_rollout_logprobs_alone_gets_them(make_config, monkeypatch):
    def only_rollout_logprobs(rewards, mask, rollout_logprobs):
        return torch.where(mask, rollout_logprobs, 0.0), {"seen": float(rollout_logprobs[mask].mean())}

    monkeypatch.setitem(ADVANTAGES, "only_rollout_logprobs", only_rollout_logprobs)
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    learner = Learner(make_config(algorithm__advantage_fn="only_rollout_logprobs"), 9, ranks)
    assert -6.1 < learner.step(make_batch(1), 1)["seen"] < -6
