"""What MLflow shows about a run: a description with links, its data sets, valid names, and rollouts as traces."""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.base.addresses import studio_links
from trinity_core.base.errors import DataError
from trinity_core.base.files import read_json
from trinity_core.base.layout import label_of, stages_of
from trinity_core.config.findings import value_at
from trinity_core.data.files import data_files, is_local
from trinity_core.exchange.tracking.run_record import read_config
from trinity_core.exchange.tracking.scores import data_digest
from trinity_core.exchange.tracking.writers import flatten

if TYPE_CHECKING:
    from mlflow.entities import Assessment, DatasetInput, Span

    from trinity_core.exchange.tracking.rollouts import SampledRollout


DESCRIPTION = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run."""
MOST_BYTES = 1 << 30
"""Data sets larger than this get a fingerprint of their size only."""
LONGEST_KEY, LONGEST_MODEL, LONGEST_DATA_SET, LONGEST_DIGEST = 250, 256, 500, 36
"""Length limits of MLflow (`utils/validation.py`, and its database columns, which PostgreSQL enforces) for metrics,
parameters, runs and assessments; registered models; data sets; their digests."""

SIGNS = {"@": "at", "<": "lt", ">": "gt", "%": "pct"}
"""Words for signs that MLflow forbids in names, so that names differing in one sign stay distinct."""
FIRST, FIRST_ENDINGS = "Achieved", ("/accuracy", "/reward/mean")
"""Group for the most important charts, and its metrics: accuracy of eval sets, reward of explorers. MLflow sorts groups
by name, at first with capitals in front, later as a dictionary does: this one precedes `actor` in both. The titles of
its charts begin with it, and have room for about 22 letters."""
NAME_LENGTH = LONGEST_KEY - len(f"{FIRST}/")
"""Maximum length of a metric's name: MLflow's limit, minus its group."""


def shortened(text: str, length: int) -> str:
    """Return the text, or its beginning with a checksum if it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length - 9]}_{zlib.crc32(text.encode()):08x}"


def registered_name(name: str) -> str:
    """Return the registered model's name for that of a run or a project. MLflow forbids `/` and `:` in it."""
    return shortened(re.sub(r"[/:]+", ".", name), LONGEST_MODEL)


def description(job_dir: Path) -> str:
    """Return Markdown: what is trained, with which model and data; then the run's page, rollouts and logs, as links
    while `trinity up` serves Studio, otherwise as commands."""
    logs = f"Logs: `trinity log --checkpoint-dir {shlex.quote(str(job_dir))}`"
    links = " · ".join([*studio_links(job_dir.parent.parent, f"{job_dir.parent.name}/{job_dir.name}"), logs])
    config = read_config(job_dir)
    return f"{_about(config)}\n\n{links}" if config else links


def _about(config: Mapping[str, Any]) -> str:
    """Return algorithm, or stages of a pipeline, model and training data."""
    parts = [stage["stage_name"] for stage in config.get("stages") or ()]
    model = label_of(value_at(config, "model.model_path") or "")
    data = [f"`{data_set['path']}`" for context, data_set in _data(config) if context == "training"]
    facts = {
        "pipeline": " → ".join(parts),
        "algorithm": "" if parts else value_at(config, "algorithm.algorithm_type"),
        "model": f"`{model}`" * bool(model),
        "data": ", ".join(dict.fromkeys(data)),
    }
    return " · ".join(f"{name} {fact}" for name, fact in facts.items() if fact)


def steps_before(pipeline: Path, stage: str = "") -> int:
    """Return the train steps of a pipeline's stages before `stage`, by default of all, that have ended."""
    earlier = takewhile(lambda run: run[0] != stage, stages_of(pipeline).items())
    summaries = (read_json(folder / "summary.json") for _, folder in earlier)
    return sum(summary["step"] for summary in summaries if summary.get("hf_dir"))


def dataset_inputs(config: Mapping[str, Any]) -> list[DatasetInput]:
    """Return a run's data sets with the fingerprints of their files; for hub data sets, of their names."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for context, data_set in _data(config):
        path = str(data_set["path"])
        digest = _digest(path, str(data_set.get("split") or ""), data_set.get("subset_name"))
        kind = "local" if is_local(path) else "hugging_face"
        name = shortened(str(data_set.get("name") or Path(path).name), LONGEST_DATA_SET)
        dataset = Dataset(
            name, digest[-LONGEST_DIGEST:], kind, json.dumps({"uri": path, "split": data_set.get("split")})
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    return inputs


def _digest(path: str, split: str, subset: str | None) -> str:
    """Return the first eight digits of a digest of the contents, as MLflow's own digests have; for large data their
    size, so that a start need not read terabytes; for hub data sets the name."""
    try:
        size = sum(file.stat().st_size for file in data_files(path, split, subset)) if is_local(path) else 0
    except DataError:
        size = 0
    digest = f"{size} bytes" if size > MOST_BYTES else data_digest(path, split, subset)
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1", digest)


def _data(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    data_sets = [("training", tasks) for tasks in value_at(config, "buffer.explorer_input.tasksets") or ()]
    data_sets += [("evaluation", tasks) for tasks in value_at(config, "buffer.explorer_input.eval_tasksets") or ()]
    data_sets.append(("training", value_at(config, "buffer.trainer_input.experience_buffer")))
    for context, data_set in data_sets:
        if data_set and data_set.get("path") and "://" not in str(data_set["path"]):
            yield context, data_set


def allowed_name(name: str) -> str:
    """Convert a metric's or parameter's name to one that MLflow allows: `pass@4` becomes `pass_at_4`.

    Letters of any script are allowed. Names may become file names, so parts between two `/` that are empty or consist
    of dots become `_`. Names that are too long end in a checksum.
    """
    allowed = re.sub(r"[^\w\-. :/]", "_", re.sub("[@<>%]", lambda sign: f"_{SIGNS[sign[0]]}_", name))
    plain = "/".join(part if part.strip(".") else "_" for part in allowed.split("/"))
    return shortened(plain, NAME_LENGTH)


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration's settings by names that MLflow allows."""
    return {allowed_name(name): str(value) for name, value in flatten(config).items()}


