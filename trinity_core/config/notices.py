"""Notices about a valid configuration: keys without a counterpart, and settings that do not do what they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from trinity_core.base.registry import registry_of
from trinity_core.base.signatures import ActsWith
from trinity_core.config.algorithm_types import ALGORITHMS, PARTS
from trinity_core.config.findings import Code, Finding
from trinity_core.config.foreign.names import instead_of
from trinity_core.config.resolve import THINKING_WORKFLOWS, draws_by, expert_share, most_repeats
from trinity_core.config.rules.resources import colocates
from trinity_core.config.rules.tasks import eval_tasksets, training_tasksets
from trinity_core.config.schema import Config
from trinity_core.config.schema.buffer import ReplayBufferConfig, TaskSelectorConfig
from trinity_core.config.training import kept_on_gpu, train_settings

ACTOR, CRITIC = "trainer.trainer_config.actor_rollout_ref.actor", "trainer.trainer_config.critic"

REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"


def notices(config: Config) -> list[str]:
    """Return one sentence per notice, for a log or a terminal; empty for most configurations."""
    instead = [(finding.key, instead_of(finding.key)) for finding in config.notices]
    foreign = ", ".join(f"{key} (here {name})" if name else key for key, name in instead)
    sentence = [f"Accepted, but without effect here: {foreign}."] if foreign else []
    return [*sentence, *(finding.message for finding in _surprises(config))]


def remarks(config: Config) -> list[Finding]:
    """Return a notice for each of other systems' keys without a counterpart, and for settings that, as they are, do
    not do what they say."""
    return [*config.notices, *_surprises(config)]


def _surprises(config: Config) -> Iterator[Finding]:
    for rule in (_idle, _uncorrected, _clips, _peak, _thinking, _tasks, _replay, _batches, _offload):
        yield from rule(config)


def _notice(key: str, code: Code, message: str) -> Finding:
    return Finding(key, None, code, message, severity="notice")


def _idle(config: Config) -> Iterator[Finding]:
    """Yield written arguments of a part that is `none`, and those that other arguments keep from acting.

    A default of the algorithm type gets no notice: the files of runs list them.
    """
    for part in PARTS if _trains(config) else ():
        key, name, registry = f"algorithm.{part}", getattr(config.algorithm, part), registry_of(f"algorithm.{part}")
        args, usual = getattr(config.algorithm, f"{part}_args"), getattr(config.algorithm_type, f"{part}_args")
        model = registry.arguments(registry[name], name) if name in registry else None
        if model is None:
            continue
        for argument in config.written(f"{key}_args") or {}:
            value = args.get(argument)
            if value is None or argument not in model.model_fields or value == usual.get(argument):
                continue
            reason = _why_idle(model, argument, args, f"{key}_args")
            if name == "none":
                others = ", ".join(other for other in registry if other != "none")
                reason = f"{key} is none. It acts with {others}." if value else ""
            if reason:
                yield _notice(f"{key}_args.{argument}", "no-effect", f"{key}_args.{argument} has no effect: {reason}")


def _why_idle(model: type[BaseModel], argument: str, args: Mapping[str, Any], key: str) -> str:
    """Return what keeps an argument from acting; "" if it acts."""
    for extra in model.model_fields[argument].metadata:
        if isinstance(extra, ActsWith):
            current = args.get(extra.other, model.model_fields[extra.other].default)
            if not extra.acts(current):
                return f"{key}.{extra.other} is {current}. It acts with {extra.value or 'another value'}."
    sides = ("clip_range_low", "clip_range_high")
    if argument == "clip_range" and all(args.get(side) is not None for side in sides):
        return f"{key} has {' and '.join(sides)}."
    return ""


def _uncorrected(config: Config) -> Iterator[Finding]:
    """Yield a rollout correction that the policy loss does not take."""
    key, losses = "algorithm.rollout_correction", registry_of("algorithm.policy_loss_fn")
    rule = registry_of(key).get(config.written(key) or "none")
    loss = losses.get(config.algorithm.policy_loss_fn)
    if not _trains(config) or rule is None or rule.name == "none" or loss is None:
        return
    if loss.ratio_to_rollout and not rule.ratio_to_rollout:
        why = "takes its ratio to the rollouts' policy itself, so that a weight would count the gap twice"
    elif not loss.corrects_rollouts:
        why = "takes no correction"
    elif rule.ratio_to_rollout and not loss.inputs & {"old_logprobs"}:
        why = "has no ratio"
    else:
        return
    yield _notice(key, "no-effect", f"{key}: {rule.name} has no effect: the policy loss {loss.name} {why}.")


def _trains(config: Config) -> bool:
    return config.mode in ("both", "train")


def _clips(config: Config) -> Iterator[Finding]:
    """Yield clips without effect: with one update per batch every ratio is 1.

    A ratio to the sampling policy, from the loss or `bypass`, still differs from 1.
    """
    losses, loss = registry_of("algorithm.policy_loss_fn"), config.algorithm.policy_loss_fn
    updates = config.trainer.trainer_config.actor_rollout_ref.actor.ppo_epochs
    if not _trains(config) or updates > 1 or config.algorithm.rollout_correction == "bypass":
        return
    if loss not in losses or losses[loss].ratio_to_rollout:
        return
    for name in config.written("algorithm.policy_loss_fn_args") or {}:
        if name.startswith(("clip_range", "clip_ratio")):
            key = f"algorithm.policy_loss_fn_args.{name}"
            message = (
                f"{key} has no effect: with one update a batch the ratio that it clips is 1. It acts with {ACTOR}."
                "ppo_epochs above 1, or algorithm.rollout_correction: bypass."
            )
            yield _notice(key, "no-effect", message)


def _peak(config: Config) -> Iterator[Finding]:
    """Yield a peak of CHORD's schedule that no step has."""
    args = {**ALGORITHMS["mix_chord"].policy_loss_fn_args, **(config.algorithm.policy_loss_fn_args or {})}
    if config.algorithm.policy_loss_fn != "mix_chord" or args["mu_peak"] == args["mu_valley"] or args["mu_decay_steps"]:
        return
    key = "algorithm.policy_loss_fn_args.mu_peak"
    message = (
        f"{key}: mu is mu_valley ({args['mu_valley']}) after the warm-up. A peak acts with mu_decay_steps above 0."
    )
    yield _notice(key, "no-effect", message)


