"""Rules of `cluster`, `synchronizer` and `trainer`: GPUs, workers, weight sync and staleness."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config.findings import Finding, conflict
from trinity_core.config.resolve import draws_by, expert_share, replay_args
from trinity_core.config.schema import Config
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.sync_schedule import SyncSchedule, least_staleness

SHARED_GPU_MEMORY = 0.7
"""Maximum `gpu_memory_utilization` at which an engine leaves room for a trainer on the same GPU."""
MAX_STALENESS = "synchronizer.max_staleness"
STYLE, STRATEGY = "synchronizer.sync_style", "algorithm.sample_strategy"
BESIDE = "explorer.eval_beside_training"
COLOCATE, PER_NODE, SIZE = "cluster.colocate", "cluster.gpu_per_node", "tensor_parallel_size"


def shares_a_gpu(config: Config, total: int) -> bool:
    """True if engine and trainer may share the only GPU: in turns, or if the engine leaves enough memory."""
    engine = config.explorer.rollout_model
    leaves_room = engine.kv_cache_gib is not None or engine.gpu_memory_utilization <= SHARED_GPU_MEMORY
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
    trainer, gpus = config.trainer, config.cluster.node_num * (config.cluster.gpu_per_node or 0)
    drawn = {**(replay_args(config) or {}), **config.algorithm.sample_strategy_args}
    replays = draws_by(config) == "priority" and drawn.get("reuse_cooldown_time") is not None
    style = f"mode {config.mode} with sync_style {config.synchronizer.sync_style}"
    for is_fault, message, *rests_on in (
        (not config.is_synchronous, f"needs an explorer that waits for versions, unlike in {style}.", "mode", STYLE),
        (gpus > 1, f"is for one GPU, and the run has {gpus}: leave it out, each side has its own.", "cluster"),
        (
            trainer.zero_stage == 3,
            "cannot go with trainer.zero_stage 3, whose states DeepSpeed moves for its own Adam alone.",
            "trainer.zero_stage",
        ),
        (
            replays,
            "cannot go with reuse_cooldown_time: a trainer that may take rows again never waits for new ones.",
            "buffer.trainer_input.experience_buffer",
        ),
        ((trainer.worker_num or 1) > 1, "is for one trainer worker.", "trainer.worker_num"),
    ):
        if is_fault:
            yield Finding(COLOCATE, True, "conflict", message, tuple(rests_on))


def stop_rules(config: Config) -> Iterator[Finding]:
    price = "cluster.price_per_hour"
    stop = config.monitor.stop
    for key, budgets in (("monitor.stop", stop), ("monitor.stop.pipeline", stop.pipeline)):
        if budgets.price is not None and config.cluster.price_per_hour is None:
            yield conflict(config, f"{key}.price", f"needs the price of an hour: set {price}.", price)
    sets, interval = "buffer.explorer_input.eval_tasksets", "explorer.eval_interval"
    is_scored = config.buffer.explorer_input.eval_tasksets and config.explorer.eval_interval
    for name in ("patience", "target"):
        if getattr(stop, name) is not None and config.mode == "both" and not is_scored:
            yield conflict(config, f"monitor.stop.{name}", f"needs scores: set {sets} and {interval}.", sets)


def pause_rules(config: Config) -> Iterator[Finding]:
    for name in ("after_steps", "at_findings"):
        if config.is_part and getattr(config.monitor.pause, name):
            message = f"needs explorer and trainer in one run, unlike mode {config.mode}."
            yield conflict(config, f"monitor.pause.{name}", message, "mode")


def cluster_rules(config: Config) -> Iterator[Finding]:
    """Several nodes are joined, not started. GPUs are checked if their number is given; 0 means the CPU."""
    per_node = config.cluster.gpu_per_node
    if config.cluster.node_num > 1 and not config.cluster.ray_address:
        message = "must be 1 without cluster.ray_address: a Ray that is started for the run has this machine alone."
        yield conflict(config, "cluster.node_num", message, "cluster.ray_address")
    for key, model in config.engine_models.items() if per_node == 0 else ():
        if model.tensor_parallel_size > 1:
            yield conflict(config, f"{key}.{SIZE}", "must be 1 on the CPU (cluster.gpu_per_node is 0).", PER_NODE)
    if per_node:
        yield from gpu_rules(config, per_node)


def engine_gpus(config: Config) -> int:
    """Return the GPUs of the run's engines, and of an evaluation beside training."""
    models = config.engine_models.values()
    return sum(model.engine_num * model.tensor_parallel_size for model in models) + config.gpus_beside


