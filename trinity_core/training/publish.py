"""Giving new weights to the engines, with a proof that travels with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trinity_core.config.schema import Config
from trinity_core.data.experience import Experience
from trinity_core.files import clear_errors, write_atomically
from trinity_core.layout import JobLayout
from trinity_core.sync.schedule import publishes_after
from trinity_core.sync.weight_check import WeightCheck
from trinity_core.training.compiled import uncompiled
from trinity_core.training.distributed import any_rank
from trinity_core.training.learner import Learner
from trinity_core.training.micro import build_micro

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.sync.publisher import WeightPublisher
    from trinity_core.sync.versions import WeightVersions

KEPT = "rollout_weights.safetensors"
"""In a checkpoint between two hand-overs: the weights that the engines sampled with, their version and proof."""
PROBE_TOKENS = 48
"""Enough that a wrong tensor cannot pass by luck, few enough to cost a millisecond."""


class Publisher:
    """Publishes versions of the policy's weights. Collective; rank 0 writes."""

    def __init__(self, config: Config, learner: Learner, versions: WeightVersions, publisher: WeightPublisher) -> None:
        self.learner = learner
        self.interval = config.synchronizer.sync_interval
        self.versions = versions
        self._publisher = publisher
        self.told = JobLayout(config.job_dir).latest_state_dict
        """Where the run's folder names the newest version, for people and other tools."""

    def due(self, step: int) -> bool:
        """Whether the weights after `step` go to the engines."""
        return publishes_after(step, self.interval)

    def publish(self, version: int) -> None:
        """Give the present weights to the engines as `version`."""
        self._publisher.publish(version, make_weight_check(self.learner))
        self._tell()

    def _tell(self) -> None:
        """Write down the newest version, unless the folder of weights is the run's own, which names it itself."""
        newest = self.versions.latest() if self.learner.ranks.first and self.versions.root != self.told.parent else None
        if newest is not None:
            write_atomically(self.told, f"{newest}\n".encode(), durable=False)

    def rewind(self, step: int) -> None:
        """Forget versions newer than the checkpoint that the run goes on from."""
        if self.learner.ranks.first:
            self.versions.rewind(step)

    def resume(self, step: int, checkpoint: Path) -> None:
        """Make sure that explorers find weights after `step`: those they had, where these are still to be had.

        Between two hand-overs that is an older version, from the folder or the checkpoint. Where neither has one that
        is new enough for `sync_interval`, which may have been another, the present weights are given as version `step`.
        """
        due = step - step % self.interval
        found = self.learner.ranks.first and due != step and self._bring_back(due, checkpoint)
        if any_rank(found, self.learner.ranks):
            self._tell()
        else:
            self.publish(step)

    def _bring_back(self, due: int, checkpoint: Path) -> bool:
        """Whether the folder has version `due` or a newer one, if need be that of the checkpoint."""
        if not self.versions.keeps_tensors:
            return False
        if any(version >= due for version in self.versions.versions()):
            return True
        kept = _read_kept(checkpoint / KEPT)
        if kept is None or kept[0] < due:
            return False
        version, probe, tensors = kept
        self.versions.publish(version, tensors.items(), probe)
        return True

    def keep_for_resume(self, step: int, checkpoint: Path) -> None:
        """Where `step` is no hand-over, put the weights that the engines hold now into its checkpoint (rank 0)."""
        version = self.versions.latest() if self.versions.keeps_tensors else None
        if version is not None and version != step:
            from safetensors.torch import save_file

            probe = self.versions.probe(version)
            told = {"version": str(version), "probe": json.dumps(None if probe is None else probe.to_json())}
            tensors = {name: t.clone() for name, t in self.versions.load(version)}
            with clear_errors("writing", checkpoint / KEPT):
                save_file(tensors, checkpoint / KEPT, told)


def _read_kept(path: Path) -> tuple[int, WeightCheck | None, dict[str, Tensor]] | None:
    """Version, proof and tensors of the engines' weights in a checkpoint; None without them or their version."""
    if not path.exists():
        return None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        told = file.metadata() or {}
        if "version" not in told:
            return None
        probe = json.loads(told["probe"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    return int(told["version"]), None if probe is None else WeightCheck.from_json(probe), tensors


def make_weight_check(learner: Learner) -> WeightCheck:
    """Fixed tokens with the trainer's log-probs of them at temperature 1. Collective."""
    import torch

    vocabulary = learner.model_config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)
    row = Experience(tokens=tokens, prompt_length=1, action_mask=np.ones(PROBE_TOKENS - 1, dtype=np.bool_))
    micro = build_micro([row], [0], PROBE_TOKENS - 1, learner.cut.packing).to(learner.ranks.device, learner.dtype)
    with torch.no_grad(), uncompiled():
        logprobs, _ = learner.engine(micro, 1.0, False)
    dtype = str(learner.dtype).removeprefix("torch.")
    return WeightCheck(tuple(tokens.tolist()), tuple(logprobs.tolist()), dtype)
