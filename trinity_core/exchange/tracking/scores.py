"""Scores of a run's checkpoints, and fingerprints of what they depend on.

Scores are comparable only with the same eval sets, sampling, workflow, reward and model. The summary, `evaluate` and
the best checkpoint all use `valid_scores`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.base.files import expanded
from trinity_core.base.plugins import python_files
from trinity_core.config import Config
from trinity_core.config.engine_args import is_lossy
from trinity_core.config.load import without_defaults
from trinity_core.data.files import data_files, is_local, is_slice
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_evaluations
from trinity_core.exchange.weights_digest import weight_files, weights_digest

ANSWERING = ("*.json", "*.jinja", "*.model")
"""Files of a model folder, besides its weights, that affect its answers."""
FORMAT = 1
"""Raised when a changed default affects scores, because settings with default values are left out."""
ENGINE = ("dtype", "tool_call_parser", "reasoning_parser", "seed")
"""Engine settings that change the policy's answers."""
SCORED = re.compile(r"eval/(?P<set>.+)/(?P<kind>accuracy|reward|judged)(?:/mean)?")
"""Metrics of an eval set that determine its score."""
ASIDE = ("name", "engine_num", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "max_num_seqs")
"""Settings of an auxiliary model that do not change its answers."""


def score_fingerprint(config: Config, step: int) -> str:
    """Return the SHA-256 of everything that a score of `step` depends on, except the trained weights themselves.

    Those are identified by run and step. Step 0 is `model.model_path` with the starting adapter, whose files are part
    of the fingerprint, or the external model: its address, name and `request_args`.
    """
    explorer, model = config.explorer, without_defaults(config.model)
    prompts = {name: value for name, value in model.items() if name not in ("model_path", "critic_model_path")}
    template, plugins = config.model.chat_template_path, config.plugin_dir
    made_with = {
        "format": FORMAT,
        "seed": config.seed,
        "model": _model_digest(config.model.model_path) if step == 0 and not config.external_model else "",
        "prompts and sampling": prompts,
        "chat template": _files_digest([Path(template).expanduser()]) if template else "",
        "eval sets": without_defaults(config.buffer.explorer_input.eval_tasksets),
        "data": [
            data_digest(data.path, data.split, data.subset_name) for data in config.buffer.explorer_input.eval_tasksets
        ],
        "auxiliary models": [
            {name: value for name, value in auxiliary.items() if name not in ASIDE}
            | {"files": _model_digest(auxiliary["model_path"])}
            for auxiliary in without_defaults(explorer.auxiliary_models)
        ],
        "workflows": {"max_timeout": explorer.max_timeout, "env_vars": sorted(explorer.env_vars)},
        "plugins": _files_digest(python_files(expanded(plugins), "**/*.py")) if plugins else "",
    }
    if step == 0 and config.model.lora is not None and config.model.lora.path is not None:
        made_with["adapter"] = _model_digest(config.model.lora.path)
    if external := config.external_model:
        names = ("base_url", "model_name", "request_args")
        made_with["external model"] = {name: getattr(external, name) for name in names}
    else:
        engine = explorer.rollout_model
        lossy = {name: value for name, value in engine.extra_engine_args.items() if is_lossy({name: value})}
        made_with["engines"] = {name: getattr(engine, name) for name in ENGINE} | lossy
    return sha256(json.dumps(_resolved(made_with), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _resolved(value: Any, key: str = "") -> Any:
    """Return the value with existing paths made absolute, so that the notation of a path does not matter."""
    if isinstance(value, dict):
        return {name: _resolved(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, key) for item in value]
    is_path = isinstance(value, str) and key.endswith("path") and value
    return str(expanded(value).resolve()) if is_path and expanded(value).exists() else value


def valid_scores(config: Config) -> dict[int, float]:
    """Return step → score of the run's weights; only scores made with the current configuration.

    A score is the mean over all eval sets: an evaluation with an unscored set has none. A configuration without eval
    sets, such as that of a trainer with a separate explorer, uses `latest_scores`.
    """
    sets = [str(taskset.name) for taskset in config.buffer.explorer_input.eval_tasksets]
    return _scores(_valid(read_evaluations(config.job_dir), config), sets)


def uncounted_steps(config: Config) -> list[int]:
    """Return steps scored only with other settings, or by a release that scored differently."""
    lines = read_evaluations(config.job_dir)
    return sorted({line.step for line in lines} - {line.step for line in _valid(lines, config)})


def latest_scores(job_dir: Path | str) -> dict[int, float]:
    """Return step → score, of evaluations with the same fingerprint as the newest, for use without a configuration."""
    return scores_like_the_newest(read_evaluations(job_dir))


def scores_like_the_newest(evaluations: list[MetricLine]) -> dict[int, float]:
    """Like `latest_scores`, given the evaluations' lines."""
    return _scores(like_the_newest(evaluations))


def intervals_like_the_newest(evaluations: list[MetricLine]) -> dict[int, tuple[float, float]]:
    """Return step → 95 % interval of its score in `scores_like_the_newest`; none if the score is a mean of several
    sets."""
    intervals: dict[int, tuple[float, float]] = {}
    for line in like_the_newest(evaluations):
        ends = [
            (value, line.metrics[name.removesuffix("low") + "high"])
            for name, value in line.metrics.items() if name.endswith("/accuracy_low")
        ]  # fmt: skip
        intervals.pop(line.step, None)
        if len(ends) == 1 and len(_by_set(line.metrics)) == 1:
            intervals[line.step] = ends[0]
    return intervals


def score_text(score: float, interval: tuple[float, float] | None) -> str:
    """Return `0.985 [0.968, 0.993]`."""
    return f"{score:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else f"{score:.3f}"


def steps_to_evaluate(config: Config, whole: Collection[int]) -> list[int]:
    """Return the whole checkpoints, scored or not, that an evaluation beside training scores, apart from the last."""
    every = config.explorer.eval_interval
    return [step for step in whole if every and step % every == 0]


def best_steps(config: Config, among: Collection[int]) -> list[int]:
    """Return the steps of `among` to keep as the best: by the valid scores, and by those of the previous fingerprint.

    So a change of what scores depend on, or an update of this package, does not delete the best checkpoint. Ties go to
    the first step.
    """
    lines = read_evaluations(config.job_dir)
    newest = list(dict.fromkeys(line.made_with for line in reversed(lines) if line.step))[:2]  # step 0 has its own
    earlier = [_scores(line for line in lines if line.made_with == fingerprint) for fingerprint in newest]
    rankings = [valid_scores(config), *earlier]
    best = [sorted(scores.keys() & set(among), key=lambda step: (-scores[step], step))[:1] for scores in rankings]
    return sorted({step for steps in best for step in steps})


def evaluated_sets(metrics: Mapping[str, float]) -> list[str]:
    """Return the eval sets of an evaluation that have an accuracy."""
    names = (name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy"))
    return [name.removeprefix("eval/").removesuffix("/accuracy") for name in names]


def unscored_sets(metrics: Mapping[str, float]) -> list[str]:
    """Return the eval sets of an evaluation that have no score because no answer has a verdict."""
    return sorted(name for name, value in _by_set(metrics).items() if value is None)


def _scores(lines: Iterable[MetricLine], sets: Collection[str] = ()) -> dict[int, float]:
    """Return step → mean over `sets`, by default those of the line. The latest evaluation of a step counts, scored or
    not."""
    scores: dict[int, float] = {}
    for line in lines:
        by_set = _by_set(line.metrics)
        values = [value for name in sets or by_set if (value := by_set.get(name)) is not None]
        scores.pop(line.step, None)
        if values and len(values) == len(sets or by_set):
            scores[line.step] = sum(values) / len(values)
    return scores


def _by_set(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return eval set → accuracy, or reward if there is no accuracy and answers were not judged; otherwise None.

    Parts of the reward may have the same names as metrics of a set, but only eval sets have a number of judged answers.
    """
    sets: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if match := SCORED.fullmatch(name):
            sets.setdefault(match["set"], {})[match["kind"]] = value
    counted = {name: kinds for name, kinds in sets.items() if "judged" in kinds}
    return {
        name: kinds.get("accuracy", None if "judged" in kinds else kinds.get("reward"))
        for name, kinds in (counted or sets).items()
    }


def _valid(lines: list[MetricLine], config: Config) -> list[MetricLine]:
    if not config.buffer.explorer_input.eval_tasksets:
        return like_the_newest(lines)
    now = {first: score_fingerprint(config, first) for first in {min(line.step, 1) for line in lines}}
    return [line for line in lines if line.made_with == now[min(line.step, 1)]]


def like_the_newest(lines: list[MetricLine]) -> list[MetricLine]:
    """Return the evaluations with the fingerprint of the newest one; that of step 0 is a fingerprint of its own."""
    newest = {min(line.step, 1): line.made_with for line in lines}
    return [line for line in lines if line.made_with == newest[min(line.step, 1)]]


def data_digest(source: str, split: str, subset_name: str | None) -> str:
    """Return a digest of the contents of local files; other sources are identified by name."""
    try:
        digest = _files_digest(data_files(source, split, subset_name)) if is_local(source) else source
    except DataError:
        return "no data"
    return f"{digest} {split}" if is_slice(split) else digest


def _model_digest(model_path: str) -> str:
    """Return a digest of a folder's weights, configuration and tokenizer; hub models are identified by name."""
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        return model_path
    files = sorted(file for pattern in ANSWERING for file in folder.glob(pattern))
    try:
        weights = weights_digest(str(folder))
    except DataError:  # reported when the model is loaded
        weights = _files_digest(weight_files(folder))
    return f"{weights} {_files_digest(files)}"


def _files_digest(files: Iterable[Path]) -> str:
    digest = sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            file_digest(content, lambda: digest)
    return digest.hexdigest()


def evaluation_of(config: Config, step: int) -> dict[str, dict[str, float]]:
    """Return eval set → metric → value of the evaluation behind the score of `step`; empty if there is none."""
    metrics = [line.metrics for line in _valid(read_evaluations(config.job_dir), config) if line.step == step]
    return by_eval_set(config, metrics[-1]) if metrics else {}


def by_eval_set(config: Config, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    sets: dict[str, dict[str, float]] = {}
    for taskset in config.buffer.explorer_input.eval_tasksets:
        below = f"eval/{taskset.name}/"
        numbers = {name.removeprefix(below): value for name, value in metrics.items() if name.startswith(below)}
        sets |= {str(taskset.name): numbers} if numbers else {}
    return sets


def evaluation_text(evaluation: Mapping[str, Mapping[str, float]]) -> str:
    """Return a line per eval set: accuracy with its interval, answers judged, deviation between repeats, pass@k."""
    return "\n".join(f"{taskset:11}{scored_text(numbers)}" for taskset, numbers in evaluation.items())


def scores_text(evaluation: Mapping[str, Mapping[str, float]]) -> str:
    """Return the eval sets on one line: `test accuracy 0.985 …; hard accuracy …`."""
    return "; ".join(f"{taskset} {scored_text(numbers)}" for taskset, numbers in evaluation.items())


def step_scores_text(config: Config, step: int, evaluation: Mapping[str, Mapping[str, float]]) -> str:
    """Return `scores_text` with the run, which in a pipeline is a stage's, and the step."""
    begins = " (before training)" if not step and config.external_model is None else ""
    return f"{config.name}, step {step}{begins}: {scores_text(evaluation)}"


def scored_text(numbers: Mapping[str, float]) -> str:
    """Return `accuracy 0.985 [0.968, 0.993], 400 of 400 answers judged`."""
    judged = f"{numbers.get('judged', 0):g} of {numbers.get('answers', 0):g} answers judged"
    if unsampled := numbers.get("unsampled"):
        judged += f", {unsampled:g} prompts too long"
    if "accuracy" not in numbers:
        return f"no score: {judged}"
    within = (numbers["accuracy_low"], numbers["accuracy_high"]) if "accuracy_low" in numbers else None
    parts = [f"accuracy {score_text(numbers['accuracy'], within)}", judged]
    if failed := numbers.get("failed_requests"):
        parts.append(f"{failed:g} requests failed")
    if "accuracy_std" in numbers:
        parts.append(f"±{numbers['accuracy_std']:.3f} between repeats")
    best = {int(k): f"{name}@{k}" for name, _, k in (metric.partition("@") for metric in numbers) if k.isdigit()}
    parts += [f"{name} {numbers[name]:.3f}" for k, name in sorted(best.items()) if k > 1]
    return ", ".join(parts)
