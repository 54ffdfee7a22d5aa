"""One estimate of the memory that a stage takes: what it holds throughout, and the largest moment beside that.

A trainer worker, with P parameters of w bytes, O of them its own (P / workers, under ZeRO 0 whole tensors):

| ZeRO | weights | Adam's moments | float32 weights, if w is 2 | gradients | in a pass, besides activations and logits |
| --- | --- | --- | --- | --- | --- |
| 0 | wP | 8O | 4O | 4P, none in the pass of a single micro-batch | – |
| 2 | wP | 8O | 4O | 4O, twice in the update | the gradients reduced at a time, (4 + w) each |
| 3 | wP / workers | 8O | 4O | 4O, twice in the update | as above, and the weights gathered at a time |

(Rajbhandari et al. 2020, arXiv 1910.02054, section 3.) `optimizer_offload` moves moments, float32 weights and a copy of
weights and gradients to the host, (16 + w)O, and under ZeRO 3 the gradients; `param_offload` also the weights. With an
adapter, P is the adapter's, except for the weights. Weights, moments, float32 weights and an engine's share of a GPU
are known, so a run whose `held` needs do not fit is refused; the rest is a bound of the peak, and warns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trinity_core.base.registry import registry_of
from trinity_core.config import Config, LoraConfig, train_settings
from trinity_core.config.schema import AuxiliaryModelConfig
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import (
    AT_ONCE_ON_CPU,
    DTYPE_BYTES,
    GPU_CONTEXT,
    MAX_LIVE,
    REDUCE_BUCKET,
    UpdateSettings,
    dtype_of,
    kept_on_gpu,
)
from trinity_core.exchange.sync.versions import version_count
from trinity_core.hosting.placement import Placement, sync_method
from trinity_core.rollout.inference.settings import (
    CPU_BATCH_TOKENS,
    GIB,
    SEQUENCES,
    EngineSettings,
    auxiliary_engine,
    kv_bytes,
    kv_bytes_per_token,
    policy_engine,
)
from trinity_core.run.preflight.model_shape import ModelShape, adapter_parameters, base_bytes, shape_of, why_unknown
from trinity_core.run.preflight.needs import AUXILIARY, ENGINE, REWARDS, TRAINER, Need, ProcessEstimate, size, total
from trinity_core.training.batching import LARGEST_MASK, mask_elements
from trinity_core.workflows.rewards.pool import usual_workers

MIB = 1 << 20
FLOAT = 4
"""Bytes of a number in which norms, log-probs and gradients are computed, whatever the weights' dtype."""
ENGINE_BASE = Need("process", 820 * MIB, "Python, Ray, torch and vLLM, as measured by benchmarks/plan.py")
TRAINER_BASE = Need("process", 760 * MIB, "Python, Ray, torch, transformers and DeepSpeed, by benchmarks/plan.py")
REWARD_BASE = Need("process", 100 * MIB, "Python, NumPy, SymPy, math-verify; up to 4 GiB more for an answer")
GPU_BASE = Need("process", GPU_CONTEXT, "CUDA's context, libraries and their workspaces; assumed, not measured")
GPU_PASS = Need("largest pass", 1 << 30, "activations, logits and workspaces; assumed, not measured")
HOST_BASE = Need("process", 3 << 30, "Python, torch, CUDA's libraries and pinned buffers; assumed, not measured")
PINNED = 2
"""Bound of pinned host memory over what it holds: torch rounds each allocation up to a power of two. vLLM's sleep takes
26.8 GiB for the 14.2 of a 7B model."""
FITTING = 0.9
"""Share of a GPU that a worker may take for its states not to be partitioned. Assumed, not measured."""
SAMPLER_COPIES = 6
"""float32 copies of a step's logits: raw, after temperature, log-probs and their intermediate values."""
LOGITS_AT_ONCE, SLICE = 1 << 24, 1 << 23
"""Logits above which the head is computed in slices (`training/policy.py`), and those of a slice
(`algorithms/logprobs.py`)."""
PIECE = 2 << 30
"""Bytes per file of optimizer state (`PIECE_BYTES` of `training/checkpoint.py`)."""


