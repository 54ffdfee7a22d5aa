"""A whole configuration: what one run (or one sequence of stages) is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from trinity_core.config.algorithm_types import ALGORITHMS, AlgorithmType, uses_reference
from trinity_core.config.schema.algorithm import AlgorithmConfig
from trinity_core.config.schema.buffer import BufferConfig
from trinity_core.config.schema.cluster import ClusterConfig
from trinity_core.config.schema.explorer import ExplorerConfig
from trinity_core.config.schema.model import ModelConfig
from trinity_core.config.schema.monitor import DataProcessorConfig, LogConfig, MonitorConfig, ServiceConfig
from trinity_core.config.schema.stage import StageConfig
from trinity_core.config.schema.synchronizer import SynchronizerConfig
from trinity_core.config.schema.trainer import TrainerConfig
from trinity_core.config.types import DERIVED, IS_HIDDEN, Derived, Seed


@dataclass(slots=True)
class Config:
    """The settings of a run, section by section."""

    project: str = "trinity"
    """Project; runs of one project lie in one folder."""
    name: str = "run"
    """Name of the run."""
    mode: Literal["both", "train", "explore", "bench"] = "both"
    """`both`: explore and train; `train`, `explore`: only one of them; `bench`: only evaluate."""
    checkpoint_root_dir: str = "./checkpoints"
    """Folder of all checkpoints and logs; those of this run are in `<checkpoint_root_dir>/<project>/<name>`."""
    continue_from_checkpoint: bool = True
    """Go on from the run's latest checkpoint; false starts anew as `<name>_<timestamp>` where the name is taken."""
    ray_namespace: Derived[str] = DERIVED
    """Ray namespace of the run's actors; by default `<project>/<name>`."""
    seed: Seed = 42
    """Seed from which all random streams derive."""
    plugin_dir: str | None = None
    """Folder of Python files with the user's own workflows, rewards and algorithms."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Which update is made from experiences."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy, and how many tokens it sees."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Nodes and GPUs."""
    buffer: BufferConfig = field(default_factory=BufferConfig)
    """Tasks, experiences and batch sizes."""
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    """Rollout engines and workflow runners."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training and checkpoints."""
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    """Hand-over of weights."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Tracking."""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    """Services."""
    data_processor: DataProcessorConfig = field(default_factory=DataProcessorConfig)
    """Pipelines over tasks and experiences."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logs of the actors."""
    stages: list[StageConfig] = field(default_factory=list)
    """Several runs in sequence."""
    given: Annotated[dict[str, Any], IS_HIDDEN] = field(default_factory=dict, repr=False, compare=False)
    """What the user wrote, interpolated; stages are merged from it."""

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values at dotted keys, such as `{"synchronizer.sync_method": "memory"}`."""
        return _with_values(self, values)

    @property
    def job_dir(self) -> Path:
        """The run's own folder, absolute."""
        return Path(self.checkpoint_root_dir).expanduser().absolute() / self.project / self.name

    @property
    def algorithm_type(self) -> AlgorithmType:
        """The defaults behind `algorithm.algorithm_type`."""
        return ALGORITHMS[self.algorithm.algorithm_type]

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage function in use reads values."""
        used = self.algorithm.advantage_fn
        return any(known.needs_critic and known.advantage_fn == used for known in ALGORITHMS.values())

    @property
    def needs_reference(self) -> bool:
        """Whether any part in use compares with the reference model."""
        parts = self.algorithm
        return uses_reference(
            parts.policy_loss_fn,
            parts.kl_penalty_fn,
            parts.kl_penalty_fn_args,
            parts.kl_loss_fn,
            parts.kl_loss_fn_args,
        )


def _with_values(section: Any, values: Mapping[str, Any]) -> Any:
    changed: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            changed[name] = value
    changed |= {name: _with_values(getattr(section, name), inner) for name, inner in below.items()}
    return dataclasses.replace(section, **changed)
