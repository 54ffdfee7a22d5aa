"""Trinity-RFT's keys of data and rollouts: the buffer and the explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config import schema
from trinity_core.config.foreign.key_action import (
    FOLLOWS,
    SILENT,
    Below,
    Keys,
    Moved,
    Spelled,
    keys,
    moved,
    noted,
    refused,
    same,
    unset,
)

VISION = refused("models see text alone: there are no images or videos.", "")
PER_ROW = refused("all tasks of a task set have the same workflow and reward: make a separate task set for each.", "")
PREFIX = refused("an answer begins where the chat template's prompt ends; write the prefix into a chat template.", "")
LOCAL = noted("The store is a local database, which retries on its own.")
WARMUP = refused(
    "a stage warms up: `stages: [{stage_name: sft, mode: train, algorithm: {algorithm_type: sft}, buffer: "
    "{total_steps: N, trainer_input: {experience_buffer: {path: …}}}}, {stage_name: rft}]`.",
    0,
)
PROGRESS = noted("A run shows its progress in one line.", False)
UNUSED = noted("It is no property of this data set.", None, "", False, {})
ALL_STEPS = noted("Its rows are used again as often as the run needs them.", 1)
WORKFLOW = Spelled(
    {
        "": None,
        "async_simple_workflow": "simple_workflow",
        "async_math_boxed_workflow": "math_boxed_workflow",
        "async_math_rm_workflow": "math_rm_workflow",
        "async_math_ruler_workflow": "math_ruler_workflow",
        "tool_call_workflow": "toolcall_workflow",
    }
)
"""Trinity-RFT's further names for the same workflow; here all workflows are asynchronous."""

FORMAT: Keys = {
    "image_key": VISION,
    "video_key": VISION,
    "reply_prefix": PREFIX,
    "workflow_key": PER_ROW,
    "reward_fn_key": PER_ROW,
    "solution_key": noted("See response_key.", "", "solution"),
    "reward_key": noted("Rewards are computed, not read.", "", "reward"),
    "label_key": noted("Preferences are pairs: see chosen_key and rejected_key.", ""),
    "teacher_hint_key": refused("a teacher sees what the policy sees; leave this out.", ""),
    "enable_thinking": moved("/model.enable_thinking"),
    "chat_template": unset(""),
}
REWARD = Spelled({"": None, "math_boxed_reward_naive_dapo": "math_dapo_reward"})
"""The latter is scored by math-verify here, where Trinity-RFT compares normalised texts."""
ROLLOUT_ARGS: Keys = {
    "n": moved("../repeat_times", yields=True),
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
}
STORED: Keys = {
    "max_retry_times": LOCAL,
    "max_retry_interval": LOCAL,
    "capacity": noted("The store is on disk and has no limit; synchronizer.max_staleness bounds its age."),
    "enable_progress_bar": PROGRESS,
    **same(FOLLOWS, "ray_namespace wrap_in_ray index is_eval task_type batch_size tokenizer_path"),
    "algorithm_type": noted("It follows from the algorithm."),
    "schema_type": noted("It follows from the algorithm."),
    "mm_data_kwargs": refused("models see text alone: there are no images or videos.", {}),
    "raw": noted("See data_processor.task_pipeline.inputs.", False),
    "total_epochs": ALL_STEPS,
    "total_steps": ALL_STEPS,
    "subset": moved("subset_name"),
}
TASKSET = keys(
    STORED,
    {
        "default_eval_workflow_type": noted("See default_workflow_type of each task set.", ""),
        "default_workflow_type": WORKFLOW,
        "default_reward_fn_type": REWARD,
        "subset_name": unset(""),
        "path": unset(),
        **same(
            UNUSED,
            "max_read_timeout use_priority_queue reuse_cooldown_time replay_buffer replay_buffer_kwargs",
        ),
    },
)
SELECTOR: Keys = {
    "random_method": noted("The order follows from the seed and NumPy's PCG64.", "numpy"),
}
EXPERIENCES = keys(
    STORED,
    {
        "data_selector": noted(
            "Given rows are gone through in a new order each epoch.", {}, {"selector_type": "shuffle"}
        ),
        "task_selector": noted(
            "Given rows are gone through in a new order each epoch.", {}, {"selector_type": "shuffle"}
        ),
        "replay_buffer_kwargs": Below(
            {"priority_fn": moved("../replay_buffer.priority_fn", yields=True)},
            Moved(("../replay_buffer.priority_fn_args.*",), yields=True),
        ),
        **same(
            UNUSED,
            "default_workflow_type default_eval_workflow_type default_reward_fn_type rollout_args "
            "workflow_args reward_fn_args repeat_times",
        ),
    },
)
EXPLORER_INPUT: Keys = {
    "default_workflow_type": WORKFLOW,
    "default_reward_fn_type": REWARD,
    "default_eval_workflow_type": moved("eval_tasksets[].default_workflow_type", unset=("",), yields=True),
    "system_prompt": moved(
        "taskset.format.system_prompt",
        "tasksets[].format.system_prompt",
        "eval_tasksets[].format.system_prompt",
        unset=("",),
        yields=True,
    ),
    "reply_prefix": PREFIX,
}
TRAINER_INPUT: Keys = {
    "sft_warmup_dataset": moved("auxiliary_buffers.sft_warmup_dataset"),
    "sft_warmup_steps": WARMUP,
    "read_experience_strategy": noted("See algorithm.sample_strategy."),
}
BUFFER: Keys = {
    "train_batch_size": unset(0),
    "default_workflow_type": WORKFLOW,
    "default_reward_fn_type": REWARD,
    "max_retry_times": LOCAL,
    "max_retry_interval": LOCAL,
    "explorer_output": noted("Explorer and trainer share buffer.trainer_input.experience_buffer."),
    **same(FOLLOWS, "tokenizer_path pad_token_id cache_dir read_batch_size"),
    "sft_batch_size": noted("Of a stage with sft it is buffer.train_batch_size."),
    "explore_batch_size": refused("batch_size counts the tasks of an explore step, train_batch_size a step's rows."),
    "expert_data_ratio": moved("/algorithm.sample_strategy_args.expert_data_ratio"),
    "train_dataset": moved("trainer_input.experience_buffer"),
    "sft_warmup_dataset": moved("trainer_input.auxiliary_buffers.sft_warmup_dataset"),
    "db_url": moved("trainer_input.experience_buffer.path", unset=("",)),
}

