"""Trinity-RFT's keys of the run, the algorithm and the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trinity_core.config import schema
from trinity_core.config.algorithm_types import ALGORITHMS, M2PO
from trinity_core.config.foreign.key_action import (
    FOLLOWS,
    SILENT,
    Below,
    Cases,
    Keys,
    Refused,
    Rewritten,
    Spelled,
    moved,
    noted,
    refused,
    same,
    unset,
)
from trinity_core.config.foreign.rollout_keys import WARMUP
from trinity_core.config.schema.monitor import TaskOutputConfig

TASKSET = "/buffer.explorer_input.taskset"
AGENT = refused(
    "no model chooses the operators; list them under data_processor.task_pipeline.operators (data_juicer is one)."
)
AGENTS = noted("No model chooses the operators.")
ENGINES_ADAPTER = noted("Each engine holds one adapter.", False, 0, 1)
ROPE = refused("change it in the model folder's config.json, which the engines and the trainer both read.")


def _juicer(path: Any, _: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "data_juicer", "args": {"config_path": path}}]


def _path(buffer: Any, _: Mapping[str, Any]) -> Any:
    return buffer.get("path") if isinstance(buffer, Mapping) else buffer


def _paths(buffers: Any, _: Mapping[str, Any]) -> Any:
    return [_path(buffer, _) for buffer in buffers] if isinstance(buffers, list) else buffers


RUN: Keys = {
    "group": noted(
        "A run's folder is checkpoint_root_dir/project/name: where two groups have a run of one name, write "
        "the group into the name.",
        "",
    ),
    "checkpoint_job_dir": FOLLOWS,
    "checkpoint_root_dir": unset(""),
    "ignore_validator_suggestions": noted("What does not fit is an error, and no setting is changed."),
    "mode": Spelled({"colocate": "both"}),
    "algorithm_type": moved("algorithm.algorithm_type"),
}


EXTERNAL_KEYS = ("enable", "base_url_env", "api_key_env", "model_name")


def _external_model(written: Any, top: Mapping[str, Any]) -> Mapping[str, Any] | Refused:
    """Translate an endpoint for mode bench; its address is in an environment variable."""
    if not isinstance(written, Mapping):
        return Refused("must be a section with keys.")
    if unknown := [str(key) for key in written if key not in EXTERNAL_KEYS]:
        return Refused(f"has no key {', '.join(unknown)}; it takes {', '.join(EXTERNAL_KEYS)}.")
    model, explorer, stages = top["model"]["external_model"], top.get("explorer"), top.get("stages")
    if not model.get("enable"):
        return {"/explorer.external_model": None}
    modes = (
        [stage.get("mode") for stage in stages or () if isinstance(stage, Mapping)] if isinstance(stages, list) else []
    )
    if "bench" not in [str(mode or top.get("mode")).lower() for mode in modes or [None]]:
        return Refused("an endpoint is scored, and neither trained nor sampled from: set mode: bench, or leave it out.")
    variable = str(model.get("base_url_env") or "OPENAI_BASE_URL")
    own = explorer.get("env_vars") if isinstance(explorer, Mapping) else None
    address = (isinstance(own, Mapping) and own.get(variable)) or os.environ.get(variable)
    if not address:
        return Refused(
            f"the variable {variable} is not set; set it, or explorer.env_vars.{variable}, to the API's address."
        )
    named = {"model_name": model.get("model_name"), "api_key_env": model.get("api_key_env") or "OPENAI_API_KEY"}
    return {"/explorer.external_model": {"base_url": address, **named}}


MODEL: Keys = {
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
    "repetition_penalty": refused("rollouts are sampled without one, as the trainer's log-probs are.", 1.0, 1),
    **same(ENGINES_ADAPTER, "fully_sharded_loras max_cpu_loras"),
    "rope_scaling": ROPE,
    "rope_theta": ROPE,
    "max_token_len": moved("max_model_len"),
    "checkpoint_path": moved("/checkpoint_root_dir", unset=("",)),
    "tinker": Below(
        {"enable": refused("training is done by the run itself, not by Tinker; leave model.tinker out.", False)},
        noted("Tinker is not used."),
    ),
    "external_model": Rewritten(_external_model, from_top=True),
}
CLUSTER: Keys = same(
    FOLLOWS,
    "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num "
    "trainer_node_num trainer_gpu_num_per_node",
)
FULLY_ASYNC = {"sync_style": "trainer_driven", "sync_in_flight": True}
"""The explorer never waits, and engines load each version in mid-generation."""
SYNCHRONIZER: Keys = {
    "sync_style": Cases({"fully_async": Rewritten(lambda *_: FULLY_ASYNC)}, SILENT),
    "sync_iteration_interval": moved("sync_interval"),
    "wait_for_checkpoint": noted("Each side always waits for the version that it needs, up to sync_timeout.", False),
    "explorer_sync_interval": moved("sync_interval"),
    "trainer_sync_interval": moved("sync_interval"),
    "group_name": noted("The group of GPUs is the run's own."),
    "explorer_world_size": FOLLOWS,
    "ray_namespace": FOLLOWS,
}
MONITOR: Keys = {
    "cache_dir": FOLLOWS,
    "cache_root_dir": FOLLOWS,
    "project": moved("/project"),
    "name": moved("/name"),
    "detailed_stats": noted("Scores are always given with their spread.", False),
}
DATA_PROCESSOR: Keys = {
    "data_processor_url": noted("See service.data_juicer."),
    "data_workflow_url": noted("See service.data_juicer.", ""),
    "db_url": noted("Tasks are read from their files.", ""),
    "max_retry_times": noted("Tasks are read from their files."),
    "max_retry_interval": noted("Tasks are read from their files."),
    "dj_config_path": moved("task_pipeline.operators", convert=_juicer),
    "dj_process_desc": AGENT,
    **same(
        AGENTS,
        "source_data_path format load_kwargs agent_model_name agent_model_config clean_strategy "
        "min_size_ratio min_priority_score priority_weights data_dist",
    ),
}
TASK_PIPELINE: Keys = {
    "num_process": noted("Rows pass through one process, in order.", 1),
    "config_path": moved("operators", convert=_juicer),
    "dj_config_path": moved("operators", convert=_juicer),
    "input_buffers": moved("inputs", convert=_paths),
    "output_buffer": moved("output.path", convert=_path),
    "dj_process_desc": AGENT,
    "dynamic": refused("it runs once, before the run; leave this out.", False),
    "reward_shaping": refused("list a reward_shaping_mapper under data_processor.experience_pipeline.operators.", []),
    **same(
        AGENTS,
        "format agent_model_name agent_model_config clean_strategy min_size_ratio min_priority_score data_dist",
    ),
}
ANNOTATED = refused(
    "a person's verdicts are given on Prefect's page: the flow pauses and asks, and they become pairs for dpo "
    "(docs/human.md); leave this operator out."
)
OPERATOR: Keys = {"name": Cases({"human_preference_annotation_mapper": ANNOTATED}, SILENT)}
TASK_OUTPUT: Keys = same(
    noted("The output is a folder of Parquet, read by the task sets."), "name storage_type split subset_name format"
)
EXPERIENCE_PIPELINE: Keys = {
    "output": refused("what operators return goes to the experience buffer; leave this out."),
}

OFFLOAD = "trainer_config.actor_rollout_ref.actor.fsdp_config"
MEGATRON = refused("Megatron does not train here, DeepSpeed does: leave this out, and set trainer.zero_stage.")
STRATEGY = Cases({"megatron": MEGATRON}, noted("DeepSpeed shards the model; see trainer.zero_stage."))
NOT_MEGATRON = noted("There is no Megatron; DeepSpeed shards the model; see trainer.zero_stage.", {})
EXACT = noted("The loss does not depend on micro-batches.", False, True)
ADAMW = refused("AdamW is the only optimizer.", "adam", "adamw", "AdamW")
SCHEDULE = noted(
    "The learning rate has a warm-up, a course and an end: warmup_style, min_lr_ratio.", 0.0, 0, "constant"
)
FROM_BATCH = noted("It follows from the batch itself.")
CLIP_V = refused(
    "it needs a sum over the whole vocabulary at each token, which is not computed here; write clipb, which leaves out "
    "the tokens that would change the entropy most."
)
CPT = refused("texts without a prompt are not trained on here; write sft, with rows of a prompt and a response.")


GRPO_ADVANTAGE = (ALGORITHMS["grpo"].advantage_fn, ALGORITHMS["grpo"].advantage_fn_args)


def m2po(_: Any, algorithm: Mapping[str, Any]) -> Mapping[str, Any] | Refused:
    """Translate M2PO: elsewhere a loss, here GRPO's advantage with M2PO's masking and an unclipped loss against the
    sampling policy."""
    name = algorithm.get("algorithm_type") or "ppo"
    kind = ALGORITHMS.get("grpo" if name == "grpo_verl" else str(name), ALGORITHMS["ppo"])
    if algorithm.get("advantage_fn") or algorithm.get("add_strategy"):
        return Refused("m2po is an advantage here: leave advantage_fn out, or write algorithm_type: m2po.")
    if (kind.advantage_fn, kind.advantage_fn_args) not in (GRPO_ADVANTAGE, (M2PO.advantage_fn, M2PO.advantage_fn_args)):
        return Refused(f"m2po has GRPO's advantage here, algorithm_type {name} another: add algorithm_type: m2po.")
    corrected = algorithm.get("rollout_correction")
    if corrected not in (None, {}, "bypass") and correction(corrected, {}) != {
        "/algorithm.rollout_correction": "bypass"
    }:
        return Refused("m2po's ratio is to the policy that sampled: leave rollout_correction out.")
    loss_args = algorithm.get("policy_loss_fn_args")
    asked = algorithm.get("loss_agg_mode") or (isinstance(loss_args, Mapping) and loss_args.get("loss_agg_mode"))
    if asked and asked != M2PO.loss_agg_mode:
        return Refused("m2po's loss is a mean over tokens: write loss_agg_mode: token-mean.")
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
NOT_CORRECTED = {
    "rollout_rs": "rejection sampling is a separate correction here, not one of weights: leave it out, or write "
    "`rollout_correction: geometric`, `mis` or `icepop` in place of this section (docs/algorithms.md).",
    "rollout_is_threshold_lower": "weights have an upper bound: leave it out, or write `rollout_correction: icepop` in "
    "place of this section.",
    "rollout_token_veto_threshold": "a token vetoes no sequence here: leave it out, or write `rollout_correction: mis` "
    "in place of this section.",
    "rollout_is_batch_normalize": "weights are not normalised over a batch: leave it out.",
}
"""Keys of that section that change the loss and have no counterpart, with advice."""
NOT_CLIPPED = "a loss without a clip is one of its own here, such as `policy_loss_fn: reinforce` (docs/algorithms.md)."


def correction(written: Any, _: Mapping[str, Any]) -> Mapping[str, Any] | Refused | None:
    """Translate a section about rollout correction to the name and arguments of one correction.

    In veRL's bypass mode the clipped ratio is to the sampling policy, and `rollout_is` has no effect.
    """
    if not isinstance(written, Mapping):
        return None
    for key, value in written.items():
        if value not in (None, False) and key not in CORRECTED_BY:
            return Refused(f"{key}: {NOT_CORRECTED.get(key, 'there is no such key of rollout_correction.')}")
    if any(written.get(key) is True for key in BYPASSES):
        if written.get("loss_type", "ppo_clip") != "ppo_clip" or written.get("use_policy_gradient"):
            return Refused(f"loss_type: {NOT_CLIPPED}")
        return {"/algorithm.rollout_correction": "bypass"}
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
        return Refused(f"rollout_is_threshold: two bounds, {cap}, are those of single tokens (rollout_is: token).")
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


OPTIMIZER: Keys = {
    "lr_warmup_steps": unset(-1),
    "min_lr_ratio": unset(),
    "warmup_style": unset(),
    "lr_scheduler_type": moved("warmup_style"),
    "optimizer_type": ADAMW,
    "clip_grad": noted("See trainer.grad_clip."),
    "beta1": Rewritten(betas),
    "beta2": Rewritten(betas),
    "fused": noted("AdamW is fused wherever the parameters' device has a fused one.", False, True),
    **same(SCHEDULE, "lr_warmup_init lr_decay_steps lr_decay_style min_lr"),
}
LOSS_ARGS = Below(
    {
        "loss_agg_mode": moved("../loss_agg_mode"),
        "m2_threshold": moved("../advantage_fn_args.m2_threshold"),
        "log_ratio_clip": noted("The log-ratio is held within +-20.", 20.0, 20),
        "sft_loss_agg_mode": noted("Both terms of mix are aggregated as algorithm.loss_agg_mode says.", "token-mean"),
        "use_token_level_loss_in_sft": noted("Both terms of mix are aggregated as algorithm.loss_agg_mode says.", True),
        **same(
            FROM_BATCH,
            "use_dynamic_bsz ppo_mini_batch_size ppo_micro_batch_size_per_gpu ngpus_trainer "
            "repeat_times train_batch_size_expert train_batch_size_usual read_batch_size_expert "
            "read_batch_size_usual",
        ),
    }
)
ADVANTAGE_ARGS = Below(
    {
        "omega": moved("step_weight"),
        "fnorm": moved("std_normalize", convert=lambda kind, _: kind == "std"),
    }
)
ALGORITHM: Keys = {
    "algorithm_type": Cases({"cpt": CPT, "grpo_verl": moved("algorithm_type", convert=lambda *_: "grpo")}, SILENT),
    "advantage_fn": Cases({"clipv": CLIP_V}, SILENT),
    "policy_loss_fn": Cases({"m2po": Rewritten(m2po)}, SILENT),
    "add_strategy": moved("advantage_fn"),
    "add_strategy_args": moved("advantage_fn_args"),
    "mu": moved("policy_loss_fn_args.mu"),
    "gamma": moved("advantage_fn_args.gamma"),
    "lam": moved("advantage_fn_args.lam"),
    "use_token_level_loss": refused("write loss_agg_mode, such as seq-mean-token-mean.", True),
    "enable_router_replay": refused("the experts' choice is not replayed in training.", False),
    "bypass_old_logprobs": Rewritten(lambda asked, _: {"rollout_correction": "bypass"} if asked is True else {}),
    "rollout_correction": Rewritten(correction),
    "sample_strategy": Spelled({"warmup": "default"}),
    "policy_loss_fn_args": LOSS_ARGS,
    "advantage_fn_args": ADVANTAGE_ARGS,
}
TRAINER: Keys = {
    "trainer_strategy": STRATEGY,
    "enable_preview": noted("Rollouts are always recorded; monitor.traces_per_step is how many MLflow shows.", True),
    "max_token_len_per_gpu": unset(),
    "ppo_max_token_len_per_gpu": moved("max_token_len_per_gpu"),
    "max_checkpoints_to_keep": unset(0),
    "actor_grad_clip": moved("grad_clip", yields=True),
    "actor_clip_ratio": moved("/algorithm.policy_loss_fn_args.clip_range"),
    "actor_entropy_coef": moved("/algorithm.entropy_loss_fn_args.entropy_coef"),
    "actor_kl_loss_coef": moved("/algorithm.kl_loss_fn_args.kl_coef"),
    "actor_use_kl_loss": moved("/algorithm.kl_loss_fn", unset=(True,), convert=lambda used, _: used or "none"),
    "use_remove_padding": noted("Micro-batches never hold more padding than their rows' difference in length.", True),
    "balance_batch": noted("Workers always get rows of about equal total length.", True),
    "fix_actor_microbatch_loss_scale": EXACT,
    "critic_warmup": moved("trainer_config.trainer.critic_warmup"),
    "param_offload": moved(
        f"{OFFLOAD}.param_offload",
        "trainer_config.actor_rollout_ref.ref.fsdp_config.param_offload",
        "trainer_config.critic.model.fsdp_config.param_offload",
        yields=True,
    ),
    "optimizer_offload": moved(
        f"{OFFLOAD}.optimizer_offload", "trainer_config.critic.model.fsdp_config.optimizer_offload", yields=True
    ),
    "grad_offload": noted("Gradients are kept on the GPU.", False),
    "offload_policy": noted("See param_offload.", False),
    "megatron": Below({}, NOT_MEGATRON),
    "trust_remote_code": moved("/model.trust_remote_code", yields=True),
    "algorithm_type": moved("/algorithm.algorithm_type"),
    "eval_interval": moved("/explorer.eval_interval"),
    "sft_warmup_steps": WARMUP,
    "sft_warmup_iteration": WARMUP,
    "get_exp_strategy": noted("See algorithm.sample_strategy."),
}


LORA: Keys = {
    "rank": moved("lora_rank"),
    "r": moved("lora_rank"),
    "alpha": moved("lora_alpha"),
    "dropout": moved("lora_dropout"),
    "base_model_name": noted("The adapter belongs to model.model_path."),
    "lora_dtype": noted("Adapters have the dtype of the base's weights: see explorer.rollout_model.dtype.", "auto"),
    "dtype": noted("Adapters have the dtype of the base's weights: see explorer.rollout_model.dtype.", "auto"),
    "is_dummy": SILENT,
}
KEYS: Mapping[type[Any], Keys] = {
    schema.Config: RUN,
    schema.ModelConfig: MODEL,
    schema.LoraConfig: LORA,
    schema.ClusterConfig: CLUSTER,
    schema.SynchronizerConfig: SYNCHRONIZER,
    schema.MonitorConfig: MONITOR,
    schema.DataJuicerConfig: {"port": unset(0)},
    schema.DataProcessorConfig: DATA_PROCESSOR,
    schema.TaskPipelineConfig: TASK_PIPELINE,
    schema.OperatorConfig: OPERATOR,
    TaskOutputConfig: TASK_OUTPUT,
    schema.ExperiencePipelineConfig: EXPERIENCE_PIPELINE,
    schema.LogConfig: {"save_dir": FOLLOWS},
    schema.AlgorithmConfig: ALGORITHM,
    schema.OptimizerConfig: OPTIMIZER,
    schema.TrainerConfig: TRAINER,
}
