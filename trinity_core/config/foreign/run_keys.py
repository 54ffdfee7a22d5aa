"""Trinity-RFT's keys of the run, the algorithm and the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trinity_core.config import schema
from trinity_core.config.algorithm_types import ALGORITHMS, M2PO
from trinity_core.config.foreign.key_action import (
    SILENT,
    Below,
    Cases,
    Keys,
    Moved,
    Noted,
    Refused,
    Rewritten,
    Spelled,
    follows,
    moved,
    noted,
    refused,
    silent,
    unset,
)
from trinity_core.config.schema.monitor import TaskOutputConfig

OPTIMIZER_NAMES = ("adam", "adamw", "AdamW")
SCHEDULE = (0.0, 0, "constant")
"""Values of the further keys of a learning rate's course that request nothing."""
STRATEGY = Cases({"megatron": Refused()}, Noted())


def _juicer(path: Any, _: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "data_juicer", "args": {"config_path": path}}]


def _path(buffer: Any, _: Mapping[str, Any]) -> Any:
    return buffer.get("path") if isinstance(buffer, Mapping) else buffer


def _paths(buffers: Any, _: Mapping[str, Any]) -> Any:
    return [_path(buffer, _) for buffer in buffers] if isinstance(buffers, list) else buffers


EXTERNAL_KEYS = ("enable", "base_url_env", "api_key_env", "model_name")


def _external_model(written: Any, top: Mapping[str, Any]) -> Mapping[str, Any] | Refused:
    """Translate an endpoint for mode bench; its address is in an environment variable."""
    if not isinstance(written, Mapping):
        return Refused(why="must be a section with keys.")
    if unknown := [str(key) for key in written if key not in EXTERNAL_KEYS]:
        return Refused(why=f"has no key {', '.join(unknown)}; it takes {', '.join(EXTERNAL_KEYS)}.")
    model, explorer, stages = top["model"]["external_model"], top.get("explorer"), top.get("stages")
    if not model.get("enable"):
        return {"/explorer.external_model": None}
    modes = (
        [stage.get("mode") for stage in stages or () if isinstance(stage, Mapping)] if isinstance(stages, list) else []
    )
    if "bench" not in [str(mode or top.get("mode")).lower() for mode in modes or [None]]:
        return Refused(
            why="an endpoint is scored, and neither trained nor sampled from: set mode: bench, or leave it out."
        )
    variable = str(model.get("base_url_env") or "OPENAI_BASE_URL")
    own = explorer.get("env_vars") if isinstance(explorer, Mapping) else None
    address = (isinstance(own, Mapping) and own.get(variable)) or os.environ.get(variable)
    if not address:
        return Refused(
            why=f"the variable {variable} is not set; set it, or explorer.env_vars.{variable}, to the API's address."
        )
    named = {"model_name": model.get("model_name"), "api_key_env": model.get("api_key_env") or "OPENAI_API_KEY"}
    return {"/explorer.external_model": {"base_url": address, **named}}


_BYPASS = {"/algorithm.rollout_correction": "bypass"}


def m2po(_: Any, algorithm: Mapping[str, Any]) -> Mapping[str, Any] | Refused:
    """Translate M2PO: elsewhere a loss, here GRPO's advantage with M2PO's masking and an unclipped loss against the
    sampling policy."""
    name = algorithm.get("algorithm_type") or "ppo"
    kind = ALGORITHMS.get("grpo" if name == "grpo_verl" else str(name), ALGORITHMS["ppo"])
    advantages = [(known.advantage_fn, known.advantage_fn_args) for known in (kind, ALGORITHMS["grpo"], M2PO)]
    corrected, loss_args = algorithm.get("rollout_correction"), algorithm.get("policy_loss_fn_args")
    mean = algorithm.get("loss_agg_mode") or (isinstance(loss_args, Mapping) and loss_args.get("loss_agg_mode"))
    fits = (
        not (algorithm.get("advantage_fn") or algorithm.get("add_strategy"))
        and advantages[0] in advantages[1:]
        and (corrected in (None, {}, "bypass") or correction(corrected, {}) == _BYPASS)
        and mean in (None, False, "", M2PO.loss_agg_mode)
    )
    if not fits:
        return Refused(
            why="m2po has GRPO's advantage, a ratio to the policy that sampled and a mean over tokens: write "
            "algorithm_type: m2po, without advantage_fn, rollout_correction and loss_agg_mode."
        )
    parts = {"advantage_fn": "m2po", "policy_loss_fn": "importance_sampling", "rollout_correction": "bypass"}
    return {f"/algorithm.{part}": name for part, name in parts.items()}