ONE_GPU_GROUP = refused("an engine's GPUs share its tensors: use tensor_parallel_size, and engine_num for more.", 1)
AT_ONCE = noted("The rollouts of a task run at once, each by its own runner.", None, "asynchronous")
ADAPTERS = noted("Engines hold the adapter of model.lora_configs.", False, True, {}, [])
STATED = noted("A server starts with the run and ends with it.")


def _per_engine(runners: Any, explorer: Mapping[str, Any]) -> Any:
    """Return the runners per engine, given the total number."""
    inner = explorer.get("rollout_model")
    engines = (inner.get("engine_num") if isinstance(inner, Mapping) else None) or explorer.get("engine_num") or 1
    return max(-(-runners // engines), 1) if isinstance(runners, int) and isinstance(engines, int) else runners


EXPLORER: Keys = {
    "mode": FOLLOWS,
    "runner_num": moved("runner_per_model", convert=_per_engine, yields=True),
    "max_repeat_times_per_runner": AT_ONCE,
    "concurrent_mode": AT_ONCE,
    "runner_prepare_concurrency": noted("Runners share one process, which prepares one workflow after another."),
    "runner_prepare_max_retries": noted("See max_retry_times."),
    "runner_state_report_interval": noted("trinity log shows what runners do.", 0),
    "collect_experiences": FOLLOWS,
    "max_pending_requests": noted("See runner_per_model and rollout_model.max_num_seqs."),
    "max_waiting_steps": noted("See synchronizer.max_staleness."),
    "max_inflight_batches": noted("See synchronizer.sync_offset and max_staleness.", 1),
    "use_ray": noted("Engines are always Ray's."),
    "backend": noted("See synchronizer.sync_method."),
    "eval_on_latest_checkpoint": moved("bench_on_latest_checkpoint"),
    "proxy_port": moved("api_port"),
    "service_status_check_interval": STATED,
    "min_running_model_num": STATED,
    "db_url": noted("What users ask is kept in the run's experience store."),
    "over_rollout": Below(
        {
            "ratio": noted(
                "A step waits for all its tasks; max_timeout bounds how long, and synchronizer.sync_style "
                "explorer_driven lets the trainer continue meanwhile.",
                0.0,
                0,
            )
        },
        SILENT,
    ),
    "dynamic_timeout": Below(
        {"enable": noted("A workflow may take max_timeout, which does not change.", False)}, SILENT
    ),
    "repeat_times": moved("/algorithm.repeat_times"),
    "temperature": moved("/model.temperature"),
    "top_p": moved("/model.top_p"),
    "top_k": moved("/model.top_k"),
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
    **same(
        moved("rollout_model.*"),
        "engine_type engine_num tensor_parallel_size enable_prefix_caching enforce_eager dtype seed "
        "gpu_memory_utilization enable_chunked_prefill use_v1 enable_thinking chat_template",
    ),
}
ENGINE: Keys = {
    "use_v1": noted("vLLM's first engine no longer exists.", True),
    "enable_chunked_prefill": noted("vLLM prefills in chunks on a GPU, and never on the CPU."),
    "data_parallel_size": ONE_GPU_GROUP,
    "pipeline_parallel_size": ONE_GPU_GROUP,
    "enable_expert_parallel": refused("give it in extra_engine_args.", False),
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
    "repetition_penalty": refused("rollouts are sampled without one, as the trainer's log-probs are.", 1.0, 1),
    "ignore_eos": refused("an answer ends where the model ends it.", False),
    "enable_multimodal": refused("models see text alone; there are no images or videos.", False),
    "base_port": noted("See explorer.api_port."),
    "api_key": noted("The API listens on explorer.listen_address; it asks for no key.", "EMPTY"),
    "external_model_config": noted("See explorer.external_model."),
    "enable_return_routed_experts": refused("the experts' choice is not replayed in training.", False),
    "weight_sync_buffer_size": noted("Weights are sent tensor by tensor."),
    **same(
        ADAPTERS,
        "enable_lora enable_runtime_lora_updating lora_modules lora_kwargs",
    ),
    **same(
        FOLLOWS,
        "gpu_per_engine nnodes node_rank bundle_indices engine_id ray_namespace ray_actor_name "
        "sync_method checkpoint_job_dir cuda_visible_devices rope_scaling rope_theta",
    ),
}
POLICY = keys(
    ENGINE,
    {
        "model_path": moved("/model.model_path", unset=("",), yields=True),
        "name": noted("Workflows know the policy without a name."),
        "chat_template": moved("/model.custom_chat_template", unset=("",)),
        **same(
            moved("/model.*"),
            "max_model_len max_prompt_tokens max_response_tokens min_response_tokens temperature "
            "top_p top_k enable_prompt_truncation enable_thinking trust_remote_code",
        ),
    },
)
CALLED = noted("A workflow that calls the model gives it.")
AUXILIARY = keys(
    ENGINE,
    {
        "chat_template": refused("an auxiliary model has the chat template of its folder; put it there."),
        **same(
            CALLED,
            "temperature top_p top_k min_response_tokens enable_prompt_truncation",
        ),
    },
)


KEYS: Mapping[type[Any], Keys] = {
    schema.BufferConfig: BUFFER,
    schema.ExplorerInputConfig: EXPLORER_INPUT,
    schema.TrainerInputConfig: TRAINER_INPUT,
    schema.TasksetConfig: TASKSET,
    schema.ExperienceBufferConfig: EXPERIENCES,
    schema.FormatConfig: FORMAT,
    schema.RolloutArgs: ROLLOUT_ARGS,
    schema.TaskSelectorConfig: SELECTOR,
    schema.ExplorerConfig: EXPLORER,
    schema.RolloutModelConfig: POLICY,
    schema.AuxiliaryModelConfig: AUXILIARY,
}
