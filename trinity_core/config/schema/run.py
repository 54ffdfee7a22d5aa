"""A whole configuration: one run, or a sequence of stages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from trinity_core.base.files import expanded
from trinity_core.base.layout import JobLayout
from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import ALGORITHMS, AlgorithmType, uses_reference
from trinity_core.config.findings import Finding, value_at
from trinity_core.config.schema.algorithm import AlgorithmConfig
from trinity_core.config.schema.buffer import BufferConfig
from trinity_core.config.schema.explorer import ExplorerConfig, ExternalModelConfig, RolloutModelConfig
from trinity_core.config.schema.gate import GateConfig
from trinity_core.config.schema.model import LoraConfig, ModelConfig
from trinity_core.config.schema.monitor import DataProcessorConfig, LogConfig, MonitorConfig, ServiceConfig
from trinity_core.config.schema.synchronizer import SynchronizerConfig
from trinity_core.config.schema.trainer import TrainerConfig
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.config.types import (
    DERIVED,
    EMPTY,
    Args,
    Count,
    Derived,
    Flag,
    Many,
    Natural,
    Positive,
    Section,
    Seed,
)


class ClusterConfig(Section):
    """Nodes and GPUs. Engines are placed first, the trainer gets the rest."""

    node_num: Count = 1
    """Maximum number of nodes; more than one needs `ray_address`, a shared disk and a PostgreSQL store."""
    gpu_per_node: Natural | None = None
    """GPUs per node, which must be free; null means all of a node's GPUs, 0 runs engines and trainer on the CPU."""
    ray_address: str | None = None
    """Ray cluster to join, as `host:port` or `auto`; its token is read from Ray's default location. Null starts one for
    the run."""
    colocate: Flag | None = None
    """Engine and trainer use the same GPU in turns: the engine sleeps while the trainer works, and the trainer's state
    moves to host memory while the engine works. Null: true if a synchronous run has a single GPU."""
    price_per_hour: Positive | None = None
    """Price of an hour of all machines of the run, in any currency: `trinity plan` shows what a run costs, and
    `monitor.stop.price` limits it."""
    allow_oversized: Flag = False
    """Start a run even if weights and optimizer, or the disk that it writes, do not fit on this machine."""


class StageConfig(Section):
    """Settings of one stage. Omitted settings are inherited from the sections above.

    Sections are merged key by key; an `experience_buffer`, a `taskset` and any list replace the inherited one as a
    whole.
    """

    stage_name: str = ""
    """Unique name; the stage's run is called `<name>_<stage_name>`."""
    mode: str | None = None
    """Mode of this stage."""
    algorithm: Args = EMPTY
    """Settings of `algorithm`."""
    model: Args = EMPTY
    """Settings of `model`. A stage after the first starts from the previous stage's model."""
    cluster: Args = EMPTY
    """Settings of `cluster`."""
    buffer: Args = EMPTY
    """Settings of `buffer`."""
    explorer: Args = EMPTY
    """Settings of `explorer`."""
    trainer: Args = EMPTY
    """Settings of `trainer`."""
    synchronizer: Args = EMPTY
    """Settings of `synchronizer`."""
    data_processor: Args = EMPTY
    """Settings of `data_processor`."""
    gate: Args = EMPTY
    """Settings of `gate`."""


