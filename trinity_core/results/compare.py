"""`trinity compare`: how runs differ in what they were made from, and in their scores, answer by answer.

Runs whose configurations differ in nothing but seed and name form one group: its scores are a band. The first group is
the baseline. Reads what the runs have stored, and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.base.layout import label_of, step_of
from trinity_core.config.fields import plain_settings
from trinity_core.config.paths import normalised
from trinity_core.config.source import WHOLE, inherited, merge
from trinity_core.exchange.tracking.answers import TaskAnswers, read_answers
from trinity_core.exchange.tracking.metrics_file import read_evaluations, read_metrics, series
from trinity_core.exchange.tracking.run_record import read_config, read_record
from trinity_core.exchange.tracking.scores import evaluated_sets, latest_scores
from trinity_core.exchange.tracking.writers import flatten, leaves
from trinity_core.results.audit import runs_in, stored_runs
from trinity_core.results.data_rows import input_digests
from trinity_core.results.lineage import next_stage
from trinity_core.results.paired import Difference, means, paired_by_blocks, paired_over_seeds

NAMES = ("name", "ray_namespace", "checkpoint_root_dir")
"""Settings that always differ between runs, or in notation."""
NOISE = (*NAMES, "project", "seed")
"""Settings in which the runs of one group may differ."""
STAGE = re.compile(r"^stages\.\d+\.")
NO_SCORES = "  held-out scores: none in common; evaluate the runs on the same eval set (`trinity evaluate --which all`)"
TRAINED_ON = "measured on training tasks, so it does not say which model is better"
SHOWN, LISTED = 3, 20
"""Samples that changed sides, and differing settings, that are shown without `--all`."""


@dataclass(frozen=True)
class ComparedRun:
    """What a run has stored, with the answers of one evaluation."""

    name: str
    step: int | None
    """Step of the checkpoint whose scores these are; None without any."""
    config: Mapping[str, Any]
    """As recorded; dotted key → value once `compare` has read all runs."""
    data: Mapping[str, Any]
    """Data file or plugin → digest; empty before the run has ended."""
    software: Mapping[str, str]
    answers: Mapping[str, Mapping[str, TaskAnswers]]
    """Eval set → digest of the row → its answers."""
    rewards: Mapping[int, float]
    """Train step → mean training reward."""

    def scores(self, taskset: str) -> dict[str, Sequence[float | None]]:
        return {digest: task.scores for digest, task in self.answers.get(taskset, {}).items()}


@dataclass(frozen=True, slots=True)
class Changed:
    """A sample whose score rose or fell."""

    location: str
    prompt: str
    scores: tuple[float, float]
    answers: tuple[str, str]


@dataclass(frozen=True)
class SetComparison:
    """One eval set of two groups."""

    difference: Difference
    seeds: tuple[Sequence[float], Sequence[float]]
    """Score of each run of either group."""
    changed: Sequence[Changed]


@dataclass(frozen=True)
class GroupComparison:
    """A group beside the baseline."""

    runs: Sequence[str]
    sets: Mapping[str, SetComparison]
    rewards: Difference | None


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[str]
    baseline: Sequence[str]
    configuration: Mapping[str, Sequence[Any]]
    """Setting → its value in each run, None where it is not set; only settings that differ. Alike the next two."""
    data: Mapping[str, Sequence[Any]]
    code: Mapping[str, Sequence[Any]]
    others: Sequence[GroupComparison]
    notes: Sequence[str]

    def json(self) -> dict[str, Any]:
        tree = asdict(self)
        for group, shown in zip(self.others, tree["others"], strict=True):
            shown["rewards"] = group.rewards and group.rewards.json()
            for name, compared in group.sets.items():
                shown["sets"][name]["difference"] = compared.difference.json()
        return tree


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare the runs in these folders, or checkpoints of theirs.

    Raises DataError for fewer than two, and for a folder that is no run.
    """
    if len(paths) < 2:
        raise DataError(f"give two runs to compare, not {len(paths)}")
    runs = [read_run(path) for path in paths]
    configs: Sequence[Mapping[str, Any]] = [run.config for run in runs]
    if all(pipelines := [_pipeline_config(path) for path in paths]):
        configs = pipelines
    runs = [replace(run, config=settings) for run, settings in zip(runs, comparable_settings(configs), strict=True)]
    groups: dict[tuple[str, str], list[ComparedRun]] = {}
    for path, run in zip(paths, runs, strict=True):
        settings = sorted((key, str(value)) for key, value in run.config.items() if key not in NOISE)
        groups.setdefault((str(settings), str(path) if step_of(path) else ""), []).append(run)
    baseline, *others = groups.values()
    if not others:
        baseline, others = runs[:1], [runs[1:]]  # they differ in their seeds alone
    return Comparison(
        [run.name for run in runs],
        [run.name for run in baseline],
        differing([run.config for run in runs]),
        differing([run.data for run in runs]),
        differing([run.software for run in runs]),
        [_compared(baseline, group) for group in others],
        list(_notes(runs)),
    )


