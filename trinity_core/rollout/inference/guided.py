"""Answers that a grammar guides: which of their tokens were the policy's own choice."""

from __future__ import annotations

import numpy as np

from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import Request, Sample

FREE_GAP = 1e-3
"""Nats: at such a token the grammar excluded at most a thousandth of the probability."""


async def free_tokens(pool: EnginePool, request: Request, sample: Sample, max_model_len: int) -> np.ndarray:
    """bool [T]: tokens of a guided answer at which the grammar excluded next to no probability.

    vLLM reports log-probs among the tokens that the grammar allows; scored without the grammar they are lower by the
    log of those tokens' total probability. No token is free if the weights have changed since, or if it cannot be
    determined: at a temperature other than 1, and for a sequence that fills the context.
    """
    tokens = np.concatenate([request.prompt, sample.tokens])
    none = np.zeros(len(sample.tokens), np.bool_)
    held = pool.held_version
    if request.sampling.logprob_temperature != 1 or len(tokens) >= max_model_len or not len(sample.tokens):
        return none
    scores = await pool.score(tokens.tolist())
    if held != pool.held_version or (held is not None and (sample.versions != held).any()):
        return none
    gaps = sample.logprobs - np.array(scores[-len(none) :], np.float32)
    return np.abs(gaps) <= FREE_GAP
