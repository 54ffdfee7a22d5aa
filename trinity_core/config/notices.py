"""Notices about a valid configuration: settings that change another setting, or that have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Code, Finding
from trinity_core.config.paths import PIPELINE, is_backup, uses_pipeline
from trinity_core.config.resolve import THINKING_WORKFLOWS, draws_by, expert_share, held_out, most_repeats, shares
from trinity_core.config.rules.algorithm import training_temperatures
from trinity_core.config.rules.experiences import AUXILIARY, BUFFER
from trinity_core.config.rules.tasks import training_tasksets
from trinity_core.config.schema import Config
from trinity_core.config.schema.synchronizer import BY_EXPLORER

VERL = "trainer.trainer_config"
ACTOR = f"{VERL}.actor_rollout_ref.actor"


def notices(config: Config) -> list[str]:
    """Return one sentence per notice, for a log or a terminal; empty for most configurations."""
    return sentences(remarks(config))


def remarks(config: Config) -> list[Finding]:
    """Return a notice for each setting without effect in this run, and for each that another setting changes."""
    rules = (_clips, _thinking, _batches, _budget, _pushed, _merged, _greedy, _late_peak)
    unread = [Finding(key, None, "no-effect", "", severity="notice") for key in _unread(config)]
    return [*unread, *config.notices, *(finding for rule in rules for finding in rule(config))]


def sentences(findings: Iterable[Finding]) -> list[str]:
    """Return findings as text; keys without effect for the same reason share a sentence."""
    reasons: dict[str, list[str]] = {}
    texts: list[str] = []
    for finding in findings:
        if finding.code == "no-effect":
            reasons.setdefault(finding.message, []).append(finding.key)
        else:
            texts.append(finding.message)
    idle = [(_listed(keys) if why else ", ".join(keys), why) for why, keys in reasons.items()]
    return [*(f"Accepted, but without effect here: {keys}. {why}".rstrip() for keys, why in idle), *texts]


def _notice(key: str, code: Code, message: str) -> Finding:
    return Finding(key, None, code, message, severity="notice")


def _listed(keys: list[str]) -> str:
    """Join keys in one line; those in one section as `section.{a, b}`."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return ", ".join(
        f"{section}.{{{', '.join(names)}}}"
        if section and len(names) > 1
        else ", ".join(f"{section}.{name}".lstrip(".") for name in names)
        for section, names in sections.items()
    )


def _unread(config: Config) -> list[str]:
    """Return settings that are checked, but not read in this run: data sets, offloading, reasons to stop, whole
    sections."""
    trainer, verl = config.trainer, config.trainer.trainer_config
    inputs = config.buffer.trainer_input
    buffer, drawn = inputs.experience_buffer, {*shares(config), *held_out(config)}
    exported = buffer.storage_type == "file" and config.algorithm_type.uses_rollouts and config.mode != "explore"
    lora = config.model.lora
    unread = {
        f"{BUFFER}.path": bool(buffer.path) and (is_backup(buffer) or exported),
        **{f"{AUXILIARY}.{key}": config.mode == "explore" or key not in drawn for key in inputs.auxiliary_buffers},
        "model.lora_configs[0].lora_dropout": lora is not None and lora.lora_dropout > 0 and not config.is_supervised,
        "explorer.external_model": config.explorer.external_model is not None and not config.external_model,
        PIPELINE: config.data_processor.task_pipeline is not None and not uses_pipeline(config),
    }
    sets, stop = config.buffer.explorer_input.eval_tasksets, config.monitor.stop
    evaluates = bool(sets and config.explorer.eval_interval) and config.explores and not config.is_supervised
    for name in ("patience", "target"):
        unread[f"monitor.stop.{name}"] = getattr(stop, name) is not None and not evaluates
    monitors, monitor = registry_of("monitor.monitor_type"), config.monitor.monitor_type
    model = monitors.arguments(monitors[monitor], monitor) if monitor in monitors else None
    names = model.model_fields if model else {}
    unread |= {f"monitor.monitor_args.{name}": name not in names for name in config.monitor.monitor_args}
    actor = verl.actor_rollout_ref.actor
    for name, fsdp in ((ACTOR, actor.fsdp_config), (f"{VERL}.critic.model", verl.critic.model.fsdp_config)):
        unread[f"{name}.fsdp_config.param_offload"] = fsdp.param_offload and trainer.zero_stage != 3
    return [key for key, is_unread in unread.items() if is_unread]


