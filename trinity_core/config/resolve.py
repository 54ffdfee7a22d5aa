"""Fills every setting whose default follows from others: pure functions, one per section.

They depend on the machine only through the working directory, which relative paths start from. Resolving twice changes
nothing; nothing is checked or raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trinity_core.base.files import expanded
from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS, PARTS, AlgorithmType, effective_args
from trinity_core.config.schema import (
    AlgorithmConfig,
    AuxiliaryModelConfig,
    BufferConfig,
    Config,
    ExperienceBufferConfig,
    ExplorerInputConfig,
    FormatConfig,
    ModelConfig,
    RolloutArgs,
    SynchronizerConfig,
    TasksetConfig,
    TrainerConfig,
    TrainerInputConfig,
)
from trinity_core.config.sync_methods import default_sync_method
from trinity_core.config.types import FrozenDict

DEFAULT_WORKFLOW, DEFAULT_REWARD = "math_workflow", "math_reward"
THINKING_WORKFLOWS = ("math_workflow", "async_math_workflow")
CALLS = {"tools_key": "tools", "response_key": "answer"}
CONVERSATION = {"prompt_type": "messages", "messages_key": "conversations", "system_prompt_key": "raw_system"}
PROMPT = {"prompt_type", "prompt_key", "messages_key"}
"""Keys that each say where the prompt is."""


def resolve(config: Config) -> Config:
    """Return a copy with all derived settings filled."""
    model = _model(config.model)
    algorithm = _algorithm(config.algorithm, model)
    auxiliary_models = tuple(_auxiliary(auxiliary, model) for auxiliary in config.explorer.auxiliary_models)
    return config.model_copy(
        update={
            "checkpoint_root_dir": str(expanded(config.checkpoint_root_dir).absolute()),
            "ray_namespace": config.ray_namespace or f"{config.project}/{config.name}",
            "algorithm": algorithm,
            "model": model,
            "buffer": _buffer(config.buffer, algorithm, model),
            "explorer": config.explorer.model_copy(update={"auxiliary_models": auxiliary_models}),
            "trainer": _trainer(config.trainer),
            "synchronizer": _synchronizer(config.synchronizer, config),
        }
    )


def _model(model: ModelConfig) -> ModelConfig:
    """Fill token limits and the critic's path."""
    prompt, response, longest = model.max_prompt_tokens, model.max_response_tokens, model.max_model_len
    update: dict[str, Any] = {"critic_model_path": model.critic_model_path or model.model_path}
    if longest is None and prompt and response:
        longest = prompt + response
    if longest is not None:
        update["max_model_len"] = longest
        update["max_prompt_tokens"] = prompt or max(longest - (response or 1), 1)
        update["max_response_tokens"] = response or max(longest - (prompt or 1), 1)
    return model.model_copy(update=update)


def _auxiliary(auxiliary: AuxiliaryModelConfig, model: ModelConfig) -> AuxiliaryModelConfig:
    if auxiliary.max_model_len is not None:
        return auxiliary
    prompt, response = auxiliary.max_prompt_tokens, auxiliary.max_response_tokens
    total = prompt + response if prompt and response else model.max_model_len
    return auxiliary.model_copy(update={"max_model_len": total})


def _algorithm(algorithm: AlgorithmConfig, model: ModelConfig) -> AlgorithmConfig:
    """Fill parts and repeats from `algorithm_type`."""
    update: dict[str, Any] = {}
    defaults = registry_of("algorithm.algorithm_type").get(algorithm.algorithm_type)
    if defaults is not None:
        for part in PARTS:
            default, name, args = getattr(defaults, part), getattr(algorithm, part), f"{part}_args"
            update[args] = effective_args(default, getattr(defaults, args), name, getattr(algorithm, args))
            update[part] = name or (_aggregation(defaults, update) if part == "loss_agg_mode" else default)
        if algorithm.repeat_times is None or not defaults.uses_rollouts:
            update["repeat_times"] = defaults.default_repeat_times
        alone = algorithm.algorithm_type == "raft" and algorithm.repeat_times == 1
        if alone and not (algorithm.advantage_fn or "selection" in (algorithm.advantage_fn_args or {})):
            update["advantage_fn_args"]["selection"] = "all"  # there is nothing to choose from
    rule, longest = update.get("loss_agg_mode", algorithm.loss_agg_mode), model.max_response_tokens
    if rule == "seq-mean-token-sum-norm" and longest is not None:
        # Token sums are divided by the maximum response length, the same for every batch.
        mode_args = update.get("loss_agg_mode_args", algorithm.loss_agg_mode_args)
        update["loss_agg_mode_args"] = {"normalizer": longest, **mode_args}
    frozen = {name: FrozenDict(value) if isinstance(value, dict) else value for name, value in update.items()}
    return algorithm.model_copy(update=frozen)


