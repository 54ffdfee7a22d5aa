"""Publishes the trainer's weights, and chooses the version that engines get when a run resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trinity_core.base.files import write_atomically
from trinity_core.config.schema import Config
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import dtype_of
from trinity_core.data.experience import Experience
from trinity_core.exchange.checkpoints.adapters import B, is_adapter, plain_name
from trinity_core.exchange.sync.tensorfile import TensorDigest, TensorSpec, digest, spec_of
from trinity_core.exchange.sync.versions import TrainerRank
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.training.distributed import Ranks, any_rank, broadcast_bytes
from trinity_core.training.engine import uncompiled
from trinity_core.training.learner import Learner
from trinity_core.training.micro import build_micro
from trinity_core.training.saving import Copying
from trinity_core.training.state import base_weights, stored_buffers, weights, whole_shape

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.exchange.sync.versions import WeightPublisher, WeightVersions
    from trinity_core.training.engine import TrainingEngine

CHECK_TOKENS = 48
"""Enough that a wrong tensor cannot pass by luck, few enough to cost a millisecond. At most what engines can score."""


class PolicyWeights:
    """The engine's weights as `TrainerWeights`: the adapter if there is one, else all weights and buffers.

    The matrices B are multiplied by the adapter's scale. `merged` merges the adapter into the full weights instead.
    `held_dtype` is the dtype of the base in the engines, "" if the base is not compared with the trainer's.
    """

    def __init__(self, engine: TrainingEngine, merged: bool = False, held_dtype: str = "") -> None:
        self._engine = engine
        self._adapter = None if merged else engine.adapter
        self._held_dtype = held_dtype
        self._held: dict[str, TensorDigest] | None = None

    @property
    def gathers(self) -> bool:
        """True under ZeRO 3, which partitions the parameters."""
        return self._engine.settings.zero_stage == 3

    def specs(self) -> list[TensorSpec]:
        """Return name, dtype and full shape of each tensor, in order of iteration, without gathering any."""
        trained: list[TensorSpec] = []
        first: dict[int, str] = {}
        for full_name, p in self._engine.module.named_parameters(remove_duplicate=False):
            name = plain_name(full_name.removeprefix("lm."))
            if self._engine.adapter is not None and is_adapter(name) is (self._adapter is None):
                continue
            tied_to = first.setdefault(id(p), name)
            dtype = str(p.dtype).removeprefix("torch.")  # a few layers of some models stay in float32
            trained.append(TensorSpec(name, dtype, whole_shape(p, self._engine), tied_to if tied_to != name else ""))
        stored = {} if self._adapter is not None else stored_buffers(self._engine)
        return trained + [spec_of(name, buffer) for name, buffer in stored.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each weight, tied names (`lm_head.weight`) included."""
        if self._adapter is not None:
            scale = self._adapter.scaling
            return ((name, p * scale if name.endswith(B) else p) for name, p in weights(self._engine))
        return weights(self._engine, tied=True) if self._engine.adapter is None else base_weights(self._engine, True)

    def held(self) -> dict[str, TensorDigest]:
        """Return the digests of the base that engines hold under the adapter; empty without an adapter or
        comparison."""
        if self._held is None:
            compared = self._adapter is not None and self._held_dtype
            tensors = base_weights(self._engine) if compared else ()
            self._held = {name: digest(tensor, dtype=self._held_dtype) for name, tensor in tensors}
        return self._held


def policy_weights(config: Config, learner: Learner) -> PolicyWeights:
    """Return the weights that a run publishes.

    An adapter's base is compared with the engines' only if both come from the same numbers: not in 4 bits, and not if
    the engine's dtype is wider than the trainer's, whose weights may have been rounded.
    """
    lora, on_gpu = config.model.lora, learner.ranks.device.type == "cuda"
    dtype = dtype_of(config.explorer.rollout_model.dtype, on_gpu)
    same = f"torch.{dtype}" == str(learner.dtype) or learner.dtype == torch.float32
    held_dtype = dtype if lora is not None and not lora.load_in_4bit and same else ""
    return PolicyWeights(learner.engine, merged=config.engine_adapter is None, held_dtype=held_dtype)


def trainer_rank(
    weights: PolicyWeights, ranks: Ranks, explorers_wait: Callable[[int], bool], stopping: Callable[[], bool]
) -> TrainerRank:
    """Return this rank as a publisher sees it. `explorers_wait` is called on rank 0 only."""
    any_of = partial(any_rank, ranks=ranks)
    return TrainerRank(ranks.rank, weights, any_of, explorers_wait, stopping, weights.held)


