"""Estimates the peak memory of a stage's processes, and its disk usage."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_core.base.layout import JobLayout
from trinity_core.base.processes import memory_limit
from trinity_core.config import Config, CriticSettings, LoraConfig, TrainSettings, store_url, train_settings
from trinity_core.config.paths import DATABASES
from trinity_core.config.schema import AuxiliaryModelConfig
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import DTYPE_BYTES, GPU_CONTEXT, dtype_of
from trinity_core.data.lengths import rollouts_taken
from trinity_core.exchange.store.run_store import is_own_file
from trinity_core.exchange.sync.versions import version_count
from trinity_core.hosting.gpus import smallest_memory, survey
from trinity_core.hosting.placement import Placement, sync_method
from trinity_core.rollout.inference.settings import (
    CPU_BATCH_TOKENS,
    CPU_BLOCK_TOKENS,
    GIB,
    SEQUENCES,
    EngineSettings,
    auxiliary_engine,
    kv_bytes,
    kv_bytes_per_token,
    policy_engine,
)
from trinity_core.run.preflight.model_shape import (
    ModelShape,
    Need,
    adapter_parameters,
    base_bytes,
    nonzero,
    shape_of,
    size,
    total,
    why_unknown,
)
from trinity_core.run.preflight.steps import kept_checkpoints, stored_steps
from trinity_core.run.preflight.trainer_memory import TrainedModel, host_needs, shared_micro_batches, trainer_needs
from trinity_core.workflows.rewards.pool import usual_workers

MIB = 1 << 20
FLOAT = 4
ENGINE_BASE = Need("process", 820 * MIB, "Python, Ray, torch and vLLM, as measured by benchmarks/plan.py")
TRAINER_BASE = Need("process", 760 * MIB, "Python, Ray, torch, transformers and DeepSpeed, by benchmarks/plan.py")
GPU_BASE = Need("process", GPU_CONTEXT, "CUDA's context, libraries and their workspaces; assumed, not measured")
GPU_PASS = Need("largest pass", 1 << 30, "activations, logits and workspaces; assumed, not measured")
"""An engine's memory besides weights and cache: vLLM opens CUDA's context and NCCL before it measures."""
HOST_BASE = Need("process", 3 << 30, "Python, torch, CUDA's libraries and pinned buffers; assumed, not measured")
SAMPLER_COPIES = 6
"""float32 copies of a step's logits: raw, after temperature, log-probs and their intermediate values."""
ROW_BYTES = 13
"""Bytes per token in the experience store: token, log-prob and version with 4 bytes each, and a mask of 1 byte."""
TEXT_BYTES = 5
"""Bytes of a token's text, in the store and again in the archive: 4 in English, 4.5 in Chinese, plus each row's numbers
(`pytest tests/run/test_preflight_plan.py -k full_answers`)."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where torch and `sync_method: memory` share tensors
REWARD_BASE = Need("process", 100 * MIB, "Python, NumPy, SymPy, math-verify; up to 4 GiB more for an answer")
FITTING = 0.9
"""Share of a GPU's memory that a worker may take by estimate for its states not to be partitioned: fragments take some
of the rest. Assumed, not measured."""
PINNED = 2
"""Bound of pinned host memory over what it holds: torch rounds each allocation up to a power of two, and vLLM's sleep
makes one for each piece of the weights. A 7B model takes 26.8 GiB for 14.2."""
ENGINE, TRAINER, AUXILIARY, REWARDS = "engine", "trainer worker", "auxiliary engine", "reward worker"


@dataclass(frozen=True, slots=True)
class ProcessEstimate:
    """Processes of one kind."""

    kind: str
    """`engine`, `trainer worker`, `reward worker`, or `auxiliary engine` with its model."""
    number: int
    gpus: float
    """GPUs per process; a fraction shares a GPU, 0 computes on the CPU."""
    threads: int
    memory: tuple[Need, ...] | None = None
    """Peak memory per process: of a GPU, or on the CPU of the machine. None if it cannot be estimated."""
    unknown: str = ""
    least: tuple[Need, ...] = ()
    """Minimum content of an engine's share of the GPU."""
    host: tuple[Need, ...] = ()
    """Peak host memory of a process on a GPU, without shared memory."""
    reading: int = 0
    """Host memory in bytes that one of them needs to read the model, before anything else."""
    shared_memory: int = 0
    """Bytes in /dev/shm of all of them together."""
    resting: tuple[Need, ...] = ()
    """GPU memory held while the other side has the GPU; only with `cluster.colocate`."""

    @property
    def bytes(self) -> int | None:
        return None if self.memory is None else self.number * total(self.memory)


