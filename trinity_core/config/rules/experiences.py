"""Rules about what the trainer reads: batches, the experience buffer and the auxiliary buffers."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import Finding, conflict, repeated_names
from trinity_core.config.paths import is_backup, no_database
from trinity_core.config.resolve import draws_by, expert_share
from trinity_core.config.rules.tasks import ONE_PATH
from trinity_core.config.schema import Config
from trinity_core.config.types import SEVERAL

BUFFER = "buffer.trainer_input.experience_buffer"
AUXILIARY = "buffer.trainer_input.auxiliary_buffers"


def batch_rules(config: Config) -> Iterator[Finding]:
    size, key = config.buffer.train_batch_size, "buffer.train_batch_size"
    if config.algorithm.policy_loss_fn == "dpo" and size % 2:
        message = f"counts chosen and rejected answers, so it must be even, not {size}."
        yield conflict(config, key, message, "buffer.batch_size")


def experience_rules(config: Config) -> Iterator[Finding]:
    inputs = config.buffer.trainer_input
    sources = {BUFFER: inputs.experience_buffer}
    sources |= {f"{AUXILIARY}.{key}": buffer for key, buffer in inputs.auxiliary_buffers.items()}
    yield from _storage(config)
    for key, buffer in sources.items():
        if SEVERAL in (buffer.path or "") and (buffer.storage_type != "file" or config.mode == "explore"):
            yield conflict(config, f"{key}.path", ONE_PATH, f"{key}.storage_type", "mode")
    drawn = draws_by(config)
    if inputs.experience_buffer.replay_buffer.enable and drawn != "priority":
        message = f"has no effect on rows drawn by '{drawn}'; leave it out, or choose sample_strategy default."
        yield conflict(config, f"{BUFFER}.replay_buffer.enable", message, "algorithm.sample_strategy")
    yield from _auxiliary(config)
    yield from _experts(config)
    yield from repeated_names("buffers", [(f"{key}.name", buffer.name) for key, buffer in sources.items()])


def _storage(config: Config) -> Iterator[Finding]:
    """Check where the experience buffer's rows come from: a data set for supervised algorithms, else a store."""
    buffer, name = config.buffer.trainer_input.experience_buffer, config.algorithm.algorithm_type
    rests_on = ("mode", "algorithm.algorithm_type", f"{BUFFER}.storage_type")
    explores = name in ALGORITHMS and not config.is_supervised
    explored = f"algorithm_type {name} learns from what an explorer stores."
    is_data = buffer.storage_type == "file" and config.mode in ("both", "train")
    if explores and (is_data or buffer.storage_type == "rollouts"):
        message = f"must be queue or sql in mode {config.mode}: {explored}"
        yield conflict(config, f"{BUFFER}.storage_type", message, *rests_on)
    if config.is_supervised and config.mode == "train":
        if not buffer.path:
            message = f"must be given: the data set that {name} learns from."
            yield conflict(config, f"{BUFFER}.path", message, *rests_on, code="missing")
        if buffer.storage_type == "queue":
            message = f"must be file, sql or rollouts: {name} learns from a data set, not from an explorer."
            yield conflict(config, f"{BUFFER}.storage_type", message, *rests_on)
    is_store = buffer.storage_type in ("queue", "sql") and not is_backup(buffer)
    if buffer.path and is_store and (wrong := no_database(buffer.path)):
        message = f"{wrong} {explored}" if explores else wrong
        yield conflict(config, f"{BUFFER}.path", message, *rests_on, code="invalid")
    if buffer.held_out:
        yield conflict(config, f"{BUFFER}.held_out", "must be false: this data set is trained on.")
    if buffer.human_verdicts.enable and not (
        config.is_supervised and config.mode == "train" and buffer.storage_type == "rollouts"
    ):
        message = "needs mode train, sft or dpo, and storage_type rollouts: a person is asked about an earlier run."
        yield conflict(config, f"{BUFFER}.human_verdicts.enable", message, *rests_on)


def _auxiliary(config: Config) -> Iterator[Finding]:
    for name, buffer in config.buffer.trainer_input.auxiliary_buffers.items():
        key = f"{AUXILIARY}.{name}"
        if not buffer.path:
            message = "must be given: a file, a folder or a hub name."
            yield conflict(config, f"{key}.path", message, code="missing")
        if buffer.storage_type == "queue":
            message = "must be file, sql or rollouts: an auxiliary buffer is a data set, which no explorer fills."
            yield conflict(config, f"{key}.storage_type", message)
        if buffer.held_out and (buffer.share or not config.is_supervised):
            message = "must be false: sft and dpo measure a held-out loss, of data without a share."
            yield conflict(config, f"{key}.held_out", message, "algorithm.algorithm_type")
        if buffer.human_verdicts.enable:
            message = "must be false: only the experience buffer is asked about."
            yield conflict(config, f"{key}.human_verdicts.enable", message)


def _experts(config: Config) -> Iterator[Finding]:
    """Expert data must be given if it is drawn, and only to algorithms that use it."""
    algorithm, buffers = config.algorithm, config.buffer.trainer_input.auxiliary_buffers
    ratio = algorithm.sample_strategy_args.get("expert_data_ratio")
    if isinstance(ratio, float) and not 0 <= ratio < 1:
        message = f"must be a number, at least 0 and below 1, not {ratio!r}."
        yield conflict(config, "algorithm.sample_strategy_args.expert_data_ratio", message, code="out-of-range")
    if config.mode not in ("both", "train") or config.is_supervised or not expert_share(algorithm):
        return
    rests_on = ("algorithm.sample_strategy", "algorithm.algorithm_type")
    losses, loss = registry_of("algorithm.policy_loss_fn"), algorithm.policy_loss_fn
    if loss in losses and not losses.uses(loss, "is_expert"):
        able = [name for name, other in ALGORITHMS.items() if losses.uses(other.policy_loss_fn, "is_expert")]
        message = (
            f"cannot go with {algorithm.algorithm_type}, whose policy_loss_fn '{loss}' would take expert data for "
            f"rollouts; those that can use it are {', '.join(able)}, sft and dpo."
        )
        key = AUXILIARY if buffers else "algorithm.sample_strategy"
        yield Finding(key, None, "conflict", message, (*rests_on, "algorithm.policy_loss_fn"))
    elif not buffers:
        message = "must hold the expert data that the sample strategy 'mix' draws from."
        yield Finding(AUXILIARY, None, "missing", message, rests_on)
