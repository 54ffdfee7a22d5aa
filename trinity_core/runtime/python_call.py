"""`trinity_core.train`: a run from a script or a notebook, with rows and reward functions as Python objects.

Everything that the run needs is written below its folder, as a user would write it: `config.yaml`, the rows, and the
reward functions as a plugin. So every command works on the run: view, resume, evaluate.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.config import source
from trinity_core.config.yaml_text import dump
from trinity_core.errors import InputError, TrinityError, on_failure
from trinity_core.files import expanded, write_atomically
from trinity_core.runlock import RUN_TRAINS, held, is_held, lock_path
from trinity_core.workflows.rewards.base import name_of
from trinity_core.workflows.rewards.functions import PROMPT, Functions, accepted

if TYPE_CHECKING:
    from trinity_core.tracking.metrics_file import MetricLine
    from trinity_core.tracking.rollouts import SampledRollout

Row = Mapping[str, Any]
Rows = Iterable[Row] | str | Path
"""Rows (a list, a `datasets.Dataset`), or the path or hub name of a data set."""
Reward = Callable[..., Any] | str
LENGTHS = {"max_prompt_tokens": 512, "max_response_tokens": 256}
"""Lengths of a run whose settings give neither them nor `max_model_len`."""

PLUGIN = '''"""The reward functions that were given to `trinity_core.train`; their digest is {digest}."""

from pathlib import Path

from trinity_core.workflows.rewards.functions import register_functions

register_functions(Path(__file__).with_suffix(".pickle"), {name!r})
'''


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run."""

    folder: Path
    """Checkpoints, metrics, rollouts and logs."""
    config_file: Path
    """The `--config` for `trinity evaluate`, `run` and other commands."""
    summary: dict[str, Any]

    @property
    def model_folder(self) -> Path | None:
        """The trained model as a Hugging Face folder."""
        return Path(self.summary["hf_dir"]) if self.summary["hf_dir"] else None

    def metrics(self) -> list[MetricLine]:
        """Return all metrics, one line per step and source (`explorer`, `trainer`, `eval`)."""
        from trinity_core.tracking.metrics_file import read_metrics

        return read_metrics(self.folder)

    def samples(self) -> dict[int, list[SampledRollout]]:
        """Return explore step → some of its rollouts, with prompt, response, reward and its parts."""
        from trinity_core.tracking.rollouts import read_rollouts, rollout_files

        return {step: read_rollouts(path) for _, step, path in rollout_files(self.folder)}


def train(
    model: str | Path,
    rows: Rows,
    rewards: Reward | Sequence[Callable[..., Any]] | None = None,
    *,
    output_dir: str | Path,
    eval_rows: Rows | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = True,
) -> TrainResult:
    """Train `model` (a folder or hub name) on rows, and wait for the end.

    With `rewards`, train by reinforcement learning (GRPO, unless `settings` name another `algorithm.algorithm_type`).
    Each row has a `prompt`, a text or a list of messages, and any columns that the rewards read. `rewards` are
    functions in TRL's form, `f(completions, prompts, **columns) -> list of numbers`, whose values are summed, or the
    name of a registered reward function. Without `rewards`, train by DPO if rows have `chosen` and `rejected`, else by
    SFT on `messages` or on `prompt` and `completion`.

    `settings` are keys of a configuration, dotted or nested: `{"algorithm.repeat_times": 8}`. Everything is written
    below `output_dir`. A repeated call resumes from the latest checkpoint unless `resume` is false. Raises InputError
    for unsuitable rows or functions, ConfigError with every problem of the settings, TrinityError if another process
    trains below `output_dir`, and any error of the run.
    """
    from trinity_core.runtime.driver import run_configuration
    from trinity_core.runtime.preflight.checks import load_ready

    root = expanded(output_dir).absolute()
    with held(root, "train"):
        _refuse_in_progress(root)
        files: dict[Path, bytes] = {}
        tree = _with_settings(_configuration(root, str(model), rows, rewards, eval_rows, files), settings or {})
        tree["continue_from_checkpoint"] = resume
        config_file = root / "config.yaml"
        files[config_file] = dump(tree).encode()
        with _written(files):
            config = load_ready(config_file)
        summary = run_configuration(config, is_ready=True)
    # A run that starts over has its own folder.
    return TrainResult(config.with_values({"name": summary["name"]}).job_dir, config_file, summary)


