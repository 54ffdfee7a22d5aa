"""Task sets, rewards and filters of a veRL run."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from trinity_core.import_verl.draft import Draft, Written
from trinity_core.import_verl.run_keys import ROLLOUT

_INPUT = "buffer.explorer_input"
_UNBOUNDED = 99
"""Number of rounds instead of veRL's 0, which means unlimited."""


def files(draft: Draft, key: str, default: str) -> list[str]:
    """Return the paths of `data.train_files` or `data.val_files`: one, or a list; an empty list counts as not given."""
    paths = draft.path(key, default)
    return [str(path) for path in (paths if isinstance(paths, list) else [paths])]


def data_set_names(paths: list[str], suffix: str = "") -> list[str]:
    """Return a unique name for each data set: its folder's, or its file's."""
    names: list[str] = []
    for path in paths:
        parts = PurePosixPath(path).parts
        last = PurePosixPath(path.replace("???", "tasks")).stem or "tasks"
        name = parts[-2] if last in ("train", "test", "validation", "val") and len(parts) > 1 else last
        name = f"{name.replace('$', '').strip('{}').rpartition(':')[2]}{suffix}"
        names.append(name if name not in names else f"{name}_{len(names) + 1}")
    return names


def write_tasks(draft: Draft, responses: Any) -> None:
    columns = _columns(draft)
    shuffled = draft.get("data.shuffle", True)
    order: dict[str, Any] = {
        "selector_type": Written("shuffle" if shuffled else "sequential", draft.origin("data.shuffle"))
    }
    if (seed := draft.get("data.seed")) is not None:
        order["seed"] = Written(seed, "data.seed")
    reward = _reward(draft, responses)
    home = "${oc.env:HOME}/data/rlhf/gsm8k"
    train = files(draft, "data.train_files", f"{home}/train.parquet")
    held_out = files(draft, "data.val_files", f"{home}/test.parquet")
    sampled = _validation(draft)
    _put(draft, "tasksets", [
        _taskset(name, path, draft.origin("data.train_files"), columns) | {"task_selector": order} | reward
        for name, path in zip(data_set_names(train), train, strict=True)
    ])  # fmt: skip
    _put(draft, "eval_tasksets", [
        _taskset(name, path, draft.origin("data.val_files"), columns) | sampled | reward
        for name, path in zip(data_set_names(held_out, "_eval"), held_out, strict=True)
    ])  # fmt: skip


def write_filter(draft: Draft) -> None:
    """Write DAPO's dynamic sampling: groups with equal rewards are dropped, and replaced by others."""
    key = "algorithm.filter_groups"
    rounds, metric = draft.get(f"{key}.max_num_gen_batches", 0), draft.get(f"{key}.metric")
    if not draft.get(f"{key}.enable", False):
        return
    operator = {"name": Written("dynamic_sampling", f"{key}.enable")}
    draft.tree["data_processor"] = {"experience_pipeline": {"operators": [operator]}}
    known = isinstance(rounds, int) and rounds > 0
    draft.put("explorer.max_refill_rounds", rounds - 1 if known else _UNBOUNDED, f"{key}.max_num_gen_batches")
    if metric not in (None, "seq_reward", "seq_final_reward"):
        draft.leave(f"{key}.metric", "groups are filtered by reward")


def _put(draft: Draft, name: str, tasksets: list[dict[str, Any]]) -> None:
    draft.tree.setdefault("buffer", {}).setdefault("explorer_input", {})[name] = tasksets


def _taskset(name: str, path: str, origin: str, columns: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": Written(name, ""),
        "storage_type": Written("file", ""),
        "path": Written(path, origin),
        "format": columns,
    }


def _columns(draft: Draft) -> dict[str, Any]:
    """Return the columns of veRL's data sets: lists of messages, and the reference answer within `reward_model`."""
    answer = draft.get("data.response_key")
    return {
        "prompt_type": Written("messages", "as veRL's data sets are made"),
        "messages_key": Written(draft.get("data.prompt_key", "prompt"), "data.prompt_key"),
        "response_key": Written(
            answer or "reward_model.ground_truth", "data.response_key" if answer else "where veRL's rewards find it"
        ),
    }


def _validation(draft: Draft) -> dict[str, Any]:
    """Return the sampling arguments of an evaluation; greedy by default, as in veRL."""
    key = f"{ROLLOUT}.val_kwargs"
    count = draft.get(f"{key}.n", 1)
    sampling: dict[str, Any] = {}
    temperature, sampled = draft.get(f"{key}.temperature", 0), draft.get(f"{key}.do_sample", False)
    sampling["temperature"] = Written(
        temperature if sampled else 0, f"{key}.temperature" if sampled else f"{key}.do_sample=False"
    )
    for name, off in (("top_p", 1.0), ("top_k", -1)):
        value = draft.get(f"{key}.{name}", off)
        if name == "top_k" and isinstance(value, int) and value <= 0:
            value = off
        sampling[name] = Written(value, f"{key}.{name}")
    return {"repeat_times": Written(count, f"{key}.n"), "rollout_args": sampling}


def _reward(draft: Draft, responses: Any) -> dict[str, Any]:
    """Return the reward function of all task sets. If none is named, it is the workflow's own, for mathematics."""
    enabled = draft.get("reward_model.enable", False)
    manager = draft.get("reward_model.reward_manager", "naive")
    path = draft.get("custom_reward_function.path")
    if path is not None:
        name = draft.get("custom_reward_function.name", "compute_score")
        reason = f"register {name} in a file of --plugin-dir and name it as default_reward_fn_type (docs/rewards.md)"
        draft.leave("custom_reward_function.path", reason)
    if enabled:
        draft.put(f"{_INPUT}.default_workflow_type", "math_rm_workflow", "reward_model.enable=True")
        return {}
    if manager == "dapo":
        return _dapo(draft, responses)
    if manager not in ("naive", "batch", "prime"):
        draft.leave("reward_model.reward_manager", "choose a reward as default_reward_fn_type (docs/rewards.md)")
    draft.remark(
        "veRL chooses a reward by each row's data_source; here math_workflow scores with math_reward unless "
        "buffer.explorer_input.default_reward_fn_type names another"
    )
    return {}


def _dapo(draft: Draft, responses: Any) -> dict[str, Any]:
    places = (
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
        "custom_reward_function.overlong_buffer",
    )
    arguments: dict[str, Any] = {"wrong_score": Written(-1.0, "veRL's score of a wrong answer")}
    for place in places:
        enabled, length, factor = (draft.get(f"{place}.{name}") for name in ("enable", "len", "penalty_factor"))
        draft.get(f"{place}.log")
        if enabled and length is not None:
            arguments |= {
                "enable_overlong_penalty": Written(True, f"{place}.enable"),
                "max_response_length": Written(responses, "data.max_response_length"),
                "cache_length": Written(length, f"{place}.len"),
                "penalty_factor": Written(1.0 if factor is None else factor, f"{place}.penalty_factor"),
            }
    draft.get("reward_model.reward_kwargs.max_resp_len")
    return {
        "default_reward_fn_type": Written("math_dapo_reward", "reward_model.reward_manager=dapo"),
        "reward_fn_args": arguments,
    }
