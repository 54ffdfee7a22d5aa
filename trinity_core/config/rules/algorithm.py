"""Rules of `algorithm` and `model`: rollouts to compare, room for tokens, and how training samples are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.base.errors import closest
from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS, AlgorithmType
from trinity_core.config.findings import Finding
from trinity_core.config.rules.tasks import training_tasksets
from trinity_core.config.schema import Config, ModelConfig
from trinity_core.config.schema.buffer import RolloutArgs

RAFT = (
    "advantage_fn_args {selection: all}, which a repeat_times of 1 stands for, learns from every rollout that the "
    "workflow returns, as Trinity-RFT's raft."
)
RESTRICTED_ON_GPU = (
    "must be 1 (or 0) on a GPU where {} restricts sampling: vLLM cannot report log-probs over the whole vocabulary at "
    "another temperature, of any task set, and every importance ratio would be biased."
)
TAUGHT = "must be 1 (or 0) for {}: the teacher's log-probs are at temperature 1, and the student's would not be."


def algorithm_rules(config: Config) -> Iterator[Finding]:
    name, key = config.algorithm.algorithm_type, "algorithm.algorithm_type"
    known = ALGORITHMS.get(name)
    if known is None:
        listed = ", ".join(sorted(ALGORITHMS))
        yield Finding(
            key, name, "unknown-choice", f"must be one of {listed}, not '{name}'.", suggestion=closest(name, ALGORITHMS)
        )
        return
    if known.uses_rollouts:
        yield from _pairs_of_rollouts(config, known)
        least = 1 if chooses_every_rollout(config) else known.min_repeat_times
        repeats = [("algorithm.repeat_times", config.algorithm.repeat_times)]
        repeats += [(f"{where}.repeat_times", taskset.repeat_times) for where, taskset in training_tasksets(config)]
        for where, times in repeats:
            if times < least:
                message = f"{name} compares rollouts of the same task, so it needs at least {least}, not {times}."
                message += f" {RAFT}" if name == "raft" else ""
                yield Finding(where, times, "conflict", message, (key, "algorithm.repeat_times"))
                break
    elif config.explores:
        message = f"{name} learns from a data set, without an explorer: the mode must be train, not {config.mode}."
        yield Finding("mode", config.mode, "conflict", message, (key,))


def _pairs_of_rollouts(config: Config, known: AlgorithmType) -> Iterator[Finding]:
    chosen, key = config.algorithm.policy_loss_fn, "algorithm.policy_loss_fn"
    loss = registry_of(key).get(chosen)
    if loss is not None and loss.rows_per_unit > 1 and chosen != known.policy_loss_fn:
        message = (
            f"{chosen} compares the pairs of a data set, but adjacent rollouts of {known.name} are no pairs: write "
        )
        yield Finding(key, chosen, "conflict", f"{message}algorithm_type: dpo.", ("algorithm.algorithm_type",))


def chooses_every_rollout(config: Config) -> bool:
    """True for RAFT with `selection: all`: it learns from every rollout, so that one per task is enough."""
    parts = config.algorithm
    return parts.advantage_fn == "raft" and parts.advantage_fn_args.get("selection", "best") != "best"


def model_rules(config: Config) -> Iterator[Finding]:
    model = config.model
    if config.external_model and model.max_model_len is None:
        return
    if not model.model_path and not config.external_model:
        yield Finding(
            "model.model_path", model.model_path, "missing", "must be given: a Hugging Face folder or hub name."
        )
    if model.max_model_len is None:
        message = "must be given, or both max_prompt_tokens and max_response_tokens, from which it follows."
        yield Finding(
            "model.max_model_len", None, "missing", message, ("model.max_prompt_tokens", "model.max_response_tokens")
        )
        return
    for name, other in (("max_response_tokens", "prompt"), ("max_prompt_tokens", "response")):
        limit = getattr(model, name)
        if limit >= model.max_model_len and (other == "response" or model.max_prompt_tokens <= 1):
            message = f"is {limit}, which leaves no room for a {other} within max_model_len {model.max_model_len}."
            yield Finding(
                f"model.{name}", limit, "conflict", message, ("model.max_model_len", "model.max_response_tokens")
            )
            break
    if model.min_response_tokens >= model.max_response_tokens:
        least, most = model.min_response_tokens, model.max_response_tokens
        message = f"must be less than max_response_tokens, which is {most}; it is {least}."
        yield Finding("model.min_response_tokens", least, "conflict", message, ("model.max_response_tokens",))


def sampling_rules(config: Config) -> Iterator[Finding]:
    """`inference.settings.policy_engine` repeats this check at start, when the number of GPUs is known."""
    if config.mode == "bench" or not config.cluster.gpu_per_node:
        return
    for key, value, message in unreported_temperatures(config):
        rests_on = ("cluster.gpu_per_node", "model.temperature", restricted_sampling(config))
        yield Finding(key, value, "conflict", message, rests_on)


def distillation_rules(config: Config) -> Iterator[Finding]:
    """`training.update.prepare` checks the rows themselves."""
    name = config.algorithm.advantage_fn
    if config.mode == "bench" or not name or not registry_of("algorithm.advantage_fn").uses(name, "teacher_logprobs"):
        return
    for key, value in training_temperatures(config):
        if value not in (0.0, 1.0):
            yield Finding(key, value, "conflict", TAUGHT.format(name), ("algorithm.advantage_fn", "model.temperature"))


def training_temperatures(config: Config) -> list[tuple[str, float]]:
    """Return key and value of each training task set's temperature, and that of users' requests in mode `serve`."""
    default = config.model.temperature
    temperatures = [("model.temperature", default)] if config.mode == "serve" else []
    for key, taskset in training_tasksets(config):
        own = taskset.rollout_args.temperature
        temperatures.append((f"{key}.rollout_args.temperature", default if own is None else own))
    return temperatures


def restricted_sampling(config: Config) -> str:
    """Return the first key that restricts training samples to a part of the vocabulary, or ""."""
    model = config.model
    if model.min_response_tokens > 1 and training_temperatures(config):
        return "model.min_response_tokens"
    sources: list[tuple[str, ModelConfig | RolloutArgs]] = [("model", model)] if config.mode == "serve" else []
    sources += [(f"{key}.rollout_args", taskset.rollout_args) for key, taskset in training_tasksets(config)]
    for key, args in sources:
        if (1.0 if args.top_p is None else args.top_p) < 1.0:
            return f"{key}.top_p"
        if (args.top_k or 0) > 0:
            return f"{key}.top_k"
    return ""


def unreported_temperatures(config: Config) -> list[tuple[str, float, str]]:
    """Return key, value and reason for each temperature whose log-probs an engine on a GPU cannot report.

    Log-prob reporting is one setting per engine: if one task set restricts sampling, all get raw log-probs.
    """
    if not (restricting := restricted_sampling(config)):
        return []
    message = RESTRICTED_ON_GPU.format(restricting)
    return [(key, value, message) for key, value in training_temperatures(config) if value not in (0.0, 1.0)]