def processes_of(config: Config, placement: Placement, free: int, gpu_memory: int) -> list[ProcessEstimate]:
    """Return the engines and trainer workers of a stage with their peaks, without explorer, rewards, Ray and flow.

    `free` is the machine's free memory in bytes, `gpu_memory` that of one GPU (0 if unknown). Raises TrinityError for a
    KV cache that does not fit.
    """
    config = config.with_values(
        {
            "synchronizer.sync_method": sync_method(config, placement)[0],
            "trainer.zero_stage": zero_stage_that_fits(config, placement, gpu_memory),
        }
    )
    estimates = []
    if placement.engines:
        policy = policy_engine(config, placement.on_gpu)
        groups, prompt = config.explorer.runner_per_model, config.model.max_prompt_tokens
        lora = config.engine_adapter
        synced = DTYPE_BYTES[trainer_dtype(config, on_gpu=False)] if placement.trainers and lora is None else 0
        memory = _engine(policy, config.model.model_path, gpu_memory, groups, prompt, synced, free, lora)
        process = _process(ENGINE, placement.engines, placement.engine_gpus, placement.engine_threads, memory)
        estimates.append(_on_gpu(process, policy, config.model.model_path, lora, placement.colocated))
    models = config.explorer.auxiliary_models if placement.auxiliary_gpus else ()
    for model, gpus in zip(models, placement.auxiliary_gpus, strict=True):
        settings = auxiliary_engine(config, model, placement.on_gpu)
        prompt = model.max_prompt_tokens or settings.max_model_len
        memory = _engine(settings, model.model_path, gpu_memory, settings.max_num_seqs or 0, prompt, 0, free)
        process = _process(auxiliary_kind(model), model.engine_num, gpus, placement.engine_threads, memory)
        estimates.append(_on_gpu(process, settings, model.model_path))
    if placement.trainers:
        estimates.append(_trainer(config, placement))
    return estimates


def auxiliary_kind(model: AuxiliaryModelConfig) -> str:
    return f"{AUXILIARY} {model.called}"


def reward_processes(config: Config, cpus: int) -> list[ProcessEstimate]:
    """Return all processes for scoring answers that may start on a machine with `cpus` cores."""
    if not config.uses_engines or config.mode == "serve":
        return []
    return [_process(REWARDS, config.explorer.reward_workers or usual_workers(cpus), 0, 1, (REWARD_BASE,))]


def _on_gpu(
    process: ProcessEstimate, settings: EngineSettings, model: str, lora: LoraConfig | None = None, sleeps: bool = False
) -> ProcessEstimate:
    """Add the host memory of an engine on a GPU; `sleeps`: it releases the GPU while others work, and moves an
    adapter's base to the host."""
    if not settings.on_gpu:
        return process
    shape = shape_of(model)
    least = () if shape is None else least_engine_needs(settings, shape, lora)
    asleep = tuple(
        Need(
            "weights while it sleeps",
            PINNED * need.bytes,
            f"{PINNED} × {size(need.bytes)}: torch rounds pinned memory",
            held=True,
        )
        for need in least
        if need.what == "weights" and sleeps and settings.sleep_level == 1
    )
    return replace(process, least=least, host=(HOST_BASE, *asleep), resting=(GPU_BASE,) if sleeps else ())


