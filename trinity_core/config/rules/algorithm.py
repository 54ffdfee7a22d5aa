"""Rules of `algorithm` and `model`: rollouts to compare, room for tokens, and how training samples are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.base.errors import closest
from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Finding, conflict
from trinity_core.config.rules.tasks import eval_tasksets, training_tasksets
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
GRAMMARS = ("json", "regex", "choice", "grammar")
GUIDED = (
    "must be 1 (or 0) with structured_output: at another temperature the engine does not tell which tokens the grammar "
    "forced, so that no token would carry loss."
)
TAUGHT = "must be 1 (or 0) for {}: the teacher's log-probs are at temperature 1, and the student's would not be."


def algorithm_rules(config: Config) -> Iterator[Finding]:
    name, key = config.algorithm.algorithm_type, "algorithm.algorithm_type"
    defaults = ALGORITHMS.get(name)
    form = "buffer.trainer_input.experience_buffer.format.prompt_type"
    if name == "cpt" and config.written(form) not in (None, "text"):
        yield conflict(config, form, "must be text for cpt: it learns from whole texts; use sft for answers.", key)
    if defaults is None:
        message = f"must be one of {', '.join(sorted(ALGORITHMS))}, not '{name}'."
        yield conflict(config, key, message, code="unknown-choice", meant=closest(name, ALGORITHMS))
        return
    if not defaults.uses_rollouts:
        if config.explores:
            message = f"{name} learns from a data set, without an explorer: the mode must be train, not {config.mode}."
            yield conflict(config, "mode", message, key)
        return
    loss = config.algorithm.policy_loss_fn
    definition = registry_of("algorithm.policy_loss_fn").get(loss)
    if definition is not None and definition.rows_per_unit > 1 and loss != defaults.policy_loss_fn:
        message = f"{loss} compares the pairs of a data set: write algorithm_type: dpo. {name}'s rollouts are no pairs."
        yield conflict(config, "algorithm.policy_loss_fn", message, key)
    least = 1 if chooses_every_rollout(config) else defaults.min_repeat_times
    repeats = [("algorithm.repeat_times", config.algorithm.repeat_times)]
    repeats += [(f"{where}.repeat_times", taskset.repeat_times) for where, taskset in training_tasksets(config)]
    for where, times in repeats:
        if times < least:
            message = f"{name} compares rollouts of the same task, so it needs at least {least}, not {times}."
            message += f" {RAFT}" if name == "raft" else ""
            yield conflict(config, where, message, key, "algorithm.repeat_times")
            break


def chooses_every_rollout(config: Config) -> bool:
    """True for RAFT with `selection: all`: it learns from every rollout, so that one per task is enough."""
    parts = config.algorithm
    return parts.advantage_fn == "raft" and parts.advantage_fn_args.get("selection", "best") != "best"


def model_rules(config: Config) -> Iterator[Finding]:
    model, longest = config.model, config.model.max_model_len
    if config.external_model and longest is None:
        return
    if not model.model_path and not config.external_model:
        message = "must be given: a Hugging Face folder or hub name."
        yield conflict(config, "model.model_path", message, code="missing")
    limits = ("model.max_prompt_tokens", "model.max_response_tokens")
    if longest is None:
        message = "must be given, or both max_prompt_tokens and max_response_tokens, from which it follows."
        yield conflict(config, "model.max_model_len", message, *limits, code="missing")
        return
    room = f"leaves no room for a {{}} within max_model_len {longest}."
    if model.max_response_tokens >= longest and model.max_prompt_tokens <= 1:
        message = f"is {model.max_response_tokens}, which {room.format('prompt')}"
        yield conflict(config, limits[1], message, "model.max_model_len")
    elif model.max_prompt_tokens >= longest:
        message = f"is {model.max_prompt_tokens}, which {room.format('response')}"
        yield conflict(config, limits[0], message, "model.max_model_len", limits[1])
    least, most = model.min_response_tokens, model.max_response_tokens
    if least >= most:
        message = f"must be less than max_response_tokens, which is {most}; it is {least}."
        yield conflict(config, "model.min_response_tokens", message, limits[1])


def sampling_rules(config: Config) -> Iterator[Finding]:
    """`inference.settings.policy_engine` repeats this check at start, when the number of GPUs is known."""
    if config.mode == "bench" or not config.cluster.gpu_per_node:
        return
    rests_on = ("cluster.gpu_per_node", "model.temperature", restricted_sampling(config))
    for key, value, message in unreported_temperatures(config):
        yield Finding(key, value, "conflict", message, rests_on)


def grammar_rules(config: Config) -> Iterator[Finding]:
    """What `rollout_args.structured_output` names, and who follows it."""
    for key, taskset in (*training_tasksets(config), *eval_tasksets(config)):
        names, where = list(taskset.rollout_args.structured_output), f"{key}.rollout_args.structured_output"
        if names and (len(names) > 1 or names[0] not in GRAMMARS):
            message = f"must have one of {', '.join(GRAMMARS)}, not {', '.join(names)}."
            yield Finding(where, names, "conflict", message)
        elif names and config.external_model:
            yield Finding(where, names, "conflict", "works with the run's own engines, not with an external model.")
    args = {f"{key}.rollout_args": taskset.rollout_args for key, taskset in training_tasksets(config)}
    for key, value in training_temperatures(config) if config.mode != "bench" else ():
        where = key.removesuffix(".temperature")
        if where in args and args[where].structured_output and value not in (0.0, 1.0):
            yield Finding(key, value, "conflict", GUIDED, (f"{where}.structured_output", "model.temperature"))


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
        temperature = taskset.rollout_args.temperature
        temperatures.append((f"{key}.rollout_args.temperature", default if temperature is None else temperature))
    return temperatures


def restricted_sampling(config: Config) -> str:
    """Return the first key by which training samples do not follow the policy's whole distribution, or ""."""
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
        if args.repetition_penalty not in (None, 1.0):
            return f"{key}.repetition_penalty"
    return ""


def unreported_temperatures(config: Config) -> list[tuple[str, float, str]]:
    """Return key, value and reason for each temperature whose log-probs an engine on a GPU cannot report.

    Log-prob reporting is one setting per engine: if one task set restricts sampling, all get raw log-probs.
    """
    if not (restricting := restricted_sampling(config)):
        return []
    message = RESTRICTED_ON_GPU.format(restricting)
    return [(key, value, message) for key, value in training_temperatures(config) if value not in (0.0, 1.0)]
