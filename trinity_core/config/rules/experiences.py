"""Rules about what the trainer reads: batches, the experience buffer and the auxiliary buffers."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Finding, repeated_names
from trinity_core.config.paths import is_backup, no_database
from trinity_core.config.resolve import expert_share
from trinity_core.config.rules.tasks import ONE_PATH
from trinity_core.config.schema import Config
from trinity_core.config.types import SEVERAL

BUFFER = "buffer.trainer_input.experience_buffer"
AUXILIARY = "buffer.trainer_input.auxiliary_buffers"
HELD_OUT = "must be false: only sft and dpo measure a held-out loss; give others eval_tasksets."


def batch_rules(config: Config) -> Iterator[Finding]:
    size, key = config.buffer.train_batch_size, "buffer.train_batch_size"
    if config.algorithm.policy_loss_fn == "dpo" and size % 2:
        yield Finding(
            key,
            size,
            "conflict",
            f"counts chosen and rejected answers, so it must be even, not {size}.",
            ("buffer.batch_size",),
        )


def experience_rules(config: Config) -> Iterator[Finding]:
    known = ALGORITHMS.get(config.algorithm.algorithm_type)
    inputs = config.buffer.trainer_input
    buffer, name = inputs.experience_buffer, config.algorithm.algorithm_type
    rests_on = ("mode", "algorithm.algorithm_type", f"{BUFFER}.storage_type")
    if known and not known.uses_rollouts and config.mode == "train":
        if not buffer.path:
            yield Finding(
                f"{BUFFER}.path",
                buffer.path,
                "missing",
                f"must be given: the data set that {name} learns from.",
                rests_on,
            )
        if buffer.storage_type == "queue":
            message = f"must be file, sql or rollouts: {name} learns from a data set, not from an explorer."
            yield Finding(f"{BUFFER}.storage_type", buffer.storage_type, "conflict", message, rests_on)
    elif (
        known
        and known.uses_rollouts
        and (buffer.storage_type == "rollouts" or (config.mode in ("both", "train") and buffer.storage_type == "file"))
    ):
        message = (
            f"must be queue or sql in mode {config.mode}: algorithm_type {name} learns from what an explorer stores."
        )
        yield Finding(f"{BUFFER}.storage_type", buffer.storage_type, "conflict", message, rests_on)
    sources = {BUFFER: buffer, **{f"{AUXILIARY}.{key}": extra for key, extra in inputs.auxiliary_buffers.items()}}
    for key, source in sources.items():
        if SEVERAL in (source.path or "") and (source.storage_type != "file" or config.mode == "explore"):
            yield Finding(f"{key}.path", source.path, "conflict", ONE_PATH, (f"{key}.storage_type", "mode"))
    is_store = buffer.storage_type in ("queue", "sql") and not is_backup(buffer)
    if buffer.path and is_store and (wrong := no_database(buffer.path)):
        explored = (
            f" algorithm_type {name} learns from what an explorer stores." if known and known.uses_rollouts else ""
        )
        yield Finding(f"{BUFFER}.path", buffer.path, "invalid", wrong + explored, rests_on)
    replay, other = buffer.replay_buffer.reuse_cooldown_time, buffer.reuse_cooldown_time
    if buffer.replay_buffer.enable and replay and other and replay != other:
        key = f"{BUFFER}.replay_buffer.reuse_cooldown_time"
        yield Finding(
            key,
            replay,
            "two-spellings",
            f"is {replay:g}, but {BUFFER}.reuse_cooldown_time is {other:g}; give one of them.",
        )
    for key, auxiliary in inputs.auxiliary_buffers.items():
        if not auxiliary.path:
            yield Finding(
                f"{AUXILIARY}.{key}.path", auxiliary.path, "missing", "must be given: a file, a folder or a hub name."
            )
        if auxiliary.storage_type == "queue":
            message = "must be file, sql or rollouts: an auxiliary buffer is a data set, which no explorer fills."
            yield Finding(f"{AUXILIARY}.{key}.storage_type", auxiliary.storage_type, "conflict", message)
    yield from _held_out(config)
    yield from _verdicts(config)
    yield from _expert_share(config)
    yield from _experts(config)
    names = [(f"{AUXILIARY}.{key}.name", auxiliary.name) for key, auxiliary in inputs.auxiliary_buffers.items()]
    yield from repeated_names("buffers", [(f"{BUFFER}.name", buffer.name), *names])


def _held_out(config: Config) -> Iterator[Finding]:
    """Only sft and dpo measure a held-out loss, of data that they do not train on."""
    inputs = config.buffer.trainer_input
    if inputs.experience_buffer.held_out:
        yield Finding(f"{BUFFER}.held_out", True, "conflict", "must be false: this data set is trained on.")
    for key, buffer in inputs.auxiliary_buffers.items():
        if buffer.held_out and (buffer.share or not config.is_supervised):
            message = "must be false: a data set that is held out has no share." if buffer.share else HELD_OUT
            yield Finding(f"{AUXILIARY}.{key}.held_out", True, "conflict", message, ("algorithm.algorithm_type",))


def _verdicts(config: Config) -> Iterator[Finding]:
    """Verdicts are asked for answers of an earlier run, in a flow that only trains on them."""
    inputs = config.buffer.trainer_input
    buffer = inputs.experience_buffer
    asks = {
        f"{AUXILIARY}.{key}": auxiliary.human_verdicts.enable for key, auxiliary in inputs.auxiliary_buffers.items()
    }
    for key in (key for key, enabled in asks.items() if enabled):
        yield Finding(
            f"{key}.human_verdicts.enable",
            True,
            "conflict",
            "must be false: only the experience buffer is asked about.",
        )
    if not buffer.human_verdicts.enable:
        return
    key, rests_on = f"{BUFFER}.human_verdicts.enable", ("mode", f"{BUFFER}.storage_type", "algorithm.algorithm_type")
    if not (config.is_supervised and config.mode == "train" and buffer.storage_type == "rollouts"):
        message = "needs mode train, sft or dpo, and storage_type rollouts: a person is asked about an earlier run."
        yield Finding(key, True, "conflict", message, rests_on)


def _experts(config: Config) -> Iterator[Finding]:
    """Expert data must be given if it is drawn, and only to algorithms that use it."""
    if config.mode not in ("both", "train") or config.is_supervised:
        return
    algorithm, buffers = config.algorithm, config.buffer.trainer_input.auxiliary_buffers
    if not expert_share(algorithm):
        return
    rests_on = ("algorithm.sample_strategy", "algorithm.algorithm_type")
    losses, loss = registry_of("algorithm.policy_loss_fn"), algorithm.policy_loss_fn
    if loss in losses and not losses.uses(loss, "is_expert"):
        key = AUXILIARY if buffers else "algorithm.sample_strategy"
        able = [name for name, known in ALGORITHMS.items() if losses.uses(known.policy_loss_fn, "is_expert")]
        message = (
            f"cannot go with {algorithm.algorithm_type}, whose policy_loss_fn '{loss}' would take expert data for "
            f"rollouts; those that can use it are {', '.join(able)}, sft and dpo."
        )
        yield Finding(key, None, "conflict", message, (*rests_on, "algorithm.policy_loss_fn"))
    elif not buffers:
        yield Finding(
            AUXILIARY, None, "missing", "must hold the expert data that the sample strategy 'mix' draws from.", rests_on
        )


def _expert_share(config: Config) -> Iterator[Finding]:
    ratio = config.algorithm.sample_strategy_args.get("expert_data_ratio")
    if isinstance(ratio, float) and not 0 <= ratio < 1:
        key = "algorithm.sample_strategy_args.expert_data_ratio"
        yield Finding(key, ratio, "out-of-range", f"must be a number, at least 0 and below 1, not {ratio!r}.")
