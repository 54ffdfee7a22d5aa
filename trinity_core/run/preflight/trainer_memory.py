"""The peak memory of one trainer worker: its permanent tensors and the largest temporary allocation.

With P parameters of w bytes and N workers, under ZeRO 2 and 3 as DeepSpeed lays them out (Rajbhandari et al. 2020,
"ZeRO", arXiv 1910.02054, section 3; `deepspeed/runtime`), under ZeRO 0 as `training/engine.py` does:

| ZeRO | weights | float32 weights | Adam's moments | gradients in a pass | in the update |
| --- | --- | --- | --- | --- | --- |
| 0 | wP | 4O, none if w is 4 | 8O | 4P if there are several micro-batches | 4P, and 4B to sum over workers |
| 2 | wP | 4P/N | 8P/N | 4B and 4P/N: those not reduced yet, and the worker's part | wB and 8P/N |
| 3 | wP/N, and wL gathered | 4P/N; none if w is 4, without offload | 8P/N | 4B | 4P/N, on a CPU 4B |

O is the parameters that a worker owns: P/N, or a larger tensor. B is the bucket in which gradients are reduced
(`reduce_bucket_size`), at most P. A tensor larger than the bucket, as the output embedding often is, is reduced whole:
4 + w bytes per parameter instead of 4B. L is the weights that may be gathered at a time (`max_live_parameters`) and the
largest tensor, at most P. ZeRO 3 also keeps, from its first backward pass on, the worker's gradients (4P/N) and the
bucket (wB). On a GPU the bucket of ZeRO 2 and 3 is allocated whole, on
the CPU only that of ZeRO 3; otherwise as much as is used. On the CPU B and L are `AT_ONCE_ON_CPU`.

With a LoRA adapter, P is the adapter's parameters, except for the weights, which include the base; the reference needs
no second model.

With `optimizer_offload`, float32 weights, moments and a copy of the gradients (16P/N) and of the weights (wP/N) are in
host memory. Under ZeRO 2 the worker's gradients (4P/N) still stay on the GPU
(`_build_compact_grad_partition_buffer` of `stage_1_and_2.py`), under ZeRO 3 they do not (`stage3.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trinity_core.base.registry import registry_of
from trinity_core.config import Config, CriticSettings, LoraConfig, TrainSettings
from trinity_core.config.training import AT_ONCE_ON_CPU, MAX_LIVE, REDUCE_BUCKET
from trinity_core.run.preflight.model_shape import ModelShape, Need, adapter_parameters, base_bytes, nonzero, size
from trinity_core.training.batching import LARGEST_MASK, mask_elements

FLOAT = 4
"""Bytes per number in which norms and log-probs are computed, whatever the weights' dtype."""
LOGITS_AT_ONCE = 1 << 24
"""Number of logits above which the head is computed in slices (`training/policy.py`)."""
SLICE = 1 << 23
"""Number of logits per slice (`algorithms/logprobs.py`)."""


def layer_bytes(shape: ModelShape, micro: MicroBatches, width: int, on_gpu: bool = False) -> int:
    """Return the bytes that one layer saves for the micro-batch; `width` is the bytes per weight.

    float32 on a GPU is computed with masks, and by kernels without grouped heads (`packing.masked_attention`).
    """
    norms = 2 * shape.hidden * (FLOAT + width)  # the input in float32, and the normed input
    linear = 2 * shape.hidden + shape.queries  # the inputs of q/k/v, of the MLP and of the output projection
    heads = 2 * shape.queries + 2 * shape.keys  # q and the output; k and v
    mlp = 4 * shape.intermediate  # gate, its activation, up, and their product
    repeated = 2 * micro.rows * micro.longest  # k and v of each row with its prompt
    repeated *= shape.queries if on_gpu and width == FLOAT else shape.keys
    return micro.tokens * (norms + width * (linear + heads + mlp)) + width * repeated


def activation_bytes(
    shape: ModelShape, micro: MicroBatches, width: int, checkpointing: bool, on_gpu: bool = False
) -> int:
    """Return the bytes that all layers save; with gradient checkpointing, each layer's input and one recomputed
    layer."""
    last = micro.tokens * shape.hidden * (FLOAT + width) + micro.targets * shape.hidden * width  # norm and head
    layer = layer_bytes(shape, micro, width, on_gpu)
    if not checkpointing:
        return last + shape.layers * layer
    return last + shape.layers * micro.tokens * shape.hidden * width + layer


