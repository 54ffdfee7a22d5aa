"""Texts and columns of single tokens, on values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trinity_core.data.experience import Experience
from trinity_core.view.app import words_found
from trinity_core.view.tokens import token_page, token_texts


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
    page = token_page(experience(), None, [1.5, -1.5], offset=1, limit=3)
    assert (page["offset"], page["total"], page["prompt_length"], page["ids"]) == (1, 5, 2, [1, 2, 3])
    assert page["kind"] == "pac"
    assert page["logprob"] == [None, -0.5, None]
    assert page["version"] == [None, 2, None]
    assert page["advantage"] == [None, 1.5, None]
    assert page["teacher"] == page["reward"] == [None] * 3
    last = token_page(experience(logprobs=[0.0, 0.0, -np.inf]), None, None, offset=4, limit=10**9)
    assert (last["ids"], last["kind"], last["logprob"], last["version"]) == ([4], "a", [None], [3])


def test_an_advantage_is_one_of_all_tokens_in_the_loss_or_one_of_each() -> None:
    assert token_page(experience(), None, -0.5)["advantage"] == [None, None, -0.5, None, -0.5]
    assert token_page(experience(), None, [1.5, -1.5])["advantage"] == [None, None, 1.5, None, -1.5]


@pytest.mark.parametrize(
    ("reference", "answer", "found"),
    [
        ("a b c d", "b c x d", [False, True, True, True]),
        ("the sum is 7", "so the total is\n7", [True, False, True, True]),
        ("4", "", [False]),
        ("", "4", []),
    ],
)
def test_words_that_an_answer_has_are_found(reference: str, answer: str, found: list[bool]) -> None:
    assert words_found(reference, answer) == list(zip(reference.split(), found, strict=True))
