"""Converts veRL's supervised fine-tuning (fsdp_sft_trainer, sft_trainer) to a draft."""

from __future__ import annotations

from typing import Any

from trinity_core.config.import_verl.draft import OFF, Draft
from trinity_core.config.import_verl.keys import DEFAULTS
from trinity_core.config.import_verl.reinforced import data_sets, write_run


def write_supervised(draft: Draft) -> None:
    draft.put("mode", "train", "no explorer")
    draft.put("algorithm.algorithm_type", "sft", f"program {draft.verl.program}")
    defaults = {**DEFAULTS["sft"], **DEFAULTS.get(draft.verl.program.rpartition(".")[2], {})}
    draft.rows(defaults)
    _data(draft)
    for native, option, key, default in (
        ("node_num", "nnodes", "trainer.nnodes", 1),
        ("gpu_per_node", "nproc_per_node", "trainer.n_gpus_per_node", 8),
    ):
        count = draft.verl.launcher.get(option, "")
        number = int(count) if count.isdigit() else draft.whole(key, default)
        draft.put(f"cluster.{native}", number, f"torchrun --{option}" if count else key)
        draft.used.add(key)
    if draft.tree["cluster"]["node_num"].value > 1:
        draft.put("cluster.ray_address", "auto", "the cluster that veRL is started on")
    write_run(draft, defaults)
    if draft.get("data.truncation") in ("left", "right"):
        draft.leave("data.truncation", "a row that is too long is rejected, not cut")
    draft.absent()


def _data(draft: Draft) -> None:
    home, columns = "${oc.env:HOME}/data/gsm8k", _columns(draft)
    first, *others = data_sets(draft, "data.train_files", f"{home}/train.parquet", columns)
    inputs = draft.tree.setdefault("buffer", {}).setdefault("trainer_input", {})
    inputs["experience_buffer"] = first
    further = [other | {"share": draft.written(1.0, "rows of each file are equally likely")} for other in others]
    if draft.verl.values.get("data.val_files") not in OFF:
        measured = data_sets(draft, "data.val_files", f"{home}/test.parquet", columns, "_eval")
        further += [buffer | {"held_out": draft.written(True, "its loss is measured")} for buffer in measured]
    if further:
        inputs["auxiliary_buffers"] = {buffer["name"].value: buffer for buffer in further}


def _columns(draft: Draft) -> dict[str, Any]:
    """Return columns for one question and answer, or for a conversation."""
    several = draft.get("data.multiturn.enable", False)
    key, messages = draft.first(("data.messages_key", "data.multiturn.messages_key"), "messages")
    tools_key, tools = draft.first(("data.tools_key", "data.multiturn.tools_key"))
    pairs = {}
    for name in ("prompt", "response"):  # a column, or a field within one: `prompt_dict_keys=[question]`
        column, inner = draft.get(f"data.{name}_key"), draft.get(f"data.{name}_dict_keys")
        pairs[name] = f"{column}.{inner[0]}" if isinstance(inner, list) and len(inner) == 1 else column
    if not several and (pairs["prompt"] or not key.startswith("data.messages") or "fsdp" in draft.verl.program):
        usual = {"prompt": "question", "response": "answer"}
        return {
            f"{name}_key": draft.written(column or usual[name], f"data.{name}_key") for name, column in pairs.items()
        }
    columns = {
        "prompt_type": draft.written("messages", f"by {key}"),
        "messages_key": draft.written(messages, key),
        "enable_concatenated_multi_turn": draft.written(True, "veRL's loss is on every answer of a conversation"),
    }
    return columns | ({"tools_key": draft.written(tools, tools_key)} if tools else {})
