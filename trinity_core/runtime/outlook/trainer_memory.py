"""The peak memory of one trainer worker: what it always holds, and the largest of what comes and goes.

With P parameters of w bytes and N workers, as DeepSpeed lays them out (Rajbhandari et al. 2020, "ZeRO", arXiv
1910.02054, section 3; `deepspeed/runtime`):

| ZeRO | weights | float32 weights | Adam's moments | gradients in a pass | in the update |
| --- | --- | --- | --- | --- | --- |
| 0 | 4P | – | 8P | 4P if there is more than one micro-batch | 4P, and 4P in the buffer in which they are summed |
| 1, 2 | wP | 4P/N | 8P/N | 4P and 4P/N: the sums, and the worker's part | wP and 8P/N |
| 3 | wP/N, and wP gathered | 4P/N | 8P/N | 4P | 4P/N |

ZeRO 3 also keeps, from its first backward pass on, the worker's gradients (4P/N) and the buffer in which gradients are
reduced (wP). On a GPU the buffer of ZeRO 1 to 3 is allocated whole, on the CPU as far as it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from trinity_core.runtime.outlook.activations import FLOAT, activation_bytes, logit_bytes
from trinity_core.runtime.outlook.micro_batches import MicroBatches
from trinity_core.runtime.outlook.model_shape import ModelShape
from trinity_core.runtime.outlook.need import Need, known, size

BUCKET = 500_000_000
"""Gradients that DeepSpeed sums at a time (`reduce_bucket_size`)."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The policy or the critic as one worker holds it."""

    name: str
    shape: ModelShape
    width: int
    """Bytes of a weight."""
    stage: int
    """ZeRO stage."""
    workers: int
    micro: MicroBatches
    checkpointing: bool
    on_gpu: bool = False
    offloaded: bool = False
    """The optimizer's state is in the machine's memory, under ZeRO 1 to 3."""
    scores: bool = True
    """It computes log-probs; a critic computes one value a token."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.shape.parameters

    @property
    def part(self) -> int:
        """Parameters whose optimizer state is this worker's."""
        return self.parameters // (self.workers if self.stage else 1)

    @property
    def kept(self) -> int:
        """Parameters whose weights this worker keeps."""
        return self.part if self.stage == 3 else self.parameters

    @property
    def gathered(self) -> int:
        """Bytes of the weights that ZeRO 3 gathers for a pass."""
        return self.width * self.parameters if self.stage == 3 else 0

    def weights(self) -> Need:
        """The weights that this worker keeps."""
        return Need(f"{self.name} weights", self.width * self.kept, f"{self.kept:,} parameters × {self.width} bytes")

    @property
    def bucket(self) -> int:
        """Bytes of the buffer in which ZeRO 1 to 3 reduces gradients."""
        return self.width * (BUCKET if self.on_gpu else min(self.parameters, BUCKET))

    def optimizer(self) -> Need:
        """Adam's moments, and the float32 weights that it updates."""
        each = (3 if self.stage else 2) * FLOAT
        each *= not (self.on_gpu and self.offloaded and self.stage)
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        why = f"{self.part:,} parameters × {each} bytes (ZeRO {self.stage}, {workers})"
        return Need(f"{self.name} optimizer", each * self.part, why)

    def kept_gradients(self) -> Need:
        """What ZeRO 3 allocates for gradients once and never frees."""
        taken = FLOAT * self.part + self.bucket if self.stage == 3 else 0
        return Need(f"{self.name} buffers of gradients", taken, f"{self.part:,} gradients, and those being reduced")

    def left_by_loading(self) -> Need:
        """The model as loaded and its partitions, which ZeRO 3 copies into a buffer of its own.

        A trainer on the CPU keeps memory that it has freed (`KEPT_MEMORY` of `runtime/actors.py`). The float32 copies
        for a checkpoint fit where tensors in float32 were, but not where tensors in half precision were.
        """
        is_left = self.stage == 3 and self.width < FLOAT and not self.on_gpu
        taken = self.width * (self.parameters + self.part) * is_left
        return Need(f"{self.name} kept by malloc", taken, "the model as loaded, and its partitions; freed")

    def passes(self) -> Need:
        """A forward pass at its end, with the gradients that there are then."""
        activations = activation_bytes(self.shape, self.micro, self.width, self.checkpointing)
        logits = logit_bytes(self.shape, self.micro) if self.scores else 0
        if self.stage == 3:
            gradients = FLOAT * min(self.parameters, BUCKET)  # the buffer in float32, as it is reduced
        elif self.stage:
            gradients = FLOAT * (self.part + self.parameters)
        else:
            gradients = FLOAT * self.parameters if self.micro.count > 1 else 0
        parts = {"activations": activations, "logits": logits, "gradients": gradients, "weights": self.gathered}
        why = ", ".join(f"{size(count)} of {what}" for what, count in parts.items() if count)
        why = f"{self.micro.tokens:,} tokens through {self.shape.layers} layers: {why}"
        return Need(f"{self.name} forward and backward", sum(parts.values()), why)

    def update(self) -> Need:
        """Gradients on their way into the optimizer."""
        if self.stage == 3:
            return Need(f"{self.name} gradients", FLOAT * self.part, "this worker's, in one tensor")
        taken = self.bucket + 2 * FLOAT * self.part if self.stage else 2 * FLOAT * self.parameters
        return Need(f"{self.name} gradients", taken, "all of them, and the buffer in which they are summed")

    def saved(self) -> Need:
        """Copies of the partitioned optimizer state that a checkpoint is written from; of whole state none are made."""
        each = (2 if self.width == FLOAT else 3) * FLOAT
        taken = each * self.part if self.stage and not self.on_gpu else 0
        return Need(f"{self.name} copies for a checkpoint", taken, f"{self.part:,} parameters × {each} bytes")


def trainer_needs(
    base: Need, policy: TrainedModel, critic: TrainedModel | None, reference: bool, slots: int
) -> tuple[Need, ...]:
    """What the first worker, which takes the most, holds at its peak.

    `slots` are the versions of the weights that it has in shared memory.
    """
    models = [policy, *([critic] if critic else [])]
    model = policy.width * policy.parameters
    passing = [need for each in models for need in (each.passes(), each.update(), each.saved())]
    if not policy.on_gpu:
        passing.append(Need("policy copies for Hugging Face's format", 2 * model, f"2 × {size(model)}"))
    own = policy.weights()
    return known(
        [
            base,
            *(each.weights() for each in models),
            *(each.optimizer() for each in models),
            *(each.kept_gradients() for each in models),
            *(each.left_by_loading() for each in models),
            Need("reference weights", own.bytes * reference, own.why),
            Need("attention masks", sum(each.width * each.micro.mask for each in models), "of all micro-batches"),
            max(passing, key=lambda need: need.bytes),
            Need("published weights", slots * model, f"{slots} versions in shared memory"),
        ]
    )
