"""Random configurations of the settings that matter, one per seed. `random_runs.py` runs them.

Settings are drawn independently, so that they occur in combinations that no recipe has; only settings that would be
refused most of the time are drawn together. The configurations that are still refused show whether refusals are right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_core.base.registry import registry_of

ACTOR = "trainer.trainer_config.actor_rollout_ref.actor"
STORE = "buffer.trainer_input.experience_buffer"
ENGINE = "explorer.rollout_model"
KL = ("none", "k1", "k2", "k3", "abs", "corrected_k3")
PLUGIN = '''
from trinity_core.workflows import ENVIRONMENTS, REWARD_FNS


@REWARD_FNS.register("even_letters")
def even_letters(*, response, **args):
    """What even an untrained model does more or less of."""
    return {"even": sum(ord(letter) % 2 == 0 for letter in response) / max(len(response), 1)}


@ENVIRONMENTS.register("longer")
class Longer:
    """Asks for a text with more even letters than the seed's last digit."""

    def reset(self, seed):
        self.wanted, self.turns = seed % 10, 0
        return f"Give {self.wanted} letters.", 0.0, False, {}

    def step(self, action):
        self.turns += 1
        enough = sum(ord(letter) % 2 == 0 for letter in action) > self.wanted
        return "More.", float(enough) - 0.1, enough or self.turns >= 4, {"invalid": not action}

    def tools(self):
        return []

    def close(self):
        pass
