"""The explorer: workflow runners and engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.dialects.verdict import FOLLOWS, Below, Keys, moved, noted, refused
from trinity_core.config.schema import AuxiliaryModelConfig, ExplorerConfig, ExternalModelConfig, RolloutModelConfig

ONE_GPU_GROUP = refused("an engine's GPUs share its tensors: use tensor_parallel_size, and engine_num for more.", 1)
AT_ONCE = noted("The rollouts of a task run at once, each by a runner of its own.", None, "asynchronous")
NO_LORA = noted("Engines load whole weights.", False, {}, [])
STATED = noted("A server starts with the run and ends with it.")


def _per_engine(runners: Any, explorer: Mapping[str, Any]) -> Any:
    """The runners of each engine, given their number in all."""
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
    "max_inflight_batches": noted("See synchronizer.sync_offset and max_staleness."),
    "use_ray": noted("Engines are always Ray's."),
    "backend": noted("See synchronizer.sync_method."),
    "eval_on_latest_checkpoint": moved("bench_on_latest_checkpoint"),
    "proxy_port": moved("api_port"),
    "service_status_check_interval": STATED,
    "min_running_model_num": STATED,
    "db_url": noted("What users ask is kept in the run's experience store."),
    "over_rollout": Below(
        {
            "ratio": refused(
                "a step waits for all its tasks; max_timeout bounds how long, and synchronizer.sync_style "
                "explorer_driven lets the trainer go on meanwhile.",
                0.0,
                0,
            )
        },
        noted("It is not enabled."),
    ),
    "dynamic_timeout": Below(
        {"enable": refused("a workflow may take max_timeout; there is no limit that changes.", False)},
        noted("It is not enabled."),
    ),
    "repeat_times": moved("/algorithm.repeat_times"),
    "temperature": moved("/model.temperature"),
    "top_p": moved("/model.top_p"),
    "top_k": moved("/model.top_k"),
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
    **{
        name: moved(f"rollout_model.{name}")
        for name in (
            "engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "dtype",
            "seed", "gpu_memory_utilization", "enable_chunked_prefill", "use_v1", "enable_thinking", "chat_template",
        )
    },
}  # fmt: skip
ENGINE: Keys = {
    "use_v1": noted("vLLM has one engine, its first version is gone.", True),
    "enable_chunked_prefill": noted("vLLM prefills in chunks on a GPU, and never on the CPU."),
    "data_parallel_size": ONE_GPU_GROUP,
    "pipeline_parallel_size": ONE_GPU_GROUP,
    "enable_expert_parallel": refused("experts are not spread over GPUs; use tensor_parallel_size.", False),
    "extra_engine_args": refused("vLLM takes the keys of this section alone.", {}),
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
    "repetition_penalty": refused("rollouts are sampled without one, as the trainer's log-probs are.", 1.0, 1),
    "ignore_eos": refused("an answer ends where the model ends it.", False),
    "enable_multimodal": refused("models see text alone; there are no images or videos.", False),
    "base_port": noted("See explorer.api_port."),
    "api_key": noted("The API listens on explorer.listen_address; it asks for no key.", "EMPTY"),
    "external_model_config": noted("See explorer.external_model."),
    "enable_return_routed_experts": refused("the experts' choice is not replayed in training.", False),
    "weight_sync_buffer_size": noted("Weights are sent tensor by tensor."),
    **dict.fromkeys(("enable_lora", "enable_runtime_lora_updating", "lora_modules", "lora_kwargs"), NO_LORA),
    **dict.fromkeys(
        (
            "gpu_per_engine", "nnodes", "node_rank", "bundle_indices", "engine_id", "ray_namespace", "ray_actor_name",
            "sync_method", "checkpoint_job_dir", "cuda_visible_devices", "rope_scaling", "rope_theta",
        ),
        FOLLOWS,
    ),
}  # fmt: skip
POLICY: Keys = ENGINE | {
    "model_path": moved("/model.model_path", unset=("",), yields=True),
    "name": noted("Workflows know the policy without a name."),
    "chat_template": moved("/model.custom_chat_template", unset=("",)),
    **{
        name: moved(f"/model.{name}")
        for name in (
            "max_model_len", "max_prompt_tokens", "max_response_tokens", "min_response_tokens", "temperature", "top_p",
            "top_k", "enable_prompt_truncation", "enable_thinking", "trust_remote_code",
        )
    },
}  # fmt: skip
CALLED = noted("A workflow that calls the model gives it.")
AUXILIARY: Keys = ENGINE | {
    "chat_template": refused("an auxiliary model has the chat template of its folder; put it there."),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_response_tokens", "enable_prompt_truncation"), CALLED),
}

KEYS: Mapping[type[Any], Keys] = {
    ExplorerConfig: EXPLORER,
    RolloutModelConfig: POLICY,
    AuxiliaryModelConfig: AUXILIARY,
    ExternalModelConfig: {},
}
