"""Rollouts that are to be seen."""

from __future__ import annotations

import numpy as np

from trinity_core.data.experience import Experience

NASTY = "<script>alert('from the model')</script><img src=x onerror=alert(1)>"


def rollout(tokenizer, prompt: str, answer: str, reward: float | None, group: str, run: int, version: int = 0, **given):
    """One rollout of these texts, with log-probs -0.1, -0.2 …"""
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    return Experience(
        tokens=np.array(before + after),
        prompt_length=len(before),
        action_mask=np.ones(len(after), bool),
        logprobs=-np.arange(1, len(after) + 1) / 10,
        versions=np.full(len(after), version),
        reward=reward,
        group=group,
        run=run,
        info={"prompt": prompt, "response": answer, "truth": "#### 4"},
        **given,
    )
