"""The whole file: keys at the top, and the sections about what surrounds training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.dialects.verdict import FOLLOWS, Below, Keys, Spelled, moved, noted, refused, unset
from trinity_core.config.schema import (
    ClusterConfig,
    Config,
    DataJuicerConfig,
    DataProcessorConfig,
    ExperiencePipelineConfig,
    LogConfig,
    ModelConfig,
    MonitorConfig,
    SynchronizerConfig,
    TaskPipelineConfig,
)
from trinity_core.config.schema.monitor import TaskOutputConfig

TASKSET = "/buffer.explorer_input.taskset"
AGENT = refused(
    "no model chooses the operators; list them under data_processor.task_pipeline.operators (data_juicer is one)."
)
AGENTS = noted("No model chooses the operators.")
LORA = refused("all weights are trained: there are no LoRA adapters; leave this out.", [], False)
ROPE = refused("change it in the model folder's config.json, which the engines and the trainer both read.")


def _juicer(path: Any, _: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operators of a Data-Juicer recipe."""
    return [{"name": "data_juicer", "args": {"config_path": path}}]


def _path(buffer: Any, _: Mapping[str, Any]) -> Any:
    return buffer.get("path") if isinstance(buffer, Mapping) else buffer


def _paths(buffers: Any, _: Mapping[str, Any]) -> Any:
    return [_path(each, _) for each in buffers] if isinstance(buffers, list) else buffers


def _held_out(split: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The evaluation set that `data.eval_split` names."""
    columns = data.get("format") or data.get("format_config")
    named = {"path": data.get("dataset_path"), "subset_name": data.get("subset_name") or None, "format": columns}
    return [{"name": "eval", **named, "split": split}]


DATA = Below(
    {
        "dataset_path": moved(f"{TASKSET}.path"),
        "subset_name": moved(f"{TASKSET}.subset_name", unset=("",)),
        "train_split": moved(f"{TASKSET}.split", unset=("",)),
        "eval_split": moved("/buffer.explorer_input.eval_tasksets", unset=("",), convert=_held_out),
        "format": moved(f"{TASKSET}.format"),
        "format_config": moved(f"{TASKSET}.format"),
        "total_epochs": moved("/buffer.total_epochs"),
        "batch_size": moved("/buffer.batch_size"),
        "default_workflow_type": moved("/buffer.explorer_input.default_workflow_type", unset=("",)),
        "default_reward_fn_type": moved("/buffer.explorer_input.default_reward_fn_type", unset=("",)),
        "db_url": noted("Tasks are read from their files.", ""),
        "dj_process_desc": AGENT,
        "dj_config_path": moved("/data_processor.task_pipeline.operators", unset=("",), convert=_juicer),
    },
    AGENTS,
)
"""Version 0.1's section of tasks."""
GLOBAL = Below(
    {
        "total_epochs": moved("/buffer.total_epochs"),
        "batch_size": moved("/buffer.batch_size"),
        "eval_interval": moved("/explorer.eval_interval"),
        "eval_on_latest_checkpoint": moved("/explorer.bench_on_latest_checkpoint"),
    },
    refused("is not a known key."),
)

RUN: Keys = {
    "group": noted("Runs are grouped by project, within which their names differ.", ""),
    "checkpoint_job_dir": FOLLOWS,
    "checkpoint_root_dir": unset(""),
    "ignore_validator_suggestions": noted("What does not fit is an error, and no setting is changed."),
    "mode": Spelled({"colocate": "both"}),
    "algorithm_type": moved("algorithm.algorithm_type"),
    "data": DATA,
    "global_config": GLOBAL,
    "cod": refused("tasks are not packed together; write a workflow that does it."),
}
MODEL: Keys = {
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
    "repetition_penalty": refused("rollouts are sampled without one, as the trainer's log-probs are.", 1.0, 1),
    "lora_configs": LORA,
    "fully_sharded_loras": LORA,
    "max_cpu_loras": LORA,
    "rope_scaling": ROPE,
    "rope_theta": ROPE,
    "max_token_len": moved("max_model_len"),
    "checkpoint_path": moved("/checkpoint_root_dir", unset=("",)),
    "tinker": Below(
        {"enable": refused("training is done by the run itself, not by Tinker; leave model.tinker out.", False)},
        noted("Tinker is not used."),
    ),
    "external_model": Below(
        {
            "enable": refused(
                "the policy is a model of the run's own engines; explorer.external_model scores another in mode bench.",
                False,
            )
        },
        noted("It is not enabled."),
    ),
}
CLUSTER: Keys = dict.fromkeys(
    (
        "total_gpu_num", "rollout_gpu_num", "auxiliary_model_gpu_num", "explorer_gpu_num", "trainer_gpu_num",
        "trainer_node_num", "trainer_gpu_num_per_node",
    ),
    FOLLOWS,
)  # fmt: skip
SYNCHRONIZER: Keys = {
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
    **dict.fromkeys(
        (
            "source_data_path", "format", "load_kwargs", "agent_model_name", "agent_model_config", "clean_strategy",
            "min_size_ratio", "min_priority_score", "priority_weights", "data_dist",
        ),
        AGENTS,
    ),
}  # fmt: skip
TASK_PIPELINE: Keys = {
    "config_path": moved("operators", convert=_juicer),
    "dj_config_path": moved("operators", convert=_juicer),
    "input_buffers": moved("inputs", convert=_paths),
    "output_buffer": moved("output.path", convert=_path),
    "dj_process_desc": AGENT,
    "dynamic": refused("it runs once, before the run; leave this out.", False),
    "reward_shaping": refused("list a reward_shaping_mapper under data_processor.experience_pipeline.operators.", []),
    **dict.fromkeys(
        (
            "format", "agent_model_name", "agent_model_config", "clean_strategy", "min_size_ratio",
            "min_priority_score", "data_dist",
        ),
        AGENTS,
    ),
}  # fmt: skip
TASK_OUTPUT: Keys = dict.fromkeys(
    ("name", "storage_type", "split", "subset_name", "format"),
    noted("The output is a folder of Parquet, read by the task sets."),
)
EXPERIENCE_PIPELINE: Keys = {
    "output": refused("what operators return goes to the experience buffer; leave this out."),
}

KEYS: Mapping[type[Any], Keys] = {
    Config: RUN,
    ModelConfig: MODEL,
    ClusterConfig: CLUSTER,
    SynchronizerConfig: SYNCHRONIZER,
    MonitorConfig: MONITOR,
    DataJuicerConfig: {"port": unset(0)},
    DataProcessorConfig: DATA_PROCESSOR,
    TaskPipelineConfig: TASK_PIPELINE,
    TaskOutputConfig: TASK_OUTPUT,
    ExperiencePipelineConfig: EXPERIENCE_PIPELINE,
    LogConfig: {"save_dir": FOLLOWS},
}
