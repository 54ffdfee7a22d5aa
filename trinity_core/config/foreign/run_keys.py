"""Trinity-RFT's keys of the run, the algorithm and the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trinity_core.config import schema
from trinity_core.config.algorithm_types import M2PO
from trinity_core.config.findings import value_at
from trinity_core.config.foreign.actions import (
    Below,
    Keys,
    Moved,
    Refusal,
    Rewritten,
    moved,
    noted,
    refused,
    spelled,
    switched,
    unset,
)
from trinity_core.config.schema.monitor import TaskOutputConfig

Values = Mapping[str, Any]
OPTIMIZER_NAMES = ("adam", "adamw", "AdamW")
_BYPASS = {"/algorithm.rollout_correction": "bypass"}


def strategy(name: Any, *_: Any) -> Values | Refusal:
    """Refuse Megatron; other backends do what DeepSpeed does."""
    return Refusal() if name == "megatron" else {}


def _juicer(path: Any, _: Values) -> list[dict[str, Any]]:
    return [{"name": "data_juicer", "args": {"config_path": path}}]


def _path(buffer: Any, _: Values) -> Any:
    return buffer.get("path") if isinstance(buffer, Mapping) else buffer


def _paths(buffers: Any, _: Values) -> Any:
    return [_path(buffer, _) for buffer in buffers] if isinstance(buffers, list) else buffers


def _external_model(model: Any, _: Values, top: Values) -> Values | Refusal:
    """Translate an endpoint for mode bench; its address is in an environment variable."""
    if not isinstance(model, Mapping) or model.keys() - {"enable", "base_url_env", "api_key_env", "model_name"}:
        return Refusal("must be a section with enable, base_url_env, api_key_env and model_name, and no other keys.")
    if not model.get("enable"):
        return {"/explorer.external_model": None}
    listed = top.get("stages")
    stages = [stage for stage in listed if isinstance(stage, Mapping)] if isinstance(listed, list) else []
    if "bench" not in [str(stage.get("mode") or top.get("mode")).lower() for stage in stages or [{}]]:
        return Refusal("is for mode: bench; an endpoint is scored, and neither trained nor sampled from.")
    variable = str(model.get("base_url_env") or "OPENAI_BASE_URL")
    if not (address := value_at(top, ["explorer", "env_vars", variable]) or os.environ.get(variable)):
        return Refusal(f"needs the API's address in {variable} or explorer.env_vars.{variable}.")
    settings = {"model_name": model.get("model_name"), "api_key_env": model.get("api_key_env") or "OPENAI_API_KEY"}
    return {"/explorer.external_model": {"base_url": address, **settings}}


def m2po(loss: Any, algorithm: Values, _: Values) -> Values | Refusal | None:
    """Translate M2PO: elsewhere a loss, here GRPO's advantage with M2PO's masking and an unclipped loss against the
    sampling policy. Other advantages, corrections and means do not go with it."""
    if loss != "m2po":
        return None
    corrected, loss_args = algorithm.get("rollout_correction"), algorithm.get("policy_loss_fn_args")
    mean = algorithm.get("loss_agg_mode") or (isinstance(loss_args, Mapping) and loss_args.get("loss_agg_mode"))
    fits = (
        algorithm.get("algorithm_type") in ("grpo", "grpo_verl", "m2po")
        and not (algorithm.get("advantage_fn") or algorithm.get("add_strategy"))
        and (corrected in (None, {}, "bypass") or correction(corrected) == _BYPASS)
        and mean in (None, False, "", M2PO.loss_agg_mode)
    )
    if not fits:
        return Refusal("is algorithm_type: m2po here, without advantage_fn, rollout_correction and loss_agg_mode.")
    parts = {"advantage_fn": "m2po", "policy_loss_fn": "importance_sampling", "rollout_correction": "bypass"}
    return {f"/algorithm.{part}": part_name for part, part_name in parts.items()}


_CORRECTIONS = {"none": "none", "token": "tis_token", "sequence": "tis_sequence"}
_BYPASSES = ("bypass_mode", "bypass_old_logprob_for_rollout")
_CORRECTED_BY = (
    *_BYPASSES,
    "rollout_is",
    "rollout_is_threshold",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "loss_type",
    "use_policy_gradient",
)
"""Keys of veRL's section `rollout_correction` that are used, or have no effect on their own."""


