"""A rollout token by token, in pages: text, log-prob, mask, policy version and advantage."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.exchange.store.archive import Advantage

PAGE = 2_000
"""Tokens of a page, as in static/tokens.js."""
LONGEST_CHARACTER = 4
"""Bytes of a character, so its maximum number of tokens."""


def token_texts(tokenizer: Any, ids: Sequence[int], before: int | None = None) -> list[str]:
    """Return the text that each token adds after the previous one, including special tokens.

    A character's bytes may be spread over several tokens: the first gets its text, the others none. Without a tokenizer
    the texts are the ids.
    """
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    vocabulary_size = len(tokenizer)
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        if not 0 <= ids[at] < vocabulary_size:
            texts.append(f"⟨{ids[at]}⟩")
            before = None
            continue
        text, used = "", 1
        for used in range(1, LONGEST_CHARACTER + 1):
            text = _added(tokenizer, before, [token for token in ids[at : at + used] if 0 <= token < vocabulary_size])
            if "\ufffd" not in text:
                break
        else:
            text, used = _added(tokenizer, before, [ids[at]]), 1
        used = min(used, len(ids) - at)
        texts += [text, *[""] * (used - 1)]
        before = ids[at + used - 1]
    return texts


def _added(tokenizer: Any, before: int | None, ids: list[int]) -> str:
    if before is None:
        return _decoded(tokenizer, ids)
    alone, both = _decoded(tokenizer, [before]), _decoded(tokenizer, [before, *ids])
    return both[len(alone) :] if both.startswith(alone) else _decoded(tokenizer, ids)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_page(
    experience: Experience, tokenizer: Any, advantage: Advantage | None, offset: int = 0, limit: int = PAGE
) -> dict[str, Any]:
    """Return tokens from `offset` on as columns; missing values are null.

    `kind` is `p` for the prompt, `a` for an action (in the loss), `c` for context within the response (masked out).
    """
    start = min(offset, len(experience.tokens))
    end = start + limit
    ids = experience.tokens[start:end].tolist()
    response = slice(max(0, start - experience.prompt_length), max(0, end - experience.prompt_length))
    mask = experience.action_mask[response]
    nothing = [None] * (len(ids) - len(mask))

    def column(values: np.ndarray | None) -> list[Any]:
        if values is None:
            return [None] * len(ids)
        sampled = zip(values[response].tolist(), mask, strict=True)
        return nothing + [round(value, 5) if has and isfinite(value) else None for value, has in sampled]

    by_token = None
    if advantage is not None:
        by_token = np.zeros(experience.response_length)
        by_token[experience.action_mask] = advantage
    before = int(experience.tokens[start - 1]) if start else None
    return {
        "offset": start, "total": len(experience.tokens), "prompt_length": experience.prompt_length, "ids": ids,
        "text": token_texts(tokenizer, ids, before),
        "kind": "p" * len(nothing) + "".join("a" if is_sampled else "c" for is_sampled in mask),
        "logprob": column(experience.logprobs), "version": column(experience.versions),
        "reward": column(experience.token_rewards), "teacher": column(experience.teacher_logprobs),
        "advantage": column(by_token),
    }  # fmt: skip