CORRECTIONS = {"none": "none", "token": "tis_token", "sequence": "tis_sequence"}


BYPASSES = ("bypass_mode", "bypass_old_logprob_for_rollout")
CORRECTED_BY = (
    *BYPASSES,
    "rollout_is",
    "rollout_is_threshold",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "loss_type",
    "use_policy_gradient",
)
"""Keys in veRL's section `rollout_correction` that are used, or have no effect on their own."""
NOT_CORRECTED = (
    "rollout_rs",
    "rollout_is_threshold_lower",
    "rollout_token_veto_threshold",
    "rollout_is_batch_normalize",
)
"""Keys of that section that change the loss and have no counterpart."""


def correction(written: Any, _: Mapping[str, Any]) -> Mapping[str, Any] | Refused | None:
    """Translate a section about rollout correction to the name and arguments of one correction.

    In veRL's bypass mode the clipped ratio is to the sampling policy, and `rollout_is` has no effect.
    """
    if not isinstance(written, Mapping):
        return None
    for key, value in written.items():
        if value not in (None, False) and key not in CORRECTED_BY:
            return Refused(why=f"{key}: there is no such correction here (docs/algorithms.md).")
    if any(written.get(key) is True for key in BYPASSES):
        if written.get("loss_type", "ppo_clip") != "ppo_clip" or written.get("use_policy_gradient"):
            return Refused(why="loss_type: a loss without a clip is a policy_loss_fn of its own (docs/algorithms.md).")
        return _BYPASS
    if "rollout_is" not in written:
        return {}
    asked = "none" if written["rollout_is"] is None else written["rollout_is"]
    name = CORRECTIONS.get(asked, asked) if isinstance(asked, str) else asked
    cap = None if name == "none" else written.get("rollout_is_threshold")
    bounds = str(cap).split("_")
    if len(bounds) == 1 or not isinstance(cap, str):
        capped = {} if cap is None else {"/algorithm.rollout_correction_args.cap": cap}
        return {"/algorithm.rollout_correction": name, **capped}
    if name != "tis_token" or len(bounds) != 2:
        return Refused(why=f"rollout_is_threshold: two bounds, {cap}, are those of single tokens (rollout_is: token).")
    low, high = bounds
    args = "/algorithm.rollout_correction_args"
    return {"/algorithm.rollout_correction": "icepop", f"{args}.low": bound(low), f"{args}.high": bound(high)}


def bound(text: str) -> float | str:
    """Convert a text to a number, or return it unchanged for the schema to refuse."""
    try:
        return float(text)
    except ValueError:
        return text


