"""A teacher with another tokenizer: its log-probs of a text, carried over to the policy's tokens of the same text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream


def carried_over(
    logprobs: np.ndarray, ends: Sequence[int], teacher_logprobs: np.ndarray, teacher_ends: Sequence[int]
) -> np.ndarray:
    """Return a teacher's log-probs for the policy's tokens of one text: float32 [T].

    `logprobs` [T] are the policy's, `teacher_logprobs` [U] those of the teacher's own tokens; `ends` and
    `teacher_ends` say where in the text each token ends (`token_ends`). Where tokens of both end, the text is cut;
    within each piece the teacher's log-prob of the piece minus the policy's is shared equally by the policy's tokens.
    So the sum over the answer is exact, and so is each token that both have (the merging of spans of TRL's GOLD, on
    sampled tokens). Tokens after the last cut, of a character that was cut off, keep the policy's log-probs.
    """
    cuts = sorted({end for end in ends if end >= 0} & {end for end in teacher_ends if end >= 0})
    last = {end: index + 1 for index, end in enumerate(ends)}
    teacher_last = {end: index + 1 for index, end in enumerate(teacher_ends)}
    result = np.asarray(logprobs, dtype=np.float64).copy()
    for (start, end), (teacher_start, teacher_end) in zip(
        pairwise([0, *(last[cut] for cut in cuts)]), pairwise([0, *(teacher_last[cut] for cut in cuts)]), strict=True
    ):
        gap = np.sum(teacher_logprobs[teacher_start:teacher_end], dtype=np.float64) - result[start:end].sum()
        result[start:end] += gap / (end - start)
    return result.astype(np.float32)


def token_ends(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, special ones included, and where in it each token ends, in characters; -1 within a
    character. Linear in the number of tokens."""
    stream, text, ends = DecodeStream(skip_special_tokens=False), "", []
    for token in tokens:
        piece = stream.step(tokenizer.backend_tokenizer, int(token))
        text += piece or ""
        ends.append(-1 if piece is None else len(text))
    return text, ends