def logit_bytes(shape: ModelShape, micro: MicroBatches, on_gpu: bool = False) -> int:
    """Return the bytes at the end of the forward pass: logits, log-probs, probabilities and the terms of their entropy.

    A large head is computed in slices; three copies of a slice exist at a time. On a GPU a slice is larger, and there
    is one copy (`KERNEL_SLICE` of `algorithms/logprobs.py`).
    """
    logits = micro.targets * shape.vocabulary
    if logits > LOGITS_AT_ONCE:
        return 4 * FLOAT * LOGITS_AT_ONCE if on_gpu else 3 * FLOAT * SLICE
    return 4 * FLOAT * logits


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Bounds of the micro-batches of one worker in one step."""

    count: int
    """Number of micro-batches if all rows have full length."""
    tokens: int
    """Tokens of the largest one in the forward pass; a shared prompt counts once."""
    targets: int
    """Tokens with a loss in the largest one."""
    rows: int
    """Sequences of the largest one."""
    longest: int
    mask: int
    """Elements of the largest attention mask, which exists only during its pass."""


def shared_micro_batches(
    config: Config, settings: TrainSettings | CriticSettings, workers: int, sharing: int
) -> MicroBatches:
    """Return a worker's part of the micro-batches if `sharing` workers share each."""
    wide = settings.model_copy(update={"max_tokens": settings.max_tokens * sharing})
    whole = worst_micro_batches(config, wide, max(workers // sharing, 1))
    tokens, targets, rows = (-(-count // sharing) for count in (whole.tokens, whole.targets, whole.rows))
    return replace(whole, tokens=tokens, targets=targets, rows=rows)


def worst_micro_batches(config: Config, settings: TrainSettings | CriticSettings, workers: int) -> MicroBatches:
    """Return bounds of the micro-batches that rows of any lengths within the limits can make: answers shorter than the
    limit fill the token budget. Copies of shared prompts are counted for answers of full length."""
    prompt, response = config.model.max_prompt_tokens, config.model.max_response_tokens
    rows, longest = config.buffer.train_batch_size, prompt + response
    repeats = 1 if config.is_supervised else config.algorithm.repeat_times
    if registry_of("algorithm.policy_loss_fn").uses(config.algorithm.policy_loss_fn, "divergences"):
        longest, repeats = max(longest, config.model.max_model_len), 1  # teachers read longer prompts, each its own
        prompt = longest - response
    if not settings.use_dynamic_bsz and settings.micro_batch_size:
        return _of_rows(rows, settings.micro_batch_size, workers, repeats, prompt, response)
    shares = mask_elements(rows, prompt, response) <= LARGEST_MASK
    whole = -(-rows // repeats) * prompt + rows * response if shares else rows * longest
    if config.algorithm.algorithm_type == "dpo":
        unit = 2 * longest
    else:  # a group beyond the budget is split
        unit = max(longest, min(settings.max_tokens, repeats * longest))
    here = whole if workers == 1 else -(-whole // workers) + unit
    tokens = min(max(settings.max_tokens, unit), here)
    cells = max(tokens, min(rows * longest, LARGEST_MASK // response))
    mask = min(mask_elements(rows, prompt, response), LARGEST_MASK)
    return MicroBatches(
        -(-whole // (workers * tokens)), tokens, min(tokens, rows * response), -(-cells // longest), longest, mask
    )


def _of_rows(rows: int, micro_rows: int, workers: int, repeats: int, prompt: int, response: int) -> MicroBatches:
    """Return micro-batches for a number of rows; groups stay together if they fit."""
    here = -(-rows // workers)
    top = min(micro_rows, here)
    count = -(-here // top)
    prompts = -(-top // repeats)
    tokens, mask = prompts * prompt + top * response, mask_elements(top, prompt, response)
    return MicroBatches(count, tokens, top * response, top, prompt + response, mask)


PIECE = 2 << 30
"""Bytes per file of optimizer state (`PIECE_BYTES` of `training/checkpoint.py`)."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The policy or the critic as one worker holds it."""

    name: str
    shape: ModelShape
    width: int
    stage: int
    workers: int
    micro: MicroBatches
    checkpointing: bool
    on_gpu: bool = False
    offloaded: bool = False
    """True if the optimizer's state is in host memory (ZeRO 2 and 3)."""
    weights_offloaded: bool = False
    """True if this worker's weights are in host memory too (ZeRO 3)."""
    colocated: bool = False
    """True if all GPU memory moves to the host while an engine has the GPU (`cluster.colocate`)."""
    scores: bool = True
    """True if it computes log-probs; a critic computes one value per token."""
    lora: LoraConfig | None = None
    """The adapter, which is then the only part trained."""

    @property
    def adapter(self) -> int:
        """Number of the adapter's parameters; 0 without one."""
        return adapter_parameters(self.shape, self.lora)

    @property
    def parameters(self) -> int:
        return self.shape.parameters + self.adapter

    @property
    def trained(self) -> int:
        return self.adapter if self.lora is not None else self.parameters

    @property
    def part(self) -> int:
        """Number of parameters whose optimizer state this worker holds: under ZeRO 0 whole tensors."""
        largest = self.shape.embedding if self.stage == 0 and self.lora is None else 0
        return max(self.trained // self.workers, largest)

    @property
    def kept(self) -> int:
        """Number of parameters whose weights this worker holds."""
        return self.parameters // self.workers if self.stage == 3 else self.parameters

    @property
    def published(self) -> int:
        return self.width * self.trained

    @property
    def gathered(self) -> int:
        """Bytes of the weights that ZeRO 3 gathers for a pass: those prefetched, and the largest tensor."""
        live = min(self.parameters, (MAX_LIVE if self.on_gpu else AT_ONCE_ON_CPU) + self.shape.embedding)
        return self.width * live if self.stage == 3 else 0

    @property
    def is_offloaded(self) -> bool:
        return self.on_gpu and self.offloaded and bool(self.stage)

    def weights(self) -> Need:
        """The weights that this worker holds."""
        share = self.workers if self.stage == 3 else 1
        held = (base_bytes(self.shape, self.width, self.lora) + self.width * self.adapter) // share
        held *= not self.holds_weights_on_host
        why = f"{self.kept:,} parameters × {self.width} bytes" + ", in 4 bits" * (held < self.width * self.kept - share)
        return Need(f"{self.name} weights", held, why, held=True)

    @property
    def holds_weights_on_host(self) -> bool:
        """True if the weights are on the GPU only during a pass."""
        return self.on_gpu and self.weights_offloaded and self.stage == 3

    def on_host(self) -> Need:
        """Host memory of a worker on a GPU: offloaded state, and one file of a checkpoint."""
        part = self.width * self.part
        offloaded = (16 * self.part + part) * self.is_offloaded
        offloaded += self.width * self.kept * self.holds_weights_on_host
        offloaded += (self.weights().bytes + self.optimizer().bytes) * self.colocated
        held = offloaded + self.largest_file
        why = f"{size(offloaded)} offloaded, a file of a checkpoint"
        return Need(f"{self.name} in host memory", held, why, held=True)

    @property
    def reduced_at_once(self) -> int:
        """Number of gradients reduced at a time, if no tensor is larger."""
        return self.bucket_elements if self.on_gpu else min(self.trained, self.bucket_elements)

    @property
    def bucket_elements(self) -> int:
        """Capacity of the buffer in gradients, if it is allocated whole."""
        return REDUCE_BUCKET if self.on_gpu else AT_ONCE_ON_CPU

    @property
    def bucket(self) -> int:
        """Bytes of the buffer in which ZeRO 2 and 3 reduce gradients."""
        return self.width * self.reduced_at_once

    @property
    def being_reduced(self) -> int:
        """Bytes of the gradients reduced at a time, in float32.

        A tensor larger than the bucket is reduced whole, in addition to the bucket.
        """
        largest = self.shape.embedding if self.lora is None else 0
        beside = self.width * largest * (largest > self.reduced_at_once)
        return FLOAT * min(self.trained, max(self.reduced_at_once, largest)) + beside

    def optimizer(self) -> Need:
        """Adam's moments, and the float32 weights that it updates."""
        in_place = self.stage in (0, 3) and self.width == FLOAT and not self.holds_weights_on_host
        state_bytes = (2 if in_place else 3) * FLOAT * (not self.is_offloaded)
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        why = f"{self.part:,} parameters × {state_bytes} bytes (ZeRO {self.stage}, {workers})"
        return Need(f"{self.name} optimizer", state_bytes * self.part, why, held=True)

    def kept_gradients(self) -> Need:
        """Gradient memory that ZeRO 3 allocates once and never frees."""
        part = FLOAT * self.part * (not self.is_offloaded)
        held = part + self.width * self.bucket_elements if self.stage == 3 else 0
        return Need(f"{self.name} buffers of gradients", held, f"{self.part:,} gradients, and those being reduced")

    def loaded(self) -> Need:
        """The whole model on the worker that reads it for ZeRO 3, before moments exist."""
        is_whole = self.stage == 3 and not self.on_gpu
        peak = max(0, self.width * self.parameters - 2 * FLOAT * self.part) * is_whole
        return Need(f"{self.name} as loaded", peak, "the whole model, before there are moments")

    def passes(self) -> Need:
        """The end of a forward pass, with the gradients present at that time."""
        activations = activation_bytes(self.shape, self.micro, self.width, self.checkpointing, self.on_gpu)
        logits = logit_bytes(self.shape, self.micro, self.on_gpu) if self.scores else 0
        if self.stage == 3:
            gradients = self.being_reduced
        elif self.stage:
            gradients = FLOAT * self.part + self.being_reduced + self.bucket * self.on_gpu
        else:
            is_summed = self.micro.count > 1
            gradients = FLOAT * self.trained * is_summed
            if self.width < FLOAT and self.trained == self.parameters:  # the embeddings' own, before it is summed
                per_number = self.width + FLOAT * (not is_summed or not self.on_gpu)
                gradients += per_number * self.shape.embedding
        parts = {"activations": activations, "logits": logits, "gradients": gradients, "weights": self.gathered}
        why = ", ".join(f"{size(count)} of {what}" for what, count in parts.items() if count)
        why = f"{self.micro.tokens:,} tokens through {self.shape.layers} layers: {why}"
        return Need(f"{self.name} forward and backward", sum(parts.values()), why)

    def update(self) -> Need:
        """Gradients being passed to the optimizer."""
        if self.stage == 3:
            updated = self.part if self.on_gpu else min(self.part, AT_ONCE_ON_CPU + self.shape.embedding)
            peak = FLOAT * updated * (not self.is_offloaded)
            return Need(f"{self.name} gradients", peak, "of the parameters that are updated at a time")
        copies = 1 if self.is_offloaded else 2
        if self.stage:
            peak = self.bucket + copies * FLOAT * self.part
        else:
            peak = FLOAT * (self.trained + min(self.trained, self.bucket_elements) * (self.workers > 1))
        return Need(f"{self.name} gradients", peak, "all of them, and the buffer in which they are summed")

    def saved(self) -> Need:
        """The copy of the largest checkpoint file, without which none is written."""
        peak = 0 if self.on_gpu else self.largest_file
        return Need(f"{self.name} file of a checkpoint", peak, f"weights, or at most {size(PIECE)} of the optimizer")

    def copied(self) -> Need:
        """The copy of this worker's part of a checkpoint, written in the background."""
        parameter_bytes = self.width + self.state_bytes
        share = self.trained // self.workers
        why = f"{share:,} parameters × {parameter_bytes} bytes; where they find no room, steps wait for the disk"
        return Need(f"{self.name} copy for checkpoints", parameter_bytes * share, why, spared=True)

    @property
    def largest_file(self) -> int:
        """Bytes of the largest checkpoint file that this worker writes."""
        share = self.trained // self.workers
        return max(self.width * share, min(self.state_bytes * share, PIECE))

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter in a checkpoint: moments, and float32 copies of half-precision
        weights."""
        return (2 if self.width == FLOAT else 3) * FLOAT


def trainer_needs(
    base: Need, policy: TrainedModel, critic: TrainedModel | None, reference: TrainedModel | None, slots: int
) -> tuple[Need, ...]:
    """Return the peak needs of the first worker, which takes the most: GPU memory, or on the CPU host memory.

    `slots` is the number of weight versions that it holds in shared memory, which is host memory.
    """
    models = [policy, *([critic] if critic else [])]
    model = policy.width * policy.parameters
    on_host = policy.on_gpu and reference is not None and reference.weights_offloaded
    held = [] if reference is None or on_host else [reference.weights()]
    passing = [
        need for trained in models for need in (trained.loaded(), trained.passes(), trained.update(), trained.saved())
    ]
    if not policy.on_gpu:
        passing.append(Need("policy copies for Hugging Face's format", 2 * model, f"2 × {size(model)}"))
    elif reference is not None and reference.weights_offloaded:
        scoring = reference.gathered or model
        logits = logit_bytes(policy.shape, policy.micro, on_gpu=True)
        passing.append(Need("reference pass", scoring + logits, "its weights, logits"))
    return nonzero(
        [
            base,
            *(trained.weights() for trained in models),
            *(trained.optimizer() for trained in models),
            *(trained.kept_gradients() for trained in models),
            *(replace(need, what="reference weights") for need in held),
            Need(
                "attention mask",
                max(trained.width * trained.micro.mask for trained in models),
                "of the largest micro-batch",
            ),
            max(passing, key=lambda need: need.bytes),
            *(trained.copied() for trained in models if not policy.on_gpu),
            Need(
                "published weights",
                slots * policy.published * (not policy.on_gpu),
                f"{slots} versions in shared memory",
            ),
        ]
    )


def host_needs(
    base: Need, policy: TrainedModel, critic: TrainedModel | None, reference: TrainedModel | None
) -> tuple[Need, ...]:
    """Return the host memory of a worker on a GPU, without what it publishes."""
    models = [policy, *([critic] if critic else [])]
    moves = reference is not None and (reference.weights_offloaded or reference.colocated)
    kept = reference.width * reference.kept if reference is not None and moves else 0
    held = [*(model.copied() for model in models), *(model.on_host() for model in models)]
    return nonzero([base, *held, Need("reference weights", kept, "offloaded", held=True)])
