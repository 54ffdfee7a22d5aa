"""Rules between settings. Each rule reports what it finds; none raises.

A finding is dropped if one of the settings it rests on is already reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.curriculum_rules import queue_rules, spelled_twice, weight_rules
from trinity_core.config.experience_rules import experience_rules
from trinity_core.config.external_rules import external_rules
from trinity_core.config.joined_rules import joined_rules
from trinity_core.config.openai_api import openai_api_rules
from trinity_core.config.problems import Finding, Report, repeated_names
from trinity_core.config.schema import Config, TasksetConfig
from trinity_core.config.serve_rules import serve_rules
from trinity_core.config.staleness import staleness_rules
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.task_output import pipeline_rules
from trinity_core.slips import closest

INPUT = "buffer.explorer_input"
RAFT = "advantage_fn_args {selection: all} learns from every rollout that the workflow returns, as Trinity-RFT's raft."
PATH = "must be given, and not be blank: a file, a folder or a hub name."
ON_CPU = "must be 1 on the CPU (cluster.gpu_per_node is 0)."
SHARED_GPU_MEMORY = 0.7
"""Up to this `gpu_memory_utilization` an engine leaves room for a trainer on the same single GPU."""


def check(written: Config, config: Config, report: Report) -> None:
    """Report every contradiction between what was written and, in `config`, what it resolves to."""
    rules = (
        _names,
        _algorithm,
        _model,
        _cluster,
        _batches,
        _tasks,
        _restricted_on_gpu,
        experience_rules,
        _synchronizer,
        staleness_rules,
        _explorer,
        external_rules,
        openai_api_rules,
        serve_rules,
        joined_rules,
        _trainer,
    )
    findings = [
        *_spelled_twice(written),
        *spelled_twice(written),
        *(finding for rule in rules for finding in rule(config)),
    ]
    for key, value, message, rests_on, suggestion in findings:
        if not report.touched((key, *rests_on)):
            report.add(key, value, message, suggestion)


def check_stage_list(config: Config, report: Report) -> None:
    """Report stages without a usable name or with another's."""
    seen: set[str] = set()
    for index, stage in enumerate(config.stages):
        key = f"stages[{index}].stage_name"
        if wrong := _unusable(stage.stage_name):
            report.add(key, stage.stage_name, wrong)
        elif stage.stage_name in seen:
            report.add(key, stage.stage_name, f"two stages are called '{stage.stage_name}'; names must differ.")
        seen.add(stage.stage_name)


def _unusable(name: str) -> str:
    """Why a name cannot be a folder's, or an empty string."""
    if not name or name != name.strip():
        return "must be given, without blanks around it."
    if "/" in name or "\0" in name or name in (".", ".."):
        return f"names a folder, so it cannot be {name!r}."
    return ""


def _spelled_twice(written: Config) -> Iterator[Finding]:
    given = written.buffer.explorer_input
    if given.taskset is not None and given.tasksets:
        yield Finding(f"{INPUT}.tasksets", None, "give this or taskset, not both.")
    steps, other = written.buffer.total_steps, written.trainer.total_steps
    if steps is not None and other is not None and steps != other:
        yield Finding("trainer.total_steps", other, f"is {other}, but buffer.total_steps is {steps}; give one of them.")
    optimizer = written.algorithm.optimizer
    if optimizer.lr_warmup_steps and optimizer.lr_warmup_steps_ratio:
        message = "give this or lr_warmup_steps, not both."
        yield Finding("algorithm.optimizer.lr_warmup_steps_ratio", optimizer.lr_warmup_steps_ratio, message)
    if written.model.custom_chat_template and written.model.chat_template_path:
        message = "give this or custom_chat_template, not both."
        yield Finding("model.chat_template_path", written.model.chat_template_path, message)


def _names(config: Config) -> Iterator[Finding]:
    for key, name in (("project", config.project), ("name", config.name)):
        if wrong := _unusable(name):
            yield Finding(key, name, wrong)


