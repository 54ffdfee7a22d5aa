"""The `synchronizer` section: how and when explorers get the trainer's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from trinity_core.config.sync_methods import SYNC_METHODS, SyncMethodName
from trinity_core.config.types import (
    DERIVED,
    Derived,
    Flag,
    Natural,
    Seconds,
    Section,
    Steps,
    StepsOrNone,
    Unit,
)

SyncStyle = Literal["fixed", "explorer_driven", "trainer_driven"]
"""Determines which side decides when weights are synchronised."""


class SynchronizerConfig(Section):
    """Weight sync. With interval 2 and offset 1: explorer 1 2 3 |sync| 4, trainer 1 2 |sync| 3 4."""

    sync_method: Derived[SyncMethodName] = DERIVED
    """`nccl`: from GPU to GPU; `memory`: through shared memory on one node; `checkpoint`: through the run's folder, the
    only method for modes `explore` and `train`; `champion`: no trainer, mode `serve` follows the project's champion. By
    default `nccl` in mode `both` (with a LoRA adapter `memory`, on several nodes `checkpoint`), else `checkpoint`.
    Without GPUs, or where engine and trainer share one, `nccl` means `memory`."""
    sync_style: SyncStyle = "fixed"
    """`fixed`: at predetermined steps. `explorer_driven`: the explorer takes the newest weights every `sync_interval`
    explore steps. `trainer_driven`: the trainer publishes every `sync_interval` train steps, and the explorer takes
    them before its next step."""
    sync_interval: Steps = 1
    """Steps between weight syncs: explore steps if the explorer decides, else train steps."""
    sync_offset: StepsOrNone = 0
    """Steps by which the explorer may run ahead of the trainer, in `fixed` style and mode `both`."""
    max_staleness: Annotated[Natural, Unit("versions")] | None = None
    """Maximum number of versions by which the trainer may be ahead of the version that sampled a token. An explorer
    does not begin a step whose rows would be older when they are trained on; null: no bound beyond what `fixed`
    implies."""
    sync_in_flight: Flag = False
    """Engines load each version as soon as it is published, even in mid-generation: each token records the version that
    sampled it. Not in mode `both` with `fixed`, nor with `explorer_driven`."""
    sync_timeout: Seconds = 3600.0
    """How long one side waits for the other before the run stops with an error."""

    @property
    def style(self) -> SyncStyle:
        """The effective style. If the trainer pushes weights into the engines, the explorer cannot decide when.

        It depends only on the configuration: a run keeps its style if another method takes over for lack of GPUs.
        """
        pushed = self.sync_method in SYNC_METHODS and SYNC_METHODS[self.sync_method].vllm_backend
        return "trainer_driven" if self.sync_style == "explorer_driven" and pushed else self.sync_style
