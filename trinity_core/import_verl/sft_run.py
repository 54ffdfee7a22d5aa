"""Converts veRL's supervised fine-tuning (fsdp_sft_trainer, sft_trainer) to a draft."""

from __future__ import annotations

from typing import Any

from trinity_core.config.foreign.table import ROOT
from trinity_core.import_verl.draft import Draft, Written, whole
from trinity_core.import_verl.rl_run import write_adapter, write_run
from trinity_core.import_verl.run_keys import DEFAULTS
from trinity_core.import_verl.tasks import data_set_names, files


def write_supervised(draft: Draft) -> None:
    draft.put("mode", "train", "no explorer")
    draft.put("algorithm.algorithm_type", "sft", draft.verl.program)
    for key in ("data.val_files", "trainer.test_freq"):
        if draft.get(key) not in (None, -1):
            draft.leave(key, "the loss on held-out rows is not computed: evaluate checkpoints with `trinity evaluate`")
    write_adapter(draft, "model")
    draft.rows(DEFAULTS["sft"] | DEFAULTS.get(draft.verl.program.rpartition(".")[2], {}))
    _data(draft)
    _micro_batches(draft)
    _gpus(draft)
    write_run(draft)
    if draft.get("data.truncation") in ("left", "right"):
        draft.leave("data.truncation", "a row that is too long is rejected, not cut")
    draft.absent()


def _data(draft: Draft) -> None:
    paths = files(draft, "data.train_files", "${oc.env:HOME}/data/gsm8k/train.parquet")
    columns = _columns(draft)
    buffers = [
        {
            "name": Written(name, ""),
            "storage_type": Written("file", ""),
            "path": Written(path, draft.origin("data.train_files")),
            "format": columns,
        }
        for name, path in zip(data_set_names(paths), paths, strict=True)
    ]
    inputs = draft.tree.setdefault("buffer", {}).setdefault("trainer_input", {})
    inputs["experience_buffer"] = buffers[0]
    if len(buffers) > 1:
        share = {"share": Written(1.0, "rows of each file are equally likely")}
        names = data_set_names(paths)[1:]
        inputs["auxiliary_buffers"] = {name: buffer | share for name, buffer in zip(names, buffers[1:], strict=True)}


def _columns(draft: Draft) -> dict[str, Any]:
    """Return columns for one question and answer, or for a conversation."""
    several = draft.get("data.multiturn.enable", False)
    key, messages = draft.first(("data.messages_key", "data.multiturn.messages_key"), "messages")
    tools_key, tools = draft.first(("data.tools_key", "data.multiturn.tools_key"))
    pairs = {name: _column(draft, name) for name in ("prompt", "response")}
    if not several and (pairs["prompt"] or not key.startswith("data.messages") or "fsdp" in draft.verl.program):
        defaults = {"prompt": "question", "response": "answer"}
        return {
            f"{name}_key": Written(column or defaults[name], draft.origin(f"data.{name}_key"))
            for name, column in pairs.items()
        }
    columns: dict[str, Any] = {
        "prompt_type": Written("messages", key),
        "messages_key": Written(messages, draft.origin(key)),
        "enable_concatenated_multi_turn": Written(True, "veRL's loss is on every answer of a conversation"),
    }
    return columns | ({"tools_key": Written(tools, tools_key)} if tools else {})


def _column(draft: Draft, name: str) -> str | None:
    """Return a column, or a field within one: `prompt_key=extra_info` with `prompt_dict_keys=[question]`."""
    key, inner = draft.get(f"data.{name}_key"), draft.get(f"data.{name}_dict_keys")
    if isinstance(inner, list) and len(inner) == 1:
        return f"{key}.{inner[0]}"
    return key


def _micro_batches(draft: Draft) -> None:
    key, rows = draft.first(("data.micro_batch_size_per_gpu", "data.micro_batch_size"))
    if (
        draft.get("data.use_dynamic_bsz", draft.verl.program.endswith(".sft_trainer"))
        or not isinstance(rows, int)
        or rows < 1
    ):
        return
    draft.put("trainer.use_dynamic_bsz", False, key)
    draft.put(f"{ROOT}.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", rows, key)


def _gpus(draft: Draft) -> None:
    """Write GPUs and nodes, as given to torchrun or the trainer."""
    asked = {
        "node_num": ("nnodes", "trainer.nnodes", 1),
        "gpu_per_node": ("nproc_per_node", "trainer.n_gpus_per_node", 8),
    }
    for native, (option, key, default) in asked.items():
        count = draft.verl.launcher.get(option, "")
        if count.isdigit():
            draft.get(key)
            draft.put(f"cluster.{native}", int(count), f"torchrun --{option}")
        else:
            draft.put(f"cluster.{native}", whole(draft, key, default), draft.origin(key))
    if draft.tree["cluster"]["node_num"].value > 1:
        draft.put("cluster.ray_address", "auto", "the cluster that veRL is started on")