def betas(_: Any, optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join beta1 and beta2; a missing one is inherited from the stage."""
    above = optimizer.get("betas")
    both = above if isinstance(above, list | tuple) and len(above) == 2 else (0.9, 0.999)
    return {"betas": [optimizer.get(key, usual) for key, usual in zip(("beta1", "beta2"), both, strict=True)]}


BETAS: Keys = dict.fromkeys(("beta1", "beta2"), Rewritten(betas))
_FULLY_ASYNC = {"sync_style": "trainer_driven", "sync_in_flight": True}
"""The explorer never waits, and engines load each version in mid-generation."""
_AGENT = "format agent_model_name agent_model_config clean_strategy min_size_ratio min_priority_score data_dist"
_FSDP, _CRITIC_FSDP = "actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"
_REF_FSDP = "actor_rollout_ref.ref.fsdp_config"

_RUN: Keys = {
    **noted("group", ""),
    **noted("ignore_validator_suggestions"),
    **follows("checkpoint_job_dir"),
    **unset("checkpoint_root_dir", ""),
    "mode": Spelled({"colocate": "both"}),
    **moved("algorithm_type", "algorithm.algorithm_type"),
}
_MODEL: Keys = {
    **noted("logprobs", 0),
    **refused("repetition_penalty", 1.0, 1),
    **noted("fully_sharded_loras max_cpu_loras", False, 0, 1),
    **refused("rope_scaling rope_theta"),
    **moved("max_token_len", "max_model_len"),
    **moved("checkpoint_path", "/checkpoint_root_dir", unset=("",)),
    "tinker": Below(refused("enable", False), Noted()),
    "external_model": Rewritten(_external_model, from_top=True),
}
_LORA: Keys = {
    **moved("rank r", "lora_rank"),
    **moved("alpha", "lora_alpha"),
    **moved("dropout", "lora_dropout"),
    **noted("base_model_name"),
    **noted("lora_dtype dtype", "auto"),
    **silent("is_dummy"),
}
_CLUSTER = follows(
    "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num trainer_node_num "
    "trainer_gpu_num_per_node"
)
_SYNCHRONIZER: Keys = {
    "sync_style": Cases({"fully_async": Rewritten(lambda *_: _FULLY_ASYNC)}, SILENT),
    **moved("sync_iteration_interval explorer_sync_interval trainer_sync_interval", "sync_interval"),
    **noted("wait_for_checkpoint", False),
    **noted("group_name"),
    **follows("explorer_world_size ray_namespace"),
}
_MONITOR: Keys = {
    **follows("cache_dir cache_root_dir"),
    **moved("project name", "/*"),
    **noted("detailed_stats", False),
}
_DATA_PROCESSOR: Keys = {
    **noted(
        f"data_processor_url max_retry_times max_retry_interval source_data_path load_kwargs priority_weights {_AGENT}"
    ),
    **noted("data_workflow_url db_url", ""),
    **moved("dj_config_path", "task_pipeline.operators", convert=_juicer),
    **refused("dj_process_desc"),
}
_TASK_PIPELINE: Keys = {
    **noted("num_process", 1),
    **moved("config_path dj_config_path", "operators", convert=_juicer),
    **moved("input_buffers", "inputs", convert=_paths),
    **moved("output_buffer", "output.path", convert=_path),
    **refused("dj_process_desc"),
    **refused("dynamic", False),
    **refused("reward_shaping", []),
    **noted(_AGENT),
}
_OPTIMIZER: Keys = {
    **unset("lr_warmup_steps", -1),
    **unset("min_lr_ratio warmup_style"),
    **moved("lr_scheduler_type", "warmup_style"),
    **refused("optimizer_type", *OPTIMIZER_NAMES),
    **noted("clip_grad"),
    **noted("fused", False, True),
    **noted("lr_warmup_init lr_decay_steps lr_decay_style min_lr", *SCHEDULE),
    **BETAS,
}
_LOSS_ARGS: Keys = {
    **moved("loss_agg_mode", "../loss_agg_mode"),
    **moved("m2_threshold", "../advantage_fn_args.m2_threshold"),
    **noted("log_ratio_clip", 20.0, 20),
    **noted("sft_loss_agg_mode", "token-mean"),
    **noted("use_token_level_loss_in_sft", True),
    **noted(
        "use_dynamic_bsz ppo_mini_batch_size ppo_micro_batch_size_per_gpu ngpus_trainer repeat_times "
        "train_batch_size_expert train_batch_size_usual read_batch_size_expert read_batch_size_usual"
    ),
}
_GRPO_VERL = Moved(("algorithm_type",), convert=lambda *_: "grpo")
_ALGORITHM: Keys = {
    "algorithm_type": Cases({"cpt": Refused(), "grpo_verl": _GRPO_VERL}, SILENT),
    "advantage_fn": Cases({"clipv": Refused()}, SILENT),
    "policy_loss_fn": Cases({"m2po": Rewritten(m2po)}, SILENT),
    **moved("add_strategy", "advantage_fn"),
    **moved("add_strategy_args", "advantage_fn_args"),
    **moved("mu", "policy_loss_fn_args.mu"),
    **moved("gamma lam", "advantage_fn_args.*"),
    **refused("use_token_level_loss", True),
    **refused("enable_router_replay", False),
    "bypass_old_logprobs": Rewritten(lambda asked, _: {"rollout_correction": "bypass"} if asked is True else {}),
    "rollout_correction": Rewritten(correction),
    "sample_strategy": Spelled({"warmup": "default"}),
    "policy_loss_fn_args": Below(_LOSS_ARGS),
    "advantage_fn_args": Below(
        moved("omega", "step_weight") | moved("fnorm", "std_normalize", convert=lambda kind, _: kind == "std")
    ),
}
_TRAINER: Keys = {
    "trainer_strategy": STRATEGY,
    **noted("enable_preview use_remove_padding balance_batch", True),
    **unset("max_token_len_per_gpu"),
    **unset("max_checkpoints_to_keep", 0),
    **moved("ppo_max_token_len_per_gpu", "max_token_len_per_gpu"),
    **moved("actor_grad_clip", "grad_clip", yields=True),
    **moved("actor_clip_ratio", "/algorithm.policy_loss_fn_args.clip_range"),
    **moved("actor_entropy_coef", "/algorithm.entropy_loss_fn_args.entropy_coef"),
    **moved("actor_kl_loss_coef", "/algorithm.kl_loss_fn_args.kl_coef"),
    **moved("actor_use_kl_loss", "/algorithm.kl_loss_fn", unset=(True,), convert=lambda used, _: used or "none"),
    **noted("fix_actor_microbatch_loss_scale", False, True),
    **moved("critic_warmup", "trainer_config.trainer.critic_warmup"),
    **moved("param_offload", *(f"trainer_config.{part}.*" for part in (_FSDP, _REF_FSDP, _CRITIC_FSDP)), yields=True),
    **moved("optimizer_offload", *(f"trainer_config.{part}.*" for part in (_FSDP, _CRITIC_FSDP)), yields=True),
    **noted("grad_offload offload_policy", False),
    "megatron": Below({}, Noted(({},))),
    **moved("trust_remote_code", "/model.*", yields=True),
    **moved("algorithm_type", "/algorithm.*"),
    **moved("eval_interval", "/explorer.*"),
    **refused("sft_warmup_steps sft_warmup_iteration", 0),
    **noted("get_exp_strategy"),
}

KEYS: Mapping[type[Any], Keys] = {
    schema.Config: _RUN,
    schema.ModelConfig: _MODEL,
    schema.LoraConfig: _LORA,
    schema.ClusterConfig: _CLUSTER,
    schema.SynchronizerConfig: _SYNCHRONIZER,
    schema.MonitorConfig: _MONITOR,
    schema.DataJuicerConfig: unset("port", 0),
    schema.DataProcessorConfig: _DATA_PROCESSOR,
    schema.TaskPipelineConfig: _TASK_PIPELINE,
    schema.OperatorConfig: {"name": Cases({"human_preference_annotation_mapper": Refused()}, SILENT)},
    TaskOutputConfig: noted("name storage_type split subset_name format"),
    schema.ExperiencePipelineConfig: refused("output"),
    schema.LogConfig: follows("save_dir"),
    schema.AlgorithmConfig: _ALGORITHM,
    schema.OptimizerConfig: _OPTIMIZER,
    schema.TrainerConfig: _TRAINER,
}
