"""A teacher's log-probs carried over to other tokens of the same text, by hand and by properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trinity_core.workflows.distillation import carried_over, token_ends


def test_by_hand():
    """ "ab|c|de" against "a|bc|de": the pieces are "abc" and "de"."""
    taught = carried_over(np.array([-1.0, -2.0, -3.0]), [2, 3, 5], np.array([-0.5, -1.5, -7.0]), [1, 3, 5])
    np.testing.assert_allclose(taught, [-1.0 + 0.5, -2.0 + 0.5, -7.0])


def test_the_same_tokens_keep_the_teachers_log_probs():
    theirs = np.array([-0.5, -4.0, -1.0])
    np.testing.assert_allclose(carried_over(np.array([-1.0, -2.0, -3.0]), [1, 2, 6], theirs, [1, 2, 6]), theirs)


lengths = st.lists(st.integers(1, 4), min_size=1, max_size=12)


@given(lengths, lengths, st.integers(0, 2**32 - 1))
def test_the_sum_over_the_answer_is_the_teachers(ours, theirs, seed):
    ours, theirs = ([*part, max(sum(ours), sum(theirs)) - sum(part) or 1] for part in (ours, theirs))
    total = max(sum(ours), sum(theirs))
    ours[-1] += total - sum(ours)
    theirs[-1] += total - sum(theirs)
    draw = np.random.default_rng(seed)
    logprobs, teacher = (np.log(draw.random(len(part))) for part in (ours, theirs))
    taught = carried_over(logprobs, np.cumsum(ours).tolist(), teacher, np.cumsum(theirs).tolist())
    assert taught.sum() == pytest.approx(teacher.sum(), rel=1e-4)


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Byte-level BPE with few merges: a character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.mark.parametrize("text", ["the cat", "naïve – 日本語 🙂!", " the  mat\n\n", "<|end|>the", ""])
def test_ends_of_tokens_are_those_of_their_text(bytes_tokenizer, tiny_tokenizer, text):
    for tokenizer in (bytes_tokenizer, tiny_tokenizer):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        decoded, ends = token_ends(tokenizer, tokens)
        assert decoded == tokenizer.decode(tokens, skip_special_tokens=False)
        assert len(ends) == len(tokens) and (not ends or ends[-1] == len(decoded))
        for count, end in enumerate(ends, 1):
            if end >= 0:
                assert tokenizer.decode(tokens[:count], skip_special_tokens=False) == decoded[:end]


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_folder)
