"""Rules of `cluster`, `synchronizer` and `trainer`: GPUs, workers, weight sync and staleness."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.findings import Finding
from trinity_core.config.resolve import draws_by, expert_share, replay_args
from trinity_core.config.schema import Config
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.sync_schedule import SyncSchedule, least_staleness

ON_CPU = "must be 1 on the CPU (cluster.gpu_per_node is 0)."
SHARED_GPU_MEMORY = 0.7
"""Maximum `gpu_memory_utilization` at which an engine leaves room for a trainer on the same GPU."""
MAX_STALENESS = "synchronizer.max_staleness"
STYLE, STRATEGY = "synchronizer.sync_style", "algorithm.sample_strategy"
COLOCATE, PER_NODE, SIZE = "cluster.colocate", "cluster.gpu_per_node", "tensor_parallel_size"


def shares_a_gpu(config: Config, total: int) -> bool:
    """True if engine and trainer may share the only GPU: in turns, or if the engine leaves enough memory."""
    leaves_room = config.explorer.rollout_model.gpu_memory_utilization <= SHARED_GPU_MEMORY
    return total == 1 and (colocates(config, total) or leaves_room)


def colocates(config: Config, total: int) -> bool:
    """True if engine and trainer use the GPU in turns, given the `total` number of GPUs. On a CPU (0) only on
    request."""
    asked = config.cluster.colocate
    if not config.is_synchronous or next(colocation_rules(config, asked=True), None) is not None:
        return False
    return total == 1 if asked is None else asked and total <= 1


def colocation_rules(config: Config, asked: bool | None = None) -> Iterator[Finding]:
    """Yield settings that prevent engine and trainer from taking turns on a GPU; `asked` replaces
    `cluster.colocate`."""
    if not (config.cluster.colocate if asked is None else asked) or config.is_supervised or config.mode == "bench":
        return
    sync, trainer = config.synchronizer, config.trainer
    gpus = config.cluster.node_num * (config.cluster.gpu_per_node or 0)
    drawn = {**(replay_args(config) or {}), **config.algorithm.sample_strategy_args}
    faults: list[tuple[bool, str, tuple[str, ...]]] = [
        (
            not config.is_synchronous,
            f"cannot be true in mode {config.mode} with sync_style {sync.sync_style}: an explorer gives the GPU up "
            "where it waits for a version, and this one never waits.",
            ("mode", STYLE),
        ),
        (gpus > 1, f"is for one GPU, and the run has {gpus}: leave it out, each side has its own.", ("cluster",)),
        (
            trainer.zero_stage == 3,
            "cannot be true with trainer.zero_stage 3, whose states DeepSpeed moves for its own Adam alone; "
            "one worker has nothing to partition.",
            ("trainer.zero_stage",),
        ),
        (
            draws_by(config) == "priority" and drawn.get("reuse_cooldown_time") is not None,
            "cannot be true with reuse_cooldown_time: a trainer that may take rows again never waits for new ones, and "
            "keeps the GPU.",
            ("buffer.trainer_input.experience_buffer",),
        ),
        (
            (trainer.worker_num or 1) > 1,
            "is for one trainer worker.",
            ("trainer.worker_num",),
        ),
    ]
    for is_fault, message, rests_on in faults:
        if is_fault:
            yield Finding(COLOCATE, True, "conflict", message, rests_on)


def cluster_rules(config: Config) -> Iterator[Finding]:
    """Several nodes are joined, not started. GPUs are checked if their number is given; 0 means the CPU."""
    per_node = config.cluster.gpu_per_node
    if config.cluster.node_num > 1 and not config.cluster.ray_address:
        message = "must be 1 without cluster.ray_address: a Ray that is started for the run has this machine alone."
        yield Finding("cluster.node_num", config.cluster.node_num, "conflict", message, ("cluster.ray_address",))
    if per_node == 0:
        for key, model in config.engine_models.items():
            if model.tensor_parallel_size > 1:
                yield Finding(f"{key}.{SIZE}", model.tensor_parallel_size, "conflict", ON_CPU, (PER_NODE,))
    elif per_node is not None:
        yield from gpu_rules(config, per_node)


def gpu_rules(config: Config, per_node: int) -> Iterator[Finding]:
    """Each engine must fit a node with `per_node` GPUs, and all engines and trainer workers the run's nodes."""
    models, total = config.engine_models, per_node * config.cluster.node_num
    large = {key: model.tensor_parallel_size for key, model in models.items() if model.tensor_parallel_size > per_node}
    for key, size in large.items():
        message = f"must be at most {per_node}, the GPUs of a node: an engine runs on one node; it is {size}."
        yield Finding(f"{key}.{SIZE}", size, "conflict", message, (PER_NODE,))
    if large:
        return
    engines = sum(model.engine_num * model.tensor_parallel_size for model in models.values())
    key, workers = "explorer.rollout_model.engine_num", config.trainer.worker_num
    rests_on = (PER_NODE, f"explorer.rollout_model.{SIZE}", "cluster.node_num", key, "explorer.auxiliary_models")
    have = f"and there {'is' if total == 1 else 'are'} {total} (cluster.node_num x cluster.gpu_per_node)"
    trains = config.mode in ("both", "train")
    if engines > total:
        yield Finding(key, engines, "conflict", f"the engines need {engines} GPUs, {have}.", rests_on)
    elif not trains:
        return
    elif engines == total and shares_a_gpu(config, total):
        if (workers or 1) > 1:
            message = f"must be 1 where engine and trainer share the only GPU; it is {workers}."
            yield Finding("trainer.worker_num", workers, "conflict", message, rests_on)
    elif engines == total:
        message = f"the engines need {engines} GPUs, {have}: none is left for the trainer."
        if total == 1:
            message += (
                f" They share one if the run is synchronous ({COLOCATE}), or if "
                f"explorer.rollout_model.gpu_memory_utilization is at most {SHARED_GPU_MEMORY}."
            )
        yield Finding(key, engines, "conflict", message, (*rests_on, COLOCATE))
    elif (workers or 0) > total - engines:
        message = f"asks for {workers} GPUs, but the engines leave {total - engines} of {total}."
        yield Finding("trainer.worker_num", workers, "conflict", message, rests_on)