def trainer_workers(config: Config, total: int) -> int:
    """Return the number of trainer workers, given the `total` number of GPUs: one for each that the engines leave, and
    one that shares their only GPU or is on the CPU."""
    return config.trainer.worker_num or max(total - engine_gpus(config), 1)


def gpu_rules(config: Config, per_node: int) -> Iterator[Finding]:
    """Each engine must fit a node with `per_node` GPUs, and all engines and trainer workers the run's nodes."""
    models, total = config.engine_models, per_node * config.cluster.node_num
    large = {key: model.tensor_parallel_size for key, model in models.items() if model.tensor_parallel_size > per_node}
    for key, size in large.items():
        message = f"must be at most {per_node}, the GPUs of a node: an engine runs on one node; it is {size}."
        yield conflict(config, f"{key}.{SIZE}", message, PER_NODE)
    if large:
        return
    engines = engine_gpus(config)
    key, workers = "explorer.rollout_model.engine_num", config.trainer.worker_num
    rests_on = (
        PER_NODE,
        f"explorer.rollout_model.{SIZE}",
        "cluster.node_num",
        key,
        "explorer.auxiliary_models",
        BESIDE,
    )
    need = f"the engines need {engines} GPUs"
    need += f" ({config.gpus_beside} of them for {BESIDE})" if config.gpus_beside else ""
    have = f"and there {'is' if total == 1 else 'are'} {total} (cluster.node_num x cluster.gpu_per_node)"
    shares = engines == total and shares_a_gpu(config, total)
    if engines > total:
        yield Finding(key, engines, "conflict", f"{need}, {have}.", rests_on)
    elif config.mode not in ("both", "train"):
        return
    elif engines == total and not shares:
        message = f"{need}, {have}: none is left for the trainer."
        if total == 1:
            message += (
                f" They share one if the run is synchronous ({COLOCATE}), or if "
                f"explorer.rollout_model.gpu_memory_utilization is at most {SHARED_GPU_MEMORY}, or kv_cache_gib is set."
            )
        yield Finding(key, engines, "conflict", message, (*rests_on, COLOCATE))
    elif (workers or 0) > (1 if shares else total - engines):
        message = f"asks for {workers} GPUs, but the engines leave {total - engines} of {total}."
        message = f"must be 1 where engine and trainer share the only GPU; it is {workers}." if shares else message
        yield conflict(config, "trainer.worker_num", message, *rests_on)


def synchronizer_rules(config: Config) -> Iterator[Finding]:
    key, name = "synchronizer.sync_method", config.synchronizer.sync_method
    method = SYNC_METHODS.get(name)
    if method is None:
        return
    if name == "champion" and (config.mode != "serve" or config.model.lora is not None):
        message = "goes with mode serve, and without model.lora_configs: the champion is a whole model."
        yield conflict(config, key, message, "mode", meant="checkpoint")
    elif config.is_part and not method.separate_runs:
        allowed = [name for name, other in SYNC_METHODS.items() if other.separate_runs and name != "champion"]
        why = f" (algorithm_type {config.algorithm.algorithm_type} has an explorer)" if config.mode == "train" else ""
        message = f"must be {' or '.join(allowed)} in mode {config.mode}{why}: explorer and trainer are separate runs."
        yield conflict(config, key, message, "mode", meant=allowed[0])
    elif method.one_node and config.cluster.node_num > 1:
        allowed = [name for name, other in SYNC_METHODS.items() if not other.one_node]
        message = f"must be {' or '.join(allowed)} on several nodes: {name} works within one."
        yield conflict(config, key, message, "cluster.node_num")


def staleness_rules(config: Config) -> Iterator[Finding]:
    """Yield settings that contradict a bound on staleness, or weight sync in mid-generation."""
    sync, most = config.synchronizer, config.synchronizer.max_staleness
    if sync.sync_in_flight and (config.is_synchronous or sync.style == "explorer_driven"):
        message = f"cannot go with sync_style {sync.sync_style}, where weights change between explore steps only."
        yield conflict(config, "synchronizer.sync_in_flight", message, STYLE, "mode")
    if most is None:
        return
    drawn, other = draws_by(config), config.algorithm.sample_strategy_args.get("max_staleness", most)
    if drawn not in ("default", "fifo", "staleness_control"):
        message = f"cannot go with rows drawn by '{drawn}': they must be trained in the order of their arrival."
        yield conflict(config, MAX_STALENESS, message, STRATEGY)
    if drawn == "staleness_control" and other != most:
        message = f"is {most}, but {STRATEGY}_args.max_staleness is {other}; give one of them."
        yield conflict(config, MAX_STALENESS, message, f"{STRATEGY}_args", code="two-spellings")
    yield from _room(config, most)


