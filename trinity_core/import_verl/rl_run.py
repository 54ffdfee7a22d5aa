"""Converts veRL's reinforcement learning (main_ppo, main_dapo) to a draft, for keys that must be combined.

Follows the guide "align with veRL": a veRL mini-batch is a batch here, and a veRL step is `sync_interval` steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trinity_core.import_verl.algorithm import write_algorithm
from trinity_core.import_verl.draft import Draft, Written, whole
from trinity_core.import_verl.run_keys import DEFAULTS, ENGINE, ROLLOUT
from trinity_core.import_verl.tasks import write_filter, write_tasks

_ACTOR = "actor_rollout_ref.actor"
_PER_STEP = ("trainer.total_training_steps", "trainer.critic_warmup", f"{_ACTOR}.optim.lr_warmup_steps")
"""Keys that count veRL's trainer steps: of `data.train_batch_size` tasks or, if fully asynchronous, of
`require_batches` mini-batches."""
_PER_SYNC = ("trainer.save_freq", "trainer.test_freq")
"""Keys that count weight versions."""
_ASYNC, _MINI = "async_training", f"{_ACTOR}.ppo_mini_batch_size"
_IGNORED = ("checkpoint_engine", "use_trainer_do_validate")
GPUS_OF_A_NODE = 8
SHARED = 0.6
"""`gpu_memory_utilization` at which engine and trainer may share the only GPU."""


@dataclass(frozen=True)
class GpuLayout:
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
    rollouts = whole(draft, f"{ROLLOUT}.n", 1)
    interval = (_async_batches if draft.verl.is_fully_async else _batches)(draft, rollouts)
    if not write_algorithm(draft, rollouts, interval):
        draft.used |= {key for key in draft.verl.values if key.startswith("critic.")}
    write_adapter(draft, "actor_rollout_ref.model")
    steps = whole(draft, "async_training.require_batches", 1) if draft.verl.is_fully_async else interval
    draft.rows(DEFAULTS[""], dict.fromkeys(_PER_STEP, steps) | dict.fromkeys(_PER_SYNC, interval))
    _truncation(draft)
    write_tasks(draft, draft.get("data.max_response_length", 512))
    write_filter(draft)
    _gpus(draft)
    _micro_batches(draft)
    _restricted_sampling(draft)
    write_run(draft)
    if draft.get("trainer.val_only", False):
        draft.put("mode", "bench", "trainer.val_only")
    draft.absent()


def _tracker(value: Any) -> str | None:
    """Return the first of veRL's loggers that is supported here, or None."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    here = {"wandb": "wandb", "vemlp_wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}
    return next((here[name] for name in names if name in here), None)