def _algorithm(config: Config) -> Iterator[Finding]:
    name, key = config.algorithm.algorithm_type, "algorithm.algorithm_type"
    known = ALGORITHMS.get(name)
    if known is None:
        listed = ", ".join(sorted(ALGORITHMS))
        yield Finding(key, name, f"must be one of {listed}, not '{name}'.", suggestion=closest(name, ALGORITHMS))
        return
    if known.uses_rollouts:
        least = 1 if chooses_every_rollout(config) else known.min_repeat_times
        repeats = [("algorithm.repeat_times", config.algorithm.repeat_times)]
        repeats += [(f"{where}.repeat_times", taskset.repeat_times) for where, taskset in training_tasksets(config)]
        for where, times in repeats:
            if times < least:
                message = f"{name} compares rollouts of the same task, so it needs at least {least}, not {times}."
                message += f" {RAFT}" if name == "raft" else ""
                yield Finding(where, times, message, (key, "algorithm.repeat_times"))
                break
    elif config.explores:
        message = f"{name} learns from a data set, without an explorer: the mode must be train, not {config.mode}."
        yield Finding("mode", config.mode, message, (key,))


def chooses_every_rollout(config: Config) -> bool:
    """True for RAFT without a choice: every rollout is learned from, so that one of each task is enough."""
    parts = config.algorithm
    return parts.advantage_fn == "raft" and parts.advantage_fn_args.get("selection", "best") != "best"


def _model(config: Config) -> Iterator[Finding]:
    model = config.model
    if config.external_model and model.max_model_len is None:
        return
    if not model.model_path and not config.external_model:
        yield Finding("model.model_path", model.model_path, "must be given: a Hugging Face folder or hub name.")
    if model.max_model_len is None:
        message = "must be given, or both max_prompt_tokens and max_response_tokens, from which it follows."
        yield Finding("model.max_model_len", None, message, ("model.max_prompt_tokens", "model.max_response_tokens"))
        return
    for name, other in (("max_response_tokens", "prompt"), ("max_prompt_tokens", "response")):
        limit = getattr(model, name)
        if limit >= model.max_model_len and (other == "response" or model.max_prompt_tokens <= 1):
            message = f"is {limit}, which leaves no room for a {other} within max_model_len {model.max_model_len}."
            yield Finding(f"model.{name}", limit, message, ("model.max_model_len", "model.max_response_tokens"))
            break
    if model.min_response_tokens >= model.max_response_tokens:
        least, most = model.min_response_tokens, model.max_response_tokens
        message = f"must be less than max_response_tokens, which is {most}; it is {least}."
        yield Finding("model.min_response_tokens", least, message, ("model.max_response_tokens",))


def shares_a_gpu(config: Config, total: int) -> bool:
    """Whether engine and trainer may share the only GPU: the engine leaves enough of its memory."""
    return total == 1 and config.explorer.rollout_model.gpu_memory_utilization <= SHARED_GPU_MEMORY