def _refuse_in_progress(root: Path) -> None:
    """Raise TrinityError if a command trains a run below `root`, because it would load this call's rows and
    functions."""
    for lock in root.glob(f"checkpoints/*/*/{lock_path(root, RUN_TRAINS).name}"):
        if is_held(lock.parent, RUN_TRAINS):
            raise TrinityError(
                f"The run in {lock.parent} is in progress and reads its rows and rewards from {root}: wait for it or "
                "stop it, or give another output_dir",
                key="output_dir",
            )


@contextmanager
def _written(files: Mapping[Path, bytes]) -> Iterator[None]:
    """Write the files; if the block raises, restore what an earlier call wrote."""
    before = {file: file.read_bytes() if file.exists() else None for file in files}

    def restore() -> None:
        for file, earlier in before.items():
            if earlier is None:
                file.unlink(missing_ok=True)
            else:
                write_atomically(file, earlier)

    with on_failure(restore):
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content)
        yield


def _configuration(
    root: Path, model: str, rows: Rows, rewards: Reward | Sequence[Callable[..., Any]] | None, eval_rows: Rows | None,
    files: dict[Path, bytes],
) -> dict[str, Any]:  # fmt: skip
    """Return the configuration's tree; add the rows and functions that it names to `files`."""
    train_set = _data_set(root / "data" / "train.jsonl", rows, files)
    tree: dict[str, Any] = {
        "project": "trinity",
        "name": root.name,
        "checkpoint_root_dir": str(root / "checkpoints"),
        "model": {"model_path": model},
    }
    if rewards is None:
        if eval_rows is not None:
            raise InputError("eval_rows are answered and scored, which needs rewards", key="eval_rows")
        is_dpo = "chosen" in train_set.columns
        experiences = {"name": "train", **train_set.storage}
        tree |= {"mode": "train", "algorithm": {"algorithm_type": "dpo" if is_dpo else "sft"}}
        return tree | {"buffer": {"trainer_input": {"experience_buffer": experiences}}}
    if isinstance(rewards, str):
        name = rewards
    else:
        functions = _named([rewards] if callable(rewards) else rewards)
        if train_set.columns and PROMPT not in train_set.columns:
            raise InputError(
                f"rows for reward functions need a column 'prompt'; they have {', '.join(train_set.columns)}",
                key="prompt",
            )
        name = _plugin(root / "plugins", functions, train_set.columns, files)
        tree["plugin_dir"] = str(root / "plugins")
    tasks = {"default_workflow_type": "simple_workflow", "default_reward_fn_type": name}
    taskset = {"name": "train", **train_set.storage, **tasks}
    explorer_input: dict[str, Any] = {"taskset": taskset}
    if eval_rows is not None:
        eval_set = _data_set(root / "data" / "test.jsonl", eval_rows, files)
        explorer_input["eval_tasksets"] = [{"name": "test", **eval_set.storage, **tasks}]
    return tree | {"algorithm": {"algorithm_type": "grpo"}, "buffer": {"explorer_input": explorer_input}}


@dataclass(frozen=True, slots=True)
class _DataSet:
    storage: dict[str, Any]
    columns: tuple[str, ...]
    """Columns of the first row; () if it has not been read."""


