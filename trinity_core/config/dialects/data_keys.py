"""The buffer: task sets, and what the trainer reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.dialects.verdict import FOLLOWS, Below, Keys, Moved, Spelled, moved, noted, refused, unset
from trinity_core.config.schema import (
    BufferConfig,
    ExperienceBufferConfig,
    ExplorerInputConfig,
    FormatConfig,
    RolloutArgs,
    TaskSelectorConfig,
    TasksetConfig,
    TrainerInputConfig,
)

VISION = refused("models see text alone: there are no images or videos.", "")
PER_ROW = refused("the tasks of one task set have one workflow and one reward: make a task set of each.", "")
PREFIX = refused("an answer begins where the chat template's prompt ends; write the prefix into a chat template.", "")
LOCAL = noted("The store is a local database, which retries by itself.")
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
"""Names that Trinity-RFT has for the same workflow; all of them are asynchronous here."""

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
ROLLOUT_ARGS: Keys = {
    "n": moved("../repeat_times", yields=True),
    "logprobs": noted("The log-prob of each sampled token is always recorded, that of no other.", 0),
}
STORED: Keys = {
    "max_retry_times": LOCAL,
    "max_retry_interval": LOCAL,
    "capacity": noted("The store is on disk and has no limit; synchronizer.max_staleness bounds its age."),
    "enable_progress_bar": PROGRESS,
    "ray_namespace": FOLLOWS,
    "wrap_in_ray": FOLLOWS,
    "index": FOLLOWS,
    "is_eval": FOLLOWS,
    "task_type": FOLLOWS,
    "batch_size": FOLLOWS,
    "tokenizer_path": FOLLOWS,
    "algorithm_type": noted("It follows from the algorithm."),
    "schema_type": noted("It follows from the algorithm."),
    "mm_data_kwargs": refused("models see text alone: there are no images or videos.", {}),
    "raw": noted("See data_processor.task_pipeline.inputs.", False),
    "total_epochs": ALL_STEPS,
    "total_steps": ALL_STEPS,
    "subset": moved("subset_name"),
}
TASKSET: Keys = STORED | {
    "default_eval_workflow_type": noted("See default_workflow_type of each task set.", ""),
    "default_workflow_type": WORKFLOW,
    "default_reward_fn_type": unset(""),
    "subset_name": unset(""),
    "path": unset(),
    **dict.fromkeys(
        ("max_read_timeout", "use_priority_queue", "reuse_cooldown_time", "replay_buffer", "replay_buffer_kwargs"),
        UNUSED,
    ),
}
SELECTOR: Keys = {
    "random_method": noted("The order follows from the seed and NumPy's PCG64.", "numpy"),
}
EXPERIENCES: Keys = STORED | {
    "data_selector": noted("Given rows are gone through in a new order each epoch.", {}, {"selector_type": "shuffle"}),
    "task_selector": noted("Given rows are gone through in a new order each epoch.", {}, {"selector_type": "shuffle"}),
    "replay_buffer_kwargs": Below(
        {"priority_fn": moved("../replay_buffer.priority_fn", yields=True)},
        Moved(("../replay_buffer.priority_fn_args.*",), yields=True),
    ),
    **dict.fromkeys(
        (
            "default_workflow_type", "default_eval_workflow_type", "default_reward_fn_type", "rollout_args",
            "workflow_args", "reward_fn_args", "repeat_times",
        ),
        UNUSED,
    ),
}  # fmt: skip
EXPLORER_INPUT: Keys = {
    "default_workflow_type": WORKFLOW,
    "default_reward_fn_type": unset(""),
    "default_eval_workflow_type": moved("eval_tasksets[].default_workflow_type", unset=("",), yields=True),
    "system_prompt": moved(
        "taskset.format.system_prompt", "tasksets[].format.system_prompt", "eval_tasksets[].format.system_prompt",
        unset=("",), yields=True,
    ),
    "reply_prefix": PREFIX,
}  # fmt: skip
TRAINER_INPUT: Keys = {
    "sft_warmup_dataset": moved("auxiliary_buffers.sft_warmup_dataset"),
    "sft_warmup_steps": WARMUP,
    "read_experience_strategy": noted("See algorithm.sample_strategy."),
}
BUFFER: Keys = {
    "train_batch_size": unset(0),
    "default_workflow_type": WORKFLOW,
    "default_reward_fn_type": unset(""),
    "max_retry_times": LOCAL,
    "max_retry_interval": LOCAL,
    "explorer_output": noted("Explorer and trainer share buffer.trainer_input.experience_buffer."),
    "tokenizer_path": FOLLOWS,
    "pad_token_id": FOLLOWS,
    "cache_dir": FOLLOWS,
    "read_batch_size": FOLLOWS,
    "sft_batch_size": noted("Of a stage with sft it is buffer.train_batch_size."),
    "explore_batch_size": refused("batch_size counts the tasks of an explore step, train_batch_size a step's rows."),
    "expert_data_ratio": moved("/algorithm.sample_strategy_args.expert_data_ratio"),
    "train_dataset": moved("trainer_input.experience_buffer"),
    "sft_warmup_dataset": moved("trainer_input.auxiliary_buffers.sft_warmup_dataset"),
    "db_url": moved("trainer_input.experience_buffer.path", unset=("",)),
}

KEYS: Mapping[type[Any], Keys] = {
    BufferConfig: BUFFER,
    ExplorerInputConfig: EXPLORER_INPUT,
    TrainerInputConfig: TRAINER_INPUT,
    TasksetConfig: TASKSET,
    ExperienceBufferConfig: EXPERIENCES,
    FormatConfig: FORMAT,
    RolloutArgs: ROLLOUT_ARGS,
    TaskSelectorConfig: SELECTOR,
}
