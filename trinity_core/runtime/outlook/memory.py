"""The estimates of a stage's processes: which models each holds, and with what."""

from __future__ import annotations

from dataclasses import replace

from trinity_core.config import Config, CriticSettings, TrainSettings, train_settings
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.inference.settings import EngineSettings, auxiliary_engine, policy_engine
from trinity_core.runtime.outlook.engine_memory import cpu_engine_needs, gpu_engine_needs
from trinity_core.runtime.outlook.micro_batches import micro_batches
from trinity_core.runtime.outlook.model_shape import ModelShape
from trinity_core.runtime.outlook.model_sizes import shape_of, why_unknown
from trinity_core.runtime.outlook.need import Need
from trinity_core.runtime.outlook.processes import AUXILIARY, ENGINE, TRAINER, ProcessOutlook
from trinity_core.runtime.outlook.trainer_memory import TrainedModel, trainer_needs
from trinity_core.runtime.placement import Placement, sync_method
from trinity_core.sync.schedule import versions_kept

MIB = 1 << 20
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
ENGINE_BASE = Need("process", 820 * MIB, "Python, Ray, torch and vLLM, as measured by benchmarks/plan.py")
TRAINER_BASE = Need("process", 760 * MIB, "Python, Ray, torch, transformers and DeepSpeed, by benchmarks/plan.py")
GPU_BASE = Need("process", 600 * MIB, "CUDA's context and libraries; assumed, not measured")
DEFAULT_KEEP = 2
"""Versions that stay loadable outside fixed style (`sync/versions.py`)."""


def with_memory(
    processes: list[ProcessOutlook], config: Config, placement: Placement, free: int, gpu_memory: int
) -> list[ProcessOutlook]:
    """The processes with their peaks, or with the reason why a peak cannot be estimated.

    `free` and `gpu_memory` are bytes: of the machine's free memory, and of one GPU, 0 if it is not known. Raises
    TrinityError for a KV cache that does not fit.
    """
    auxiliary = iter(config.explorer.auxiliary_models)
    found = []
    for process in processes:
        if process.kind == TRAINER:
            found.append(_with(process, _trainer(config, placement)))
        elif process.kind == ENGINE:
            settings, model = policy_engine(config, placement.on_gpu), config.model.model_path
            groups, prompt = config.explorer.runner_per_model, config.model.max_prompt_tokens
            synced = WIDTHS[trainer_dtype(config, on_gpu=False)] if placement.trainers else 0
            found.append(_with(process, _engine(settings, model, gpu_memory, (groups, prompt, synced, free))))
        elif process.kind.startswith(AUXILIARY):
            other = next(auxiliary)
            settings = auxiliary_engine(config, other, placement.on_gpu)
            prompt = other.max_prompt_tokens or settings.max_model_len
            on_cpu = (settings.max_num_seqs, prompt, 0, free)
            found.append(_with(process, _engine(settings, other.model_path, gpu_memory, on_cpu)))
        else:
            found.append(process)
    return found


def _with(process: ProcessOutlook, memory: tuple[Need, ...] | str) -> ProcessOutlook:
    """The process with its peak, or the reason why there is none."""
    if isinstance(memory, str):
        return replace(process, unknown=memory)
    return replace(process, memory=memory)


def trainer_dtype(config: Config, on_gpu: bool) -> str:
    """`trainer.dtype`; by default bfloat16 on a GPU, float32 on the CPU."""
    return train_settings(config).dtype or ("bfloat16" if on_gpu else "float32")


def zero_stage(asked: int | None, workers: int, width: int) -> int:
    """The stage in force (`training/learner.py`): by default 0 for one worker, 2 for several; in half precision at
    least 2."""
    stage = (0 if workers == 1 else 2) if asked is None else asked
    return stage if width == 4 else max(stage, 2)


def _engine(
    settings: EngineSettings, model: str, gpu_memory: int, on_cpu: tuple[int, int, int, int]
) -> tuple[Need, ...] | str:
    """`on_cpu`: the last four arguments of `cpu_engine_needs`."""
    if settings.on_gpu:
        if gpu_memory:
            return gpu_engine_needs(settings, gpu_memory)
        return f"gpu_memory_utilization {settings.gpu_memory_utilization:g} of a GPU, of which this machine has none"
    shape = shape_of(model)
    return why_unknown(model) if shape is None else cpu_engine_needs(ENGINE_BASE, settings, shape, *on_cpu)


def _trainer(config: Config, placement: Placement) -> tuple[Need, ...] | str:
    settings, on_gpu = train_settings(config), placement.on_gpu
    shape = shape_of(config.model.model_path)
    if shape is None:
        return why_unknown(config.model.model_path)
    policy = _trained("policy", config, settings, placement, shape)
    critic = None
    if settings.critic is not None:
        other = shape_of(settings.critic.model_path)
        if other is None:
            return why_unknown(settings.critic.model_path)
        critic = replace(_trained("critic", config, settings.critic, placement, other), scores=False)
    method, _ = sync_method(config, placement)
    slots = 0
    if SYNC_METHODS[method].one_node and not config.is_supervised and not on_gpu:
        sync = config.synchronizer
        kept = versions_kept(sync.sync_interval, sync.sync_offset) if config.is_synchronous else DEFAULT_KEEP
        published = (config.buffer.total_steps or kept) // sync.sync_interval + 1
        slots = min(kept + 1, published)
    base = GPU_BASE if on_gpu else TRAINER_BASE
    return trainer_needs(base, policy, critic, config.needs_reference, slots)


def _trained(
    name: str, config: Config, settings: TrainSettings | CriticSettings, placement: Placement, shape: ModelShape
) -> TrainedModel:
    width = WIDTHS[trainer_dtype(config, placement.on_gpu)]
    stage = zero_stage(train_settings(config).zero_stage, placement.trainers, width)
    micro = micro_batches(config, settings, placement.trainers)
    return TrainedModel(
        name, shape, width, stage, placement.trainers, micro, settings.gradient_checkpointing, placement.on_gpu,
        offloaded=settings.optimizer_offload,
    )  # fmt: skip