def synchronizer_rules(config: Config) -> Iterator[Finding]:
    key, name = "synchronizer.sync_method", config.synchronizer.sync_method
    method = SYNC_METHODS.get(name)
    if method is None:
        return
    if config.is_part and not method.separate_runs:
        allowed = [name for name, other in SYNC_METHODS.items() if other.separate_runs]
        why = f" (algorithm_type {config.algorithm.algorithm_type} has an explorer)" if config.mode == "train" else ""
        message = f"must be {' or '.join(allowed)} in mode {config.mode}{why}: explorer and trainer are separate runs."
        yield Finding(key, name, "conflict", message, ("mode",), allowed[0])
    elif method.one_node and config.cluster.node_num > 1:
        allowed = [name for name, other in SYNC_METHODS.items() if not other.one_node]
        message = f"must be {' or '.join(allowed)} on several nodes: {name} works within one."
        yield Finding(key, name, "conflict", message, ("cluster.node_num",))


def staleness_rules(config: Config) -> Iterator[Finding]:
    """Yield settings that contradict a bound on staleness, or weight sync in mid-generation."""
    sync, most = config.synchronizer, config.synchronizer.max_staleness
    if sync.sync_in_flight and (config.is_synchronous or sync.style == "explorer_driven"):
        message = f"cannot go with sync_style {sync.sync_style}, where weights change between explore steps only."
        yield Finding("synchronizer.sync_in_flight", True, "conflict", message, (STYLE, "mode"))
    if most is None:
        return
    if (drawn := draws_by(config)) not in ("default", "fifo", "staleness_control"):
        replayed = "" if config.algorithm.sample_strategy in (drawn, "mix") else ", by which the replay buffer draws"
        order = "rows must be trained in the order of their arrival."
        message = f"cannot go with the sample strategy '{drawn}'{replayed}: {order}"
        yield Finding(MAX_STALENESS, most, "conflict", message, (STRATEGY,))
    other = config.algorithm.sample_strategy_args.get("max_staleness", most)
    if drawn == "staleness_control" and other != most:
        message = f"is {most}, but {STRATEGY}_args.max_staleness is {other}; give one of them."
        yield Finding(MAX_STALENESS, most, "two-spellings", message, (f"{STRATEGY}_args",))
    yield from _room(config, most)


