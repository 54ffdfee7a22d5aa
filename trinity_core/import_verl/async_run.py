"""veRL's runs with separate GPUs for rollouts: `fully_async_policy` and `one_step_off_policy`.

Follows veRL's docs/advance/fully_async.md and docs/advance/one_step_off.md.
"""

from __future__ import annotations

import math

from trinity_core.import_verl.draft import Draft, whole
from trinity_core.import_verl.run_keys import ENGINE, ROLLOUT

_ASYNC, _MINI = "async_training", "actor_rollout_ref.actor.ppo_mini_batch_size"
_IGNORED = ("checkpoint_engine", "use_trainer_do_validate")
GPUS_OF_A_NODE = 8


def is_fully_async(draft: Draft) -> bool:
    """True if the trainer takes batches as they arrive."""
    return "fully_async" in draft.verl.program


def has_rollout_gpus(draft: Draft) -> bool:
    return is_fully_async(draft) or "one_step_off" in draft.verl.program


def write_async_batches(draft: Draft, rollouts: int) -> int:
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
    draft.put(
        "explorer.eval_interval", whole(draft, "rollout.test_freq", 1) * interval, "rollout.test_freq * sync_interval"
    )
    ignored = {"data.train_batch_size", "data.gen_batch_size", "trainer.test_freq", "rollout.n", "rollout.total_epochs"}
    draft.used |= ignored | {
        key for key in draft.verl.values if key.startswith(tuple(f"{_ASYNC}.{n}" for n in _IGNORED))
    }
    return interval


def bypasses_async(draft: Draft) -> str:
    """Return the key that makes the rollouts' log-probs the old ones, or ""."""
    computed = draft.get(f"{_ASYNC}.compute_prox_log_prob", False)
    own = draft.get(f"{_ASYNC}.use_rollout_log_probs", True)
    return draft.origin(f"{_ASYNC}.use_rollout_log_probs") if is_fully_async(draft) and own and not computed else ""


def write_rollout_gpus(draft: Draft, size: int) -> None:
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