'''

SETTINGS: dict[str, tuple[float, Sequence[Any]]] = {
    "algorithm.repeat_times": (0.9, (1, 2, 2, 3, 3, 4, 4)),
    "algorithm.kl_loss_fn": (0.4, KL),
    "algorithm.kl_penalty_fn": (0.2, KL),
    "algorithm.kl_penalty_fn_args": (0.1, ({"kl_coef": 0.1}, {"adaptive": True})),
    "algorithm.loss_agg_mode": (
        0.3, ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")),
    "algorithm.rollout_correction": (
        0.3, ("none", "bypass", "tis_token", "tis_sequence", "mis", "icepop", "geometric")),
    "algorithm.entropy_loss_fn_args": (0.15, ({"entropy_coef": 0.01},)),
    "algorithm.optimizer.lr_warmup_steps": (0.3, (1, 2)),
    "algorithm.optimizer.warmup_style": (0.3, ("cosine", "linear")),
    "algorithm.sample_strategy": (0.15, ("fifo", "priority", "staleness_control")),
    "model.temperature": (0.4, (0.0, 0.7, 1.0)),
    "model.top_p": (0.2, (0.9,)),
    "model.top_k": (0.1, (5,)),
    "model.min_response_tokens": (0.2, (0, 3)),
    "model.enable_prompt_truncation": (0.15, (False,)),
    "trainer.worker_num": (0.6, (1, 2, 2)),
    "trainer.zero_stage": (0.6, (0, 1, 2, 3)),
    "trainer.ulysses_sequence_parallel_size": (0.15, (2,)),
    "trainer.dtype": (0.25, ("bfloat16", "float32", "float16")),
    "trainer.gradient_checkpointing": (0.2, (True,)),
    "trainer.use_dynamic_bsz": (0.2, (False,)),
    "trainer.max_token_len_per_gpu": (0.3, (128, 400, 2000)),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (0.2, (1, 3)),
    f"{ACTOR}.ppo_epochs": (0.15, (2,)),
    f"{ACTOR}.fsdp_config.optimizer_offload": (0.15, (True,)),
    f"{ACTOR}.fsdp_config.param_offload": (0.1, (True,)),
    "trainer.trainer_config.trainer.critic_warmup": (0.1, (1,)),
    "trainer.save_interval": (0.8, (0, 1, 2, 3)),
    "trainer.max_checkpoints_to_keep": (0.3, (1, 2)),
    "trainer.save_hf_checkpoint": (0.3, ("always", "last")),
    "trainer.save_strategy": (0.2, ("single_thread", "single_process", "single_node")),
    "synchronizer.sync_method": (0.5, ("memory", "checkpoint", "checkpoint")),
    "synchronizer.sync_style": (0.5, ("fixed", "explorer_driven", "trainer_driven")),
    "synchronizer.sync_interval": (0.5, (1, 2, 3)),
    "synchronizer.sync_offset": (0.3, (1, 2)),
    "synchronizer.max_staleness": (0.25, (0, 1, 3, 5)),
    "synchronizer.sync_in_flight": (0.15, (True,)),
    "buffer.batch_size": (0.95, (1, 2, 3, 4, 5)),
    "buffer.train_batch_size": (0.35, (3, 4, 6, 8, 10, 16)),
    f"{STORE}.use_priority_queue": (0.1, (True,)),
    f"{STORE}.max_read_timeout": (1.0, (20, 60)),
    f"{STORE}.replay_buffer": (0.15, ({"enable": True, "reuse_cooldown_time": 0.01},
        {"enable": True, "priority_fn": "decay_limit_randomization", "reuse_cooldown_time": 1,
         "priority_fn_args": {"sigma": 0.5, "use_count_limit": 2}})),
    "explorer.runner_per_model": (0.3, (1, 2, 8)),
    f"{ENGINE}.engine_num": (0.3, (1, 2)),
    f"{ENGINE}.enable_openai_api": (0.2, (True,)),
    f"{ENGINE}.enable_history": (0.1, (True,)),
    f"{ENGINE}.max_num_seqs": (0.3, (2, 8)),
    f"{ENGINE}.enable_prefix_caching": (0.2, (False,)),
    f"{ENGINE}.dtype": (0.15, ("bfloat16",)),
    "explorer.eval_interval": (0.7, (0, 1, 2, 3)),
    "explorer.eval_on_startup": (0.6, (True, False, False)),
    "explorer.max_refill_rounds": (0.25, (1, 2)),
    "explorer.max_retry_times": (0.2, (0,)),
    "explorer.reward_workers": (0.2, (1, 2)),
    "cluster.colocate": (0.07, (True,)),
    "monitor.monitor_type": (0.7, ("tensorboard",)),
    "monitor.enable_ray_timeline": (0.1, (True,)),
    "monitor.traces_per_step": (0.2, (0,)),
    "continue_from_checkpoint": (0.1, (False,)),
    "log.level": (0.1, ("DEBUG",)),
}  # fmt: skip
"""Key → how often it is given, and its values."""
LENGTHS = (
    {"max_prompt_tokens": 88, "max_response_tokens": 12},
    {"max_prompt_tokens": 200, "max_response_tokens": 20},
    {"max_prompt_tokens": 87, "max_response_tokens": 8},
    {"max_model_len": 96, "max_response_tokens": 16},
    {"max_model_len": 300},
)
COLUMNS = {"prompt_key": "question", "response_key": "answer"}
OPERATORS = (
    {"name": "zero_variance_group_filter"},
    {"name": "reward_filter", "args": {"min_reward": 0.3}},
    {"name": "reward_std_filter", "args": {"threshold": 0.05}},
    {"name": "dynamic_sampling"},
    {"name": "dynamic_sampling", "args": {"rows": 6}},
    {"name": "invalid_reward_filter"},
    {"name": "mask_response_truncated"},
    {"name": "overlong_penalty", "args": {"max_response_length": 12, "cache_length": 4}},
    {"name": "taskset_balance_filter"},
    {"name": "pass_rate_calculator"},
)
TASK_OPERATORS = (
    {"name": "text_length_filter", "args": {"input_keys": ["question"], "min_len": 40, "max_len": 90}},
    {"name": "duplicate_filter", "args": {"input_keys": ["question"]}},
    {"name": "format_check_filter", "args": {"input_key": "answer", "pattern": "####"}},
)
SELECTORS = ("sequential", "shuffle", "random", "difficulty_based")
CONVERSATIONS = ("multi_step_grpo", "gigpo")
TAUGHT = ("on_policy_distill", "jsd")


@dataclass(frozen=True)
class Draw:
    """A configuration, the commands that it is run by, and whether a process of it is killed."""

    tree: dict[str, Any]
    parts: tuple[tuple[str, ...], ...]
    """Overrides of each command: one, or an explorer's and a trainer's."""
    kill_after: float | None
    """Seconds after the start, or after the first train step if it is negative."""
    victim: float
    """Which of the processes, as a share of them."""


def draw(seed: int, folder: Path, tiny: Path, database: str = "") -> Draw:
    """Configuration `seed`, with its folders below `folder`; `database` is the URL of a PostgreSQL server."""
    rng = random.Random(f"random run {seed}")
    algorithm = rng.choice([*registry_of("algorithm.algorithm_type"), "grpo", "grpo"])
    supervised = algorithm in ("sft", "dpo")
    mode = "train" if supervised else rng.choices(("both", "parts", "bench"), (70, 25, 5))[0]
    values = {key: rng.choice(choices) for key, (share, choices) in SETTINGS.items() if rng.random() < share}
    values |= {
        "project": "random", "name": "run", "mode": mode.replace("parts", "both"), "plugin_dir": f"{tiny}/plugins",
        "checkpoint_root_dir": f"{folder}/checkpoints", "cluster.gpu_per_node": 0, "model.model_path": f"{tiny}/model",
        "algorithm.algorithm_type": algorithm, f"{ENGINE}.kv_cache_gib": 0.25, "algorithm.optimizer.lr": 1e-4,
    }  # fmt: skip
    values |= {f"model.{key}": value for key, value in rng.choice(LENGTHS).items()}
    if rng.random() < 0.25:
        values["model.lora_configs"] = [{"lora_rank": 4, "target_modules": rng.choice((["all-linear"], ["q_proj"]))}]
    if rng.random() < 0.15 and not supervised:
        part = rng.choice(("advantage_fn", "policy_loss_fn"))
        names = [name for name in registry_of(f"algorithm.{part}") if name not in TAUGHT]
        values[f"algorithm.{part}"] = rng.choice(names)
    values["buffer.total_steps" if rng.random() < 0.75 else "buffer.total_epochs"] = rng.choice((3, 4, 4, 5))
    epochs = "buffer.total_epochs" in values
    values |= {"buffer.total_epochs": rng.choice((1, 2))} if epochs else {}
    if database and mode != "bench" and not supervised and rng.random() < 0.15:
        values[f"{STORE}.path"] = database
    _draw_data(rng, values, f"{tiny}/data", "few" if epochs else "train")
    if mode == "both" and rng.random() < 0.15:
        values["stages"] = [_warm_up(tiny), {"stage_name": "rft"}]
    parts: tuple[tuple[str, ...], ...] = ((),)
    if mode == "parts":
        values |= {"synchronizer.sync_method": "checkpoint", "continue_from_checkpoint": True}
        parts = (("mode=explore",), ("mode=train",))
    kill_after = rng.choice((rng.uniform(5, 40), -rng.uniform(0, 5))) if rng.random() < 1 / 3 else None
    return Draw(_tree(values), rng.choice((parts, parts[::-1])), kill_after, rng.random())


def _draw_data(rng: random.Random, values: dict[str, Any], data: str, split: str) -> None:
    """Draw task sets, evaluation sets, expert data, models that workflows ask, and operators."""
    algorithm = values["algorithm.algorithm_type"]
    auxiliary = [{"model_path": values["model.model_path"], "name": "other", "kv_cache_gib": 0.25}]
    if algorithm in ("sft", "dpo"):
        columns = {"chosen_key": "chosen", "rejected_key": "rejected"} if algorithm == "dpo" else {}
        values[STORE] = {"path": data, "split": algorithm, "format": COLUMNS | columns}
        for key in [key for key in values if key.startswith(f"{STORE}.")]:
            del values[key]
    if algorithm.startswith("mix"):
        values["buffer.trainer_input.auxiliary_buffers.experts"] = {"path": data, "split": "sft", "format": COLUMNS}
    names = [f"set{number}" for number in range(rng.choice((1, 1, 1, 2, 3)))]
    weigh = rng.choice(("weight", "", "weight_by_step"))
    tasksets = [_taskset(rng, algorithm, name, data, split) for name in names]
    for taskset in tasksets if len(names) > 1 and weigh else ():
        taskset[weigh] = rng.choice((0.5, 1.0, 2.0)) if weigh == "weight" else {"1": 1.0, "3": rng.choice((0.2, 3.0))}
    if algorithm not in ("sft", "dpo"):
        values["buffer.explorer_input.tasksets"] = tasksets
    evals = [_taskset(rng, "", f"eval{number}", data, "test") for number in range(rng.choice((0, 1, 1, 2)))]
    for taskset in evals:
        taskset |= {"repeat_times": rng.choice((1, 2)), "rollout_args": {"temperature": rng.choice((0.0, 1.0))}}
        taskset.pop("task_selector", None)
    if evals or values["mode"] == "bench":
        values["buffer.explorer_input.eval_tasksets"] = evals or [_taskset(rng, "", "eval", data, "test")]
    workflows = str(tasksets) + str(evals)
    if "judge" in workflows or "distill" in workflows:
        values["explorer.auxiliary_models"] = auxiliary
    pipeline = "data_processor.experience_pipeline"
    if rng.random() < 0.35 and algorithm not in ("sft", "dpo"):
        values[f"{pipeline}.operators"] = rng.sample(OPERATORS, rng.choice((1, 1, 2, 3)))
        if values.get("model.temperature") == 0.0:  # all answers to a task are the same
            del values["model.temperature"]
        values |= {f"{pipeline}.{key}": True for key in ("own_process", "save_input") if rng.random() < 0.3}
    if rng.random() < 0.12 and algorithm not in ("sft", "dpo"):
        values["data_processor.task_pipeline"] = {
            "inputs": [data], "split": split, "operators": rng.sample(TASK_OPERATORS, rng.choice((1, 2))),
            "top_k": rng.choice((-1, 5)),
        }  # fmt: skip
        tasksets[0] |= {"path": "", "split": "train"}


def _taskset(rng: random.Random, algorithm: str, name: str, data: str, split: str) -> dict[str, Any]:
    taskset: dict[str, Any] = {"name": name, "path": data, "split": split, "format": COLUMNS}
    workflow, arguments = rng.choice((
        ("math_workflow", {}), ("math_workflow", {}), ("simple_workflow", {}), ("math_boxed_workflow", {}),
        ("multi_turn_workflow", {"max_turns": 2, "step_wise": rng.random() < 0.5}),
        ("env_workflow", {"environment": "longer", "max_turns": 3, "step_wise": rng.random() < 0.5,
                          "process": rng.random() < 0.3}),
        ("rubric_judge_workflow", {}),
    ))  # fmt: skip
    if algorithm in CONVERSATIONS:
        workflow, arguments = "multi_turn_workflow", {"max_turns": 2, "step_wise": True, "discount": 0}
    if algorithm in TAUGHT:
        workflow, arguments = "on_policy_distill_math_workflow", {}
    taskset |= {"default_workflow_type": workflow, "workflow_args": arguments}
    if workflow not in ("env_workflow", "rubric_judge_workflow"):
        rewards = ("even_letters",) if algorithm else ("even_letters", "math_reward")  # the model learns no arithmetic
        taskset["default_reward_fn_type"] = rng.choice(rewards)
    if rng.random() < 0.5:
        taskset["task_selector"] = {"selector_type": rng.choice(SELECTORS)}
    if rng.random() < 0.15:
        taskset["repeat_times"] = rng.choice((1, 2, 5))
    return taskset


def _warm_up(tiny: Path) -> dict[str, Any]:
    """A stage of SFT."""
    examples = {"name": "examples", "path": f"{tiny}/data", "split": "sft", "format": COLUMNS}
    buffer = {"train_batch_size": 6, "total_steps": 2, "trainer_input": {"experience_buffer": examples}}
    return {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}


def _tree(values: dict[str, Any]) -> dict[str, Any]:
    """`a.b` → value as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return tree
