"""`trinity_core.train`: a run from a script or a notebook, with rows and reward functions as Python objects.

Everything that the run needs is written below its folder, as a user would write it: `config.yaml`, the rows, and the
reward functions as a plugin. So every command works on the run: view, resume, evaluate.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_core.base.errors import InputError, TrinityError, on_failure
from trinity_core.base.files import expanded, private_folder, write_atomically
from trinity_core.base.processes import require_limits
from trinity_core.base.runlock import RUN_TRAINS, held, is_held, lock_path
from trinity_core.config import source
from trinity_core.config.foreign.names import TRL_SETTINGS
from trinity_core.config.yaml_text import dump
from trinity_core.data.messages import WEIGHT
from trinity_core.exchange.tracking.mlflow_root import default_uri
from trinity_core.workflows.rewards.base import name_of, number_of
from trinity_core.workflows.rewards.functions import PROMPT, Functions, Weighted, accepted

if TYPE_CHECKING:
    from trinity_core.exchange.tracking.metrics_file import MetricLine
    from trinity_core.exchange.tracking.rollouts import SampledRollout

Row = Mapping[str, Any]
Rows = Iterable[Row] | Mapping[str, Any] | str | Path
"""Rows (a list, a `datasets.Dataset`, a pandas DataFrame, columns by name), or the path or hub name of a data set."""
Reward = Callable[..., Any] | str
LENGTHS = {"max_prompt_tokens": 512, "max_response_tokens": 256}
"""Lengths of a run whose settings give neither them nor `max_model_len`."""

TRL_ARGUMENTS = {"reward_funcs": "rewards", "train_dataset": "rows", "eval_dataset": "eval_rows", "args": "settings"}
"""Arguments of TRL's trainers → arguments of `train`."""
LOGGERS = (__name__, "trinity_core.exchange.tracking.progress", "trinity_core.base.waits")
"""Loggers whose lines are printed: the start, steps and scores, long waits."""
log = logging.getLogger(__name__)

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

    def _repr_png_(self) -> bytes | None:
        """The curve of reward, score and loss, as notebooks show it."""
        curve = self.summary["curve"]
        return Path(curve).read_bytes() if curve else None

    def metrics(self) -> list[MetricLine]:
        """Return all metrics, one line per step and source (`explorer`, `trainer`, `eval`)."""
        from trinity_core.exchange.tracking.metrics_file import read_metrics

        return read_metrics(self.folder)

    def samples(self) -> dict[int, list[SampledRollout]]:
        """Return explore step → some of its rollouts, with prompt, response, reward and its parts."""
        from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files

        return {step: read_rollouts(path) for _, step, path in rollout_files(self.folder)}


@contextmanager
def _progress_on_screen() -> Iterator[None]:
    """Print progress to stderr, unless the program has set up logging itself."""
    screen = logging.StreamHandler()
    loggers = [logger for logger in map(logging.getLogger, LOGGERS) if not logger.hasHandlers()]
    for logger in loggers:
        logger.addHandler(screen)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(screen)


