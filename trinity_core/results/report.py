"""`trinity report`: a run as one HTML file to pass on, without scripts and without files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from trinity_core.base.files import read_json
from trinity_core.base.layout import label_of, stages_of
from trinity_core.base.timing import duration
from trinity_core.config import Config
from trinity_core.config.findings import Report, value_at
from trinity_core.config.load import to_dict, without_defaults
from trinity_core.config.resolve import resolve
from trinity_core.config.source import key_of
from trinity_core.config.validation import typed_section
from trinity_core.exchange.tracking.curve import LearningCurve, embedded
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_evaluations
from trinity_core.exchange.tracking.notes import Note
from trinity_core.exchange.tracking.rollouts import newest_rollouts, source_text
from trinity_core.exchange.tracking.run_record import read_config, read_record
from trinity_core.exchange.tracking.scores import intervals_like_the_newest, scores_like_the_newest
from trinity_core.results.audit import stored_runs
from trinity_core.results.compare import NAMES, comparable_settings, differing, newest_evaluation, scored_run, shown
from trinity_core.results.data_rows import input_digests
from trinity_core.results.doctor import Diagnosis
from trinity_core.results.lineage import next_stage, software_text

SAMPLES = 8
FOLLOWING = ("max_model_len", "train_batch_size")
"""Settings that follow from others, which follow from them too."""
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 } img { max-width: 100%; background: white }
td, th { border: 1px solid #8886; padding: .2rem .6rem; text-align: left; vertical-align: top }
td + td { min-width: 5rem }
@media (prefers-color-scheme: dark) { img { filter: invert(.92) hue-rotate(180deg) } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 0 }
"""
FIRST_TASKSET = re.compile(r"(?<=\.)tasksets(\[0\]|\.0)(?=\.)")
SCORE = ("score", "95 % interval")
Row = Sequence[object]
Key = tuple[str | int, ...]


def report(folder: Path, other: Path | None = None) -> str:
    """Return the page of the run in `folder`, or of the pipeline in it with all stages: scores, findings, curve,
    settings that differ from those of the run in `other` (by default those that its file must set), code and data,
    samples of its last evaluation.

    Of a pipeline in `other` counts the stage of the same name, else its last scored stage. Raises DataError if there is
    no run in a folder.
    """
    stored_runs(folder)
    folder, last = folder.resolve(), scored_run(other) if other is not None else None
    others = stages_of(other.resolve()) if other is not None else {}
    title = f"{folder.parent.name} / {folder.name}"
    parts = [f"<h1>{escape(title)}</h1>", _facts(folder)]
    if not (stages := stages_of(folder)):
        record = read_record(folder)
        parts += _run(folder, others.get(record.stage, last) if record is not None else last)
    else:
        parts += _scores_by_stage(folder)
        for name, run in stages.items():
            parts += [f"<h2>{escape(run.name)}</h2>", _facts(run), *_run(run, others.get(name, last))]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>'


def _scores_by_stage(pipeline: Path) -> Iterable[str]:
    """Yield the scores of the base model and of each stage's model."""
    scores = read_json(pipeline / "summary.json").get("scores") or {}
    rows, evaluations = [], list[MetricLine]()
    for name, folder in ({"before": pipeline} | stages_of(pipeline)).items():
        if (score := scores.get(name)) is not None:
            scored, step = newest_evaluation(folder)
            evaluations = read_evaluations(scored)
            interval = intervals_like_the_newest(evaluations).get(step or 0)
            rows.append(("base model" if name == "before" else name, *_score(score, interval)))
    yield f"<h2>{_scores_of(evaluations)}</h2>{_table(rows, ('model', *SCORE))}"


def _scores(folder: Path) -> Iterator[str]:
    """Yield step, score and interval of a run's evaluations; without any, of the next stage's before its first step."""
    evaluations, following, at = read_evaluations(folder), next_stage(folder), dict[int, int]()
    if not scores_like_the_newest(evaluations) and following:
        evaluations, at = [line for line in read_evaluations(following[0]) if not line.step], {0: following[1]}
    scores, intervals = scores_like_the_newest(evaluations), intervals_like_the_newest(evaluations)
    rows = [(at.get(step, step), *_score(score, intervals.get(step))) for step, score in sorted(scores.items())]
    if rows:
        yield f"<h3>{_scores_of(evaluations)}</h3>{_table(rows, ('step', *SCORE))}"


def _scores_of(evaluations: Sequence[MetricLine]) -> str:
    """Return `Scores on test (400 answers)`, of several eval sets `Mean scores on …`."""
    metrics = evaluations[-1].metrics if evaluations else {}
    answers = {name: count for name, count in metrics.items() if name.endswith("/answers")}
    sets = ", ".join(
        f"{escape(name[len('eval/') : -len('/answers')])} ({count:g} answers)" for name, count in answers.items()
    )
    return f"{'Mean scores' if len(answers) > 1 else 'Scores'}{' on ' * bool(sets)}{sets}"