def correction(section: Any, *_: Values) -> Values | Refusal | None:
    """Translate a section about rollout correction to the name and arguments of one correction.

    In veRL's bypass mode the clipped ratio is to the sampling policy, and `rollout_is` has no effect.
    """
    if not isinstance(section, Mapping):
        return None
    asked = {key: value for key, value in section.items() if value not in (None, False)}
    bypasses = any(asked.get(key) is True for key in _BYPASSES)
    has_other_loss = asked.get("loss_type", "ppo_clip") != "ppo_clip" or "use_policy_gradient" in asked
    level, cap = asked.get("rollout_is", "none"), asked.get("rollout_is_threshold")
    bounds: list[Any] = cap.split("_") if isinstance(cap, str) else [cap]
    if (absent := next((key for key in asked if key not in _CORRECTED_BY), "")) or (bypasses and has_other_loss):
        return Refusal(f"{absent or 'loss_type'}: there is no such correction here (docs/algorithms.md).")
    if bypasses:
        return _BYPASS
    if "rollout_is" not in section:
        return {}
    name = _CORRECTIONS.get(level, level) if isinstance(level, str) else level
    args = "/algorithm.rollout_correction_args"
    if len(bounds) == 1:
        capped = {} if cap is None or name == "none" else {f"{args}.cap": cap}
        return {"/algorithm.rollout_correction": name, **capped}
    if name != "tis_token" or len(bounds) != 2:
        return Refusal(f"rollout_is_threshold: two bounds, {cap}, are those of single tokens (rollout_is: token).")
    low, high = bounds
    return {"/algorithm.rollout_correction": "icepop", f"{args}.low": bound(low), f"{args}.high": bound(high)}


def bound(text: str) -> float | str:
    """Convert a text to a number, or return it unchanged for the schema to refuse."""
    try:
        return float(text)
    except ValueError:
        return text


def betas(_: Any, optimizer: Values, __: Values) -> Values:
    """Join beta1 and beta2; a missing one is inherited from the stage."""
    above = optimizer.get("betas")
    both = above if isinstance(above, list | tuple) and len(above) == 2 else (0.9, 0.999)
    return {"betas": [optimizer.get(key, usual) for key, usual in zip(("beta1", "beta2"), both, strict=True)]}


BETAS: Keys = dict.fromkeys(("beta1", "beta2"), Rewritten(betas))
OPTIMIZER: Keys = {
    **unset("lr_warmup_steps", -1),
    **unset("min_lr_ratio warmup_style"),
    **moved("lr_scheduler_type", "warmup_style"),
    **BETAS,
}
_STYLES: Mapping[str, Values] = {
    "dynamic_by_explorer": {"sync_style": "explorer_driven"},
    "dynamic_by_trainer": {"sync_style": "trainer_driven"},
    # The explorer never waits, and engines load each version in mid-generation.
    "fully_async": {"sync_style": "trainer_driven", "sync_in_flight": True},
}
_FSDP, _CRITIC_FSDP = "actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"
_REF_FSDP = "actor_rollout_ref.ref.fsdp_config"