def write_adapter(draft: Draft, section: str) -> None:
    """Write the LoRA adapter that a model section requests, with veRL's defaults."""
    names = {"lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "lora_adapter_path": None}
    asked = {name: draft.get(f"{section}.{name}", default) for name, default in names.items()}
    if asked["lora_rank"]:
        path = asked.pop("lora_adapter_path")
        entry = asked | ({"path": path} if path else {})
        draft.put("model.lora_configs", [entry], f"{section}.lora_rank, lora_alpha, target_modules")


def write_run(draft: Draft) -> None:
    loggers = draft.get("trainer.logger", ["console", "wandb"])
    if name := _tracker(loggers):
        draft.put("monitor.monitor_type", name, draft.origin("trainer.logger"))
    elif loggers not in ("console", ["console"]):
        draft.leave("trainer.logger", "trackers are mlflow, wandb and tensorboard; mlflow is used")
    resumes = draft.get("trainer.resume_mode")
    if resumes == "disable":
        draft.put("continue_from_checkpoint", False, "trainer.resume_mode")
    elif resumes == "resume_path":
        draft.leave(
            "trainer.resume_mode", "a run resumes from its own latest checkpoint; see model.model_path for others"
        )
        draft.used.add("trainer.resume_from_path")
    folder = draft.get("trainer.default_local_dir")
    if folder is not None:
        own = "/".join(str(draft.get(f"trainer.{name}")) for name in ("project_name", "experiment_name"))
        root = str(folder).removesuffix("/").removesuffix(own).removesuffix("/") or "."
        draft.put("checkpoint_root_dir", root, "trainer.default_local_dir; the run's folder is <project>/<name> in it")


def _batches(draft: Draft, rollouts: int) -> int:
    """Write batch sizes; return the number of gradient steps here per veRL step."""
    tasks, mini = whole(draft, "data.train_batch_size", 1024), whole(draft, f"{_ACTOR}.ppo_mini_batch_size", 256)
    mini = min(mini, tasks)
    interval = tasks // mini
    if tasks % mini:
        draft.remark(
            f"data.train_batch_size {tasks} is no multiple of ppo_mini_batch_size {mini}: "
            f"a step takes {interval * mini} tasks here"
        )
    draft.put("buffer.batch_size", mini, draft.origin(f"{_ACTOR}.ppo_mini_batch_size"))
    draft.put("buffer.train_batch_size", mini * rollouts, f"ppo_mini_batch_size * rollout.n = {mini} * {rollouts}")
    draft.put("synchronizer.sync_style", "fixed", "as veRL: explore, then train")
    ahead = draft.verl.has_rollout_gpus
    draft.put("synchronizer.sync_offset", interval if ahead else 0, "one step of veRL ahead" if ahead else "")
    draft.put("synchronizer.sync_interval", interval, f"data.train_batch_size / ppo_mini_batch_size = {tasks} / {mini}")
    return interval


def _async_batches(draft: Draft, rollouts: int) -> int:
    """Write batch sizes and weight sync; return the gradient steps between two syncs.

    A batch is one of veRL's mini-batches. A row sampled with version v may be trained on until the next sync; if
    rollouts run ahead by `staleness_threshold`, later by that share of the steps between two syncs.
    """
    mini = whole(draft, _MINI, 256)
    trigger, batches = (whole(draft, f"{_ASYNC}.{name}", usual) for name, usual in (
        ("trigger_parameter_sync_step", 4), ("require_batches", 1)
    ))  # fmt: skip
    threshold, partial = draft.get(f"{_ASYNC}.staleness_threshold", 0.1), draft.get(f"{_ASYNC}.partial_rollout", True)
    interval = trigger * batches
    draft.put("buffer.batch_size", mini, draft.origin(_MINI))
    draft.put("buffer.train_batch_size", mini * rollouts, f"ppo_mini_batch_size * rollout.n = {mini} * {rollouts}")
    draft.put("synchronizer.sync_interval", interval, "trigger_parameter_sync_step * require_batches")
    origin = draft.origin(f"{_ASYNC}.staleness_threshold")
    if threshold:
        draft.put("synchronizer.sync_style", "trainer_driven", origin)
        ahead = math.ceil(float(threshold) * interval)
        draft.put("synchronizer.max_staleness", interval - 1 + ahead, f"{origin}: {ahead} of {interval} steps ahead")
        draft.put("synchronizer.sync_in_flight", bool(partial), draft.origin(f"{_ASYNC}.partial_rollout"))
    else:
        draft.put("synchronizer.sync_style", "fixed", origin)
        draft.put("synchronizer.sync_offset", 0, "")
    if (samples := draft.get("rollout.total_rollout_steps")) is not None:
        total = max(whole(draft, "rollout.total_rollout_steps", 1) // mini, 1)
        draft.put(
            "buffer.total_steps", total, f"rollout.total_rollout_steps / ppo_mini_batch_size = {samples} / {mini}"
        )
    evaluated, frequency = draft.first(("rollout.test_freq", "trainer.test_freq"), 1)
    if frequency == -1:
        draft.put("explorer.eval_interval", 0, evaluated)
    else:
        origin = f"{evaluated} * sync_interval"
        draft.put("explorer.eval_interval", whole(draft, evaluated, 1) * interval, origin)
    ignored = {"data.train_batch_size", "data.gen_batch_size", "trainer.test_freq", "rollout.n", "rollout.total_epochs"}
    draft.used |= ignored | {
        key for key in draft.verl.values if key.startswith(tuple(f"{_ASYNC}.{n}" for n in _IGNORED))
    }
    return interval


def _truncation(draft: Draft) -> None:
    """Write prompt truncation: here, long prompts are rejected unless they are truncated; veRL filters them first."""
    dropped, way = draft.get("data.filter_overlong_prompts", False), draft.get("data.truncation", "error")
    origin = draft.origin("data.filter_overlong_prompts") if dropped or way == "error" else f"data.truncation={way}"
    draft.put("model.enable_prompt_truncation", not dropped and way != "error", origin)


def _gpus(draft: Draft) -> None:
    size = whole(draft, f"{ROLLOUT}.tensor_model_parallel_size", 2)
    rewarding = bool(draft.get("reward_model.enable", False))
    if draft.verl.has_rollout_gpus and not rewarding:
        _rollout_gpus(draft, size)
        return
    nodes, gpus = whole(draft, "trainer.nnodes", 1), whole(draft, "trainer.n_gpus_per_node", 8)
    layout = gpu_layout(nodes * gpus, size, rewarding)
    draft.put("cluster.node_num", nodes, draft.origin("trainer.nnodes"))
    draft.put("cluster.gpu_per_node", gpus, draft.origin("trainer.n_gpus_per_node"))
    if nodes > 1:
        draft.put("cluster.ray_address", "auto", "the cluster that veRL is started on")
    count = layout.engines * layout.tensor_parallel
    draft.put(
        f"{ENGINE}.engine_num",
        layout.engines,
        f"{count} of {nodes * gpus} GPUs sample all the time; the trainer has the rest",
    )
    origin = draft.origin(f"{ROLLOUT}.tensor_model_parallel_size")
    fewer = "" if layout.tensor_parallel == size else f": {size}, but the trainer needs GPUs of its own"
    draft.put(f"{ENGINE}.tensor_parallel_size", layout.tensor_parallel, f"{origin}{fewer}")
    memory = draft.get(f"{ROLLOUT}.gpu_memory_utilization", 0.5)
    if nodes * gpus == 1 and isinstance(memory, int | float) and memory > SHARED:
        draft.put(f"{ENGINE}.gpu_memory_utilization", SHARED, f"{memory}, but engine and trainer share the GPU")
    if rewarding:
        path = draft.path("reward_model.model.path", "${oc.env:HOME}/models/FsfairX-LLaMA3-RM-v0.1")
        model = {
            "model_path": Written(path, "reward_model.model.path"),
            "engine_num": Written(layout.reward_models, "GPUs for the reward model"),
            "tensor_parallel_size": Written(1, ""),
        }
        draft.tree.setdefault("explorer", {})["auxiliary_models"] = [model]


def _rollout_gpus(draft: Draft, size: int) -> None:
    """Write nodes and engines if `rollout` and `trainer` have separate GPUs. `size`: GPUs per engine."""
    of = {part: [whole(draft, f"{part}.{name}", usual) for name, usual in (("nnodes", 1), ("n_gpus_per_node", 8))]
          for part in ("trainer", "rollout")}  # fmt: skip
    (nodes, gpus), (rollout_nodes, rollout_gpus) = of["trainer"], of["rollout"]
    shared = nodes == rollout_nodes and gpus + rollout_gpus <= GPUS_OF_A_NODE
    nodes, gpus = (nodes, gpus + rollout_gpus) if shared else (nodes + rollout_nodes, max(gpus, rollout_gpus))
    draft.put("cluster.node_num", nodes, "trainer.nnodes and rollout.nnodes")
    draft.put("cluster.gpu_per_node", gpus, "trainer.n_gpus_per_node and rollout.n_gpus_per_node")
    if nodes > 1:
        draft.put("cluster.ray_address", "auto", "the cluster that veRL is started on")
    draft.put(f"{ENGINE}.engine_num", max(rollout_nodes * rollout_gpus // size, 1), "the GPUs of rollout")
    draft.put(f"{ENGINE}.tensor_parallel_size", size, draft.origin(f"{ROLLOUT}.tensor_model_parallel_size"))


def _micro_batches(draft: Draft) -> None:
    """veRL counts rows unless told to count tokens; here it is the other way round."""
    dynamic, rows = f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    if draft.verl.values.get(dynamic) is None and draft.verl.values.get(rows) is not None:
        draft.put("trainer.use_dynamic_bsz", False, f"{dynamic} (veRL's default)")


def _restricted_sampling(draft: Draft) -> None:
    """With restricted sampling, log-probs are only available at temperature 1."""
    temperature = draft.get(f"{ROLLOUT}.temperature", 1.0)
    draft.put("model.min_response_tokens", 0, "veRL lets an answer end at once")
    for name, off in (("top_p", 1.0), ("top_k", -1)):
        key = f"{ROLLOUT}.{name}"
        value = draft.get(key, off)
        restricts = isinstance(value, int | float) and (value < 1 if name == "top_p" else value > 0)
        if restricts and temperature not in (0, 1):
            draft.put(f"model.{name}", off, f"{key}={value} cannot go with temperature {temperature}")
            draft.leave(key, f"with temperature {temperature} the engine gives log-probs of the whole vocabulary only")