def _thinking(config: Config) -> Iterator[Finding]:
    """Without a reward function, `math_workflow` prompts and scores as Trinity-RFT's does.

    A file that names the reward function or sets `with_think` gets no notice.
    """
    thinking = [
        key
        for key, taskset in training_tasksets(config)
        if taskset.default_workflow_type in THINKING_WORKFLOWS
        and taskset.default_reward_fn_type is None
        and taskset.workflow_args.get("with_think")
        and not config.written(f"{key}.workflow_args.with_think")
    ]
    if config.mode not in ("both", "explore") or not thinking:
        return
    message = (
        f"{', '.join(thinking)}: without a reward function, math_workflow is Trinity-RFT's: unless the task has a "
        "system prompt, one asks for <think> and <answer>, and the reward is 0.1 higher for that form, else 0.1 lower. "
        "With default_reward_fn_type: math_reward, it asks only the question and scores only the final answer."
    )
    yield _notice(f"{thinking[0]}.workflow_args", "info", message)


def _tasks(config: Config) -> Iterator[Finding]:
    """Yield what eval sets, which an evaluation takes whole and in order, say about drawing; and seeds of orders
    without chance, except the first task set's, by which a mixture draws."""
    for key, taskset in eval_tasksets(config):
        for name in ("weight", "weight_by_step", "task_selector"):
            if getattr(taskset, name) not in (None, {}, TaskSelectorConfig()):
                message = f"{key}.{name} has no effect: an evaluation takes all tasks, in the order of the data set."
                yield _notice(f"{key}.{name}", "no-effect", message)
    tasksets = training_tasksets(config) if config.explores else ()
    for index, (key, taskset) in enumerate(tasksets):
        selector, draws_sets = taskset.task_selector, index == 0 and len(tasksets) > 1
        if (
            selector.seed is not None
            and selector.selector_type in ("sequential", "offline_easy2hard")
            and not draws_sets
        ):
            message = f"{key}.task_selector.seed has no effect: {selector.selector_type} draws nothing at random."
            yield _notice(f"{key}.task_selector.seed", "no-effect", message)


def _replay(config: Config) -> Iterator[Finding]:
    """Yield settings of a replay buffer that is off."""
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer
    if not _trains(config) or draws_by(config) == "priority":
        return
    for name, field in ReplayBufferConfig.model_fields.items():
        if getattr(replay, name) != field.get_default(call_default_factory=True):
            message = f"{REPLAY}.{name} has no effect: {REPLAY}.enable is false."
            yield _notice(f"{REPLAY}.{name}", "no-effect", message)


def _batches(config: Config) -> Iterator[Finding]:
    buffer, repeats = config.buffer, most_repeats(config.buffer, config.algorithm)
    explored = buffer.batch_size * repeats
    rows = round(buffer.train_batch_size * (1 - expert_share(config.algorithm)))
    if config.mode != "both" or rows == explored:
        return
    gives = f"An explore step gives {explored} experiences (batch_size {buffer.batch_size} x repeat_times {repeats}), "
    if config.is_synchronous and rows > explored and draws_by(config) != "priority":
        message = f"{gives}and a train step of a synchronous run takes those of one, not {rows}: raise batch_size."
        yield _notice("buffer.train_batch_size", "changed", message)
    else:
        steps = f"{rows / explored:.3g} explore steps"
        rest = " What it leaves waits in the store for later ones." if rows < explored else ""
        message = f"{gives}a train step takes {rows}, those of {steps}.{rest}"
        yield _notice("buffer.train_batch_size", "info", message)


def _offload(config: Config) -> Iterator[Finding]:
    """Yield `param_offload` of the policy or the critic where it does not act. On a CPU weights are in host memory."""
    if not _trains(config) or config.cluster.gpu_per_node == 0:
        return
    settings, gpus = train_settings(config), config.cluster.node_num * (config.cluster.gpu_per_node or 0)
    if reason := kept_on_gpu(config, colocates(config, gpus)):
        critic = settings.critic is not None and settings.critic.param_offload
        keys = {f"{ACTOR}.fsdp_config": settings.param_offload, f"{CRITIC}.model.fsdp_config": critic}
        for key in (f"{section}.param_offload" for section, asked in keys.items() if asked):
            yield _notice(key, "no-effect", f"{key} has no effect: {reason}.")