class Publisher:
    """Publishes versions of the policy's weights. Collective; rank 0 writes.

    `explored` returns the last stored explore step; called on rank 0 only.
    """

    def __init__(
        self, config: Config, learner: Learner, versions: WeightVersions, publisher: WeightPublisher,
        explored: Callable[[], int],
    ) -> None:  # fmt: skip
        self.learner = learner
        self._check_tokens = min(CHECK_TOKENS, (config.model.max_model_len or CHECK_TOKENS + 1) - 1)
        self._explored = explored
        self._schedule = SyncSchedule.of(config)
        self._is_synchronous = config.is_synchronous
        self.versions = versions
        self._publisher = publisher
        self._of_adapter = config.engine_adapter is not None
        self._latest = config.layout.latest_state_dict

    def due(self, step: int) -> bool:
        """True if the weights after `step` are to be published."""
        return self._schedule.publishes_after(step)

    def publish(self, version: int) -> None:
        """Publish the current weights as `version`, with a weight check."""
        self._publisher.publish(version, make_weight_check(self.learner, self._check_tokens))
        self._write_latest()

    def _write_latest(self) -> None:
        """Write the newest version to the run's folder, for people and tools. `checkpoint` versions do so
        themselves."""
        if self.learner.ranks.first and self.versions.root != self._latest.parent:
            newest = self.versions.latest()
            if newest is not None:
                write_atomically(self._latest, f"{newest}\n".encode(), durable=False)

    def rewind(self, step: int) -> None:
        """Discard versions newer than the checkpoint that the run resumes from."""
        if self.learner.ranks.first:
            self.versions.rewind(step)

    def resume(self, step: int, checkpoint: Path) -> None:
        """Make the weights available that explorers need after a resume at `step`, oldest version first. Collective.

        Missing versions come from the checkpoint. If it lacks them too (the schedule may have changed), explorers get
        the oldest newer version, which may be the current weights as version `step`.
        """
        kept = kept_versions(checkpoint, self._of_adapter) if self.learner.ranks.first else {}
        for version in self._to_publish(step, kept):
            if version == step:
                self.publish(step)
            else:  # engines that receive pushes have version 0 without a file
                check, tensors = read_version(kept[version]) if version in kept else (None, {})
                self._publisher.publish_kept(version, check, tensors)
        self._write_latest()

    def _to_publish(self, step: int, kept: Collection[int]) -> list[int]:
        """Return the versions that `resume` must publish, on every rank; `kept` are those in the checkpoint."""
        missing: list[int] = []
        if self.learner.ranks.first:
            available, loadable = {*self.versions.there_at_start(), *kept}, self.versions.whole()
            needed = self._schedule.resumed_versions(step, self._oldest_needed(step), available)
            missing = [version for version in needed if version == step or version not in loadable]
        message = json.dumps(missing).encode() if self.learner.ranks.first else None
        return list(json.loads(broadcast_bytes(message, self.learner.ranks)))

    def keep_for_resume(self, step: int, copying: Copying) -> None:
        """Copy the versions that explorers would still need after a resume into the checkpoint of `step` (rank 0)."""
        oldest = self._oldest_needed(step)
        for version in self.versions.whole():
            if oldest <= version < step:
                keep_version(self.versions, version, copying)

    def _oldest_needed(self, step: int) -> int:
        """Return the oldest version that explorers still need: the one due at the next explore step, or the newest."""
        if not self._is_synchronous:
            return step - step % self._schedule.publish_every
        return self._schedule.required_version(self._explored() + 1)


def make_weight_check(learner: Learner, length: int) -> WeightCheck:
    """Return a weight check: fixed tokens with the trainer's log-probs at temperature 1. Collective."""
    vocabulary = learner.model_config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, length)
    row = Experience(tokens=tokens, prompt_length=1, action_mask=np.ones(length - 1, dtype=np.bool_))
    micro = build_micro([row], [0], length - 1, learner.cut.packing).to(learner.ranks.device)
    with torch.no_grad(), uncompiled():
        logprobs, _ = learner.engine(micro, 1.0, "none")
    dtype = str(learner.dtype).removeprefix("torch.")
    return WeightCheck(tuple(tokens.tolist()), tuple(logprobs.tolist()), dtype)


KEPT_WEIGHTS = "rollout_weights"
"""Prefix of the file names; each file holds one version."""


def keep_version(versions: WeightVersions, version: int, copying: Copying) -> None:
    check = versions.check(version)
    metadata = {"version": str(version), "check": json.dumps(None if check is None else asdict(check))}
    copying.file(f"{KEPT_WEIGHTS}_{version}.safetensors", iter(versions.load(version)), metadata)


def kept_versions(checkpoint: Path, of_adapter: bool = False) -> dict[int, Path]:
    """Return the file of each version that `checkpoint` holds: of full weights, or with `of_adapter` of an adapter.

    It holds the other kind if the sync method has changed.
    """
    from safetensors import safe_open

    files: dict[int, Path] = {}
    for path in checkpoint.glob(f"{KEPT_WEIGHTS}*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if any(map(is_adapter, file.keys())) is of_adapter:
                files[int(file.metadata()["version"])] = path
    return files


def read_version(path: Path) -> tuple[WeightCheck | None, dict[str, Tensor]]:
    """Return weight check and tensors of a kept version."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        check = json.loads(metadata["check"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    return None if check is None else WeightCheck.from_json(check), tensors
