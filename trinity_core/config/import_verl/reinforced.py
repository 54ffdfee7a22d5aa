"""Converts veRL's reinforcement learning (main_ppo, main_dapo) to a draft, for keys that must be combined.

Follows the guide "align with veRL": a veRL mini-batch is a batch here, and a veRL step is `sync_interval` steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from trinity_core.config.import_verl.algorithm import write_algorithm
from trinity_core.config.import_verl.draft import Draft
from trinity_core.config.import_verl.keys import ACTOR, DEFAULTS, ENGINE, OVERLONG, ROLLOUT, VALIDATION

_MINI, _ASYNC = f"{ACTOR}.ppo_mini_batch_size", "async_training"
_PER_STEP = ("trainer.total_training_steps", "trainer.critic_warmup", f"{ACTOR}.optim.lr_warmup_steps")
"""Keys that count veRL's trainer steps: of `data.train_batch_size` tasks or, if fully asynchronous, of
`require_batches` mini-batches."""
_PER_SYNC = ("trainer.save_freq", "trainer.test_freq")
"""Keys that count weight versions."""
_GPUS_OF_A_NODE = 8
_SHARED = 0.6
"""`gpu_memory_utilization` at which engine and trainer may share the only GPU."""
_UNBOUNDED = 99
"""Number of rounds instead of veRL's 0, which means unlimited."""
_TRACKERS = {"wandb": "wandb", "vemlp_wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}


class GpuLayout(NamedTuple):
    """The engines' GPUs; the trainer gets the rest."""

    engines: int
    tensor_parallel: int
    reward_models: int = 0
    """Copies of the reward model, each on one GPU."""


def gpu_layout(total: int, tensor_parallel: int, reward_model: bool) -> GpuLayout:
    """Assign a quarter of the GPUs to the policy's engines, a quarter to a reward model, as in the guides' examples.

    There is at least one engine. If the trainer would be left without a GPU, an engine gets fewer than
    `tensor_parallel`.
    """
    rewards = max(total // 4, 1) if reward_model else 0
    most = max(total - rewards - 1, 1)
    size = tensor_parallel
    while size > most:
        size = max(size // 2, 1)
    return GpuLayout(max(min(total // 4, most) // size, 1), size, rewards)


def write_reinforced(draft: Draft) -> None:
    rollouts = draft.whole(f"{ROLLOUT}.n", 1)
    interval = (_async_batches if draft.verl.is_fully_async else _batches)(draft, rollouts)
    if not write_algorithm(draft, rollouts, interval):
        draft.used |= {key for key in draft.verl.values if key.startswith("critic.")}
    steps = draft.whole(f"{_ASYNC}.require_batches", 1) if draft.verl.is_fully_async else interval
    draft.rows(DEFAULTS[""], dict.fromkeys(_PER_STEP, steps) | dict.fromkeys(_PER_SYNC, interval))
    # Long prompts are rejected here unless they are truncated; veRL filters them first.
    dropped, way = draft.get("data.filter_overlong_prompts", False), draft.get("data.truncation", "error")
    cuts = not dropped and way != "error"
    draft.put("model.enable_prompt_truncation", cuts, "data.truncation" if cuts else "data.filter_overlong_prompts")
    _tasks(draft)
    _filter(draft)
    _gpus(draft)
    _restricted_sampling(draft)
    if draft.get(f"{ROLLOUT}.name", "vllm") != "vllm":
        draft.leave(f"{ROLLOUT}.name", "the engines are vLLM's")
    write_run(draft, DEFAULTS[""])
    if draft.get("trainer.val_only", False):
        draft.put("mode", "bench", "trainer.val_only")
    draft.absent()


def write_run(draft: Draft, defaults: Mapping[str, Any]) -> None:
    # veRL counts rows of a micro-batch unless told to count tokens; here it is the other way round.
    dynamic, stated = f"{ACTOR}.use_dynamic_bsz", {**defaults, **draft.verl.values}
    if stated.get(dynamic) is None and stated.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") is not None:
        draft.put("trainer.use_dynamic_bsz", False, dynamic)
    loggers = draft.get("trainer.logger", ["console", "wandb"])
    names = [str(name) for name in (loggers if isinstance(loggers, list) else [loggers])]
    if name := next((_TRACKERS[name] for name in names if name in _TRACKERS), ""):
        draft.put("monitor.monitor_type", name, "trainer.logger")
    elif names != ["console"]:
        draft.leave("trainer.logger", "trackers are mlflow, wandb and tensorboard; mlflow is used")
    if (folder := draft.get("trainer.default_local_dir")) is not None:
        folder_in_it = "/".join(str(draft.get(f"trainer.{name}")) for name in ("project_name", "experiment_name"))
        root = str(folder).removesuffix("/").removesuffix(folder_in_it).removesuffix("/") or "."
        draft.put("checkpoint_root_dir", root, "trainer.default_local_dir; the run's folder is <project>/<name> in it")


def _batches(draft: Draft, rollouts: int) -> int:
    """Write batch sizes; return the number of gradient steps here per veRL step."""
    tasks, mini = draft.whole("data.train_batch_size", 1024), draft.whole(_MINI, 256)
    mini = min(mini, tasks)
    interval = tasks // mini
    if tasks % mini:
        draft.remark(f"data.train_batch_size {tasks} is no multiple of ppo_mini_batch_size {mini}: "
                     f"a step takes {interval * mini} tasks here")  # fmt: skip
    _batch(draft, mini, rollouts)
    draft.put("synchronizer.sync_style", "fixed", "as veRL: explore, then train")
    ahead = draft.verl.has_rollout_gpus
    draft.put("synchronizer.sync_offset", interval if ahead else 0, "one step of veRL ahead" if ahead else "")
    draft.put("synchronizer.sync_interval", interval, f"data.train_batch_size / ppo_mini_batch_size = {tasks} / {mini}")
    return interval


def _batch(draft: Draft, mini: int, rollouts: int) -> None:
    draft.put("buffer.batch_size", mini, _MINI)
    draft.put("buffer.train_batch_size", mini * rollouts, f"ppo_mini_batch_size * rollout.n = {mini} * {rollouts}")


def _async_batches(draft: Draft, rollouts: int) -> int:
    """Write batch sizes and weight sync; return the gradient steps between two syncs.

    A batch is one of veRL's mini-batches. A row sampled with version v may be trained on until the next sync; if
    rollouts run ahead by `staleness_threshold`, later by that share of the steps between two syncs.
    """
    mini = draft.whole(_MINI, 256)
    interval = draft.whole(f"{_ASYNC}.trigger_parameter_sync_step", 4) * draft.whole(f"{_ASYNC}.require_batches", 1)
    _batch(draft, mini, rollouts)
    draft.put("synchronizer.sync_interval", interval, "trigger_parameter_sync_step * require_batches")
    stale = f"{_ASYNC}.staleness_threshold"
    threshold, partial = draft.get(stale, 0.1), draft.get(f"{_ASYNC}.partial_rollout", True)
    draft.put("synchronizer.sync_style", "trainer_driven" if threshold else "fixed", f"by {stale}")
    if threshold:
        ahead = math.ceil(float(threshold) * interval)
        draft.put("synchronizer.max_staleness", interval - 1 + ahead, f"{stale}: {ahead} of {interval} steps ahead")
        draft.put("synchronizer.sync_in_flight", bool(partial), f"{_ASYNC}.partial_rollout")
    else:
        draft.put("synchronizer.sync_offset", 0, "")
    if draft.get("rollout.total_rollout_steps") is not None:
        samples = draft.whole("rollout.total_rollout_steps", 1)
        origin = f"rollout.total_rollout_steps / ppo_mini_batch_size = {samples} / {mini}"
        draft.put("buffer.total_steps", max(samples // mini, 1), origin)
    evaluated, frequency = draft.first(("rollout.test_freq", "trainer.test_freq"), 1)
    steps = 0 if frequency == -1 else draft.whole(evaluated, 1) * interval
    draft.put("explorer.eval_interval", steps, f"{evaluated} * sync_interval")
    draft.used |= {"data.train_batch_size", "data.gen_batch_size", "trainer.test_freq", "rollout.n"}
    draft.used |= {"rollout.total_epochs", f"{_ASYNC}.use_trainer_do_validate"}
    draft.used |= {key for key in draft.verl.values if key.startswith(f"{_ASYNC}.checkpoint_engine")}
    return interval


def _gpus(draft: Draft) -> None:
    tensor_parallel = f"{ROLLOUT}.tensor_model_parallel_size"
    size, rewarding = draft.whole(tensor_parallel, 2), bool(draft.get("reward_model.enable", False))
    nodes, gpus = draft.whole("trainer.nnodes", 1), draft.whole("trainer.n_gpus_per_node", 8)
    if draft.verl.has_rollout_gpus and not rewarding:
        rollout_nodes, rollout_gpus = draft.whole("rollout.nnodes", 1), draft.whole("rollout.n_gpus_per_node", 8)
        shared = nodes == rollout_nodes and gpus + rollout_gpus <= _GPUS_OF_A_NODE
        nodes, gpus = (nodes, gpus + rollout_gpus) if shared else (nodes + rollout_nodes, max(gpus, rollout_gpus))
        layout, of = GpuLayout(max(rollout_nodes * rollout_gpus // size, 1), size), "those of trainer and rollout"
    else:
        layout, of = gpu_layout(nodes * gpus, size, rewarding), ""
    draft.put("cluster.node_num", nodes, of or "trainer.nnodes")
    draft.put("cluster.gpu_per_node", gpus, of or "trainer.n_gpus_per_node")
    if nodes > 1:
        draft.put("cluster.ray_address", "auto", "the cluster that veRL is started on")
    count = layout.engines * layout.tensor_parallel
    split = f"{count} of {nodes * gpus} GPUs sample; the trainer has the rest"
    draft.put(f"{ENGINE}.engine_num", layout.engines, split if nodes * gpus > 1 else "takes turns with the trainer")
    draft.put(f"{ENGINE}.tensor_parallel_size", layout.tensor_parallel, tensor_parallel)
    memory = draft.get(f"{ROLLOUT}.gpu_memory_utilization", 0.5)
    if not of and nodes * gpus == 1 and isinstance(memory, int | float) and memory > _SHARED:
        draft.put(f"{ENGINE}.gpu_memory_utilization", _SHARED, f"{memory}, but engine and trainer share the GPU")
    if rewarding:
        path = draft.path("reward_model.model.path", "${oc.env:HOME}/models/FsfairX-LLaMA3-RM-v0.1")
        draft.tree.setdefault("explorer", {})["auxiliary_models"] = [{
            "model_path": draft.written(path, "reward_model.model.path"),
            "engine_num": draft.written(layout.reward_models, "GPUs for the reward model"),
            "tensor_parallel_size": draft.written(1, ""),
        }]  # fmt: skip


def _restricted_sampling(draft: Draft) -> None:
    """With restricted sampling, log-probs are only available at temperature 1."""
    temperature = draft.get(f"{ROLLOUT}.temperature", 1.0)
    draft.put("model.min_response_tokens", 0, "veRL lets an answer end at once")
    for name, off in (("top_p", 1.0), ("top_k", -1)):
        key = f"{ROLLOUT}.{name}"
        value = draft.get(key, off)
        restricts = isinstance(value, int | float) and (value < 1 if name == "top_p" else value > 0)
        if restricts and temperature not in (0, 1):
            draft.put(f"model.{name}", off, key)
            draft.leave(key, f"with temperature {temperature} the engine gives log-probs of the whole vocabulary only")


def data_sets(draft: Draft, key: str, default: str, columns: dict[str, Any], suffix: str = "") -> list[dict[str, Any]]:
    """Return a data set for each path of `key`: one, or a list. It has the name of its folder or file."""
    listed = draft.path(key, default)
    sets: dict[str, dict[str, Any]] = {}
    for path in [str(path) for path in (listed if isinstance(listed, list) else [listed])]:
        parts, stem = PurePosixPath(path).parts, PurePosixPath(path.replace("???", "tasks")).stem or "tasks"
        name = parts[-2] if stem in ("train", "test", "validation", "val") and len(parts) > 1 else stem
        name = f"{name.replace('$', '').strip('{}').rpartition(':')[2]}{suffix}"
        name = name if name not in sets else f"{name}_{len(sets) + 1}"
        sets[name] = {
            "name": draft.written(name, ""),
            "storage_type": draft.written("file", ""),
            "path": draft.written(path, key),
            "format": columns,
        }
    return list(sets.values())


def _tasks(draft: Draft) -> None:
    answer = draft.get("data.response_key")
    columns = {
        "prompt_type": draft.written("messages", "as veRL's data sets are made"),
        "messages_key": draft.written(draft.get("data.prompt_key", "prompt"), "data.prompt_key"),
        "response_key": draft.written(
            answer or "reward_model.ground_truth", "data.response_key" if answer else "where veRL's rewards find it"
        ),
    }
    shuffled = draft.get("data.shuffle", True)
    order = {"selector_type": draft.written("shuffle" if shuffled else "sequential", "data.shuffle")}
    if (seed := draft.get("data.seed")) is not None:
        order["seed"] = draft.written(seed, "data.seed")
    reward, home = _reward(draft), "${oc.env:HOME}/data/rlhf/gsm8k"
    train = data_sets(draft, "data.train_files", f"{home}/train.parquet", columns)
    held_out = data_sets(draft, "data.val_files", f"{home}/test.parquet", columns, "_eval")
    sampled = _validation(draft)
    inputs = draft.tree.setdefault("buffer", {}).setdefault("explorer_input", {})
    trained: dict[str, Any] = {"task_selector": order} | reward
    if draft.get("algorithm.adv_estimator") == "remax":
        trained["default_workflow_type"] = draft.written("greedy_baseline_workflow", "algorithm.adv_estimator")
    inputs["tasksets"] = [tasks | trained for tasks in train]
    inputs["eval_tasksets"] = [tasks | sampled | reward for tasks in held_out]


def _validation(draft: Draft) -> dict[str, Any]:
    """Return the sampling arguments of an evaluation; greedy by default, as in veRL."""
    temperature, key = draft.get(f"{VALIDATION}.temperature", 0), f"{VALIDATION}.temperature"
    if not draft.get(f"{VALIDATION}.do_sample", False):
        temperature, key = 0, f"{VALIDATION}.do_sample"
    top_k = draft.get(f"{VALIDATION}.top_k", -1)
    sampling = {
        "temperature": draft.written(temperature, key),
        "top_p": draft.written(draft.get(f"{VALIDATION}.top_p", 1.0), f"{VALIDATION}.top_p"),
        "top_k": draft.written(-1 if top_k in (0, False) else top_k, f"{VALIDATION}.top_k"),
    }
    repeats = draft.written(draft.get(f"{VALIDATION}.n", 1), f"{VALIDATION}.n")
    return {"repeat_times": repeats, "rollout_args": sampling}


def _reward(draft: Draft) -> dict[str, Any]:
    """Return the reward function of all task sets. If none is named, it is the workflow's own, for mathematics."""
    manager = draft.get("reward_model.reward_manager", "naive")
    if draft.get("custom_reward_function.path") is not None:
        name = draft.get("custom_reward_function.name", "compute_score")
        draft.leave("custom_reward_function.path",
                    f"register {name} in a file of --plugin-dir, and name it as default_reward_fn_type")  # fmt: skip
    if draft.get("reward_model.enable", False):
        draft.put("buffer.explorer_input.default_workflow_type", "math_rm_workflow", "reward_model.enable")
        return {}
    if manager == "dapo":
        return _dapo(draft)
    if manager not in ("naive", "batch", "prime"):
        draft.leave("reward_model.reward_manager", "choose a reward as default_reward_fn_type (docs/rewards.md)")
    draft.remark("veRL chooses a reward by each row's data_source; here math_workflow scores with math_reward unless "
                 "buffer.explorer_input.default_reward_fn_type names another")  # fmt: skip
    return {}


def _dapo(draft: Draft) -> dict[str, Any]:
    arguments = {"wrong_score": draft.written(-1.0, "veRL's score of a wrong answer")}
    enabled, length, factor = (draft.get(f"{OVERLONG}.{name}") for name in ("enable", "len", "penalty_factor"))
    draft.used |= {f"{OVERLONG}.log", "reward_model.reward_kwargs.max_resp_len"}
    if enabled and length is not None:
        longest = draft.get("data.max_response_length", 512)
        arguments |= {
            "enable_overlong_penalty": draft.written(True, f"{OVERLONG}.enable"),
            "max_response_length": draft.written(longest, "data.max_response_length"),
            "cache_length": draft.written(length, f"{OVERLONG}.len"),
            "penalty_factor": draft.written(1.0 if factor is None else factor, f"{OVERLONG}.penalty_factor"),
        }
    reward = draft.written("math_dapo_reward", "reward_model.reward_manager")
    return {"default_reward_fn_type": reward, "reward_fn_args": arguments}


def _filter(draft: Draft) -> None:
    """Write DAPO's dynamic sampling: groups with equal rewards are dropped, and replaced by others."""
    key = "algorithm.filter_groups"
    rounds, metric = draft.get(f"{key}.max_num_gen_batches", 0), draft.get(f"{key}.metric")
    if not draft.get(f"{key}.enable", False):
        return
    operator = {"name": draft.written("dynamic_sampling", f"{key}.enable")}
    draft.tree["data_processor"] = {"experience_pipeline": {"operators": [operator]}}
    is_bounded = isinstance(rounds, int) and rounds > 0
    draft.put("explorer.max_refill_rounds", rounds - 1 if is_bounded else _UNBOUNDED, f"{key}.max_num_gen_batches")
    if metric not in (None, "seq_reward", "seq_final_reward"):
        draft.leave(f"{key}.metric", "groups are filtered by reward")
