"""Rows that tests can tell apart."""

import numpy as np

from trinity_core.data.experience import Experience


def make_rows(groups, size=2, version=0, tag="", length=4):
    """`groups` groups of `size` rows, named and numbered so that each can be told apart."""
    return [
        Experience(
            tokens=np.arange(2 + length),
            prompt_length=2,
            action_mask=np.ones(length, bool),
            logprobs=np.full(length, -0.5),
            versions=np.full(length, version),
            reward=float(run),
            group=f"{tag}g{group}",
            run=run,
            info={"id": f"{tag}g{group}r{run}"},
        )
        for group in range(groups)
        for run in range(size)
    ]


def ids(experiences):
    return [experience.info["id"] for experience in experiences]
