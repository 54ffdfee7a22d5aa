"""`trinity report`: a run as one HTML file to pass on, without scripts and without files beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trinity_core.base.files import read_json
from trinity_core.base.layout import label_of, stages_of
from trinity_core.base.timing import duration
from trinity_core.config.findings import value_at
from trinity_core.exchange.tracking.curve import LearningCurve
from trinity_core.exchange.tracking.metrics_file import read_evaluations
from trinity_core.exchange.tracking.rollouts import newest_rollouts
from trinity_core.exchange.tracking.run_record import read_config, read_record
from trinity_core.exchange.tracking.scores import intervals_like_the_newest, score_text, scores_like_the_newest
from trinity_core.results.audit import stored_runs
from trinity_core.results.compare import (
    comparable_settings,
    default_settings,
    differing,
    newest_evaluation,
    settings_of,
    shown,
)
from trinity_core.results.doctor import Diagnosis

SAMPLES = 8
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 } img { max-width: 100%; background: white }
td, th { border: 1px solid #8886; padding: .2rem .6rem; text-align: left; vertical-align: top }
td + td { overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { img { filter: invert(.92) hue-rotate(180deg) } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 0 }
"""
Row = Sequence[object]


def report(folder: Path, other: Path | None = None) -> str:
    """Return the page of the run in `folder`, or of the pipeline in it with all stages: scores, findings, curve,
    settings that differ from those of the run in `other` (by default from the defaults), samples of its last
    evaluation.

    Raises DataError if there is no run in a folder.
    """
    runs = stored_runs(folder)
    if other is not None:
        stored_runs(other)
    title = f"{runs[0].parent.name} / {folder.resolve().name}"
    scores = _scores_by_stage(folder.resolve()) if list(runs) != [folder.resolve()] else ()
    parts = [f"<h1>{escape(title)}</h1>", *scores, *(part for run in runs for part in _run(run, other))]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>'


def _scores_by_stage(pipeline: Path) -> Iterable[str]:
    """Yield the scores of the base model and of each stage's model: often the next stage's run has evaluated it."""
    scores = read_json(pipeline / "summary.json").get("scores") or {}
    yield "<h2>Scores</h2>"
    rows = []
    for name, folder in ({"before": pipeline} | stages_of(pipeline)).items():
        scored, step = newest_evaluation(folder)
        if (score := scores.get(name)) is not None:
            intervals = intervals_like_the_newest(read_evaluations(scored))
            rows.append(("base model" if name == "before" else name, score_text(score, intervals.get(step or 0))))
    yield _table(rows)


def _run(folder: Path, other: Path | None) -> Iterable[str]:
    record, config = read_record(folder), read_config(folder)
    summary, evaluations = read_json(folder / "summary.json"), read_evaluations(folder)
    scores, intervals = scores_like_the_newest(evaluations), intervals_like_the_newest(evaluations)
    facts = {
        "state": record.present_state.value if record is not None else "",
        "score": ", ".join(
            f"step {step}: {score_text(score, intervals.get(step))}" for step, score in sorted(scores.items())
        ),
        "took": duration(seconds) if (seconds := summary.get("seconds")) else "",
        "model": label_of(value_at(config, "model.model_path") or ""),
        "checkpoint": summary.get("checkpoint_dir"),
    }
    yield f"<h2>{escape(folder.name)}</h2>"
    yield _table([(name, value) for name, value in facts.items() if value])
    if findings := [Diagnosis(**finding) for finding in summary.get("findings") or ()]:
        yield "<h3>Findings</h3>"
        yield _table([(found.check, found.evidence, found.cause, found.next_step) for found in findings])
    if picture := LearningCurve(folder).picture():
        encoded = base64.b64encode(picture).decode()
        yield f'<h3>Curve</h3><img alt="" src="data:image/png;base64,{encoded}">'
    than = other.name if other else "the defaults"
    yield f"<h3>Settings that differ from {escape(than)}</h3>"
    yield _table(_differences(config, read_config(other) if other else None), ("", escape(folder.name), escape(than)))
    if sample := newest_rollouts(folder):
        source, step, rollouts = sample
        yield f"<h3>Samples: {escape(source)}, step {step}</h3>"
        rows = [
            (*(f"<pre>{escape(text)}</pre>" for text in (one.prompt, one.response, one.truth)), one.reward)
            for one in rollouts[:SAMPLES]
        ]
        yield _table(rows, ("prompt", "response", "reference", "reward"), is_html=True)


def _differences(config: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[Row]:
    """Return key, value, and value of the other configuration; or else the default, for settings that have one."""
    if other is not None:
        return [(key, *pair) for key, pair in differing(comparable_settings([config, other])).items()]
    values, defaults = settings_of(config), default_settings()
    common = [{key: tree[key] for key in values if key in defaults} for tree in (values, defaults)]
    return [(key, *pair) for key, pair in differing(common).items() if key != "project"]


def _table(rows: Sequence[Row], head: Sequence[str] = (), is_html: bool = False) -> str:
    def cell(value: object) -> str:
        return f"<td>{shown(value) if is_html else escape(shown(value))}</td>"

    titles = f"<tr>{''.join(f'<th>{title}</th>' for title in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table>{titles}{body}</table>" if rows else "<p>none</p>"
