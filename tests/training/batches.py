"""Batches for a model of the tiny tokenizer's vocabulary."""

from dataclasses import replace
from typing import Any

import numpy as np

from trinity_core.data.experience import Experience

VOCABULARY = 400


def make_batch(step: int, groups: int = 4, repeats: int = 4) -> list[Experience]:
    """Rollouts with random rewards and mixed lengths, with some tokens that are not actions."""
    rng = np.random.default_rng(step)
    rows = []
    for group in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(4, 9))
        for run in range(repeats):
            response = rng.integers(3, VOCABULARY, rng.integers(2, 12))
            mask = rng.random(len(response)) < 0.8
            mask[-1] = True
            rows.append(
                Experience(
                    tokens=np.concatenate([prompt, response]),
                    prompt_length=len(prompt),
                    action_mask=mask,
                    logprobs=np.where(mask, -6 - 0.1 * rng.random(len(response)), 0.0),
                    versions=np.where(mask, step - 1, -1),
                    reward=float(rng.integers(0, 2)),
                    group=f"{step}/{group}",
                    run=run,
                )
            )
    return rows


def make_answers(step: int, groups: int = 4, repeats: int = 4) -> list[Experience]:
    """Demonstrations without rewards; with two repeats, pairs whose first answer is chosen."""
    rows = make_batch(step, groups, repeats)
    return [replace(row, logprobs=None, versions=None, reward=None, is_expert=True) for row in rows]


def trained_models(learner: Any) -> dict[str, Any]:
    """The engines of a learner's models, by the prefix of their weights' names."""
    critic = {} if learner.critic is None else {"critic/": learner.critic.engine}
    return {"": learner.engine, **critic}


def rows_of(algorithm: str, step: int) -> list[Experience]:
    """The batch of a step that several ranks train on."""
    if algorithm in ("sft", "dpo"):
        return make_answers(step, groups=3, repeats=2)
    rows = make_batch(step, groups=3)
    if algorithm == "opsd_full":
        return [replace(row, teacher_prompt=np.array([7, 8, *row.tokens[:2], row.run % 2])) for row in rows]
    return rows