def _data_set(file: Path, rows: Rows, files: dict[Path, bytes]) -> _DataSet:
    """Add rows to `files` as the contents of `file`.

    Raises InputError for rows that are not JSON, or that have different columns.
    """
    if isinstance(rows, str | Path):
        return _DataSet({"path": str(rows)}, ())
    lines: list[bytes] = []
    columns: tuple[str, ...] = ()
    form: dict[str, Any] = {}
    for number, row in enumerate(rows):
        columns = columns or tuple(row)
        form = form or _format(row)
        try:
            lines.append(json.dumps(_plain_turns(row)).encode() + b"\n")
        except (TypeError, ValueError) as error:
            raise InputError(f"row {number} has a value that cannot be written as JSON: {error}") from error
        if missing := [name for name in columns if name not in row]:
            raise InputError(f"row {number} has no column {missing[0]!r}, which row 0 has")
        if PROMPT in row and isinstance(row[PROMPT], str) != (form.get("prompt_type") != "messages"):
            raise InputError(f"row {number}: 'prompt' is {type(row[PROMPT]).__name__}, in row 0 it is another type")
    if not lines:
        raise InputError("there are no rows to train on")
    files[file] = b"".join(lines)
    return _DataSet({"path": str(file), "format": form}, columns)


def _format(row: Row) -> dict[str, Any]:
    """Return which columns hold what, in the formats that TRL knows. Raises InputError for other rows."""
    prompt, completion = row.get(PROMPT), row.get("completion")
    if "messages" in row or isinstance(completion, list):
        return {"prompt_type": "messages", "messages_key": "messages"}
    if isinstance(prompt, list):
        return {"prompt_type": "messages", "messages_key": PROMPT}
    if isinstance(prompt, str):
        return {"prompt_key": PROMPT, "response_key": "completion" if "completion" in row else "answer"}
    raise InputError(
        f"a row needs 'prompt' (a text or messages) or 'messages'; row 0 has {', '.join(row) or 'nothing'}"
    )


def _plain_turns(row: Row) -> dict[str, Any]:
    """Return the row; messages in `prompt` and `completion` are joined into one conversation."""
    if isinstance(row.get(PROMPT), list) and isinstance(row.get("completion"), list):
        rest = {name: value for name, value in row.items() if name not in (PROMPT, "completion")}
        return {"messages": [*row[PROMPT], *row["completion"]], **rest}
    return dict(row)


def _named(functions: Sequence[Callable[..., Any]]) -> Functions:
    """Return functions by name, which their metrics use. Raises InputError for a missing or repeated name."""
    named: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = name_of(function)
        if not name.isidentifier() or name in named:
            raise InputError(f"each reward function needs its own name (def name(…)); {function!r} has {name!r}")
        named[name] = function
    if not named:
        raise InputError("rewards is an empty list; give functions, or leave it out to train on the rows as examples")
    return named


def _plugin(folder: Path, functions: Functions, columns: Sequence[str], files: dict[Path, bytes]) -> str:
    """Add a plugin with the functions to `files`; return the name of the reward function that it registers."""
    import cloudpickle

    for name, function in functions.items():
        try:
            if columns:
                accepted(function, {name: [] for name in ("prompts", "completions", *columns) if name != PROMPT})
        except TypeError as error:
            raise InputError(
                f"the reward function {name}: {error}; it is given completions, prompts and the rows' columns by name",
                key=name,
            ) from error
        _take_along(function)
    # Plugins of two runs in one process need different module names.
    name = "rewards_" + hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    pickled = files[folder / f"{name}.pickle"] = cloudpickle.dumps(dict(functions))
    digest = hashlib.sha256(pickled).hexdigest()
    files[folder / f"{name}.py"] = PLUGIN.format(name=name, digest=digest).encode()
    return name


def _take_along(function: Callable[..., Any]) -> None:
    """Pickle a function of a user's module with its code, because other processes may not find the module."""
    import cloudpickle

    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    if not any(Path(file).is_relative_to(folder) for folder in installed):
        cloudpickle.register_pickle_by_value(module)


def _with_settings(tree: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in settings.items():
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        tree = source.merge(tree, nested)
    if "max_model_len" not in tree["model"]:
        tree["model"] = LENGTHS | tree["model"]
    return tree