def _aggregation(algorithm: AlgorithmType, parts: Mapping[str, Any]) -> str:
    """Return the type's aggregation, or that of the loss that replaces the type's: GSPO's is a mean over sequences
    under any type."""
    losses = registry_of("algorithm.policy_loss_fn")
    usual, loss = losses.get(algorithm.policy_loss_fn), losses.get(parts["policy_loss_fn"])
    if usual is None or loss is None or algorithm.loss_agg_mode != usual.loss_agg_mode:
        return algorithm.loss_agg_mode
    return str(loss.loss_agg_mode)


def most_repeats(buffer: BufferConfig, algorithm: AlgorithmConfig) -> int:
    """Return the largest number of training rollouts per task over all task sets."""
    usual = algorithm.repeat_times or 1
    return max((taskset.repeat_times or usual for taskset in buffer.explorer_input.training), default=usual)


def _buffer(buffer: BufferConfig, algorithm: AlgorithmConfig, model: ModelConfig) -> BufferConfig:
    """Derive one batch size from the other; with `mix`, expert data comes on top of what is explored."""
    per_task = most_repeats(buffer, algorithm) / (1 - expert_share(algorithm))
    batch_size = buffer.batch_size or max(int((buffer.train_batch_size or 0) / per_task), 1)
    return buffer.model_copy(
        update={
            "batch_size": batch_size,
            "train_batch_size": buffer.train_batch_size or round(batch_size * per_task),
            "explorer_input": _explorer_input(buffer, algorithm, model),
            "trainer_input": _trainer_input(buffer.trainer_input, algorithm),
        }
    )


def expert_share(algorithm: AlgorithmConfig) -> float:
    """Return the share of expert data in a batch; 0 if the setting is not a valid share."""
    if algorithm.sample_strategy != "mix":
        return 0
    usual = ALGORITHMS["mix"].sample_strategy_args["expert_data_ratio"]
    share = algorithm.sample_strategy_args.get("expert_data_ratio", usual)
    return share if isinstance(share, int | float) and 0 <= share < 1 else 0


def sampling_temperature(config: Config) -> float:
    """Return the temperature for log-probs of rows without their own, such as expert data mixed with rollouts.

    It is that of the first training task set (without task sets, the model's), and 1 for given data alone and for
    greedy rollouts.
    """
    if not config.algorithm_type.uses_rollouts:
        return 1.0
    tasksets = config.buffer.explorer_input.tasksets
    return (tasksets[0].rollout_args.temperature if tasksets else config.model.temperature) or 1.0


def shares(config: Config) -> dict[str, float]:
    """Return the data sets of given rows in a batch with their weights, by key of `auxiliary_buffers`.

    In a supervised run the experience buffer, as "", comes first; auxiliary buffers take part only if they have a
    share, because they are often meant for a later stage.
    """
    inputs = config.buffer.trainer_input
    if not config.is_supervised:
        is_own = config.algorithm.sample_strategy not in ("default", "fifo", "priority", "staleness_control", "mix")
        drawn = inputs.auxiliary_buffers if is_own or expert_share(config.algorithm) else {}
        return {key: buffer.share or 1.0 for key, buffer in drawn.items()}
    others = {key: buffer.share for key, buffer in inputs.auxiliary_buffers.items() if buffer.share}
    return {"": inputs.experience_buffer.share or 1.0, **others}


def held_out(config: Config) -> dict[str, ExperienceBufferConfig]:
    """Return the data sets whose loss is measured, by key of `auxiliary_buffers`."""
    buffers = config.buffer.trainer_input.auxiliary_buffers
    return {key: buffer for key, buffer in buffers.items() if buffer.held_out and config.is_supervised}


def draws_by(config: Config) -> str:
    """Return the strategy that draws rollouts from the queue: with `mix` its inner one."""
    name = _drawn_by(config.algorithm)
    return "priority" if name in ("default", "fifo") and replay_args(config) is not None else name


def replay_args(config: Config) -> dict[str, Any] | None:
    """Return the buffer's options as arguments of the sample strategy `priority`; None if there are none."""
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer
    if not replay.enable and _drawn_by(config.algorithm) != "priority":
        return None
    priority = {"priority_fn": replay.priority_fn, "priority_fn_args": dict(replay.priority_fn_args)}
    return {"reuse_cooldown_time": replay.reuse_cooldown_time, "seed": config.seed, **priority}


def _drawn_by(algorithm: AlgorithmConfig) -> str:
    """Return the strategy that `algorithm` names for rollouts."""
    name = algorithm.sample_strategy
    return str(algorithm.sample_strategy_args.get("inner") or "default") if name == "mix" else name