_LOSS_ARGS: Keys = {
    **moved("loss_agg_mode", "../loss_agg_mode"),
    **moved("m2_threshold", "../advantage_fn_args.m2_threshold"),
    **noted("sft_loss_agg_mode use_token_level_loss_in_sft log_ratio_clip", "token-mean", True, 20.0, 20),
    **noted("use_dynamic_bsz ppo_mini_batch_size ppo_micro_batch_size_per_gpu ngpus_trainer repeat_times"),
    **noted("train_batch_size_expert train_batch_size_usual read_batch_size_expert read_batch_size_usual"),
}
_ASK = "has no counterpart here. Instead: the flow sft/human (docs/human.md)."
_ADVANTAGE_ARGS: Keys = {
    **moved("omega", "step_weight"),
    **moved("fnorm", "std_normalize", convert=lambda kind, _: kind == "std"),
}
ANYWHERE: Keys = {
    **noted(
        "logprobs max_cpu_loras total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num nnodes index "
        "trainer_gpu_num trainer_node_num trainer_gpu_num_per_node explorer_world_size num_process gpu_per_engine "
        "node_rank read_batch_size sft_batch_size max_repeat_times_per_runner max_inflight_batches",
        1,
    ),
    **noted("ignore_validator_suggestions wrap_in_ray is_eval collect_experiences fused", True, False),
    **noted("enable_lora enable_runtime_lora_updating fix_actor_microbatch_loss_scale", True, False),
    **noted("enable_preview use_remove_padding balance_batch", True),
    **noted("solution_key reward_key concurrent_mode", "solution", "reward", "asynchronous"),
    **noted("random_method api_key lora_dtype lr_decay_style", "numpy", "EMPTY", "auto", "constant"),
    **noted("group checkpoint_job_dir fully_sharded_loras base_model_name is_dummy wait_for_checkpoint group_name"),
    **noted("cache_dir cache_root_dir detailed_stats data_processor_url max_retry_interval source_data_path"),
    **noted("load_kwargs data_workflow_url agent_model_name agent_model_config clean_strategy min_size_ratio"),
    **noted("min_priority_score data_dist save_dir clip_grad lr_warmup_init lr_decay_steps min_lr grad_offload"),
    **noted("offload_policy megatron get_exp_strategy read_experience_strategy explorer_output tokenizer_path"),
    **noted("pad_token_id capacity schema_type enable_progress_bar raw task_type replay_buffer_kwargs label_key"),
    **noted("runner_prepare_concurrency runner_prepare_max_retries max_pending_requests max_waiting_steps use_ray"),
    **noted("backend service_status_check_interval min_running_model_num runner_state_report_interval lora_modules"),
    **noted("lora_kwargs base_port external_model_config weight_sync_buffer_size bundle_indices engine_id"),
    **noted("ray_actor_name cuda_visible_devices"),
    **refused("data_parallel_size pipeline_parallel_size", 1),
    **refused("use_token_level_loss", True),
    **refused("optimizer_type", *OPTIMIZER_NAMES),
    **refused("rope_scaling rope_theta reply_prefix image_key video_key teacher_hint_key mm_data_kwargs ignore_eos"),
    **refused("enable_expert_parallel enable_multimodal enable_return_routed_experts enable_router_replay"),
    **refused("dj_process_desc dynamic reward_shaping explore_batch_size sft_warmup_steps sft_warmup_iteration"),
}
"""Names that are no settings of any section here, and have no counterpart in whatever section they stand."""
KEYS: Mapping[type[Any], Keys] = {
    schema.Config: {
        **unset("checkpoint_root_dir", ""),
        "mode": spelled({"colocate": "both"}),
        **moved("algorithm_type", "algorithm.algorithm_type"),
    },
    schema.ModelConfig: {
        **moved("max_token_len", "max_model_len"),
        **moved("checkpoint_path", "/checkpoint_root_dir", unset=("",)),
        **switched("tinker"),
        "external_model": Rewritten(_external_model),
    },
    schema.LoraConfig: {
        **moved("rank r", "lora_rank"),
        **moved("alpha", "lora_alpha"),
        **moved("dropout", "lora_dropout"),
        **noted("dtype", "auto"),
    },
    schema.SynchronizerConfig: {
        "sync_style": Rewritten(lambda style, *_: _STYLES.get(str(style).lower())),
        **moved("sync_iteration_interval explorer_sync_interval trainer_sync_interval", "sync_interval"),
        **noted("ray_namespace"),
    },
    schema.MonitorConfig: moved("project name", "/*"),
    schema.DataJuicerConfig: unset("port", 0),
    schema.DataProcessorConfig: {
        **noted("max_retry_times priority_weights db_url format"),
        **moved("dj_config_path", "task_pipeline.operators", convert=_juicer),
    },
    schema.TaskPipelineConfig: {
        **noted("format"),
        **moved("config_path dj_config_path", "operators", convert=_juicer),
        **moved("input_buffers", "inputs", convert=_paths),
        **moved("output_buffer", "output.path", convert=_path),
    },
    schema.OperatorConfig: {"name": spelled({"human_preference_annotation_mapper": Refusal(_ASK)})},
    TaskOutputConfig: noted("name storage_type split subset_name format"),
    schema.ExperiencePipelineConfig: refused("output"),
    schema.AlgorithmConfig: {
        "algorithm_type": spelled({"grpo_verl": "grpo"}),
        "policy_loss_fn": Rewritten(m2po),
        **moved("add_strategy", "advantage_fn"),
        **moved("add_strategy_args", "advantage_fn_args"),
        **moved("mu", "policy_loss_fn_args.mu"),
        **moved("gamma lam", "advantage_fn_args.*"),
        "bypass_old_logprobs": Rewritten(lambda asked, *_: {"rollout_correction": "bypass"} if asked is True else {}),
        "rollout_correction": Rewritten(correction),
        "sample_strategy": spelled({"warmup": "default"}),
        "policy_loss_fn_args": Below(_LOSS_ARGS),
        "advantage_fn_args": Below(_ADVANTAGE_ARGS),
    },
    schema.OptimizerConfig: OPTIMIZER,
    schema.TrainerConfig: {
        "trainer_strategy": Rewritten(strategy),
        **refused("trainer_type", "verl", "deepspeed"),
        **unset("max_token_len_per_gpu"),
        **unset("max_checkpoints_to_keep", 0),
        **moved("total_steps", "/buffer.*"),
        **moved("ppo_max_token_len_per_gpu", "max_token_len_per_gpu"),
        **moved("actor_grad_clip", "grad_clip", yields=True),
        **moved("actor_clip_ratio", "/algorithm.policy_loss_fn_args.clip_range"),
        **moved("actor_entropy_coef", "/algorithm.entropy_loss_fn_args.entropy_coef"),
        **moved("actor_kl_loss_coef", "/algorithm.kl_loss_fn_args.kl_coef"),
        **moved("actor_use_kl_loss", "/algorithm.kl_loss_fn", unset=(True,), convert=lambda used, _: used or "none"),
        **moved("critic_warmup", "trainer_config.trainer.critic_warmup"),
        "param_offload": Moved(
            tuple(f"trainer_config.{part}.param_offload" for part in (_FSDP, _REF_FSDP, _CRITIC_FSDP)), yields=True
        ),
        "optimizer_offload": Moved(
            tuple(f"trainer_config.{part}.optimizer_offload" for part in (_FSDP, _CRITIC_FSDP)), yields=True
        ),
        **moved("trust_remote_code", "/model.*", yields=True),
        **moved("algorithm_type", "/algorithm.*"),
        **moved("eval_interval", "/explorer.*"),
    },
}
