"""Texts, columns and advantages of single tokens, on values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trinity_core.data.experience import Experience
from trinity_core.view.app import side_by_side
from trinity_core.view.tokens import token_page, token_texts
from trinity_core.view.viewed_run import group_advantages


def test_texts_of_tokens_add_up(tokenizer) -> None:
    """Also where a character is spread over several tokens, and where a page begins in the middle of the text."""
    text = "It is 5 – naïve, 日本 🙂!\n#### 5<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    assert "" in texts and "🙂" in texts and "<|im_end|>" in texts
    assert token_texts(tokenizer, ids[5:], ids[4]) == texts[5:]


def test_texts_without_a_tokenizer_or_a_word(tokenizer) -> None:
    assert token_texts(None, [3, 5]) == ["⟨3⟩", "⟨5⟩"]
    assert token_texts(tokenizer, [len(tokenizer), -1]) == [f"⟨{len(tokenizer)}⟩", "⟨-1⟩"]
    cut = tokenizer("🙂", add_special_tokens=False)["input_ids"][:-1]
    assert len(token_texts(tokenizer, cut)) == len(cut)


def experience(**changes) -> Experience:
    fields = {"reward": 1.0, "group": "g", "versions": [2, -1, 3], "logprobs": [-0.5, 0.0, -1.25]} | changes
    return Experience(np.arange(5), 2, np.array([True, False, True]), **fields)


def test_columns_of_a_page() -> None:
    page = token_page(experience(), None, np.array([1.5, 0.0, -1.5]), offset=1, limit=3)
    assert (page["offset"], page["total"], page["prompt_length"], page["ids"]) == (1, 5, 2, [1, 2, 3])
    assert page["kind"] == "pac"
    assert page["logprob"] == [None, -0.5, None]
    assert page["version"] == [None, 2, None]
    assert page["advantage"] == [None, 1.5, None]
    assert page["teacher"] == page["reward"] == [None] * 3
    last = token_page(experience(logprobs=[0.0, 0.0, -np.inf]), None, None, offset=4, limit=10**9)
    assert (last["ids"], last["kind"], last["logprob"], last["version"]) == ([4], "a", [None], [3])


ROWS = [experience(reward=reward, run=run) for run, reward in enumerate([1.0, 0.0, 0.0, 1.0])]


def test_advantages_are_those_of_the_algorithm() -> None:
    """GRPO: (1 - 0.5) / the deviation of 1, 0, 0, 1, which is 1 / sqrt(3); nothing at masked tokens."""
    shown = group_advantages(ROWS, {"algorithm_type": "grpo", "advantage_fn": "grpo"})
    assert shown.values is not None and "'grpo'" in shown.note
    assert np.allclose(shown.values, [[sign * 0.75**0.5, 0, sign * 0.75**0.5] for sign in (1, -1, -1, 1)], atol=1e-4)
    rloo = group_advantages(ROWS, {"advantage_fn": "rloo"})
    assert np.allclose(rloo.values, [[sign * 2 / 3, 0, sign * 2 / 3] for sign in (1, -1, -1, 1)])


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (None, "does not say which algorithm"),
        ({"algorithm_type": "sft", "advantage_fn": "none"}, "sft has none"),
        ({"advantage_fn": "ppo"}, "cannot be computed here"),
        ({"advantage_fn": "of a plugin"}, "cannot be computed here"),
        ({"advantage_fn": "grpo", "kl_penalty_fn": "k2", "kl_penalty_fn_args": {"kl_coef": 0.1}}, "ref_logprobs"),
        ({"advantage_fn": "reinforceplusplus"}, "depends on the whole batch"),
        ({"advantage_fn": "grpo", "advantage_fn_args": {"std_cal_level": "batch"}}, "depends on the whole batch"),
    ],
)
def test_advantages_that_cannot_be_known_are_not_shown(algorithm, reason) -> None:
    shown = group_advantages(ROWS, algorithm)
    assert shown.values is None and reason in shown.note


def test_samples_are_paired_by_task_and_run() -> None:
    def sample(task: int, run: int = 0) -> dict:
        return {"task_index": task, "run": run}

    pairs = side_by_side([sample(1), sample(2)], [sample(2), sample(1, 1)])
    assert pairs == [
        {"left": sample(1), "right": None},
        {"left": sample(2), "right": sample(2)},
        {"left": None, "right": sample(1, 1)},
    ]