@_progress_on_screen()
def train(
    model: str | Path,
    rows: Rows,
    rewards: Reward | Sequence[Callable[..., Any]] | None = None,
    *,
    output_dir: str | Path,
    eval_rows: Rows | None = None,
    settings: Mapping[str, Any] | None = None,
    reward_weights: Sequence[float] | None = None,
    resume: bool = True,
    **unknown: Any,
) -> TrainResult:
    """Train `model` (a folder or hub name) on rows, and wait for the end.

    With `rewards`, train by reinforcement learning (GRPO, unless `settings` name another `algorithm.algorithm_type`).
    Each row has a `prompt`, a text or a list of messages, and any columns that the rewards read. `rewards` are
    functions in TRL's form, `f(completions, prompts, **columns) -> list of numbers`, whose values are summed, times
    their `reward_weights`, or the name of a registered reward function. Without `rewards`, train by DPO if rows have
    `chosen` and `rejected`, else by SFT on `messages` or on `prompt` and `completion`; every answer of a conversation
    carries loss, except those in `prompt`. Progress, long waits and scores are printed, unless the program has set up
    `logging`.

    `settings` are keys of a configuration, dotted or nested: `{"algorithm.repeat_times": 8}`. Everything is written
    below `output_dir`, except what `trinity up` in the current directory shows the run by: a link in its folder of runs
    (TRINITY_CHECKPOINT_ROOT_DIR, or `./checkpoints`), and MLflow's records there.

    A repeated call resumes from the latest checkpoint unless `resume` is false. Raises InputError for unsuitable rows
    or functions, for `unknown` arguments and names of TRL's, ConfigError with every problem of the settings,
    TrinityError if another process trains below `output_dir`, and any error of the run.
    """
    _refuse_foreign(settings or {}, unknown)
    log.info("Checking the configuration …")  # which imports much
    from trinity_core.exchange.tracking import mlflow_writer
    from trinity_core.run.driver import run_configuration
    from trinity_core.run.preflight.checks import load_ready

    require_limits()
    root = expanded(output_dir).absolute()
    with held(root, "train"):
        _refuse_in_progress(root)
        files: dict[Path, bytes] = {}
        tree = _configuration(root, str(model), rows, rewards, eval_rows, reward_weights, files)
        tree = _with_settings(tree, settings or {})
        tree["continue_from_checkpoint"] = resume
        shown = (Path.cwd() / expanded(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR") or "checkpoints")).absolute()
        shares = not _tracks_elsewhere(tree.get("monitor", {})) and not mlflow_writer.fault_of(None, shown)
        if shares:
            tree = source.merge(tree, {"monitor": {"monitor_args": {"uri": default_uri(shown)}}})
        config_file = root / "config.yaml"
        files[config_file] = dump(tree).encode()
        with _written(files):
            config = load_ready(config_file)
        _link(config.job_dir, shown)
        if shares:
            mlflow_writer.share_experiment(config.project, shown)
        summary = run_configuration(config, is_ready=True)
    # A run that starts over has its own folder.
    job_dir = config.with_values({"name": summary["name"]}).job_dir
    _link(job_dir, shown)
    return TrainResult(job_dir, config_file, summary)


def _tracks_elsewhere(monitor: Mapping[str, Any]) -> bool:
    return monitor.get("monitor_type", "mlflow") != "mlflow" or "uri" in monitor.get("monitor_args", {})


def _link(job_dir: Path, shown: Path) -> None:
    """Make a run visible in the folder of runs `shown`. A run of another folder keeps its name there."""
    digest = hashlib.sha256(str(job_dir).encode()).hexdigest()[:8]
    project = shown / job_dir.parent.name
    for link in (project / job_dir.name, project / f"{job_dir.name}_{digest}"):
        if link.resolve() == job_dir.resolve():
            return
        if not link.is_symlink() and not link.exists():
            private_folder(project)
            link.symlink_to(job_dir)
            return


def _refuse_foreign(settings: Mapping[str, Any], unknown: Mapping[str, Any]) -> None:
    """Raise InputError, with the names here, for all settings that are TRL's and all unknown arguments."""
    told = {name: f"TRL's {name} is here {TRL_SETTINGS[name]}" for name in settings if name in TRL_SETTINGS}
    for name in unknown:
        if name in TRL_ARGUMENTS:
            told[name] = f"TRL's {name} is here the argument {TRL_ARGUMENTS[name]}"
        elif name in TRL_SETTINGS:
            told[name] = f"TRL's {name} is here {TRL_SETTINGS[name]}, in `settings`"
        else:
            told[name] = f"train() has no argument {name}; keys of a configuration go into `settings`"
    if told:
        raise InputError(f"{'; '.join(told.values())} (docs/python.md)", key=next(iter(told)))


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
    originals = {file: file.read_bytes() if file.exists() else None for file in files}

    def restore() -> None:
        for file, earlier in originals.items():
            if earlier is None:
                file.unlink(missing_ok=True)
            else:
                write_atomically(file, earlier)

    with on_failure(restore):
        for file, content in files.items():
            private_folder(file.parent)
            write_atomically(file, content)
        yield


def _configuration(
    root: Path, model: str, rows: Rows, rewards: Reward | Sequence[Callable[..., Any]] | None, eval_rows: Rows | None,
    reward_weights: Sequence[float] | None, files: dict[Path, bytes],
) -> dict[str, Any]:  # fmt: skip
    """Return the configuration's tree; add the rows and functions that it names to `files`."""
    if reward_weights is not None and (rewards is None or isinstance(rewards, str)):
        raise InputError("reward_weights are those of reward functions, one each", key="reward_weights")
    train_set = _data_set(root / "data" / "train.jsonl", rows, files, has_rewards=rewards is not None)
    tree: dict[str, Any] = {
        "project": "trinity",
        "name": root.name,
        "checkpoint_root_dir": str(root / "checkpoints"),
        "model": {"model_path": model},
    }
    if rewards is None:
        is_dpo = "chosen" in train_set.columns
        inputs: dict[str, Any] = {"experience_buffer": {"name": "train", **train_set.storage}}
        if eval_rows is not None:
            eval_set = _data_set(root / "data" / "test.jsonl", eval_rows, files, has_rewards=False)
            inputs["auxiliary_buffers"] = {"test": {"held_out": True, **eval_set.storage}}
        tree |= {"mode": "train", "algorithm": {"algorithm_type": "dpo" if is_dpo else "sft"}}
        return tree | {"buffer": {"trainer_input": inputs}}
    if isinstance(rewards, str):
        name = rewards
    else:
        functions = _weighted(_named([rewards] if callable(rewards) else rewards), reward_weights)
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
        eval_set = _data_set(root / "data" / "test.jsonl", eval_rows, files, has_rewards=True)
        explorer_input["eval_tasksets"] = [{"name": "test", **eval_set.storage, **tasks}]
    return tree | {"algorithm": {"algorithm_type": "grpo"}, "buffer": {"explorer_input": explorer_input}}


@dataclass(frozen=True, slots=True)
class _DataSet:
    storage: dict[str, Any]
    columns: tuple[str, ...]
    """Columns of the first row; () if it has not been read."""


def _data_set(file: Path, rows: Rows, files: dict[Path, bytes], has_rewards: bool) -> _DataSet:
    """Add rows to `files` as the contents of `file`.

    Raises InputError for rows that are not JSON, that have different columns, or that no training here takes.
    """
    if isinstance(rows, str | Path):
        return _DataSet({"path": str(rows)}, ())
    lines: list[bytes] = []
    columns: tuple[str, ...] = ()
    form: dict[str, Any] = {}
    for number, row in enumerate(_listed(rows)):
        if not isinstance(row, Mapping):
            raise InputError(f"row {number} is {type(row).__name__}, not a dict of columns", key="rows")
        columns = columns or tuple(row)
        row = row if has_rewards else _with_turns(row)
        form = form or _format(row, has_rewards)
        if row.get("tools") is not None:
            form["tools_key"] = "tools"
        try:
            lines.append(json.dumps(dict(row) if has_rewards else _plain_turns(row)).encode() + b"\n")
        except (TypeError, ValueError) as error:
            raise InputError(f"row {number} has a value that cannot be written as JSON: {error}") from error
        if missing := [name for name in columns if name not in row]:
            raise InputError(f"row {number} has no column {missing[0]!r}, which row 0 has")
        reads_prompt = "prompt_key" in form or form.get("messages_key") == PROMPT
        if reads_prompt and PROMPT in row and isinstance(row[PROMPT], str) != (form.get("prompt_type") != "messages"):
            raise InputError(f"row {number}: 'prompt' is {type(row[PROMPT]).__name__}, in row 0 it is another type")
    if not lines:
        raise InputError("there are no rows to train on")
    files[file] = b"".join(lines)
    return _DataSet({"path": str(file), "format": form}, columns)


def _listed(rows: Iterable[Row] | Mapping[str, Any]) -> Iterable[Row]:
    """Return the rows of a table: a list, a Dataset, a DataFrame, or columns by name."""
    if hasattr(rows, "itertuples"):  # pandas iterates over the names of columns
        from datasets import Dataset

        return Dataset.from_pandas(rows, preserve_index=False)
    if not isinstance(rows, Mapping):
        return rows
    if any(hasattr(part, "column_names") for part in rows.values()):
        raise InputError(f"rows have the splits {', '.join(rows)}: choose one, as in rows[{min(rows)!r}]", key="rows")
    columns = {name: column for name, column in rows.items() if isinstance(column, list | tuple | np.ndarray)}
    lengths = {name: len(column) for name, column in columns.items()}
    if lengths.keys() != rows.keys() or len({*lengths.values()}) != 1:
        raise InputError(f"rows are a dict, but not of columns of equal length: {lengths or [*rows]}", key="rows")
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def _format(row: Row, has_rewards: bool) -> dict[str, Any]:
    """Return which columns hold what, in the formats that TRL knows. Raises InputError for other rows."""
    prompt, completion, preferred = row.get(PROMPT), row.get("completion"), row.get("chosen")
    if isinstance(row.get("label"), bool | int | np.bool_) and completion is not None and not has_rewards:
        raise InputError(
            "rows have a 'label' (KTO's form), and there is no training on single answers that are good or bad here: "
            "leave out the bad answers and the column for SFT, or give pairs 'chosen' and 'rejected' for DPO",
            key="label",
        )
    every_answer = {"enable_concatenated_multi_turn": not has_rewards}
    reads_prompt = PROMPT in row and (has_rewards or completion is not None or preferred is not None)
    if ("messages" in row and not reads_prompt) or (isinstance(completion, list) and not has_rewards):
        return {"prompt_type": "messages", "messages_key": "messages", **every_answer}
    if isinstance(prompt, list) or (prompt is None and isinstance(preferred, list)):
        return {"prompt_type": "messages", "messages_key": PROMPT}
    if isinstance(prompt, str):
        answers = ("answer", "completion") if has_rewards else ("completion", "answer")
        answer = next((name for name in answers if name in row), None)
        return {"prompt_key": PROMPT, **({"response_key": answer} if answer else {})}
    if isinstance(preferred, str):
        raise InputError("'chosen' and 'rejected' are texts: rows need their 'prompt' in a column", key=PROMPT)
    raise InputError(
        f"a row needs 'prompt' (a text or messages) or 'messages'; row 0 has {', '.join(row) or 'nothing'}"
    )


def _with_turns(row: Row) -> Row:
    """Return the row; a `prompt` that is a text beside answers that are messages becomes a message too."""
    if isinstance(row.get(PROMPT), str) and any(isinstance(row.get(name), list) for name in ("completion", "chosen")):
        return {**row, PROMPT: [{"role": "user", "content": row[PROMPT]}]}
    return row


def _plain_turns(row: Row) -> dict[str, Any]:
    """Return the row; messages in `prompt` and `completion` are joined into one conversation, in which the answers of
    the prompt carry no loss."""
    if isinstance(row.get(PROMPT), list) and isinstance(row.get("completion"), list):
        rest = {name: value for name, value in row.items() if name not in (PROMPT, "completion")}
        asked = [turn | {WEIGHT: 0} if turn.get("role") == "assistant" else turn for turn in row[PROMPT]]
        return rest | {"messages": [*asked, *row["completion"]]}
    return dict(row)


def _weighted(functions: Functions, weights: Sequence[float] | None) -> Functions:
    """Return functions whose values are multiplied by `weights`."""
    if weights is None:
        return functions
    if len(weights) != len(functions):
        raise InputError(f"there are {len(weights)} reward_weights for {len(functions)} rewards", key="reward_weights")
    if "accuracy" in functions:  # pass rates and evaluations read it
        raise InputError("'accuracy' is a share of right answers: give it another name to weigh it", key="accuracy")
    try:
        numbers = [number_of(weight, "reward_weights") for weight in weights]
    except (TypeError, ValueError) as error:
        raise InputError(f"reward_weights are numbers, but {error}", key="reward_weights") from error
    pairs = zip(functions.items(), numbers, strict=True)
    return {name: Weighted(function, weight) for (name, function), weight in pairs}


def _named(functions: Sequence[Callable[..., Any]]) -> Functions:
    """Return functions by name, which their metrics use. Raises InputError for a missing or repeated name."""
    by_name: dict[str, Callable[..., Any]] = {}
    for function in functions:
        if not callable(function):
            raise InputError(f"rewards are functions, or one name of a reward; {function!r} is neither", key="rewards")
        name = name_of(function)
        if not name.isidentifier() or name in by_name:
            raise InputError(f"each reward function needs its own name (def name(…)); {function!r} has {name!r}")
        by_name[name] = function
    if not by_name:
        raise InputError("rewards is an empty list; give functions, or leave it out to train on the rows as examples")
    return by_name


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

    while isinstance(function, functools.partial | Weighted):
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
        tree = source.merge(tree, source.nested(key, value))
    if "max_model_len" not in tree["model"]:
        tree["model"] = LENGTHS | tree["model"]
    return tree
