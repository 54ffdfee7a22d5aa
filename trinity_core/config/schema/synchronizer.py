"""The `synchronizer` section: how and when explorers get the trainer's weights."""

from __future__ import annotations

from typing import Literal

from trinity_core.config.section import Section
from trinity_core.config.sync_methods import SyncMethodName
from trinity_core.config.types import DERIVED, Derived, Seconds, Steps, StepsOrNone


class SynchronizerConfig(Section):
    """Weight sync. With interval 2 and offset 1: explorer 1 2 3 |sync| 4, trainer 1 2 |sync| 3 4."""

    sync_method: Derived[SyncMethodName] = DERIVED
    """`nccl`: from GPU to GPU; `memory`: through shared memory on one node; `checkpoint`: through the run's folder, the
    only one for modes `explore` and `train`. By default `nccl` in mode `both`, else `checkpoint`."""
    sync_style: Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer"] = "fixed"
    """`fixed`: at steps known beforehand; `dynamic_by_…`: the newest weights whenever that side is ready."""
    sync_interval: Steps = 1
    """Steps between weight syncs."""
    sync_offset: StepsOrNone = 0
    """Steps the explorer may run ahead of the trainer."""
    sync_timeout: Seconds = 3600.0
    """How long one side waits for the other before the run stops with an error."""