class Config(Section):
    """The settings of a run, section by section."""

    project: str = "trinity"
    """Project; runs of one project share a folder."""
    name: str = "run"
    """Name of the run."""
    mode: Literal["both", "train", "explore", "serve", "bench"] = "both"
    """`both`: explore and train; `train`, `explore`: only one of them; `serve`: explore with users of the OpenAI API;
    `bench`: only evaluate."""
    checkpoint_root_dir: str = "./checkpoints"
    """Folder of all checkpoints and logs; this run's are in `<checkpoint_root_dir>/<project>/<name>`."""
    continue_from_checkpoint: Flag = True
    """Resume from the run's latest checkpoint; false starts over as `<name>_<timestamp>` if the name is taken."""
    ray_namespace: Derived[str] = DERIVED
    """Ray namespace of the run's actors; by default `<project>/<name>`."""
    seed: Seed = 42
    """Seed from which all random streams derive."""
    plugin_dir: str | None = None
    """Folder of Python files with the user's own workflows, rewards and algorithms. A relative path is looked up in the
    current directory, then next to this file."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """How experiences become updates."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy and its token limits."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Nodes and GPUs."""
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    """Tasks, experiences and batch sizes."""
    explorer: ExplorerConfig = Field(default_factory=ExplorerConfig)
    """Inference engines and workflow runners."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Training and checkpoints."""
    synchronizer: SynchronizerConfig = Field(default_factory=SynchronizerConfig)
    """Weight sync."""
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    """Tracking."""
    service: ServiceConfig = Field(default_factory=ServiceConfig)
    """Services."""
    data_processor: DataProcessorConfig = Field(default_factory=DataProcessorConfig)
    """Pipelines over tasks and experiences."""
    gate: GateConfig = Field(default_factory=GateConfig)
    """What a candidate must show before it becomes the champion."""
    log: LogConfig = Field(default_factory=LogConfig)
    """Logs of the actors."""
    stages: Many[StageConfig] = ()
    """Several runs in sequence."""
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _stage_runs: tuple[Config, ...] = PrivateAttr(default=())
    _of_stage: dict[str, Any] = PrivateAttr(default_factory=dict)
    _notices: tuple[Finding, ...] = PrivateAttr(default=())
    _remarks: list[Finding] = PrivateAttr(default_factory=list)

    def __eq__(self, other: object) -> bool:
        """Compare settings, not how they were written."""
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    @property
    def given(self) -> dict[str, Any]:
        """What the user wrote, interpolated and translated to this schema."""
        return self._given

    def written(self, key: str) -> Any:
        """Return what the user wrote at a key such as `a.b[0].c`, interpolated and translated to this schema; None if
        nothing."""
        return value_at(self._given, key)

    def written_by_stage(self, key: str) -> Any:
        """Like `written`, but only for a stage's own entry of `stages`, not the sections above."""
        return value_at(self._of_stage, key)

    @property
    def stage_runs(self) -> tuple[Config, ...]:
        return self._stage_runs

    def resuming(self, name: str) -> Config:
        """Return a copy that resumes the run `name`, with its stages' runs next to it."""
        config = self.with_values({"name": name, "continue_from_checkpoint": True})
        suffixes = [run.name.removeprefix(self.name) for run in self._stage_runs]
        config._stage_runs = tuple(
            run.resuming(name + suffix) for run, suffix in zip(self._stage_runs, suffixes, strict=True)
        )
        return config

    @property
    def notices(self) -> tuple[Finding, ...]:
        """Findings about the user's keys that have no effect here."""
        return self._notices

    @property
    def remarks(self) -> list[Finding]:
        """Warnings of preflight, which opens what the configuration names and fills this list; copies share it."""
        return self._remarks

    def as_written(
        self,
        tree: dict[str, Any],
        notices: Iterable[Finding],
        stage_runs: Iterable[Config] = (),
        of_stage: dict[str, Any] | None = None,
    ) -> Config:
        """Return a copy that records what the user wrote, without keys that have no effect, and its stages'
        configurations; for a stage, also its own entry."""
        config = self.model_copy()
        config._given, config._notices, config._stage_runs = tree, tuple(notices), tuple(stage_runs)
        config._of_stage = of_stage or {}
        return config

    @property
    def job_dir(self) -> Path:
        """The run's own folder, absolute."""
        return expanded(self.checkpoint_root_dir).absolute() / self.project / self.name

    @property
    def layout(self) -> JobLayout:
        return JobLayout(self.job_dir)

    @property
    def external_model(self) -> ExternalModelConfig | None:
        """The endpoint that this evaluation scores instead of engines; None in a run with its own engines."""
        return self.explorer.external_model if self.mode == "bench" else None

    @property
    def explores_alone(self) -> bool:
        """True if the run is an explorer (or serves users) and its trainer is a separate run."""
        return self.mode in ("explore", "serve")

    @property
    def is_part(self) -> bool:
        """True if explorer and trainer are separate runs, and this is one of them."""
        algorithm_type = ALGORITHMS.get(self.algorithm.algorithm_type)
        return self.explores_alone or (
            self.mode == "train" and algorithm_type is not None and algorithm_type.uses_rollouts
        )

    @property
    def explores(self) -> bool:
        """True if an explorer of this run produces experiences."""
        return self.mode in ("both", "explore", "serve")

    @property
    def uses_engines(self) -> bool:
        """True if the run generates, because it explores or evaluates."""
        return self.mode == "bench" or (self.explores and not self.is_supervised)

    @property
    def engine_models(self) -> dict[str, RolloutModelConfig]:
        """The models for which this run has engines, by key."""
        if not self.uses_engines:
            return {}
        models = self.explorer.models
        if self.external_model:
            del models["explorer.rollout_model"]
        return models

    @property
    def evaluates_beside(self) -> bool:
        """True if checkpoints are scored while the run trains, by engines of their own."""
        return self.explorer.eval_beside_training and self.mode in ("both", "train")

    @property
    def gpus_beside(self) -> int:
        """GPUs for an evaluation beside training: one engine of the policy's, and the auxiliary models once more."""
        if not self.evaluates_beside:
            return 0
        models = self.explorer.auxiliary_models
        others = sum(model.engine_num * model.tensor_parallel_size for model in models)
        return self.explorer.rollout_model.tensor_parallel_size + others

    @property
    def is_synchronous(self) -> bool:
        """True if each explore step waits for the version that is due: fixed style, trainer and explorer in one run."""
        return self.mode == "both" and self.synchronizer.sync_style == "fixed"

    @property
    def algorithm_type(self) -> AlgorithmType:
        """The defaults behind `algorithm.algorithm_type`."""
        return ALGORITHMS[self.algorithm.algorithm_type]

    @property
    def is_supervised(self) -> bool:
        """True if the trainer learns from a data set, without an explorer and an experience store."""
        algorithm_type = ALGORITHMS.get(self.algorithm.algorithm_type)
        return algorithm_type is not None and not algorithm_type.uses_rollouts

    @property
    def engine_adapter(self) -> LoraConfig | None:
        """The adapter that engines hold with the base; None if they hold full weights. If a run that trains an adapter
        pushes weights, these are merged."""
        method = SYNC_METHODS.get(self.synchronizer.sync_method)
        pushes = self.mode != "bench" and method is not None and method.vllm_backend
        return None if pushes else self.model.lora

    @property
    def needs_critic(self) -> bool:
        """True if the advantage function reads values; False of an unknown algorithm, which has none."""
        name = self.algorithm.advantage_fn
        return bool(name) and registry_of("algorithm.advantage_fn").uses(name, "values")

    @property
    def needs_reference(self) -> bool:
        """True if any part compares with the reference model."""
        parts = self.algorithm
        return uses_reference(
            parts.advantage_fn,
            parts.policy_loss_fn,
            parts.policy_loss_fn_args,
            parts.kl_penalty_fn,
            parts.kl_penalty_fn_args,
            parts.kl_loss_fn,
            parts.kl_loss_fn_args,
        )
