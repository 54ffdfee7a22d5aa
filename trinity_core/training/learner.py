"""All models of a trainer (policy, and if the algorithm needs them reference and critic) and one train step.

Rank 0 reads a model and tries its fast paths; the other ranks get both from it. Weights are then sent on the device: by
DeepSpeed when it takes or partitions a module, and by `engine.broadcast` for a module without DeepSpeed. Host memory
thus holds one copy, not one for each rank, and freed memory returns to the system at once.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from trinity_core.algorithms import AGGREGATIONS, MetricAccumulator
from trinity_core.algorithms.divergence import Taught
from trinity_core.algorithms.logprobs import Head
from trinity_core.algorithms.objective import Objective
from trinity_core.algorithms.value import value_tokens
from trinity_core.base.errors import TrinityError
from trinity_core.base.processes import freeing_at_once
from trinity_core.base.timing import StepTimer
from trinity_core.config.resolve import sampling_temperature
from trinity_core.config.schema import Config, ModelConfig
from trinity_core.config.training import CriticSettings, UpdateSettings, dtype_of, train_settings
from trinity_core.data.experience import Experience
from trinity_core.exchange.checkpoints.beginning import model_name
from trinity_core.exchange.model_fault import quantization_fault
from trinity_core.exchange.store.archive import RowAdvantage
from trinity_core.training.batch import Batch, batch_metrics, make_batch
from trinity_core.training.distributed import Ranks, broadcast_bytes
from trinity_core.training.engine import (
    BaseAlone,
    FrozenModule,
    TrainingEngine,
    TrainingEngineSettings,
    beginning_on,
    compile_layers,
    free_cached,
)
from trinity_core.training.lora import add_adapter, in_4_bits
from trinity_core.training.micro import Micro, Micros, build_micro
from trinity_core.training.policy import (
    DTYPES,
    SAMPLE_WIDTH,
    FastPaths,
    Policy,
    ValueModel,
    find_fast_paths,
    load_causal_lm,
    sample,
)
from trinity_core.training.sequence_parallel import install, split_sequences
from trinity_core.training.update import (
    MicroBatchLimits,
    Teacher,
    all_reduce,
    check_finite,
    forward_batch,
    measure,
    micro_batches,
    needs_old_logprobs_first,
    prepare,
    row_advantages,
    spare_backward,
    step_in_error,
    update,
)

log = logging.getLogger(__name__)

UNUSED_EXPERTS = (
    "%d of %d rows are expert data, the first of group '%s': the loss '%s' learns nothing from them, and they count in "
    "its mean. Let the workflow give its answers a reward or log-probs, or choose a loss on expert data, such as mix"
)


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """`lr` is the peak. Cosine and linear decay towards `min_lr_ratio * lr` as in transformers and veRL: the step after
    the warm-up is at the peak, and the one after `total_steps` would be at the minimum."""

    lr: float
    total_steps: int
    warmup_steps: int = 0
    style: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = 0.0

    def at(self, step: int) -> float:
        """Return the rate of `step` (from 1). Warm-up is linear and reaches the peak at step `warmup_steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.style == "constant":
            return self.lr
        done = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)


def warmup_steps(steps: int, ratio: float, total_steps: int) -> int:
    return steps if steps > 0 else int(ratio * total_steps)


class Learner:
    """Turns a batch of experiences into an update. Collective: every rank makes the same calls with the same batch."""

    @freeing_at_once()
    def __init__(self, config: Config, total_steps: int, ranks: Ranks) -> None:
        settings = train_settings(config)
        self.ranks = ranks = split_sequences(ranks, settings.ulysses_sequence_parallel_size)
        self.settings = settings
        dtype = dtype_of(settings.dtype, ranks.device.type == "cuda")
        self.dtype = DTYPES[dtype]
        self.objective = Objective(config.algorithm)
        self._warned_of_experts = False
        self.temperature = sampling_temperature(config)
        """Temperature of rows without their own."""
        stage = settings.zero_stage_for(ranks.world_size, dtype)
        lm, lora = self._load(config), config.model.lora
        base = model_name(config.model.model_path)
        self.adapter = add_adapter(lm, lora, base, config.seed, config.is_supervised) if lora is not None else None
        fast_paths = _make_ready(lm, settings, stage, ranks)
        self._require_head(fast_paths, lm.config.model_type)
        self.model_config = lm.config
        engine_settings = _engine_settings(settings, stage, self.dtype)
        self.reference: FrozenModule | BaseAlone | None = None
        if self.objective.needs_reference and self.adapter is None:  # before DeepSpeed adds the policy's buffers
            offloaded = replace(engine_settings, param_offload=settings.reference_offload)
            self.reference = FrozenModule(self._load_reference(config, fast_paths), offloaded, ranks)
        self.engine = TrainingEngine(Policy(lm, fast_paths, ranks.sequence), engine_settings, ranks, self.adapter)
        if self.objective.needs_reference and self.adapter is not None:
            self.reference = BaseAlone(self.engine)
        self.critic = (
            Critic(settings.critic, stage, self.dtype, total_steps, config.model, ranks)
            if settings.critic is not None
            else None
        )
        self.critic_warmup_steps = self.critic.settings.warmup_steps if self.critic else 0
        """First steps, in which only the critic is updated; the policy's learning rate schedule starts after them."""
        self.schedule = _schedule(settings, max(1, total_steps - self.critic_warmup_steps))
        self.cut = _limits(settings, self.objective.policy_loss.rows_per_unit, fast_paths, ranks)
        rows = None if settings.use_dynamic_bsz else settings.reference_micro_batch_size
        self.reference_cut = replace(self.cut, max_tokens=settings.reference_max_tokens * ranks.sharing, rows=rows)
        self.advantages: list[RowAdvantage] = []
        """Of the rows of the latest batch, on the first rank."""

    def _require_head(self, fast_paths: FastPaths, model_type: str) -> None:
        """Raise TrinityError if a part needs whole distributions and they cannot be computed here."""
        teaching = self.objective.teaching is not None
        if teaching and self.ranks.sequence is not None:
            key = "trainer.ulysses_sequence_parallel_size"
            raise TrinityError(f"{key} must be 1 for the loss '{self.objective.policy_loss.name}'", key=key)
        if not fast_paths.own_head and (teaching or "expected_signals" in self.objective.advantage_inputs):
            key = "algorithm.policy_loss_fn" if teaching else "algorithm.advantage_fn"
            raise TrinityError(f"{key}: needs the logits of a plain output embedding; {model_type} has others", key=key)

    def _load(self, config: Config) -> Any:
        model = config.model
        overrides = self.settings.model_overrides
        trust, longest = model.trust_remote_code, model.max_model_len
        load = partial(load_causal_lm, model.model_path, self.dtype, trust, overrides, longest)
        if model.lora is not None and model.lora.load_in_4bit:  # quantized on the device, by each rank
            lm = load(quantized=in_4_bits(self.dtype, self.ranks.device))
            _require_unquantized("model.model_path", model.model_path, four_bits=True)
            return lm
        lm = load_on_first(load, self.ranks)
        _require_unquantized("model.model_path", model.model_path)
        return lm

    def _load_reference(self, config: Config, fast_paths: FastPaths) -> Policy:
        lm = self._load(config)
        lm.set_attn_implementation(self.model_config._attn_implementation)
        compile_layers(lm, self.settings.torch_compile, fast_paths.packing, self.ranks.device)
        return Policy(lm, fast_paths, self.ranks.sequence)

    def step(self, experiences: list[Experience], step: int) -> dict[str, float]:
        """Take train step `step` (from 1) on a batch; return its metrics. A batch without an action token updates
        nothing (`skipped_step`)."""
        watch = StepTimer()
        with watch.part("lay_out"), step_in_error(step):
            batch = make_batch(experiences, self.ranks.device, self.objective.needs_of_rows)
            micros = micro_batches(batch, self.cut, self.ranks)
        metrics = batch_metrics(batch, step - 1)
        if not any(row.action_mask.any() for row in batch.experiences):
            self.advantages = []
            return metrics | {"skipped_step": 1.0}
        self._warn_of_unused_experts(batch)
        with watch.part("log_probs"):
            old, entropies, signals = self._before_update(batch, micros)
            reference = self._reference(batch, micros)
        with watch.part("values"):
            critic_micros = self.critic.micro_batches(batch) if self.critic else micros
            values = self.critic.values(batch, critic_micros) if self.critic else None
        with watch.part("advantages"), step_in_error(step):
            prepared, advantage_metrics = prepare(self.objective, batch, old, reference, values, entropies, signals)
            prepared = prepared.of_first(self.ranks)
        metrics |= advantage_metrics
        judged = ~batch.excluded
        has_advantages = self.objective.advantage_name != "none" and self.ranks.first
        self.advantages = row_advantages(prepared) if has_advantages else []
        if self.objective.advantage_name != "none" and judged.any():
            zero = ~prepared.advantages.any(-1)[judged]
            metrics["advantages/zero_rows"] = int(zero.sum()) / len(zero)
        if self.critic is not None and values is not None and prepared.returns is not None:
            with watch.part("update_critic"):
                for _ in range(self.critic.settings.epochs):
                    metrics |= self.critic.update(batch, critic_micros, values, prepared.returns, step)
        if step > self.critic_warmup_steps:
            with watch.part("update_actor"):
                lr = self.schedule.at(step - self.critic_warmup_steps)
                learning, idle = micros, None
                if self.ranks.device.type == "cuda":  # on a CPU runs keep their bits: the head skips such tokens
                    learning, idle = spare_backward(self.objective, prepared, micros, self.cut, self.ranks)
                for _ in range(self.settings.epochs):
                    updated = update(
                        self.engine, self.objective, prepared, learning, self.temperature, step, lr, idle, self._teacher
                    )
            metrics |= {_actor(name): value for name, value in self.objective.after_batch(updated, len(batch)).items()}
        metrics["experience/micro_batches"] = float(len(micros))
        return metrics | watch.seconds

    @torch.no_grad()
    def measure(self, experiences: list[Experience], step: int) -> dict[str, float]:
        """Return the loss of these rows, and its metrics, after train step `step`; nothing is learned."""
        batch = make_batch(experiences, self.ranks.device, self.objective.needs_of_rows)
        micros = micro_batches(batch, self.cut, self.ranks)
        prepared, _ = prepare(self.objective, batch, None, self._reference(batch, micros), None)
        metrics = measure(self.engine, self.objective, prepared, micros, self.temperature, step, self._teacher)
        return {"loss" if name == "final_loss" else name: value for name, value in metrics.items()}

    def _warn_of_unused_experts(self, batch: Batch) -> None:
        loss, groups = self.objective.policy_loss, [row.group for row in batch.experiences if row.is_expert]
        learns = self.objective.advantage_name == "none" or "is_expert" in loss.inputs
        if groups and not learns and self.ranks.first and not self._warned_of_experts:
            self._warned_of_experts = True
            log.warning(UNUSED_EXPERTS, len(groups), len(batch), groups[0], loss.name)

    def offload(self) -> None:
        """Move all models and their states to host memory; no step can be taken until `reload`."""
        for engine in self._engines():
            engine.offload()
        if isinstance(self.reference, FrozenModule):
            self.reference.move(to_host=True)
        free_cached(self.ranks.device)

    def reload(self) -> None:
        for engine in self._engines():
            engine.reload()
        if isinstance(self.reference, FrozenModule):
            self.reference.move(to_host=False)

    def _engines(self) -> list[TrainingEngine]:
        return [self.engine, *([self.critic.engine] if self.critic else [])]

    def zero_losses(self) -> dict[str, Callable[[], Tensor]]:
        """Return, for each engine by its checkpoint folder, a function that computes a loss with a zero gradient."""
        micro = build_micro(sample(self.model_config.get_text_config().vocab_size), [0], SAMPLE_WIDTH, self.cut.packing)
        moved = micro.to(self.ranks.device)
        zero_losses: dict[str, Callable[[], Tensor]] = {"actor": lambda: self.engine(moved, 1.0, "none")[0].sum() * 0.0}
        if self.critic is not None:
            critic = self.critic.engine
            zero_losses["critic"] = lambda: critic(moved).sum() * 0.0
        return zero_losses

    def _before_update(self, batch: Batch, micros: Micros) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By one pass of the policy, [B, T] each: the old log-probs of the importance ratio (None: the stop-gradient of
        the new ones), and if the advantage uses them its entropy in nats and the expectation of the signal of
        `clipv`."""
        has_old = needs_old_logprobs_first(self.objective, batch, self.settings.epochs)
        inputs = self.objective.advantage_inputs
        has_entropies, has_signals = "entropies" in inputs, "expected_signals" in inputs
        if not (has_old or has_entropies or has_signals):
            return None, None, None
        arguments = self.temperature, "metric" if has_entropies else "none", "signals" if has_signals else None
        old, entropies, *signals = forward_batch(
            batch, micros, lambda micro: torch.stack(self.engine(micro, *arguments)), self.ranks
        )
        return old if has_old else None, entropies if has_entropies else None, signals[0] if has_signals else None

    def _reference(self, batch: Batch, micros: Micros) -> Tensor | None:
        if self.reference is None or not self.objective.needs_ref_logprobs:
            return None
        if self.reference_cut != self.cut:
            micros = micro_batches(batch, self.reference_cut, self.ranks)
        with self.reference.on_device() as reference:
            return forward_batch(batch, micros, lambda micro: reference(micro, self.temperature, "none")[0], self.ranks)

    @property
    def _teacher(self) -> Teacher | None:
        """The teacher of a loss that takes `divergences`: the policy itself or the reference model."""
        teaching = self.objective.teaching
        if teaching is None or not teaching.by_reference:
            return None if teaching is None else lambda _: Taught(teaching.beta)
        return partial(self._taught_by_reference, teaching.beta)

    @torch.no_grad()
    def _taught_by_reference(self, beta: float, micro: Micro) -> Taught:
        assert self.reference is not None
        with self.reference.on_device() as reference:
            hidden, *head = reference(micro.for_teacher, self.temperature, "none", "states")
        return Taught(beta, hidden, Head(*head))


def _actor(name: str) -> str:
    return name if "/" in name else f"actor/{name}"


def _make_ready(lm: Any, settings: UpdateSettings, stage: int, ranks: Ranks) -> FastPaths:
    """Apply the settings to a loaded model and return its fast paths. Collective."""
    require_stacked_experts(lm, stage, ranks)
    if stage < 3:
        lm.to(ranks.device)  # under ZeRO 3 a device holds only its part
    fast_paths = fast_paths_on_first(lm, ranks)
    if ranks.sequence is not None:
        install(lm, ranks.sequence)
    if settings.gradient_checkpointing:
        if not lm.supports_gradient_checkpointing:
            key = "trainer.gradient_checkpointing"
            raise TrinityError(f"{key}: transformers has none for {lm.config.model_type}; leave it out", key=key)
        drops = any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in lm.modules())  # only dropout draws
        lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": drops})
    compile_layers(lm, settings.torch_compile, fast_paths.packing, ranks.device)
    return fast_paths


def require_stacked_experts(lm: torch.nn.Module, stage: int, ranks: Ranks) -> None:
    """Raise TrinityError under ZeRO 2 and 3 if each expert is a separate module, as in some models' own code.

    DeepSpeed assumes that all ranks use the same parameters: it adds the gradient of an expert that only one rank has
    used to that of another expert.
    """
    for name, module in lm.named_modules() if stage and ranks.world_size > 1 else ():
        if isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] == "experts":
            key = "trainer.zero_stage"
            raise TrinityError(
                f"{key}: only 0 is for several workers and a model whose experts are separate modules ({name}): under "
                "ZeRO 2 and 3 gradients of experts that one worker alone has used would be mixed up. Set it to 0, or "
                "use a model of transformers' own, whose experts are one tensor",
                key=key,
            )


def _schedule(settings: UpdateSettings, total_steps: int) -> LearningRateSchedule:
    optimizer = settings.optimizer
    warmup = warmup_steps(optimizer.lr_warmup_steps, optimizer.lr_warmup_steps_ratio, total_steps)
    return LearningRateSchedule(optimizer.lr, total_steps, warmup, optimizer.warmup_style, optimizer.min_lr_ratio)


def _limits(settings: UpdateSettings, rows_per_unit: int, fast_paths: FastPaths, ranks: Ranks) -> MicroBatchLimits:
    rows = None if settings.use_dynamic_bsz else settings.micro_batch_size
    largest_mask = fast_paths.largest_mask if ranks.sequence is None else None  # only packed rows can be split
    return MicroBatchLimits(settings.max_tokens * ranks.sharing, rows, rows_per_unit, fast_paths.packing, largest_mask)


def _engine_settings(settings: UpdateSettings, stage: int, dtype: torch.dtype) -> TrainingEngineSettings:
    optimizer = settings.optimizer
    return TrainingEngineSettings(
        optimizer.betas, optimizer.eps, optimizer.weight_decay, settings.grad_clip, stage, dtype,
        settings.param_offload, settings.optimizer_offload,
    )  # fmt: skip


class Critic:
    """Estimates the return of each state and is fitted to the observed returns."""

    def __init__(
        self, settings: CriticSettings, zero_stage: int, dtype: torch.dtype, total_steps: int, model: ModelConfig,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.ranks = ranks
        self.dtype = dtype
        trust, longest = model.trust_remote_code, model.max_model_len
        load = partial(load_causal_lm, settings.model_path, dtype, trust, settings.model_overrides, longest)
        lm = load_on_first(load, ranks)
        _require_unquantized("model.critic_model_path", settings.model_path)
        fast_paths = _make_ready(lm, settings, zero_stage, ranks)
        head = lm.get_output_embeddings()  # may be narrower than the layers, as in OPT-350M
        value_model = ValueModel(lm, fast_paths, head.weight.shape[1], dtype, ranks.sequence)
        if head.weight is not lm.get_input_embeddings().weight:
            head.weight.requires_grad_(False)
        self.engine = TrainingEngine(value_model, _engine_settings(settings, zero_stage, dtype), ranks)
        self.schedule = _schedule(settings, total_steps)
        self.cut = _limits(settings, 1, fast_paths, ranks)

    def micro_batches(self, batch: Batch) -> Micros:
        return micro_batches(batch, self.cut, self.ranks)

    def values(self, batch: Batch, micros: Micros) -> Tensor:
        """float32 [B, T]: the value of the state in which each token was chosen."""
        return forward_batch(batch, micros, lambda micro: self.engine(micro), self.ranks)

    def update(self, batch: Batch, micros: Micros, old_values: Tensor, returns: Tensor, step: int) -> dict[str, float]:
        """Take one optimiser step on the clipped squared error (token mean) of all rows with returns, so not of
        excluded ones (expert rows, unscored answers). Return metrics that are exact over micro-batches and ranks.

        Raises TrinityError for a loss or gradient that is not finite.
        """
        judged = batch.mask & ~batch.excluded[:, None]
        weights = AGGREGATIONS["token-mean"].weights(judged)
        accumulator = MetricAccumulator()
        for i, micro in enumerate(micros):
            values = micro.grid(self.engine(micro))
            mask = judged[micro.rows] if len(micro.cells) else judged[micro.rows] & False
            losses, stats = value_tokens(
                values, returns[micro.rows], mask, old_values[micro.rows], self.settings.cliprange_value
            )
            loss = (weights[micro.rows] * losses).sum()
            accumulator.means(stats)
            accumulator.total("critic/vf_loss", loss)
            self.engine.backward(loss, last=i == len(micros) - 1)
        lr = self.schedule.at(step)
        norm = self.engine.step(lr)
        accumulator.reduce(all_reduce(self.ranks))
        accumulator.total("critic/grad_norm", norm)
        metrics = accumulator.metrics()
        inputs = {"the returns": returns, "the values": old_values}
        vf_loss, grad_norm = metrics["critic/vf_loss"], metrics["critic/grad_norm"]
        check_finite("critic", step, vf_loss, grad_norm, self.engine, lr, inputs)
        return metrics | {"critic/lr": lr}


def load_on_first(load: Callable[[bool], Any], ranks: Ranks) -> Any:
    """Call `load(reads)` for a model: with its weights on rank 0, without them on the others.

    Another rank reads them too if its model differs in form, because transformers keeps some weights in another dtype
    when it reads them. Collective.
    """
    lm = load(ranks.first)
    if ranks.world_size == 1:
        return lm
    first = broadcast_bytes(_form(lm) if ranks.first else None, ranks)
    if first != _form(lm):
        lm = load(True)
    stored = lm.state_dict()
    for name, buffer in lm.named_buffers():
        if name in stored:
            torch.distributed.broadcast(buffer, 0)
    return lm


def _require_unquantized(key: str, path: str, four_bits: bool = False) -> None:
    """Raise TrinityError if a loaded model's weights are quantized: transformers would have their codes trained. The
    check before a run does not see a hub name that had yet to be downloaded."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(path)
    if fault := quantization_fault(config, four_bits):
        raise TrinityError(f"{key} {path} {fault}", key=key)


def fast_paths_on_first(lm: Any, ranks: Ranks) -> FastPaths:
    """Return `find_fast_paths` of rank 0, the only one with weights so far; all ranks set the attention it chose.
    Collective.

    A model on the host, to be partitioned over GPUs, also has its first layers tried on the GPU.
    """
    fast = find_fast_paths(lm) if ranks.first else None
    if fast is not None and fast.packing and next(lm.parameters()).device != ranks.device:  # ZeRO 3 on a GPU
        with beginning_on(ranks.device, lm):
            fast = find_fast_paths(lm)  # also sets the attention that works there
    choice = [fast and astuple(fast), lm.config._attn_implementation, current_flash_attention_impl()]
    paths, implementation, kernel = json.loads(broadcast_bytes(json.dumps(choice).encode() if fast else None, ranks))
    if not ranks.first:
        lm.set_attn_implementation(implementation)
        if kernel is not None:
            activate_flash_attention_impl(kernel)
    return FastPaths(*paths)


def _form(lm: Any) -> bytes:
    """Return a digest of the names, dtypes, shapes and ties of all tensors."""
    tensors = [*lm.named_parameters(remove_duplicate=False), *lm.named_buffers()]
    first: dict[int, str] = {}
    rows = [(name, str(t.dtype), tuple(t.shape), first.setdefault(id(t), name)) for name, t in tensors]
    return str(zlib.crc32(repr(rows).encode())).encode()