def _cluster(config: Config) -> Iterator[Finding]:
    """Several nodes are joined, not started. GPUs are counted where their number is given; 0 means the CPU."""
    rollout, per_node = config.explorer.rollout_model, config.cluster.gpu_per_node
    if config.cluster.node_num > 1 and not config.cluster.ray_address:
        message = "must be 1 without cluster.ray_address: a Ray that is started for the run has this machine alone."
        yield Finding("cluster.node_num", config.cluster.node_num, message, ("cluster.ray_address",))
    if per_node is None:
        return
    key, size = "cluster.gpu_per_node", "explorer.rollout_model.tensor_parallel_size"
    if per_node == 0:
        if rollout.tensor_parallel_size > 1 and config.mode != "train" and not config.external_model:
            yield Finding(size, rollout.tensor_parallel_size, ON_CPU, (key,))
        for index, model in enumerate(config.explorer.auxiliary_models):
            if model.tensor_parallel_size > 1 and config.mode != "train":
                where = f"explorer.auxiliary_models[{index}].tensor_parallel_size"
                yield Finding(where, model.tensor_parallel_size, ON_CPU, (key,))
        return
    total = per_node * config.cluster.node_num
    policy = [] if config.external_model else [rollout]
    models = [] if config.mode == "train" else [*policy, *config.explorer.auxiliary_models]
    engines = sum(model.engine_num * model.tensor_parallel_size for model in models)
    rests_on = (key, size, "cluster.node_num", "explorer.rollout_model.engine_num", "explorer.auxiliary_models")
    have = f"and there {'is' if total == 1 else 'are'} {total} (cluster.node_num x cluster.gpu_per_node)"
    if engines > total:
        yield Finding(
            "explorer.rollout_model.engine_num", engines, f"the engines need {engines} GPUs, {have}.", rests_on
        )
    elif config.mode == "both" and engines == total and not shares_a_gpu(config, total):
        message = f"the engines need {engines} GPUs, {have}: none is left for the trainer."
        yield Finding("explorer.rollout_model.engine_num", engines, message, rests_on)
    elif config.mode in ("both", "train") and (config.trainer.worker_num or 0) > total - engines:
        workers = config.trainer.worker_num
        message = f"asks for {workers} GPUs, but the engines leave {total - engines} of {total}."
        yield Finding("trainer.worker_num", workers, message, rests_on)


def _batches(config: Config) -> Iterator[Finding]:
    size, key = config.buffer.train_batch_size, "buffer.train_batch_size"
    if config.algorithm.policy_loss_fn == "dpo" and size % 2:
        yield Finding(
            key, size, f"counts chosen and rejected answers, so it must be even, not {size}.", ("buffer.batch_size",)
        )


def _tasks(config: Config) -> Iterator[Finding]:
    known = ALGORITHMS.get(config.algorithm.algorithm_type)
    explores = config.mode in ("both", "explore") and (known is None or known.uses_rollouts)
    given = config.buffer.explorer_input
    if explores and not given.tasksets:
        yield Finding(
            f"{INPUT}.taskset",
            None,
            f"must be given, or tasksets, in mode {config.mode}: the explorer needs tasks.",
            ("mode",),
        )
    if config.mode == "bench" and not given.eval_tasksets:
        yield Finding(f"{INPUT}.eval_tasksets", None, "must be given in mode bench: there is nothing to evaluate on.")
    tasksets = [*training_tasksets(config), *eval_tasksets(config)]
    produced = config.data_processor.task_pipeline is not None
    for key, taskset in tasksets:
        if not taskset.path.strip() and not produced and taskset.storage_type != "queue":
            yield Finding(f"{key}.path", taskset.path, PATH)
    yield from pipeline_rules(config, tasksets)
    yield from weight_rules(training_tasksets(config))
    yield from queue_rules(config, training_tasksets(config), eval_tasksets(config))
    for group in (training_tasksets(config), eval_tasksets(config)):
        yield from repeated_names("task sets", ((f"{key}.name", taskset.name) for key, taskset in group))


RESTRICTED_ON_GPU = (
    "must be 1 (or 0) on a GPU where top_p, top_k or model.min_response_tokens restrict sampling: vLLM cannot report "
    "log-probs over the whole vocabulary at another temperature, and every importance ratio would be biased."
)


def restricted_sampling(config: Config) -> list[tuple[str, float]]:
    """Key and value of the temperature of each training task set that may not sample from the whole vocabulary."""
    found = []
    model = config.model
    if config.mode == "serve" and (model.top_p < 1.0 or model.top_k > 0):
        found.append(("model.temperature", model.temperature))
    for key, taskset in training_tasksets(config):
        args = taskset.rollout_args
        if (args.top_p or 1.0) < 1.0 or (args.top_k or 0) > 0 or config.model.min_response_tokens > 1:
            value = config.model.temperature if args.temperature is None else args.temperature
            found.append((f"{key}.rollout_args.temperature", value))
    return found