def _room(config: Config, most: int) -> Iterator[Finding]:
    """The bound must allow what the schedule implies, or explorers could never begin."""
    schedule, buffer = SyncSchedule.of(config), config.buffer
    repeats = max((taskset.repeat_times or 1 for taskset in buffer.explorer_input.tasksets), default=1)
    rows = (buffer.batch_size or 1) * repeats
    per_step = max(round((buffer.train_batch_size or 1) * (1 - expert_share(config.algorithm))), 1)
    fills = -(-rows // per_step)
    rests_on = ("buffer.batch_size", "buffer.train_batch_size", "synchronizer.sync_interval", STYLE, "mode")
    if not config.is_synchronous:
        least, offset = least_staleness(rows, per_step, schedule.publish_every), ""
    elif fills == 1:
        least, offset = schedule.largest_lag, f", sync_offset is {schedule.offset}"
    else:
        message = (
            f"cannot be kept with sync_style fixed: an explore step gives {rows} rows, a train step takes {per_step}, "
            "so the trainer runs ahead further and further."
        )
        yield conflict(config, MAX_STALENESS, message, *rests_on)
        return
    if most < least:
        message = (
            f"must be at least {least}: versions are published every {schedule.publish_every} train steps{offset}, and "
            f"the rows of an explore step fill {fills}."
        )
        yield conflict(config, MAX_STALENESS, message, *rests_on, code="out-of-range", meant=str(least))


def lora_rules(config: Config) -> Iterator[Finding]:
    """Check that there is only one adapter, and that a 4-bit base is supported."""
    key, lora, sync = "model.lora_configs", config.model.lora, config.synchronizer.sync_method
    if lora is None:
        return
    if len(config.model.lora_configs) > 1:
        yield conflict(config, key, "must have one entry: a run trains one adapter.")
    pushes = config.mode == "both" and config.engine_adapter is None
    message = f"cannot go with sync_method {sync}, which pushes full weights: set it to memory or checkpoint."
    rests_on = ("synchronizer.sync_method", "mode")
    if lora.path is not None and pushes:
        yield conflict(config, f"{key}[0].path", message, *rests_on)
    if not lora.load_in_4bit:
        return
    four = f"{key}[0].load_in_4bit"
    if pushes:
        yield conflict(config, four, message, *rests_on)
    if config.cluster.gpu_per_node == 0:
        message = "needs a GPU: the kernels of bitsandbytes that compute with 4-bit weights run there alone."
        yield conflict(config, four, message, PER_NODE)
    if config.trainer.zero_stage == 3:
        message = "cannot go with ZeRO 3, which partitions weights; each GPU holds all 4-bit ones under ZeRO 0 to 2."
        yield conflict(config, four, message, "trainer.zero_stage")


def trainer_rules(config: Config) -> Iterator[Finding]:
    trainer, per_node = config.trainer, config.cluster.gpu_per_node
    if trainer.worker_num is not None or (per_node is not None and config.mode in ("both", "train")):
        yield from sequence_rules(config, trainer_workers(config, (per_node or 0) * config.cluster.node_num))
    if trainer.torch_compile and trainer.zero_stage == 3:
        message = "cannot go with trainer.zero_stage 3, which gathers weights within a layer; choose one of them."
        yield conflict(config, "trainer.torch_compile", message, "trainer.zero_stage")


def sequence_rules(config: Config, workers: int) -> Iterator[Finding]:
    """Check that the trainer's `workers` form whole groups that share sequences."""
    key, share = "trainer.ulysses_sequence_parallel_size", config.trainer.ulysses_sequence_parallel_size
    if workers % share:
        message = f"must divide the number of trainer workers, which is {workers}; it is {share}."
        yield conflict(config, key, message, "trainer.worker_num", PER_NODE, "explorer.rollout_model.engine_num")