def processes_of(config: Config, placement: Placement, free: int, gpu_memory: int) -> list[ProcessEstimate]:
    """Return the engines and trainer workers of a stage with their peaks, without explorer, rewards, Ray and flow.

    `free` is the machine's free memory in bytes, `gpu_memory` that of one GPU (0 if unknown). Raises TrinityError for a
    KV cache that does not fit.
    """
    method, stage = sync_method(config, placement)[0], zero_stage_that_fits(config, placement, gpu_memory)
    config = config.with_values({"synchronizer.sync_method": method, "trainer.zero_stage": stage})
    estimates = []
    if placement.engines:
        policy, lora = policy_engine(config, placement.on_gpu), config.engine_adapter
        prompts = config.explorer.runner_per_model, config.model.max_prompt_tokens
        synced = DTYPE_BYTES[trainer_dtype(config, on_gpu=False)] if placement.trainers and lora is None else 0
        process = ProcessEstimate(ENGINE, placement.engines, placement.engine_gpus, placement.engine_threads)
        process = replace(process, in_turn=placement.on_gpu and placement.colocated)
        estimates.append(_engine(process, policy, gpu_memory, prompts, synced, free, lora))
    models = config.explorer.auxiliary_models if placement.auxiliary_gpus else ()
    for model, gpus in zip(models, placement.auxiliary_gpus, strict=True):
        settings = auxiliary_engine(config, model, placement.on_gpu)
        prompts = settings.max_num_seqs or 0, model.max_prompt_tokens or settings.max_model_len
        process = ProcessEstimate(auxiliary_kind(model), model.engine_num, gpus, placement.engine_threads)
        estimates.append(_engine(process, settings, gpu_memory, prompts, 0, free))
    return [*estimates, *([_trainer(config, placement)] if placement.trainers else [])]


def auxiliary_kind(model: AuxiliaryModelConfig) -> str:
    return f"{AUXILIARY} {model.called}"


def reward_processes(config: Config, cpus: int) -> list[ProcessEstimate]:
    """Return all processes for scoring answers that may start on a machine with `cpus` cores."""
    if not config.uses_engines or config.mode == "serve":
        return []
    return [ProcessEstimate(REWARDS, config.explorer.reward_workers or usual_workers(cpus), 0, 1, (REWARD_BASE,))]


def _engine(
    process: ProcessEstimate, settings: EngineSettings, gpu_memory: int, prompts: tuple[int, int], synced_width: int,
    free: int, lora: LoraConfig | None = None,
) -> ProcessEstimate:  # fmt: skip
    shape = shape_of(settings.model_path)
    if not settings.on_gpu:
        if shape is None:
            return replace(process, unknown=why_unknown(settings.model_path))
        return replace(process, memory=cpu_engine_needs(settings, shape, prompts, synced_width, free, lora))
    if not gpu_memory:
        unknown = f"gpu_memory_utilization {settings.gpu_memory_utilization:g} of a GPU; this machine has none"
        return replace(process, unknown=unknown)
    memory, share = gpu_engine_needs(settings, gpu_memory, shape, lora)
    asleep = [
        replace(need, what="weights while it sleeps", bytes=PINNED * need.bytes, why=f"{PINNED} × {size(need.bytes)}")
        for need in memory
        if need.what == "weights" and process.in_turn and settings.sleep_level == 1
    ]
    return replace(process, memory=memory, share=share, host=(HOST_BASE, *asleep))


