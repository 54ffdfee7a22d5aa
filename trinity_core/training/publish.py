"""Giving new weights to the engines, with a proof that travels with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trinity_core.config.schema import Config
from trinity_core.data.experience import Experience
from trinity_core.files import clear_errors
from trinity_core.sync.probe import Probe
from trinity_core.sync.schedule import publishes_after
from trinity_core.training.compiled import uncompiled
from trinity_core.training.handover import HandOver
from trinity_core.training.learner import Learner
from trinity_core.training.micro import build_micro

KEPT = "rollout_weights.safetensors"
"""In a checkpoint between two hand-overs: the weights that the engines sampled with."""
PROBE_TOKENS = 48
"""Enough that a wrong tensor cannot pass by luck, few enough to cost a millisecond."""


class Publisher:
    """Publishes versions of the policy's weights. Collective; rank 0 writes."""

    def __init__(self, config: Config, learner: Learner, hand_over: HandOver) -> None:
        self.learner = learner
        self.interval = config.synchronizer.sync_interval
        self.hand_over = hand_over
        self.folder = hand_over.folder

    def due(self, step: int) -> bool:
        """Whether the weights after `step` go to the engines."""
        return publishes_after(step, self.interval)

    def publish(self, version: int) -> None:
        """Give the present weights to the engines as `version`."""
        self.hand_over.give(version, make_probe(self.learner))

    def rewind(self, step: int) -> None:
        """Forget versions newer than the checkpoint that the run goes on from."""
        if self.learner.ranks.first:
            self.folder.rewind(step)

    def resume(self, step: int, checkpoint: Path) -> None:
        """Make sure that the version in use after `step` can be loaded: an older one where `step` is no hand-over.

        A way that keeps no tensors cannot bring an older one back; engines that wait for it take that of `step`.
        """
        version = step - step % self.interval if self.hand_over.keeps_tensors else step
        first = self.learner.ranks.first
        if version == step:
            self.publish(version)
        elif first and not self.folder.has(version) and (kept := checkpoint / KEPT).exists():
            from safetensors.torch import load_file

            self.folder.publish(version, load_file(kept).items())

    def keep_for_resume(self, step: int, checkpoint: Path) -> None:
        """Where `step` is no hand-over, put the weights that the engines hold now into its checkpoint (rank 0)."""
        version = step - step % self.interval
        if version != step and self.hand_over.keeps_tensors and self.folder.has(version):
            from safetensors.torch import save_file

            with clear_errors("writing", checkpoint / KEPT):
                save_file({name: t.clone() for name, t in self.folder.load(version)}, checkpoint / KEPT)


def make_probe(learner: Learner) -> Probe:
    """Fixed tokens with the trainer's log-probs of them at temperature 1. Collective."""
    import torch

    vocabulary = learner.model_config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)
    row = Experience(tokens=tokens, prompt_length=1, action_mask=np.ones(PROBE_TOKENS - 1, dtype=np.bool_))
    micro = build_micro([row], [0], PROBE_TOKENS - 1, learner.cut.packing).to(learner.ranks.device, learner.dtype)
    with torch.no_grad(), uncompiled():
        logprobs, _ = learner.engine(micro, 1.0, False)
    dtype = str(learner.dtype).removeprefix("torch.")
    return Probe(tuple(tokens.tolist()), tuple(logprobs.tolist()), dtype)