def _clips(config: Config) -> Iterator[Finding]:
    """Yield clips without effect: with one update per batch every ratio is 1.

    A ratio to the sampling policy, from the loss or `bypass`, still differs from 1.
    """
    losses, loss = registry_of("algorithm.policy_loss_fn"), config.algorithm.policy_loss_fn
    updates = config.trainer.trainer_config.actor_rollout_ref.actor.ppo_epochs
    if config.mode not in ("both", "train") or updates > 1 or config.algorithm.rollout_correction == "bypass":
        return
    if loss not in losses or losses[loss].ratio_to_rollout:
        return
    why = "With one update a batch the ratio that it clips is 1."
    remedy = f"It acts with {ACTOR}.ppo_epochs above 1, or algorithm.rollout_correction: bypass."
    for name in config.written("algorithm.policy_loss_fn_args") or {}:
        if name.startswith(("clip_range", "clip_ratio")):
            yield _notice(f"algorithm.policy_loss_fn_args.{name}", "no-effect", f"{why} {remedy}")


def _greedy(config: Config) -> Iterator[Finding]:
    """Yield a temperature of 0 at which all rollouts of a task are one answer."""
    if config.mode == "bench" or not ALGORITHMS[config.algorithm.algorithm_type].uses_rollouts:
        return
    repeats = {f"{key}.rollout_args.temperature": taskset.repeat_times for key, taskset in training_tasksets(config)}
    for key, temperature in training_temperatures(config):
        if temperature == 0 and (times := repeats.get(key, 1)) > 1:
            message = (
                f"{key} is 0, so the {times} rollouts of a task are the same answer: groups of equal rewards have no "
                "gradient, unless an environment makes them differ."
            )
            yield _notice(key, "info", message)


def _late_peak(config: Config) -> Iterator[Finding]:
    """Yield a warm-up that the run does not end."""
    steps = config.trainer.total_steps or config.buffer.total_steps
    if steps is None:
        return
    optimizer, warmup = config.algorithm.optimizer, config.algorithm.optimizer.lr_warmup_steps
    policy_steps = steps - (config.trainer.trainer_config.trainer.critic_warmup if config.needs_critic else 0)
    if config.mode in ("both", "train") and warmup > max(policy_steps, 0):
        message = (
            f"algorithm.optimizer.lr_warmup_steps is {warmup}, and the policy takes {max(policy_steps, 0)} train "
            f"steps: the learning rate rises to {optimizer.lr * max(policy_steps, 0) / warmup:.3g}, and never reaches "
            f"{optimizer.lr:g}."
        )
        yield _notice("algorithm.optimizer.lr_warmup_steps", "info", message)


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


def _budget(config: Config) -> Iterator[Finding]:
    trainer, longest = config.trainer, config.model.max_model_len
    budget = trainer.max_token_len_per_gpu
    if config.mode not in ("both", "train") or budget >= longest:
        return
    message = f"A micro-batch holds up to {longest} tokens, one sequence of max_model_len, rather than {budget}."
    yield _notice("trainer.max_token_len_per_gpu", "changed", message)


def _pushed(config: Config) -> Iterator[Finding]:
    sync = config.synchronizer
    if config.mode != "both" or sync.sync_style not in BY_EXPLORER or sync.style == "explorer_driven":
        return
    message = (
        f"With sync_method {sync.sync_method} the trainer decides when it pushes weights, so {sync.sync_style} means "
        "trainer_driven. Other methods leave it to the explorer."
    )
    yield _notice("synchronizer.sync_style", "changed", message)


def _merged(config: Config) -> Iterator[Finding]:
    merges = config.model.lora is not None and config.engine_adapter is None and config.cluster.gpu_per_node != 0
    if config.mode != "both" or config.is_supervised or not merges:
        return
    message = (
        f"With sync_method {config.synchronizer.sync_method} engines get full weights, into which the adapter is "
        "merged; with memory or checkpoint they get the adapter alone."
    )
    yield _notice("synchronizer.sync_method", "info", message)
