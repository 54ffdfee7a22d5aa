"""A task pipeline: rows of data sets, through operators, to a data set on disk. See docs/data.md.

Rows are streamed in chunks: memory holds one chunk, whatever the size of the data set (a `.json` file, unlike `.jsonl`,
is read as a whole). The output is `<root>/<fingerprint>/`; `dataset.json` is written last and marks it as complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from trinity_core.base.errors import DataError, EndpointError, ModelError, TransientFault
from trinity_core.base.files import (
    clear_errors,
    from_record,
    private_folder,
    read_json,
    remove_leftovers,
    sync_file,
    temporary_sibling,
    write_json,
)
from trinity_core.base.runlock import lock_path, one_at_a_time
from trinity_core.config import AuxiliaryModelConfig, Config, OperatorConfig
from trinity_core.config.paths import output_root, reads_output, uses_pipeline
from trinity_core.config.schema.buffer import TasksetConfig
from trinity_core.data.files import RejectedRow, Row, RowLocation, data_files, is_slice, stream_rows
from trinity_core.data.rejected import LISTED
from trinity_core.data.values import number_of
from trinity_core.pipelines.data_juicer.client import Processes
from trinity_core.pipelines.data_juicer.local import closing_data_juicer
from trinity_core.pipelines.tasks.models import TaskModels, own_model
from trinity_core.pipelines.tasks.progress import PipelineProgress
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, TaskOperator, Unusable, fingerprint

log = logging.getLogger(__name__)

CHUNK = 1024
"""Rows between commits: at most this many are processed again after a kill."""
LOCK = "curate"
WAIT_SECONDS = 3600.0
"""Time to wait for a data set that another run creates; after that the flow is retried, and waits again."""
Located = tuple[RowLocation, Row]


@dataclass(frozen=True)
class TaskPipeline:
    """Inputs, operators and size of the output."""

    inputs: Sequence[str]
    """Local files, or folders whose files are named by split."""
    operators: Sequence[OperatorConfig] = ()
    split: str = "train"
    columns: Sequence[str] = ()
    """Columns of the inputs to keep; empty: all."""
    priority_weights: Mapping[str, float] = field(default_factory=dict)
    """Numeric column → weight; rows are sorted by the weighted sum, highest first. Empty: unsorted."""
    target_size: int | None = None
    """Maximum number of output rows, the first in that order; None: all."""
    max_rejected_share: float = 1.0
    """Maximum share of rows that may be rejected."""
    test_share: float = 0.0
    """Approximate share of the rows for the split `test`; the choice depends on their contents and `seed`."""
    seed: int = 0
    models: Mapping[str, str] = field(default_factory=dict)
    """Models of the configuration that operators ask: name → path, which is part of the fingerprint."""


@dataclass(frozen=True)
class CuratedDataset:
    folder: Path
    fingerprint: str
    rows: int
    test_rows: int
    read: int
    rejected: int
    """Rejected rows, in `rejected.jsonl` with file, line and reason."""
    dropped: dict[str, int]


def curate(
    pipeline: TaskPipeline,
    root: Path,
    models: TaskModels | None = None,
    data_juicer: Processes | None = None,
    plugin_dir: str | None = None,
) -> CuratedDataset:
    """Return the pipeline's data set below `root`: read if it exists, continued if it was begun, otherwise created.

    `models` answer operators that ask some; `data_juicer` has Data-Juicer's operators; workers that score answers
    import `plugin_dir`.

    Waits while another process or thread creates it. Raises TrinityError if an input is missing, an operator does not
    exist, too many rows are rejected, or no row is left; TransientFault if the wait gets too long.
    """
    operators = [
        made_operator(config, number, models, data_juicer, plugin_dir)
        for number, config in enumerate(pipeline.operators, 1)
    ]
    files = [file for path in pipeline.inputs for file in data_files(path, pipeline.split)]
    choices = {
        "columns": list(pipeline.columns),
        "priority_weights": dict(pipeline.priority_weights),
        "target_size": pipeline.target_size,
        "max_rejected_share": pipeline.max_rejected_share,
        "split": [pipeline.test_share, pipeline.seed],
        **({"slice": pipeline.split} if is_slice(pipeline.split) else {}),
        **({"models": dict(pipeline.models)} if pipeline.models else {}),
    }
    name = fingerprint(files, pipeline.operators, operators, choices)
    folder = root / name
    if finished := _finished(folder):
        return finished
    with clear_errors("making", folder, "choose another folder"):
        private_folder(folder)
    with one_at_a_time(lock_path(folder, LOCK), WAIT_SECONDS):
        return _finished(folder) or _run(pipeline, operators, folder, name)


def _finished(folder: Path) -> CuratedDataset | None:
    path = folder / "dataset.json"
    record = read_json(path)
    return from_record(CuratedDataset, record | {"folder": folder}, path) if record else None


def made_operator(
    configured: OperatorConfig,
    number: int = 1,
    models: TaskModels | None = None,
    data_juicer: Processes | None = None,
    plugin_dir: str | None = None,
) -> TaskOperator:
    """Create the operator, labelled by its position and name, so that operators of one kind have separate memories.

    Raises TrinityError for an unknown name and for arguments that do not fit each other.
    """
    kind = TASK_OPERATORS.resolve(configured.name)
    available = {"models": models, "data_juicer_server": data_juicer, "plugin_dir": plugin_dir}
    inputs = {name: value for name, value in available.items() if TASK_OPERATORS.uses(configured.name, name)}
    operator = kind(**{**configured.args, **inputs})
    operator.label = f"{number} {configured.name}"
    return operator


def _run(pipeline: TaskPipeline, operators: Sequence[TaskOperator], folder: Path, name: str) -> CuratedDataset:
    remove_leftovers(folder)
    progress = PipelineProgress(folder / "progress.db")
    try:
        for operator in operators:
            operator.start()
        if begun := progress.read:
            log.info("%s continues after %d rows", folder, begun)
        everything = (located for path in pipeline.inputs for located in stream_rows(path, pipeline.split))
        rows = islice(everything, begun, None)
        while chunk := list(islice(rows, CHUNK)):
            with progress.chunk():
                _chunk(pipeline, operators, chunk, progress)
                if len(chunk) == CHUNK and progress.rejected == progress.read:
                    raise DataError(
                        f"task pipeline: none of the first {progress.read} rows can be used: {_first(progress)}"
                    )
        _check(pipeline, progress)
        splits = ("train", "test") if pipeline.test_share else ("train",)
        written = {split: _write(folder / f"{split}.jsonl", _of(split, pipeline, progress)) for split in splits}
        if empty := [split for split, rows in written.items() if not rows]:
            raise DataError(
                f"task pipeline: split '{empty[0]}' has no row, as {progress.kept} are left and test_share is "
                f"{pipeline.test_share:g}",
                key="test_share",
            )
        dataset = CuratedDataset(
            folder, name, written["train"], written.get("test", 0), progress.read, progress.rejected, progress.dropped
        )
        _write(folder / "rejected.jsonl", map(_rejected_line, progress.set_aside()))
    finally:
        for operator in operators:
            operator.close()
        progress.close()
    write_json(folder / "dataset.json", {key: value for key, value in vars(dataset).items() if key != "folder"})
    (folder / "progress.db").unlink()
    return dataset


def _chunk(
    pipeline: TaskPipeline, operators: Sequence[TaskOperator], chunk: Sequence[tuple[RowLocation, Row | str]],
    progress: PipelineProgress,
) -> None:  # fmt: skip
    progress.advance(len(chunk))
    located: list[Located] = []
    for location, row in chunk:
        if isinstance(row, str):
            progress.reject(RejectedRow(location, row))
        elif missing := [column for column in pipeline.columns if column not in row]:
            progress.reject(RejectedRow(location, f"the row has no column '{missing[0]}'"))
        else:
            located.append((location, {column: row[column] for column in pipeline.columns or row}))
    for operator in operators:
        located = _operated(operator, located, progress)
    for location, row in located:
        try:
            progress.keep(row, _priority(row, pipeline.priority_weights))
        except (
            DataError,
            TypeError,
            ValueError,
        ) as error:  # the latter two: a value that JSON or UTF-8 cannot represent
            progress.reject(RejectedRow(location, str(error)))


def _operated(operator: TaskOperator, located: Sequence[Located], progress: PipelineProgress) -> list[Located]:
    """Apply an operator; rows on which it fails alone are rejected."""
    try:
        with progress.attempt():
            rows = [row for _, row in located]
            results = operator.rows(rows, progress)
            if len(results) != len(rows):
                raise DataError(f"the operator gave {len(results)} results for {len(rows)} rows")
            unusable = [
                (location, outcome.why)
                for (location, _), outcome in zip(located, results, strict=True)
                if isinstance(outcome, Unusable)
            ]
            kept = [
                (location, row)
                for (location, _), outcome in zip(located, results, strict=True)
                if not isinstance(outcome, Unusable)
                for row in outcome
            ]
            dropped = sum(outcome == [] for outcome in results)
    except (TransientFault, EndpointError, ModelError):  # no row is at fault
        raise
    except Exception as error:
        if len(located) == 1:
            log.warning("%s: %s fails: %s", located[0][0], operator.label, error)
            reason = f"{operator.label}: {type(error).__name__}: {error}"
            progress.reject(RejectedRow(located[0][0], reason))
            return []
        log.debug("%s fails with a chunk; its rows are tried one by one", operator.label, exc_info=error)
        return [left for row in located for left in _operated(operator, [row], progress)]
    if dropped:
        progress.drop(operator.label, dropped)
    for location, why in unusable:
        progress.reject(RejectedRow(location, f"{operator.label}: {why}"))
    return kept


def _priority(row: Row, weights: Mapping[str, float]) -> float:
    total = 0.0
    for key, weight in weights.items():
        number = number_of(row.get(key))
        if number is None:
            raise DataError(f"priority_weights: the row has no number in the column '{key}'", key=key)
        total += weight * number
    return total


def _of(split: str, pipeline: TaskPipeline, progress: PipelineProgress) -> Iterator[str]:
    """Yield the rows of a split as JSON. A number in [0, 1) derived from a row's text puts it in the test split or
    not."""
    for text in progress.ordered(pipeline.target_size):
        digest = hashlib.sha256(f"{pipeline.seed} {text}".encode()).digest()
        is_test = int.from_bytes(digest[:8], "big") / 2**64 < pipeline.test_share
        if is_test == (split == "test"):
            yield text


def _check(pipeline: TaskPipeline, progress: PipelineProgress) -> None:
    rejected, read = progress.rejected, progress.read
    first = _first(progress)
    if rejected > pipeline.max_rejected_share * read:
        raise DataError(
            f"task pipeline: {rejected} of {read} rows cannot be used, more than max_rejected_share = "
            f"{pipeline.max_rejected_share:g} allows: {first}",
            key="max_rejected_share",
        )
    if not read:
        raise DataError(
            f"task pipeline: {', '.join(pipeline.inputs)} holds no row in split '{pipeline.split}'", key="split"
        )
    if not progress.kept:
        lost = ", ".join(f"{number} by {operator}" for operator, number in progress.dropped.items())
        raise DataError(f"task pipeline: no row of {read} is left; dropped: {lost or 'none'}; rejected: {first or 0}")


def _first(progress: PipelineProgress) -> str:
    return "; ".join(f"{source}:{line}: {reason}" for source, line, reason in progress.set_aside(LISTED))


def _rejected_line(rejected: tuple[str, int, str]) -> str:
    return json.dumps(dict(zip(("source", "line", "reason"), rejected, strict=True)), ensure_ascii=False)


def _write(path: Path, lines: Iterator[str]) -> int:
    temporary = temporary_sibling(path)
    with clear_errors("writing", path, "choose another folder"):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                number = sum(file.write(f"{line}\n") > 0 for line in lines)
            sync_file(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return number


def configured_pipeline(config: Config) -> TaskPipeline:
    pipeline = config.data_processor.task_pipeline
    assert pipeline is not None, "only a configuration with a task pipeline has one"
    return TaskPipeline(
        inputs=pipeline.inputs,
        operators=pipeline.operators,
        split=pipeline.split,
        columns=pipeline.target_fields,
        priority_weights=pipeline.priority_weights,
        target_size=None if pipeline.top_k < 0 else pipeline.top_k,
        max_rejected_share=config.buffer.max_rejected_share,
        test_share=pipeline.test_share,
        seed=config.seed,
        models={name: model.model_path for name, model in asked_models(config).items()},
    )


def asked_models(config: Config) -> dict[str, AuxiliaryModelConfig]:
    """Return the configuration's models that operators of its task pipeline ask, by the names that these use."""
    pipeline = config.data_processor.task_pipeline
    asked = (model for operator in (pipeline.operators if pipeline else ()) for model in made_operator(operator).asks)
    models = {model.name: own_model(config, model) for model in asked}
    return {name: model for name, model in models.items() if model is not None}