def _process(kind: str, number: int, gpus: float, threads: int, memory: tuple[Need, ...] | str) -> ProcessEstimate:
    """`memory` is the peak of one process, or why it cannot be estimated."""
    if isinstance(memory, str):
        return ProcessEstimate(kind, number, gpus, threads, unknown=memory)
    return ProcessEstimate(kind, number, gpus, threads, memory)


def _engine(
    settings: EngineSettings, model: str, gpu_memory: int, groups: int, prompt: int, synced_width: int, free: int,
    lora: LoraConfig | None = None,
) -> tuple[Need, ...] | str:  # fmt: skip
    if settings.on_gpu:
        if gpu_memory:
            return gpu_engine_needs(settings, gpu_memory, shape_of(model), lora)
        return f"gpu_memory_utilization {settings.gpu_memory_utilization:g} of a GPU; this machine has none"
    shape = shape_of(model)
    if shape is None:
        return why_unknown(model)
    needs = cpu_engine_needs(ENGINE_BASE, settings, shape, groups, prompt, synced_width, free)
    return (*needs, *_adapter(settings, shape, lora))


def _adapter(settings: EngineSettings, shape: ModelShape, lora: LoraConfig | None) -> tuple[Need, ...]:
    """Return an engine's adapter, once in the kernels' tensors and once as loaded."""
    count, width = adapter_parameters(shape, lora), DTYPE_BYTES[settings.compute_dtype]
    return nonzero([Need("adapter", 2 * width * count, f"2 × {count:,} parameters × {width} bytes")])


def gpu_engine_needs(
    settings: EngineSettings, gpu_memory: int, shape: ModelShape | None = None, lora: LoraConfig | None = None
) -> tuple[Need, ...]:
    """Return an engine's needs: vLLM fills its share of the GPU with KV cache, unless `kv_cache_gib` sets the size."""
    if settings.kv_cache_gib is not None and shape is not None:
        base, weights, _, *adapter = least_engine_needs(settings, shape, lora)
        cache = Need("KV cache", int(settings.kv_cache_gib * GIB), f"kv_cache_gib {settings.kv_cache_gib:g}")
        return (base, weights, cache, *adapter)
    share = settings.gpu_memory_utilization
    return (Need("share of the GPU", int(share * gpu_memory), f"gpu_memory_utilization {share:g}", held=True),)


