"""Fill every setting whose default follows from others. Pure, but for the working folder that paths start from."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

from trinity_core.config.algorithm_types import ALGORITHMS, effective_args
from trinity_core.config.parts import PARTS
from trinity_core.config.schema import AlgorithmConfig, BufferConfig, Config, ExperienceBufferConfig, TasksetConfig
from trinity_core.config.sync_methods import default_sync_method

DEFAULT_WORKFLOW = "math_workflow"


def resolve(config: Config) -> Config:
    """A copy with all derived settings filled. Resolving twice changes nothing; nothing is checked or raised."""
    config = copy.deepcopy(config)
    config.checkpoint_root_dir = str(Path(config.checkpoint_root_dir).expanduser().absolute())
    config.ray_namespace = config.ray_namespace or f"{config.project}/{config.name}"
    _algorithm(config.algorithm)
    _model(config)
    _normalizer(config)
    _batches(config.buffer, config.algorithm)
    _length(config)
    _tasksets(config)
    _buffers(config)
    if config.synchronizer.sync_method is None:
        config.synchronizer.sync_method = default_sync_method(config.mode)
    critic = config.trainer.trainer_config.critic.model
    if critic.enable_gradient_checkpointing is None:
        critic.enable_gradient_checkpointing = config.trainer.gradient_checkpointing
    return config


def _algorithm(algorithm: AlgorithmConfig) -> None:
    """Parts and repeats that `algorithm_type` stands for."""
    known = ALGORITHMS.get(algorithm.algorithm_type)
    if known is None:
        return
    for part in PARTS:
        default, name, args = getattr(known, part), getattr(algorithm, part), f"{part}_args"
        merged = effective_args(default, getattr(known, args), name, getattr(algorithm, args))
        setattr(algorithm, args, merged)
        setattr(algorithm, part, name or default)
    if algorithm.repeat_times is None or not known.uses_rollouts:
        algorithm.repeat_times = known.default_repeat_times


def _model(config: Config) -> None:
    """Token limits and the critic's path."""
    model = config.model
    model.critic_model_path = model.critic_model_path or model.model_path
    prompt, response, longest = model.max_prompt_tokens, model.max_response_tokens, model.max_model_len
    if longest is None and prompt and response:
        model.max_model_len = longest = prompt + response
    if longest is not None:
        model.max_prompt_tokens = prompt or max(longest - (response or 1), 1)
        model.max_response_tokens = response or max(longest - (prompt or 1), 1)
    for auxiliary in config.explorer.auxiliary_models:
        if auxiliary.max_model_len is None:
            given = auxiliary.max_prompt_tokens and auxiliary.max_response_tokens
            total = (auxiliary.max_prompt_tokens or 0) + (auxiliary.max_response_tokens or 0)
            auxiliary.max_model_len = total if given else model.max_model_len


def _normalizer(config: Config) -> None:
    """The length that token sums are divided by: the longest response allowed, the same for every batch."""
    algorithm, longest = config.algorithm, config.model.max_response_tokens
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and longest is not None:
        algorithm.loss_agg_mode_args = {"normalizer": longest, **algorithm.loss_agg_mode_args}


def _batches(buffer: BufferConfig, algorithm: AlgorithmConfig) -> None:
    """Either batch size from the other; with `mix`, expert data comes on top of what is explored."""
    per_task = float(algorithm.repeat_times or 1) / (1 - expert_share(algorithm))
    if buffer.batch_size is None:
        buffer.batch_size = max(int((buffer.train_batch_size or 0) / per_task), 1)
    if buffer.train_batch_size is None:
        buffer.train_batch_size = round(buffer.batch_size * per_task)


def expert_share(algorithm: AlgorithmConfig) -> float:
    """The share of a batch that expert data makes up; 0 where it is no share at all."""
    share = algorithm.sample_strategy_args.get("expert_data_ratio") if algorithm.sample_strategy == "mix" else 0
    return share if isinstance(share, int | float) and 0 <= share < 1 else 0


def draws_by(config: Config) -> str:
    """The strategy by which rollouts are drawn from the queue: with `mix` its inner one."""
    algorithm, buffer = config.algorithm, config.buffer.trainer_input.experience_buffer
    name = algorithm.sample_strategy
    name = str(algorithm.sample_strategy_args.get("inner") or "default") if name == "mix" else name
    return "priority" if name in ("default", "fifo") and buffer.use_priority_queue else name


def _length(config: Config) -> None:
    """`total_steps` may stand in either place; both hold it afterwards."""
    steps = config.buffer.total_steps or config.trainer.total_steps
    config.buffer.total_steps = config.buffer.total_steps or steps
    config.trainer.total_steps = config.trainer.total_steps or steps


def _tasksets(config: Config) -> None:
    """One list of training task sets; in each task set the defaults of what surrounds it."""
    given = config.buffer.explorer_input
    if given.taskset is not None:
        given.tasksets = [given.taskset, *given.tasksets]
        given.taskset = None
    _names(given.tasksets, "taskset")
    _names(given.eval_tasksets, "eval")
    for taskset in given.tasksets:
        taskset.repeat_times = taskset.repeat_times or config.algorithm.repeat_times
    for taskset in given.eval_tasksets:
        taskset.repeat_times = taskset.repeat_times or 1
    for taskset in (*given.tasksets, *given.eval_tasksets):
        taskset.default_workflow_type = (
            taskset.default_workflow_type
            or given.default_workflow_type
            or config.buffer.default_workflow_type
            or DEFAULT_WORKFLOW
        )
        taskset.default_reward_fn_type = (
            taskset.default_reward_fn_type or given.default_reward_fn_type or config.buffer.default_reward_fn_type
        )
        _sampling(taskset, config)


def _names(tasksets: Iterable[TasksetConfig], stem: str) -> None:
    for index, taskset in enumerate(tasksets):
        taskset.name = taskset.name or (stem if index == 0 else f"{stem}_{index}")


def _sampling(taskset: TasksetConfig, config: Config) -> None:
    args, model = taskset.rollout_args, config.model
    args.temperature = model.temperature if args.temperature is None else args.temperature
    args.top_p = model.top_p if args.top_p is None else args.top_p
    args.top_k = model.top_k if args.top_k is None else args.top_k
    args.max_tokens = args.max_tokens or model.max_response_tokens


def _buffers(config: Config) -> None:
    """Names and storage of the trainer's inputs."""
    known = ALGORITHMS.get(config.algorithm.algorithm_type)
    given = config.buffer.trainer_input
    _buffer(given.experience_buffer, "experience_buffer", "file" if known and not known.uses_rollouts else "queue")
    for name, buffer in given.auxiliary_buffers.items():
        _buffer(buffer, name, "file")


def _buffer(buffer: ExperienceBufferConfig, name: str, storage_type: str) -> None:
    buffer.name = buffer.name or name
    buffer.storage_type = buffer.storage_type or storage_type