def _score(score: float, interval: tuple[float, float] | None) -> Row:
    return f"{score:.3f}", f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "–"


def _facts(folder: Path) -> str:
    """Return the table that identifies a run or a pipeline."""
    record, config, summary = read_record(folder), read_config(folder), read_json(folder / "summary.json")
    facts = {
        "state": record.present_state.value if record is not None else "",
        "error": record.error if record is not None else "",
        "began": f"{datetime.fromtimestamp(record.run_began, UTC).astimezone():%d %b %Y %H:%M %Z}" if record else "",
        "took": duration(record.seconds) if record is not None and record.seconds is not None else "",
        "algorithm": " → ".join(stages_of(folder)) or value_at(config, "algorithm.algorithm_type"),
        "model": label_of(value_at(config, "model.model_path") or ""),
        "checkpoint": summary.get("checkpoint_dir"),
        "note": Note.of(folder).text,
    }
    return _table([(name, value) for name, value in facts.items() if value])


def _run(folder: Path, other: Path | None) -> Iterable[str]:
    config = read_config(folder)
    yield from _scores(folder)
    yield "<h3>Findings of the doctor</h3>"
    recorded = read_json(folder / "summary.json").get("findings")
    if findings := [Diagnosis(**finding) for finding in recorded or ()]:
        yield _table([(finding.check, finding.evidence, finding.cause, finding.next_step) for finding in findings])
    else:
        yield f"<p>{'0 findings' if recorded is not None else 'not examined: the run has not finished'}</p>"
    if picture := LearningCurve(folder).picture():
        yield f'<h3>Curve</h3><img alt="" src="{embedded(picture)}">'
    if other is None:
        algorithm = value_at(config, "algorithm.algorithm_type") or "all"
        yield f"<h3>Settings that are not defaults of {escape(str(algorithm))}</h3>"
        rows = [
            (_as_written(key, config), *values)
            for key, *values in _settings(config)
            if key != "algorithm.algorithm_type"  # it is in the heading
        ]
        yield _table(rows, ("", "here", "by default"))
    else:
        yield f"<h3>Settings that differ from {escape(other.name)}</h3>"
        differences = differing(comparable_settings([config, read_config(other)])).items()
        rows = [(_as_written(key, config), *pair) for key, pair in differences]
        yield _table(rows, ("", escape(folder.name), escape(other.name)))
    record = read_record(folder)
    code = [("code", software_text(record.software))] if record is not None and record.software else []
    yield f"<h3>Code and data</h3>{_table([*code, *input_digests(folder).items()])}"
    if sample := newest_rollouts(folder):
        source, step, rollouts = sample
        yield f"<h3>Samples of {escape(source_text(source))}, step {step}</h3>"
        rows = [
            (*(f"<pre>{escape(text)}</pre>" for text in (one.prompt, one.response, one.truth)), one.reward)
            for one in rollouts[:SAMPLES]
        ]
        yield _table(rows, ("prompt", "response", "reference", "reward"), is_html=True)


def _as_written(key: str, config: Mapping[str, Any]) -> str:
    """Return `….taskset.path` for `….tasksets[0].path` (or `….tasksets.0.path`), if there is only one."""
    tasksets = value_at(config, "buffer.explorer_input.tasksets") or ()
    return FIRST_TASKSET.sub("taskset", key) if len(tasksets) == 1 else key


def _settings(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return key, value and default of each setting without which the configuration would resolve to another one. The
    default is what then applies: mostly that of its algorithm."""

    def resolved(tree: Any) -> Config:
        return resolve(typed_section(Config, tree, Report()))

    tree = without_defaults(resolved(config))
    whole, keys = resolved(tree), [key for key in _leaves(tree) if key[0] not in (*NAMES, "project")]
    rows: dict[Key, tuple[str, Any, Any]] = {}
    for key in sorted(keys, key=lambda key: key[-1] not in FOLLOWING):
        section = value_at(tree, key[:-1])
        value = section.pop(key[-1])
        if (without := resolved(tree)) != whole:
            section[key[-1]] = value
            default = value_at(to_dict(without), key)
            rows[key] = (key_of(key), value, None if default in ("", [], {}) else default)
    return [rows[key] for key in keys if key in rows]


def _leaves(tree: Any, above: Key = ()) -> Iterator[Key]:
    """Yield the path of each value that is neither a section nor a list of sections."""
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        parts = enumerate(tree)
    if above and not parts:
        yield above
    for name, part in parts:
        yield from _leaves(part, (*above, name))


def _table(rows: Sequence[Row], head: Sequence[str] = (), is_html: bool = False) -> str:
    def cell(value: object) -> str:
        return f"<td>{shown(value) if is_html else escape(shown(value)).replace('/', '/<wbr>')}</td>"

    titles = f"<tr>{''.join(f'<th>{title}</th>' for title in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table>{titles}{body}</table>" if rows else "<p>none</p>"