def _restricted_on_gpu(config: Config) -> Iterator[Finding]:
    """`inference.settings.policy_engine` checks the same when the number of GPUs is counted at the start."""
    if config.mode == "bench" or not config.cluster.gpu_per_node:
        return
    for key, value in restricted_sampling(config):
        if value not in (0.0, 1.0):
            rests_on = ("cluster.gpu_per_node", "model.temperature", "model.min_response_tokens")
            yield Finding(key, value, RESTRICTED_ON_GPU, rests_on)


def _synchronizer(config: Config) -> Iterator[Finding]:
    key, given = "synchronizer.sync_method", config.synchronizer.sync_method
    method = SYNC_METHODS.get(given)
    if method is None:
        return
    known = ALGORITHMS.get(config.algorithm.algorithm_type)
    apart = config.explores_alone or (config.mode == "train" and known is not None and known.uses_rollouts)
    if apart and not method.separate_runs:
        allowed = [name for name, other in SYNC_METHODS.items() if other.separate_runs]
        why = f" (algorithm_type {config.algorithm.algorithm_type} has an explorer)" if config.mode == "train" else ""
        message = f"must be {' or '.join(allowed)} in mode {config.mode}{why}: explorer and trainer are separate runs."
        yield Finding(key, given, message, ("mode",), allowed[0])
    elif method.one_node and config.cluster.node_num > 1:
        allowed = [name for name, other in SYNC_METHODS.items() if not other.one_node]
        message = f"must be {' or '.join(allowed)} on several nodes: {given} works within one."
        yield Finding(key, given, message, ("cluster.node_num",))


def _explorer(config: Config) -> Iterator[Finding]:
    models = config.explorer.auxiliary_models
    for index, model in enumerate(models):
        key = f"explorer.auxiliary_models[{index}]"
        if not model.model_path:
            yield Finding(f"{key}.model_path", model.model_path, "must be given: a Hugging Face folder or hub name.")
    names = ((f"explorer.auxiliary_models[{i}].name", model.name) for i, model in enumerate(models) if model.name)
    yield from repeated_names("auxiliary models", names)
    if wrong := _unusable(config.explorer.name):
        yield Finding("explorer.name", config.explorer.name, wrong)


def _trainer(config: Config) -> Iterator[Finding]:
    trainer = config.trainer
    share = trainer.ulysses_sequence_parallel_size
    if trainer.worker_num is not None and trainer.worker_num % share:
        message = f"must divide trainer.worker_num, which is {trainer.worker_num}; it is {share}."
        yield Finding("trainer.ulysses_sequence_parallel_size", share, message, ("trainer.worker_num",))
    if trainer.torch_compile and trainer.zero_stage == 3:
        message = "cannot go with trainer.zero_stage 3, which gathers weights within a layer; choose one of them."
        yield Finding("trainer.torch_compile", True, message, ("trainer.zero_stage",))


def training_tasksets(config: Config) -> list[tuple[str, TasksetConfig]]:
    """Each training task set with the key under which it was given."""
    given = config.given.get("buffer")
    given = given.get("explorer_input") if isinstance(given, dict) else None
    single = isinstance(given, dict) and given.get("taskset") is not None
    return [
        (f"{INPUT}.taskset" if single and index == 0 else f"{INPUT}.tasksets[{index - single}]", taskset)
        for index, taskset in enumerate(config.buffer.explorer_input.tasksets)
    ]


def eval_tasksets(config: Config) -> list[tuple[str, TasksetConfig]]:
    """Each task set for evaluation with its key."""
    return [
        (f"{INPUT}.eval_tasksets[{i}]", taskset) for i, taskset in enumerate(config.buffer.explorer_input.eval_tasksets)
    ]