def metric_names(name: str) -> list[str]:
    """Return a metric's names in MLflow: the most important metrics also appear in the first group of charts, as `test
    accuracy` and `reward mean`."""
    allowed = allowed_name(name)
    title = allowed.removeprefix("eval/").removeprefix("explorer/").replace("/", " ")
    return [allowed, f"{FIRST}/{title}"] if allowed.endswith(FIRST_ENDINGS) else [allowed]


KINDS = {"assistant": "CHAT_MODEL", "tool": "TOOL"}
"""Role of a message → type of its span; messages of users and environments have type UNKNOWN."""
PREVIEW = 500
"""Characters of prompt and response shown in the list of traces."""


def send_trace(uri: str, experiment: str, run_id: str, name: str, rollout: SampledRollout, time_ns: int) -> None:
    """Write a rollout as a trace of the run, whose id is derived from run and name.

    The trace and its turns get the time span of the task's workflow (`SampledRollout.span`); times of single turns are
    unknown. Without a span, it gets the time `time_ns` (ns since 1970). An existing trace with this id is replaced.
    """
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.client import TracingClient
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    trace_id = f"tr-{sha256(f'{run_id} {name}'.encode()).hexdigest()[:32]}"
    client = TracingClient(uri)
    began, ended = (round(at * 1e9) for at in rollout.span) if rollout.span else (time_ns, time_ns)
    client.start_trace(
        TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment),
            request_time=began // 1_000_000,
            state=TraceState.OK,
            request_preview=rollout.prompt[:PREVIEW],
            response_preview=rollout.response[:PREVIEW],
            execution_duration=(ended - began) // 1_000_000,
            trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
            tags={TraceTagKey.TRACE_NAME: name, "task_index": str(rollout.task_index)},
            assessments=_assessments(trace_id, rollout),
        )
    )
    client.log_spans(experiment, list(_spans(trace_id, name, rollout, began, ended)))


def _spans(trace_id: str, name: str, rollout: SampledRollout, began: int, ended: int) -> Iterator[Span]:
    """Yield the rollout's span, and a child span for each turn after the prompt."""
    from mlflow.entities import Span
    from mlflow.tracing.constant import SpanAttributeKey

    def span(number: int, name: str, kind: str, inputs: Any, outputs: Any) -> Span:
        values = {
            SpanAttributeKey.REQUEST_ID: trace_id,
            SpanAttributeKey.SPAN_TYPE: kind,
            SpanAttributeKey.INPUTS: inputs,
            SpanAttributeKey.OUTPUTS: outputs,
        }
        return Span.from_dict(
            {
                "trace_id": trace_id,
                "span_id": _span_id(trace_id, number),
                "parent_span_id": _span_id(trace_id, 0) if number else None,
                "name": name,
                "start_time_unix_nano": began,
                "end_time_unix_nano": ended,
                "status": {"code": "OK", "message": ""},
                "attributes": {key: json.dumps(v, default=str) for key, v in values.items() if v is not None},
                "events": [],
            }
        )

    yield span(0, name, "AGENT", rollout.prompt, rollout.response)
    turns = rollout.turns or [
        {"role": "user", "content": rollout.prompt}, {"role": "assistant", "content": rollout.response},
    ]  # fmt: skip
    previous: Any = None
    for number, turn in enumerate(turns, 1):
        role = str(turn.get("role", ""))
        if role in KINDS or (number > 1 and role != "system"):
            yield span(number, role, KINDS.get(role, "UNKNOWN"), previous, turn)
        previous = turn


def _span_id(trace_id: str, number: int) -> str:
    return sha256(f"{trace_id} {number}".encode()).hexdigest()[:16]


def _assessments(trace_id: str, rollout: SampledRollout) -> list[Assessment]:
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    source = AssessmentSource("CODE", "trinity")
    numbers = rollout.parts | ({} if rollout.reward is None else {"reward": rollout.reward})
    assessments: list[Assessment] = [
        Feedback(shortened(name, LONGEST_KEY), value, source=source, trace_id=trace_id)
        for name, value in sorted(numbers.items())
    ]
    if rollout.truth:
        assessments.append(Expectation("truth", rollout.truth, source=source, trace_id=trace_id))
    for assessment in assessments:  # the id makes it replace one sent before
        assessment.assessment_id = f"a-{sha256(f'{trace_id} {assessment.name}'.encode()).hexdigest()[:32]}"
    return assessments
