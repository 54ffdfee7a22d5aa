"""When the trainer publishes weights, and which version the engines get when a run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trinity_core.config.schema import Config
from trinity_core.data.experience import Experience
from trinity_core.files import clear_errors, when_room, write_atomically
from trinity_core.layout import JobLayout
from trinity_core.sync.schedule import publish_interval, publishes_after
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
"""In a checkpoint between two weight syncs: the weights the engines sampled with, their version and weight check."""
CHECK_TOKENS = 48
"""Enough that a wrong tensor cannot pass by luck, few enough to cost a millisecond."""


class Publisher:
    """Publishes versions of the policy's weights. Collective; rank 0 writes."""

    def __init__(self, config: Config, learner: Learner, versions: WeightVersions, publisher: WeightPublisher) -> None:
        self.learner = learner
        sync = config.synchronizer
        self.interval = publish_interval(sync.style, sync.sync_interval)
        self.versions = versions
        self._publisher = publisher
        self._latest = JobLayout(config.job_dir).latest_state_dict

    def due(self, step: int) -> bool:
        """True if the weights after `step` are to be published."""
        return publishes_after(step, self.interval)

    def publish(self, version: int) -> None:
        """Publish the present weights as `version`, with a weight check."""
        self._publisher.publish(version, make_weight_check(self.learner))
        self._write_latest()

    def _write_latest(self) -> None:
        """Name the newest version in the run's folder, for people and tools. `checkpoint` versions do so themselves."""
        if self.learner.ranks.first and self.versions.root != self._latest.parent:
            newest = self.versions.latest()
            if newest is not None:
                write_atomically(self._latest, f"{newest}\n".encode(), durable=False)

    def rewind(self, step: int) -> None:
        """Forget versions newer than the checkpoint that the run resumes from."""
        if self.learner.ranks.first:
            self.versions.rewind(step)

    def resume(self, step: int, checkpoint: Path) -> None:
        """Make weights for the explorers available after a resume at `step`: those they had before, if possible.

        Between two weight syncs these are an older version, which is still published or kept in the checkpoint. If
        neither is new enough for `sync_interval` (which may have changed), the present weights become version `step`.
        """
        due = step - step % self.interval
        found = self.learner.ranks.first and due != step and self._restore(due, checkpoint)
        if any_rank(found, self.learner.ranks):
            self._write_latest()
        else:
            self.publish(step)

    def _restore(self, due: int, checkpoint: Path) -> bool:
        """Publish the version kept in `checkpoint` unless `due` or a newer one is published. False if none is."""
        if not self.versions.keeps_tensors:
            return False
        if any(version >= due for version in self.versions.versions()):
            return True
        kept = _read_kept(checkpoint / KEPT)
        if kept is None or kept[0] < due:
            return False
        version, check, tensors = kept
        self.versions.publish(version, tensors.items(), check)
        return True

    def keep_for_resume(self, step: int, checkpoint: Path) -> None:
        """Copy the engines' weights into the checkpoint of `step` if they are of an older version (rank 0)."""
        version = self.versions.latest() if self.versions.keeps_tensors else None
        if version is not None and version != step:
            from safetensors.torch import save_file

            check = self.versions.check(version)
            metadata = {"version": str(version), "check": json.dumps(None if check is None else check.to_json())}
            tensors = {name: t.clone() for name, t in self.versions.load(version)}
            path = checkpoint / KEPT
            with clear_errors("writing", path):
                when_room(lambda: save_file(tensors, path, metadata), path)


def _read_kept(path: Path) -> tuple[int, WeightCheck | None, dict[str, Tensor]] | None:
    """Version, weight check and tensors of the engines' weights in a checkpoint; None if missing or without version."""
    if not path.exists():
        return None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "version" not in metadata:
            return None
        check = json.loads(metadata.get("check") or metadata["probe"])  # "probe" in checkpoints of older releases
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    return int(metadata["version"]), None if check is None else WeightCheck.from_json(check), tensors


def make_weight_check(learner: Learner) -> WeightCheck:
    """Fixed tokens with the trainer's log-probs of them at temperature 1. Collective."""
    import torch

    vocabulary = learner.model_config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, CHECK_TOKENS)
    row = Experience(tokens=tokens, prompt_length=1, action_mask=np.ones(CHECK_TOKENS - 1, dtype=np.bool_))
    micro = build_micro([row], [0], CHECK_TOKENS - 1, learner.cut.packing).to(learner.ranks.device, learner.dtype)
    with torch.no_grad(), uncompiled():
        logprobs, _ = learner.engine(micro, 1.0, False)
    dtype = str(learner.dtype).removeprefix("torch.")
    return WeightCheck(tuple(tokens.tolist()), tuple(logprobs.tolist()), dtype)