def least_engine_needs(settings: EngineSettings, shape: ModelShape, lora: LoraConfig | None = None) -> tuple[Need, ...]:
    """Return the minimum that an engine's share of each GPU must hold: its weights, and the cache of one whole
    sequence."""
    width, gpus = DTYPE_BYTES[settings.compute_dtype], settings.tensor_parallel_size
    heads, latent = -(-shape.kv_heads // gpus), shape.latent.cached if shape.latent else 0
    per_token = kv_bytes_per_token(shape.layers, heads, shape.channels, settings.compute_dtype, latent)
    tokens = settings.max_model_len
    return (
        GPU_PASS if settings.kv_cache_gib is None else GPU_BASE,
        Need(
            "weights",
            base_bytes(shape, width, lora) // gpus,
            f"{shape.parameters:,} parameters × {width} bytes / {gpus}" + ", in 4 bits" * bool(settings.quantization),
            held=True,
        ),
        Need("KV cache", per_token * tokens, f"one sequence of {tokens:,} tokens × {per_token:,} bytes"),
        *_adapter(settings, shape, lora),
    )


def cpu_engine_needs(
    base: Need, settings: EngineSettings, shape: ModelShape, groups: int, prompt: int, synced_width: int, free: int
) -> tuple[Need, ...]:
    """Return one engine's peak needs on the CPU.

    `groups` prompts of `prompt` tokens arrive at once. `synced_width` is the bytes per published weight, 0 without
    weight sync; `free` is the free memory in bytes. Raises TrinityError for a KV cache that does not fit.
    """
    width = DTYPE_BYTES[settings.compute_dtype]
    latent = shape.latent.cached if shape.latent else 0
    per_token = kv_bytes_per_token(shape.layers, shape.kv_heads, shape.channels, settings.compute_dtype, latent)
    packed = shape.parameters + (shape.embedding if shape.tied else 0)
    sequences = settings.max_num_seqs or SEQUENCES
    tokens = prefill_tokens(sequences, groups, prompt)
    channels = 3 * (shape.hidden + shape.intermediate)
    held = width * packed
    version = synced_width * shape.parameters
    loading = f"{shape.parameters:,} × {synced_width} bytes of a version, and its weights while the old ones are in use"
    return nonzero(
        [
            base,
            Need("weights", held, f"{packed:,} parameters × {width} bytes; tied embeddings twice", held=True),
            Need("KV cache", kv_bytes(settings, per_token, free), f"{per_token:,} bytes a token; kv_cache_gib"),
            Need("loading weights", version + held if version else 0, loading),
            Need("prefill", width * tokens * channels, f"{tokens:,} tokens at once × {channels:,} channels"),
            Need(
                "sampler", SAMPLER_COPIES * FLOAT * sequences * shape.vocabulary,
                f"{SAMPLER_COPIES} × {sequences:,} sequences × {shape.vocabulary:,} logits",
            ),
        ]
    )  # fmt: skip


def prefill_tokens(sequences: int, groups: int, prompt: int) -> int:
    """Return the maximum number of tokens that a step prefills.

    Each prompt counts once as a whole; for the other sequences of its group only the last block, which the prefix cache
    does not share.
    """
    firsts = min(groups, sequences)
    return min(firsts * prompt + (sequences - firsts) * min(prompt, CPU_BLOCK_TOKENS), CPU_BATCH_TOKENS)


def trainer_dtype(config: Config, on_gpu: bool) -> str:
    return dtype_of(train_settings(config).dtype, on_gpu)


def _trainer(config: Config, placement: Placement) -> ProcessEstimate:
    settings, on_gpu = train_settings(config), placement.on_gpu
    shape = shape_of(config.model.model_path)

    def workers(memory: tuple[Need, ...] | str) -> ProcessEstimate:
        return _process(TRAINER, placement.trainers, placement.trainer_gpus, placement.trainer_threads, memory)

    if shape is None:
        return workers(why_unknown(config.model.model_path))
    policy = replace(_trained("policy", config, settings, placement, shape), lora=config.model.lora)
    critic = None
    if settings.critic is not None:
        other = shape_of(settings.critic.model_path)
        if other is None:
            return workers(why_unknown(settings.critic.model_path))
        critic = replace(_trained("critic", config, settings.critic, placement, other), scores=False)
    slots = 0
    if SYNC_METHODS[config.synchronizer.sync_method].one_node and not config.is_supervised:
        kept = version_count(config)
        published = (config.buffer.total_steps or kept) // SyncSchedule.of(config).publish_every + 1
        slots = min(kept + 1, published)
    reference = None
    if config.needs_reference and config.model.lora is None:
        reference = replace(policy, offloaded=False, weights_offloaded=settings.reference_offload)
    base = GPU_BASE if on_gpu else TRAINER_BASE
    return replace(
        workers(trainer_needs(base, policy, critic, reference, slots)),
        host=host_needs(HOST_BASE, policy, critic, reference) if on_gpu else (),
        reading=policy.width * policy.parameters if on_gpu else 0,
        shared_memory=slots * policy.published,
        resting=(GPU_BASE,) if on_gpu and placement.colocated else (),
    )


def zero_stage_that_fits(config: Config, placement: Placement, gpu_memory: int) -> int | None:
    """Return `trainer.zero_stage`; if it is not set, for workers on several GPUs 0 if one fits a GPU then, else 2.

    2 also where the GPU's memory (in bytes, 0 if unknown) or the model's shape is unknown.
    """
    asked = config.trainer.zero_stage
    if asked is not None or not placement.on_gpu or placement.trainers < 2:
        return asked
    whole = _trainer(config.with_values({"trainer.zero_stage": 0}), placement).memory
    return 0 if whole is not None and total(whole) <= FITTING * gpu_memory else 2


def _trained(
    name: str, config: Config, settings: TrainSettings | CriticSettings, placement: Placement, shape: ModelShape
) -> TrainedModel:
    dtype = trainer_dtype(config, placement.on_gpu)
    width, stage = DTYPE_BYTES[dtype], train_settings(config).zero_stage_for(placement.trainers, dtype)
    sharing = config.trainer.ulysses_sequence_parallel_size
    micro = shared_micro_batches(config, settings, placement.trainers, sharing)
    return TrainedModel(
        name, shape, width, stage, placement.trainers, micro, settings.gradient_checkpointing, placement.on_gpu,
        offloaded=settings.optimizer_offload, weights_offloaded=settings.param_offload,
        colocated=placement.on_gpu and placement.colocated,
    )  # fmt: skip


def disk_of(config: Config, steps: int, trained: Sequence[ModelShape], weight_bytes: int) -> tuple[Need, ...]:
    """Return the maximum bytes below the run's folder at the end of `steps` steps.

    `trained` are the policy and, if there is one, the critic; empty if nothing is trained. `weight_bytes` is the size
    of one weight.
    """
    needs: list[Need] = []
    if trained:
        kept = kept_checkpoints(config, steps)
        # Weights and Adam's two moments; in half precision also the float32 weights.
        each_weight = weight_bytes + 2 * FLOAT + (0 if weight_bytes == FLOAT else FLOAT)
        adapter = adapter_parameters(trained[0], config.model.lora)
        state = sum((adapter or shape.parameters) * each_weight for shape in trained[:1])
        state += sum(shape.parameters * each_weight for shape in trained[1:])
        models = kept if train_settings(config).save_huggingface == "always" else 1
        model = trained[0].parameters * weight_bytes
        needs = [
            Need("checkpoints", kept * state, f"{kept} × {size(state)}: weights and optimizer state; for replays too"),
            Need("models", models * model, f"{models} in Hugging Face format × {size(model)}"),
        ]
    longest = config.model.max_model_len
    if config.explores and not config.is_supervised and is_own_file(store_url(config), config.job_dir):
        groups, each = stored_steps(config, steps) * config.buffer.batch_size, ROW_BYTES + TEXT_BYTES
        rows = groups * config.algorithm.repeat_times
        why = f"{rows:,} rollouts × {longest:,} tokens × {each} bytes; for replays too"
        needs.append(Need("experiences", rows * longest * each, why))
    if trained and not config.is_supervised:
        rows = steps * rollouts_taken(config)
        why = f"texts of {rows:,} rollouts × {longest:,} tokens × {TEXT_BYTES} bytes"
        needs.append(Need("archive", rows * longest * TEXT_BYTES, why))
    return nonzero(needs)


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of one node, in bytes."""

    memory: int
    """Total host memory, including what is in use."""
    gpu_memory: int
    """Memory of the smallest GPU; 0 without GPUs."""
    disk: int
    """Free disk space for the run, plus what the run has already written."""
    shared_memory: int = sys.maxsize


def room_for(job_dir: Path) -> Room:
    """Return this machine's room for the run in `job_dir`, which need not exist."""
    there = next(folder for folder in (job_dir, *job_dir.parents) if folder.exists())
    stores = (file for file in JobLayout(job_dir).buffer.glob("*") if file.suffix in DATABASES)
    files = [*job_dir.glob("global_step_*/**/*"), *stores, JobLayout(job_dir).archive]  # what `disk_of` counts
    written = sum(file.stat().st_size for file in files if file.is_file())
    usage = shutil.disk_usage(there)
    free = usage.free if usage.total else sys.maxsize  # a file system without a size, such as /proc, has no limit
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else sys.maxsize
    return Room(memory_limit(), smallest_memory(survey()), free + written, shared)