def read_run(path: Path) -> ComparedRun:
    """Read a run from its folder, that of its pipeline (whose last scored stage counts), or one of its checkpoints."""
    path = path.resolve()
    step = step_of(path)
    folder = path if step is None else path.parent
    folder = scored_run(folder)
    scored, at = newest_evaluation(folder) if step is None else (folder, step)
    metrics = [line.metrics for line in read_evaluations(scored) if line.step == at]
    if step is not None and not metrics and not path.is_dir():
        raise DataError(f"there is no checkpoint {path}, and no score of its step", key=str(path))
    following = None if scored == folder else next_stage(folder)
    answers = {name: read_answers(scored, name, at or 0) for name in (evaluated_sets(metrics[-1]) if metrics else ())}
    record = read_record(folder)
    return ComparedRun(
        f"{folder.parent.name}/{folder.name}" + ("" if step is None else f" step {step}"),
        (following[1] if following else at) if metrics else None,
        read_config(folder),
        input_digests(folder),
        record.software if record is not None else {},
        {name: {task.digest: task for task in tasks} for name, tasks in answers.items() if tasks},
        series(read_metrics(folder), "reward/mean", "trainer"),
    )


def scored_run(folder: Path) -> Path:
    """Return the folder of a run, or of the last stage with a score of the pipeline in it. Raises DataError if there is
    no run."""
    return next((run for run in reversed(stored_runs(folder)) if read_evaluations(run)), folder.resolve())


def newest_evaluation(folder: Path) -> tuple[Path, int | None]:
    """Return folder and step of the evaluation that scores a run's newest model: the run's own latest one, or that of
    the pipeline's next stage before its first step. The step is None without any."""
    if scores := latest_scores(folder):
        return folder, max(scores)
    following = next_stage(folder)
    return (following[0], 0) if following and 0 in latest_scores(following[0]) else (folder, None)


def _pipeline_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a pipeline with those of its stages; empty for other folders.

    The configuration of a stage names the model of the stage before it, which differs between the seeds of a pipeline.
    """
    path = path.resolve()
    return read_config(path) if runs_in(path) != [path] else {}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key → value of a recorded configuration, written in one way, without what is empty."""
    return flatten(normalised(dict(config)))


def default_settings() -> dict[str, Any]:
    return settings_of({key: setting.default for key, setting in plain_settings()})


def comparable_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `settings_of` each. A key that only others set has the value that applies: its default, or in a stage what
    the stage inherits. What is empty has recorded nothing and stays empty."""
    keys = dict.fromkeys(key for config in configs for key, _ in leaves(config))
    defaults, settings = default_settings(), []
    for config in configs:
        whole = _with_inherited(config)
        values, is_set = settings_of(whole), dict(leaves(whole))
        default = {key: None if key in is_set else defaults.get(STAGE.sub("", key)) for key in keys}
        settings.append({key: values.get(key, default[key]) for key in keys} if config else {})
    return settings


def _with_inherited(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with whole stages, and without a critic's model that is the policy's."""
    stages, model = config.get("stages") or (), dict(config.get("model") or {})
    if model.get("critic_model_path") == model.get("model_path"):
        model.pop("critic_model_path", None)
    above = {name: value for name, value in config.items() if name != "stages"} | {"model": model}
    return above | {"stages": [merge(inherited(above, stage), stage, WHOLE) for stage in stages]}