def _explorer_input(buffer: BufferConfig, algorithm: AlgorithmConfig, model: ModelConfig) -> ExplorerInputConfig:
    """Join all training task sets in one list, and fill each from the defaults around it."""
    explorer_input = buffer.explorer_input

    def completed(tasksets: Iterable[TasksetConfig], stem: str, repeat_times: int) -> tuple[TasksetConfig, ...]:
        by_trainer = registry_of("algorithm.policy_loss_fn").uses(algorithm.policy_loss_fn or "none", "divergences")
        scored = (_scored(taskset, explorer_input, by_trainer) for taskset in tasksets)
        return tuple(
            taskset.model_copy(
                update={
                    "name": taskset.name or (stem if index == 0 else f"{stem}_{index}"),
                    "repeat_times": taskset.repeat_times or repeat_times,
                    "format": tool_call_rows(
                        taskset.format, taskset.default_workflow_type or "", taskset.workflow_args
                    ),
                    "rollout_args": _sampling(taskset.rollout_args, model),
                }
            )
            for index, taskset in enumerate(scored)
        )

    return explorer_input.model_copy(
        update={
            "taskset": None,
            "tasksets": completed(explorer_input.training, "taskset", algorithm.repeat_times),
            "eval_tasksets": completed(explorer_input.eval_tasksets, "eval", 1),
        }
    )


def _scored(taskset: TasksetConfig, usual: ExplorerInputConfig, by_trainer: bool) -> TasksetConfig:
    """Return the task set with its workflow and reward function.

    A `math_workflow` without a reward function asks for reasoning (`with_think`), as Trinity-RFT's does. `by_trainer`:
    the trainer computes the distributions of a `self_distill_workflow`'s teacher.
    """
    workflow = taskset.default_workflow_type or usual.default_workflow_type
    reward = taskset.default_reward_fn_type or usual.default_reward_fn_type
    args = taskset.workflow_args
    if workflow is None:
        workflow, reward = DEFAULT_WORKFLOW, reward or DEFAULT_REWARD
    elif workflow in THINKING_WORKFLOWS and reward is None:
        args = FrozenDict({"with_think": True, **args})
    elif workflow == "self_distill_workflow" and by_trainer:
        args = FrozenDict({"teacher": "trainer", **args})
    update = {"default_workflow_type": workflow, "default_reward_fn_type": reward, "workflow_args": args}
    return taskset.model_copy(update=update)


def _sampling(args: RolloutArgs, model: ModelConfig) -> RolloutArgs:
    penalty = None if model.repetition_penalty == 1 else model.repetition_penalty
    return args.model_copy(
        update={
            "repetition_penalty": penalty if args.repetition_penalty is None else args.repetition_penalty,
            "temperature": model.temperature if args.temperature is None else args.temperature,
            "top_p": model.top_p if args.top_p is None else args.top_p,
            "top_k": model.top_k if args.top_k is None else args.top_k,
        }
    )


def _trainer_input(trainer_input: TrainerInputConfig, algorithm: AlgorithmConfig) -> TrainerInputConfig:
    defaults = ALGORITHMS.get(algorithm.algorithm_type)

    def stored(buffer: ExperienceBufferConfig, name: str, storage_type: str) -> ExperienceBufferConfig:
        update = {"name": buffer.name or name, "storage_type": buffer.storage_type or storage_type}
        form = {"prompt_type": "text"} if algorithm.algorithm_type == "cpt" else {}
        return buffer.model_copy(update={**update, "format": buffer.format.model_copy(update=form)})

    storage_type = "file" if defaults and not defaults.uses_rollouts else "queue"
    auxiliary = {name: stored(buffer, name, "file") for name, buffer in trainer_input.auxiliary_buffers.items()}
    return trainer_input.model_copy(
        update={
            "experience_buffer": stored(trainer_input.experience_buffer, "experience_buffer", storage_type),
            "auxiliary_buffers": FrozenDict(auxiliary),
        }
    )


def _trainer(trainer: TrainerConfig) -> TrainerConfig:
    """Let the critic use gradient checkpointing if the policy does."""
    verl = trainer.trainer_config
    if verl.critic.model.enable_gradient_checkpointing is not None:
        return trainer
    key = "critic.model.enable_gradient_checkpointing"
    return trainer.model_copy(update={"trainer_config": verl.with_values({key: trainer.gradient_checkpointing})})


def _synchronizer(synchronizer: SynchronizerConfig, config: Config) -> SynchronizerConfig:
    several, adapter = config.cluster.node_num > 1, config.model.lora is not None
    method = synchronizer.sync_method or default_sync_method(config.mode, several, adapter)
    return synchronizer.model_copy(update={"sync_method": method})


def tool_call_rows(form: FormatConfig, workflow: str, workflow_args: Mapping[str, Any]) -> FormatConfig:
    """Return a task set's format, with default columns for this workflow.

    With `workflow_args.tools` the workflow takes any rows.
    """
    if workflow != "toolcall_workflow" or workflow_args.get("tools"):
        return form
    written = form.model_fields_set
    defaults = CALLS if PROMPT & written else {**CALLS, **CONVERSATION}
    return form.model_copy(update={key: value for key, value in defaults.items() if key not in written})