def curated_tasks(config: Config, models: TaskModels | None = None) -> CuratedDataset:
    """Return the output of the configuration's pipeline: created, continued, or found. Raises TrinityError as `curate`
    does."""
    with closing_data_juicer(config) as data_juicer:
        pipeline, root = configured_pipeline(config), output_root(config)
        dataset = curate(pipeline, root, models, data_juicer, config.plugin_dir)
    lost = "".join(f", {number} dropped by {operator}" for operator, number in dataset.dropped.items())
    aside = f", {dataset.rejected} rejected ({dataset.folder / 'rejected.jsonl'})" if dataset.rejected else ""
    test = f" and {dataset.test_rows} for tests" if dataset.test_rows else ""
    log.info("Curated tasks: %d of %d rows%s in %s%s%s", dataset.rows, dataset.read, test, dataset.folder, lost, aside)
    return dataset


def with_curated_tasks(config: Config, models: TaskModels | None = None) -> Config:
    """Return the configuration in which task sets read the pipeline's output, if a task set of this run does.

    The folder's name is the output's fingerprint, so that a run's own configuration records its input.
    """
    if not uses_pipeline(config):
        return config
    folder = str(curated_tasks(config, models).folder)
    explorer_input = config.buffer.explorer_input

    def reading(tasksets: Sequence[TasksetConfig]) -> list[TasksetConfig]:
        return [
            taskset.with_values({"path": folder}) if reads_output(config, taskset) else taskset for taskset in tasksets
        ]

    return config.with_values(
        {
            "buffer.explorer_input.tasksets": reading(explorer_input.tasksets),
            "buffer.explorer_input.eval_tasksets": reading(explorer_input.eval_tasksets),
        }
    )
