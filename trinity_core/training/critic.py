"""PPO's critic: a value model with its own engine, optimiser and learning rate schedule."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trinity_core.algorithms import AGGREGATIONS, MetricAccumulator
from trinity_core.algorithms.value import value_tokens
from trinity_core.config.schema import ModelConfig
from trinity_core.config.training import CriticSettings
from trinity_core.training.batch import Batch
from trinity_core.training.compiled import compile_layers
from trinity_core.training.distributed import Ranks
from trinity_core.training.engine import TrainingEngine, TrainingEngineSettings
from trinity_core.training.learning_rate import LearningRateSchedule, warmup_steps
from trinity_core.training.loading import fast_paths_on_first, load_on_first
from trinity_core.training.micro import Micro
from trinity_core.training.nonfinite import check_finite
from trinity_core.training.policy import ValueModel, load_causal_lm
from trinity_core.training.sequence_parallel import install
from trinity_core.training.update import Cut, all_reduce, gather, micro_batches


class Critic:
    """Estimates the return of each state and is fitted to the observed returns."""

    def __init__(
        self, settings: CriticSettings, zero_stage: int, dtype: torch.dtype, total_steps: int, model: ModelConfig,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.ranks = ranks
        self.dtype = dtype
        optimizer = settings.optimizer
        trust, longest = model.trust_remote_code, model.max_model_len
        load = partial(load_causal_lm, settings.model_path, dtype, trust, settings.model_overrides, longest)
        lm = load_on_first(load, ranks)
        if zero_stage < 3:
            lm.to(ranks.device)
        fast_paths = fast_paths_on_first(lm, ranks)
        if ranks.sequence is not None:
            install(lm, ranks.sequence)
        if settings.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        if settings.torch_compile:
            compile_layers(lm, ranks.device)
        value_model = ValueModel(lm, fast_paths, lm.config.get_text_config().hidden_size, dtype, ranks.sequence)
        head = lm.get_output_embeddings()
        if head.weight is not lm.get_input_embeddings().weight:
            head.weight.requires_grad_(False)
        self.engine = TrainingEngine(
            value_model,
            TrainingEngineSettings(
                optimizer.betas, optimizer.eps, optimizer.weight_decay, settings.grad_clip, zero_stage, dtype,
                settings.param_offload, settings.optimizer_offload,
            ),
            ranks,
        )  # fmt: skip
        warmup = warmup_steps(optimizer.lr_warmup_steps, optimizer.lr_warmup_steps_ratio, total_steps)
        self.schedule = LearningRateSchedule(
            optimizer.lr, total_steps, warmup, optimizer.warmup_style, optimizer.min_lr_ratio
        )
        rows = None if settings.use_dynamic_bsz else settings.micro_batch_size
        largest_mask = fast_paths.largest_mask if ranks.sequence is None else None
        self.cut = Cut(settings.max_tokens * ranks.sharing, rows, 1, fast_paths.packing, largest_mask)

    def micro_batches(self, batch: Batch) -> list[Micro]:
        """This rank's micro-batches, by the critic's own budget."""
        return micro_batches(batch, self.cut, self.ranks)

    def values(self, batch: Batch, micros: list[Micro]) -> Tensor:
        """Float32 [B, T]: the value of the state in which each token was chosen."""
        return gather(batch, micros, lambda micro: self.engine(micro), self.ranks)

    def update(
        self, batch: Batch, micros: list[Micro], old_values: Tensor, returns: Tensor, step: int
    ) -> dict[str, float]:
        """One optimiser step on the clipped squared error (token mean) of the rows that have returns, which excluded
        ones (expert rows, unscored answers) have not. Metrics are exact over micro-batches and ranks.

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
        metrics = accumulator.metrics()
        inputs = {"the returns": returns, "the values": old_values}
        check_finite("critic", step, metrics["critic/vf_loss"], norm, self.engine, lr, inputs)
        return metrics | {"critic/grad_norm": norm, "critic/lr": lr}