def _room(config: Config, most: int) -> Iterator[Finding]:
    """The bound must allow what the schedule implies, or explorers could never begin."""
    schedule, buffer = SyncSchedule.of(config), config.buffer
    repeats = max((taskset.repeat_times or 1 for taskset in buffer.explorer_input.tasksets), default=1)
    rows = (buffer.batch_size or 1) * repeats
    taken = max(round((buffer.train_batch_size or 1) * (1 - expert_share(config.algorithm))), 1)
    fills = -(-rows // taken)
    rests_on = ("buffer.batch_size", "buffer.train_batch_size", "synchronizer.sync_interval", STYLE, "mode")
    if not config.is_synchronous:
        least, offset = least_staleness(rows, taken, schedule.publish_every), ""
    elif fills == 1:
        least, offset = schedule.largest_lag, f", sync_offset is {schedule.offset}"
    else:
        message = (
            f"cannot be kept with sync_style fixed: an explore step gives {rows} rows, a train step takes {taken}, so "
            "the trainer runs ahead further and further."
        )
        yield Finding(MAX_STALENESS, most, "conflict", message, rests_on)
        return
    if most < least:
        message = (
            f"must be at least {least}: versions are published every {schedule.publish_every} train steps{offset}, and "
            f"the rows of an explore step fill {fills}."
        )
        yield Finding(MAX_STALENESS, most, "out-of-range", message, rests_on, str(least))


def lora_rules(config: Config) -> Iterator[Finding]:
    """Check that there is only one adapter, and that a 4-bit base is supported."""
    key, lora = "model.lora_configs", config.model.lora
    if lora is None:
        return
    if len(config.model.lora_configs) > 1:
        message = "must have one entry: a run trains one adapter."
        yield Finding(key, [adapter.name for adapter in config.model.lora_configs], "conflict", message)
    whole = config.mode == "both" and config.engine_adapter is None
    method = f"synchronizer.sync_method {config.synchronizer.sync_method} pushes full weights"
    rests_on = ("synchronizer.sync_method", "mode")
    if lora.path is not None and whole:
        message = f"{method}, but engines start without the adapter; set it to memory or checkpoint."
        yield Finding(f"{key}[0].path", lora.path, "conflict", message, rests_on)
    if not lora.load_in_4bit:
        return
    four, on = f"{key}[0].load_in_4bit", lora.load_in_4bit
    if config.cluster.gpu_per_node == 0:
        message = "needs a GPU: the kernels of bitsandbytes that compute with 4-bit weights run there alone."
        yield Finding(four, on, "conflict", message, ("cluster.gpu_per_node",))
    if whole:
        message = f"{method}, which 4-bit ones cannot be; set it to memory or checkpoint."
        yield Finding(four, on, "conflict", message, rests_on)
    if config.trainer.zero_stage == 3:
        message = "cannot go with ZeRO 3, which partitions weights; each GPU holds all 4-bit ones under ZeRO 0 to 2."
        yield Finding(four, on, "conflict", message, ("trainer.zero_stage",))


def trainer_rules(config: Config) -> Iterator[Finding]:
    trainer = config.trainer
    share = trainer.ulysses_sequence_parallel_size
    if trainer.worker_num is not None and trainer.worker_num % share:
        message = f"must divide trainer.worker_num, which is {trainer.worker_num}; it is {share}."
        yield Finding("trainer.ulysses_sequence_parallel_size", share, "conflict", message, ("trainer.worker_num",))
    if trainer.torch_compile and trainer.zero_stage == 3:
        message = "cannot go with trainer.zero_stage 3, which gathers weights within a layer; choose one of them."
        yield Finding("trainer.torch_compile", True, "conflict", message, ("trainer.zero_stage",))