def gpu_engine_needs(
    settings: EngineSettings, gpu_memory: int, shape: ModelShape | None = None, lora: LoraConfig | None = None
) -> tuple[tuple[Need, ...], int]:
    """Return an engine's needs on each of its GPUs, and what vLLM may take there, in bytes.

    vLLM fills its share of the GPU with KV cache, unless `kv_cache_gib` sets the size. The cache holds at least one
    whole sequence.
    """
    share, fixed = int(settings.gpu_memory_utilization * gpu_memory), settings.kv_cache_gib
    if shape is None:
        why = f"gpu_memory_utilization {settings.gpu_memory_utilization:g}"
        return (Need("share of the GPU", share, why, held=True),), 0
    width, gpus = DTYPE_BYTES[settings.compute_dtype], settings.tensor_parallel_size
    heads, tokens = -(-shape.kv_heads // gpus), settings.max_model_len
    sequence = tokens * kv_bytes_per_token(shape.layers, heads, shape.channels, settings.compute_dtype, shape.latent)
    base = GPU_PASS if fixed is None else GPU_BASE
    weights = base_bytes(shape, width, lora) // gpus + 2 * width * adapter_parameters(shape, lora)
    share = share if fixed is None else base.bytes + weights + int(fixed * GIB)
    cache = max(share - base.bytes - weights, sequence)
    fits = base.bytes + weights + sequence <= share
    what = "what gpu_memory_utilization leaves" if fixed is None else f"kv_cache_gib {fixed:g}"
    why = f"{shape.parameters:,} parameters × {width} bytes / {gpus}" + ", in 4 bits" * bool(settings.quantization)
    return (
        replace(base, held=fits),
        Need("weights", weights, why, held=True),
        Need("KV cache", cache, f"{what}; a sequence of {tokens:,} tokens takes {size(sequence)}", held=fits),
    ), share


def cpu_engine_needs(
    settings: EngineSettings, shape: ModelShape, prompts: tuple[int, int], synced_width: int, free: int,
    lora: LoraConfig | None = None,
) -> tuple[Need, ...]:  # fmt: skip
    """Return one engine's peak needs on the CPU.

    `prompts` are the number of prompts that arrive at once and the tokens of each, `synced_width` the bytes per
    published weight, 0 without weight sync, `free` the free memory in bytes. Raises TrinityError for a KV cache that
    does not fit.
    """
    width, sequences = DTYPE_BYTES[settings.compute_dtype], settings.max_num_seqs or SEQUENCES
    per_token = kv_bytes_per_token(shape.layers, shape.kv_heads, shape.channels, settings.compute_dtype, shape.latent)
    packed = shape.parameters + shape.embedding * shape.tied
    weights = width * packed + 2 * width * adapter_parameters(shape, lora)
    version = synced_width * shape.parameters
    tokens = min(prompts[0] * prompts[1], CPU_BATCH_TOKENS)
    passing = width * tokens * 3 * (shape.hidden + shape.intermediate)
    sampler = SAMPLER_COPIES * FLOAT * sequences * shape.vocabulary
    loading = f"{shape.parameters:,} × {synced_width} bytes of a version, and its weights while the old ones are in use"
    return _nonzero(
        [
            ENGINE_BASE,
            Need("weights", weights, f"{packed:,} parameters × {width} bytes; tied embeddings twice", held=True),
            Need("KV cache", kv_bytes(settings, per_token, free), f"{per_token:,} bytes a token; kv_cache_gib"),
            Need("loading weights", version + weights if version else 0, loading),
            Need("largest pass", passing + sampler, f"{tokens:,} tokens, {sequences:,} × {shape.vocabulary:,} logits"),
        ]
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Bounds of the micro-batches of one worker in one step."""

    count: int
    """Number of micro-batches if all rows have full length."""
    tokens: int
    """Tokens of the largest one in the forward pass; a shared prompt counts once."""
    targets: int
    """Tokens with a loss in the largest one."""
    rows: int
    longest: int
    mask: int
    """Elements of the largest attention mask, which exists only during its pass."""


def micro_batch_of(config: Config, settings: UpdateSettings, workers: int) -> MicroBatch:
    """Return bounds for rows of any lengths within the limits: answers shorter than the limit fill the token budget."""
    prompt, response = config.model.max_prompt_tokens, config.model.max_response_tokens
    rows, longest = config.buffer.train_batch_size, prompt + response
    repeats = 1 if config.is_supervised else config.algorithm.repeat_times
    if registry_of("algorithm.policy_loss_fn").uses(config.algorithm.policy_loss_fn, "divergences"):
        longest, repeats = max(longest, config.model.max_model_len), 1  # teachers read longer prompts, each its own
        prompt = longest - response
    sharing = config.trainer.ulysses_sequence_parallel_size
    here = -(-rows * sharing // workers)
    if not settings.use_dynamic_bsz and settings.micro_batch_size:
        top = min(settings.micro_batch_size, here)
        tokens = -(-top // repeats) * prompt + top * response
        mask = mask_elements(top, prompt, response)
        return MicroBatch(-(-here // top), -(-tokens // sharing), -(-top * response // sharing), top, longest, mask)
    shares = mask_elements(rows, prompt, response) <= LARGEST_MASK
    whole = -(-rows // repeats) * prompt + rows * response if shares else rows * longest
    unit = 2 if config.algorithm.algorithm_type == "dpo" else repeats  # rows that stay together, within the budget
    budget = max(settings.max_tokens * sharing, (unit if unit == 2 else 1) * longest)
    most = whole if workers <= sharing else -(-whole * sharing // workers) + min(budget, unit * longest)
    tokens = min(budget, most)
    cells = max(tokens, min(rows * longest, LARGEST_MASK // response))
    return MicroBatch(
        -(-whole * sharing // (workers * tokens)), -(-tokens // sharing), -(-min(tokens, rows * response) // sharing),
        -(-cells // (longest * sharing)), longest, min(mask_elements(rows, prompt, response), LARGEST_MASK),
    )  # fmt: skip


def layer_bytes(shape: ModelShape, micro: MicroBatch, width: int, on_gpu: bool = False) -> int:
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
    shape: ModelShape, micro: MicroBatch, width: int, checkpointing: bool, on_gpu: bool = False
) -> int:
    """Return the bytes that all layers save; with gradient checkpointing, each layer's input and one recomputed
    layer."""
    last = micro.tokens * shape.hidden * (FLOAT + width) + micro.targets * shape.hidden * width  # norm and head
    layer = layer_bytes(shape, micro, width, on_gpu)
    if not checkpointing:
        return last + shape.layers * layer
    return last + shape.layers * micro.tokens * shape.hidden * width + layer


def logit_bytes(shape: ModelShape, micro: MicroBatch, on_gpu: bool = False) -> int:
    """Return the bytes at the end of the forward pass: logits, log-probs, probabilities and the terms of their entropy.

    A large head is computed in slices; three copies of a slice exist at a time. On a GPU a slice is larger, and there
    is one copy (`KERNEL_SLICE` of `algorithms/logprobs.py`).
    """
    logits = micro.targets * shape.vocabulary
    if logits > LOGITS_AT_ONCE:
        return 4 * FLOAT * LOGITS_AT_ONCE if on_gpu else 3 * FLOAT * SLICE
    return 4 * FLOAT * logits


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The policy or the critic as one worker holds it."""

    name: str
    shape: ModelShape
    width: int
    stage: int
    workers: int
    micro: MicroBatch
    checkpointing: bool = False
    on_gpu: bool = False
    optimizer_offload: bool = False
    """True if the optimizer's state is in host memory: on a GPU, under ZeRO 2 and 3."""
    param_offload: bool = False
    """True if this worker's weights are in host memory between passes: on a GPU, under ZeRO 3."""
    lora: LoraConfig | None = None
    """The adapter, which is then the only part trained."""

    @property
    def trained(self) -> int:
        return self.shape.parameters if self.lora is None else adapter_parameters(self.shape, self.lora)

    @property
    def part(self) -> int:
        """Number of parameters whose optimizer state this worker holds: under ZeRO 0 whole tensors."""
        largest = self.shape.embedding if self.stage == 0 and self.lora is None else 0
        return max(self.trained // self.workers, largest)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this worker's weights, wherever they are."""
        adapter = self.width * adapter_parameters(self.shape, self.lora)
        return (base_bytes(self.shape, self.width, self.lora) + adapter) // (self.workers if self.stage == 3 else 1)

    @property
    def bucket(self) -> int:
        """Number of gradients reduced, or tensors gathered, at a time."""
        largest = self.shape.embedding if self.lora is None else 0
        return min(self.trained, max(REDUCE_BUCKET if self.on_gpu else AT_ONCE_ON_CPU, largest))

    @property
    def gathered(self) -> int:
        """Bytes of the weights that ZeRO 3 gathers for a pass."""
        live = (MAX_LIVE if self.on_gpu else AT_ONCE_ON_CPU) + self.shape.embedding
        return min(self.width * live, self.weight_bytes * self.workers) if self.stage == 3 else 0

    def weights(self) -> Need:
        why = f"{self.shape.parameters:,} parameters × {self.width} bytes (ZeRO {self.stage}, {self.workers} workers)"
        return Need(f"{self.name} weights", 0 if self.param_offload else self.weight_bytes, why, held=True)

    def optimizer(self) -> Need:
        """Adam's moments, and the float32 weights that it updates, unless it updates the weights in place."""
        in_place = self.width == FLOAT and self.stage != 2 and not self.param_offload
        each = 0 if self.optimizer_offload else FLOAT * (2 if in_place else 3)
        return Need(f"{self.name} optimizer", each * self.part, f"{self.part:,} parameters × {each} bytes", held=True)

    def peak(self) -> Need:
        """The largest moment: the end of a forward pass, the update, or on the CPU the writing of a checkpoint."""
        activations = activation_bytes(self.shape, self.micro, self.width, self.checkpointing, self.on_gpu)
        activations += self.width * self.micro.mask
        logits = logit_bytes(self.shape, self.micro, self.on_gpu) * (self.name == "policy")
        mine = 0 if self.optimizer_offload and self.stage == 3 else self.part
        gradients = FLOAT * (mine if self.stage else self.trained)
        reduced = (FLOAT + self.width) * self.bucket if self.stage or self.workers > 1 else 0
        in_pass = gradients + reduced if self.stage else gradients * (self.micro.count > 1)
        lasting = gradients * (self.stage == 3)  # ZeRO 3 never frees them
        written = max(self.largest_file, 2 * self.width * self.shape.parameters)
        parts = {"activations": activations, "logits": logits, "gradients": in_pass, "gathered weights": self.gathered}
        why = f"{self.micro.tokens:,} tokens: " + ", ".join(
            f"{size(count)} {what}" for what, count in parts.items() if count
        )
        moments = {
            why: sum(parts.values()),
            "gradients and their sums in the update": gradients * self._copies_in_update + reduced,
            "the largest file of a checkpoint, or a model and its copy": 0 if self.on_gpu else lasting + written,
        }
        largest = max(moments, key=lambda moment: moments[moment])
        return Need(f"{self.name} forward and backward", moments[largest], largest)

    @property
    def _copies_in_update(self) -> int:
        return 2 if self.stage and not self.optimizer_offload else 1

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of the optimizer's state in a checkpoint."""
        return FLOAT * (2 if self.width == FLOAT else 3)

    @property
    def largest_file(self) -> int:
        """Bytes of the largest checkpoint file that this worker writes."""
        share = self.trained // self.workers
        return max(self.width * share, min(self.state_bytes * share, PIECE))

    def copy(self) -> Need:
        """The copy of this worker's part of a checkpoint, written in the background."""
        share, each = self.trained // self.workers, self.width + self.state_bytes
        why = f"{share:,} parameters × {each} bytes; where they find no room, steps wait for the disk"
        return Need(f"{self.name} copy for checkpoints", each * share, why, spared=True)

    def on_host(self, colocated: bool) -> Need:
        """Host memory of a worker on a GPU: offloaded state, what moves away in turn, and a file of a checkpoint."""
        offloaded = (16 + self.width) * self.part * self.optimizer_offload + self.weight_bytes * self.param_offload
        offloaded += (self.weights().bytes + self.optimizer().bytes) * colocated
        why = f"{size(offloaded)} offloaded, {size(self.largest_file)} for a file of a checkpoint"
        return Need(f"{self.name} in host memory", offloaded + self.largest_file, why, held=True)


def trainer_dtype(config: Config, on_gpu: bool) -> str:
    return dtype_of(train_settings(config).dtype, on_gpu)


def zero_stage_that_fits(config: Config, placement: Placement, gpu_memory: int) -> int | None:
    """Return `trainer.zero_stage`; if it is not set, on GPUs 3 to hold weights in host memory (`param_offload`), else
    for several workers 0 if one fits a GPU then, else 2.

    2 also where the GPU's memory (in bytes, 0 if unknown) or the model's shape is unknown.
    """
    asked = config.trainer.zero_stage
    if asked is not None or not placement.on_gpu or not placement.trainers:
        return asked
    if train_settings(config).offloads_weights and not kept_on_gpu(config, placement.colocated):
        return 3
    if placement.trainers < 2:
        return None
    whole = _trainer(config.with_values({"trainer.zero_stage": 0}), placement).memory
    return 0 if whole is not None and total(whole) <= FITTING * gpu_memory else 2


def _trainer(config: Config, placement: Placement) -> ProcessEstimate:
    settings, on_gpu = train_settings(config), placement.on_gpu
    workers = ProcessEstimate(TRAINER, placement.trainers, placement.trainer_gpus, placement.trainer_threads)
    trained: list[tuple[str, str, UpdateSettings]] = [("policy", config.model.model_path, settings)]
    trained += [("critic", settings.critic.model_path, settings.critic)] if settings.critic else []
    models = []
    for name, path, its in trained:
        shape = shape_of(path)
        if shape is None:
            return replace(workers, unknown=why_unknown(path))
        models.append(_trained(name, shape, config, its, placement))
    policy = models[0] = replace(models[0], lora=config.model.lora)
    reference = config.needs_reference and config.model.lora is None
    elsewhere = reference and on_gpu and settings.reference_offload
    copy = Need("reference weights", policy.weight_bytes * reference, "those of the policy at the start", held=True)
    slots = _published_versions(config)
    version = policy.width * policy.trained
    published = Need("published weights", slots * version, f"{slots} versions in shared memory")
    peak = max((model.peak() for model in models), key=lambda need: need.bytes)
    needs = [*(need for model in models for need in (model.weights(), model.optimizer())), peak]
    needs += [] if elsewhere else [copy]
    if not on_gpu:
        needs += [*(model.copy() for model in models), published]
        return replace(workers, memory=_nonzero([TRAINER_BASE, *needs]))
    in_turn = placement.colocated
    host = [*(model.copy() for model in models), *(model.on_host(in_turn) for model in models)]
    host += [copy] if elsewhere or (reference and in_turn) else []
    memory, host = [GPU_BASE, *needs], [HOST_BASE, *host]
    once = _nonzero([published])
    return replace(workers, memory=_nonzero(memory), host=_nonzero(host), once=once, in_turn=in_turn)


def _published_versions(config: Config) -> int:
    """Return how many versions of the weights are in shared memory at a time."""
    if config.is_supervised or not SYNC_METHODS[config.synchronizer.sync_method].one_node:
        return 0
    versions = version_count(config)
    published = (config.buffer.total_steps or versions) // SyncSchedule.of(config).publish_every + 1
    return min(versions + 1, published)


def _trained(
    name: str, shape: ModelShape, config: Config, settings: UpdateSettings, placement: Placement
) -> TrainedModel:
    dtype, workers, on_gpu = trainer_dtype(config, placement.on_gpu), placement.trainers, placement.on_gpu
    stage = train_settings(config).zero_stage_for(workers, dtype)
    return TrainedModel(
        name, shape, DTYPE_BYTES[dtype], stage, workers, micro_batch_of(config, settings, workers),
        settings.gradient_checkpointing, on_gpu,
        optimizer_offload=settings.optimizer_offload and on_gpu and stage > 0,
        param_offload=settings.param_offload and on_gpu and stage == 3,
    )  # fmt: skip


def _nonzero(needs: Iterable[Need]) -> tuple[Need, ...]:
    return tuple(need for need in needs if need.bytes)
