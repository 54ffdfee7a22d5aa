"""Trinity-RFT's keys of data and rollouts: the buffer and the explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config import schema
from trinity_core.config.engine_args import SAFE
from trinity_core.config.foreign.actions import (
    Below,
    Keys,
    Moved,
    moved,
    noted,
    refused,
    spelled,
    unset,
)

_WORKFLOW = spelled({
    "": None,
    "async_simple_workflow": "simple_workflow",
    "async_math_boxed_workflow": "math_boxed_workflow",
    "async_math_rm_workflow": "math_rm_workflow",
    "async_math_ruler_workflow": "math_ruler_workflow",
    "tool_call_workflow": "toolcall_workflow",
})  # fmt: skip
"""Trinity-RFT's further names for the same workflow; here all workflows are asynchronous."""
_REWARD = spelled({"": None, "math_boxed_reward_naive_dapo": "math_dapo_reward"})
"""The latter is scored by math-verify here, where Trinity-RFT compares normalised texts."""
_CHOSEN: Keys = {"default_workflow_type": _WORKFLOW, "default_reward_fn_type": _REWARD}


def _per_engine(runners: Any, explorer: Mapping[str, Any]) -> Any:
    """Return the runners per engine, given the total number."""
    inner = explorer.get("rollout_model")
    engines = (inner.get("engine_num") if isinstance(inner, Mapping) else None) or explorer.get("engine_num") or 1
    return max(-(-runners // engines), 1) if isinstance(runners, int) and isinstance(engines, int) else runners


_DATA: Keys = {
    **noted("max_retry_times algorithm_type total_epochs total_steps ray_namespace batch_size", 1),
    **noted("default_eval_workflow_type"),
    **moved("subset", "subset_name"),
}
_ENGINE: Keys = {
    **refused("engine_type", "vllm", "vllm_async"),
    **noted("use_v1", True),
    **noted("ray_namespace sync_method"),
    **moved(" ".join(SAFE), "extra_engine_args.*"),
}
KEYS: Mapping[type[Any], Keys] = {
    schema.BufferConfig: {
        **moved("default_workflow_type default_reward_fn_type", "explorer_input.*", yields=True),
        **unset("train_batch_size", 0),
        **noted("max_retry_times"),
        **moved("expert_data_ratio", "/algorithm.sample_strategy_args.expert_data_ratio"),
        **moved("train_dataset", "trainer_input.experience_buffer"),
        **moved("sft_warmup_dataset", "trainer_input.auxiliary_buffers.sft_warmup_dataset"),
        **moved("db_url", "trainer_input.experience_buffer.path", unset=("",)),
    },
    schema.ExplorerInputConfig: {
        **_CHOSEN,
        **moved("default_eval_workflow_type", "eval_tasksets[].default_workflow_type", unset=("",), yields=True),
        "system_prompt": Moved(
            tuple(f"{tasks}.format.system_prompt" for tasks in ("taskset", "tasksets[]", "eval_tasksets[]")),
            unset=("",),
            yields=True,
        ),
    },
    schema.TrainerInputConfig: moved("sft_warmup_dataset", "auxiliary_buffers.sft_warmup_dataset"),
    schema.TasksetConfig: {
        **_DATA,
        **_CHOSEN,
        **moved("data_selector", "task_selector"),
        **unset("subset_name", ""),
        **unset("path"),
        **noted("max_read_timeout use_priority_queue reuse_cooldown_time replay_buffer"),
    },
    schema.ExperienceBufferConfig: {
        **_DATA,
        **moved("use_priority_queue", "replay_buffer.enable", unset=(False,)),
        **moved("reuse_cooldown_time", "replay_buffer.*"),
        **noted("data_selector task_selector", {"selector_type": "shuffle"}),
        **noted("default_workflow_type default_reward_fn_type rollout_args workflow_args reward_fn_args repeat_times"),
        "replay_buffer_kwargs": Below(
            moved("priority_fn", "../replay_buffer.priority_fn", yields=True),
            Moved(("../replay_buffer.priority_fn_args.*",), yields=True),
        ),
    },
    schema.FormatConfig: {
        **unset("workflow_key reward_fn_key chat_template", ""),
        **moved("enable_thinking", "/model.enable_thinking"),
    },
    schema.RolloutArgs: moved("n", "../repeat_times", yields=True),
    schema.ExplorerConfig: {
        **noted("mode db_url"),
        **moved("runner_num", "runner_per_model", convert=_per_engine, yields=True),
        **moved("eval_on_latest_checkpoint", "bench_on_latest_checkpoint"),
        **moved("proxy_port", "api_port"),
        **moved("repeat_times", "/algorithm.repeat_times"),
        **moved("temperature top_p top_k", "/model.*"),
        **moved(
            "engine_type engine_num tensor_parallel_size enable_prefix_caching enforce_eager dtype seed "
            "gpu_memory_utilization enable_chunked_prefill use_v1 enable_thinking chat_template",
            "rollout_model.*",
        ),
    },
    schema.OverRolloutConfig: refused("return_partial_tasks"),
    schema.RolloutModelConfig: {
        **_ENGINE,
        **noted("name"),
        **moved("model_path", "/model.model_path", unset=("",), yields=True),
        **moved("chat_template", "/model.custom_chat_template", unset=("",)),
        **moved(
            "max_model_len max_prompt_tokens max_response_tokens min_response_tokens temperature top_p top_k "
            "repetition_penalty enable_prompt_truncation enable_thinking trust_remote_code",
            "/model.*",
        ),
    },
    schema.AuxiliaryModelConfig: {
        **_ENGINE,
        **refused("chat_template"),
        **noted("temperature top_p top_k repetition_penalty min_response_tokens enable_prompt_truncation"),
    },
}