def differing(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key → value in each, for keys that differ, without those of `NAMES`. What is empty has recorded nothing,
    and differs in nothing."""
    recorded = [tree for tree in trees if tree]
    keys = dict.fromkeys(key for tree in recorded for key in tree if key not in NAMES)
    values = {key: [tree.get(key) for tree in trees] for key in keys}
    return {key: values[key] for key in keys if any(tree.get(key) != recorded[0].get(key) for tree in recorded)}


def _compared(baseline: Sequence[ComparedRun], group: Sequence[ComparedRun]) -> GroupComparison:
    sets: dict[str, SetComparison] = {}
    for name in baseline[0].answers:
        before, after = ([run.scores(name) for run in side] for side in (baseline, group))
        if difference := paired_over_seeds(before, after):
            changed = _changed(baseline[0].answers[name], group[0].answers[name])
            sets[name] = SetComparison(difference, (means(before), means(after)), list(changed))
    return GroupComparison([run.name for run in group], sets, paired_by_blocks(baseline[0].rewards, group[0].rewards))


def _changed(before: Mapping[str, TaskAnswers], after: Mapping[str, TaskAnswers]) -> Iterator[Changed]:
    """Yield of each task the first repeat whose score differs."""
    for first, second in ((before[digest], after[digest]) for digest in before if digest in after):
        for i, scores in enumerate(zip(first.scores, second.scores, strict=False)):
            if None not in scores and scores[0] != scores[1]:
                answers = [task.answers[i] if i < len(task.answers) else "" for task in (first, second)]
                yield Changed(second.location, second.prompt, scores, (answers[0], answers[1]))  # type: ignore[arg-type]
                break


def _notes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    if len({run.step for run in runs if run.answers}) > 1:
        steps = [f"{run.name.removesuffix(f' step {run.step}')} at step {run.step}" for run in runs if run.answers]
        yield f"scores of different steps: {', '.join(steps)}"
    if missing := [run.name for run in runs if not run.answers]:
        yield f"without stored answers: {', '.join(missing)}; `trinity evaluate --config FILE --which all` stores them"
    if missing := [run.name for run in runs if not run.data]:
        yield f"data not compared: {', '.join(missing)} recorded no digests, which a run does at its end"


def comparison_text(
    comparison: Comparison, titles: Sequence[str] = ("configuration", "data", "code"), everything: bool = False
) -> str:
    """Return differences of what the runs were made from, then of their scores, then the samples that changed; unless
    `everything` is true only the first of them, and how many more there are."""
    letters = [chr(ord("A") + i) for i in range(len(comparison.runs))]
    has_rows = any(getattr(comparison, title) for title in titles)
    lines = [f"{letter}  {name}" for letter, name in zip(letters, comparison.runs, strict=True)] if has_rows else []
    for title in titles:
        rows = getattr(comparison, title)
        lines += ["", f"{title}  {' | '.join(letters)}" if rows else f"{title}: no difference"]
        listed = [f"  {key}  {' | '.join(shown_setting(key, values))}" for key, values in rows.items()]
        lines += listed if everything else _first(listed, LISTED, "  … {} more")
    for group in comparison.others:
        lines += ["", f"{', '.join(group.runs)} against {', '.join(comparison.baseline)}"]
        for name, compared in group.sets.items():
            lines += _set_lines(name, compared, everything)
        lines += [] if group.sets else [NO_SCORES]
        if group.rewards is not None:
            lines.append(f"  training reward: {difference_text(group.rewards)} common steps; {TRAINED_ON}")
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)]).lstrip("\n")


def _set_lines(name: str, compared: SetComparison, everything: bool) -> list[str]:
    difference = compared.difference
    tied = difference.pairs - difference.won - difference.lost
    bands = [f"{min(s):.3f}–{max(s):.3f} ({len(s)} runs)" if len(s) > 1 else "1 run" for s in compared.seeds]
    lines = [
        f"  {name}: {difference.verdict}. {difference_text(difference)} tasks",
        f"    {difference.won} tasks won, {difference.lost} lost, {tied} tied; seeds: {' | '.join(bands)}",
    ]
    if min(map(len, compared.seeds)) == 1:
        lines.append("    the interval does not cover another seed: that needs two runs of each configuration")
    for title, samples in (
        ("gained", [sample for sample in compared.changed if sample.scores[1] > sample.scores[0]]),
        ("lost", [sample for sample in compared.changed if sample.scores[1] < sample.scores[0]]),
    ):
        listed = [_sample_text(title, sample) for sample in samples]
        lines += listed if everything else _first(listed, SHOWN, f"    … {{}} more {title}")
    return lines


def _sample_text(title: str, sample: Changed) -> str:
    before, after = (f"{'…' * (len(answer) > 100)}{answer[-100:]!r}" for answer in sample.answers)
    return (
        f"    {title} {sample.location}  {sample.scores[0]:g} → {sample.scores[1]:g}  {sample.prompt[:100]!r}\n"
        f"      before {before}\n      after  {after}"
    )


def _first(lines: list[str], number: int, rest: str) -> list[str]:
    """Return the first lines, and how to see the rest."""
    more = [f"{rest.format(len(lines) - number)}: `trinity compare --all` lists them"] if len(lines) > number else []
    return lines[:number] + more


def difference_text(of: Difference) -> str:
    """Return `0.520 → 0.985, +0.465 [+0.410, +0.520], 400`: scores, their difference with its interval, pairs."""
    return f"{of.before:.3f} → {of.after:.3f}, {of.after - of.before:+.3f} [{of.low:+.3f}, {of.high:+.3f}], {of.pairs}"


def shown(value: Any) -> str:
    return "–" if value is None else str(value)


def shown_setting(key: str, values: Sequence[Any]) -> list[str]:
    """Return a setting's value in each run as text. Models have the short names of `label_of` if these differ as their
    paths do."""
    texts = [shown(value) for value in values]
    labels = [label_of(text) for text in texts] if key.endswith("model_path") else texts
    return labels if len({*labels}) == len({*texts}) else texts
