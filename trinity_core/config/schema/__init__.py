"""The settings: one model per section of the YAML. Each field is followed by its documentation."""

from trinity_core.config.schema.algorithm import AlgorithmConfig, OptimizerConfig
from trinity_core.config.schema.buffer import (
    BufferConfig,
    EarlierRolloutsConfig,
    ExperienceBufferConfig,
    ExplorerInputConfig,
    FormatConfig,
    HumanVerdictsConfig,
    ReplayBufferConfig,
    RolloutArgs,
    TaskSelectorConfig,
    TasksetConfig,
    TrainerInputConfig,
)
from trinity_core.config.schema.explorer import (
    AuxiliaryModelConfig,
    ExplorerConfig,
    ExternalModelConfig,
    OverRolloutConfig,
    RolloutModelConfig,
)
from trinity_core.config.schema.model import LoraConfig, ModelConfig
from trinity_core.config.schema.monitor import (
    DataJuicerConfig,
    DataProcessorConfig,
    ExperienceInputConfig,
    ExperiencePipelineConfig,
    LogConfig,
    MonitorConfig,
    OperatorConfig,
    ServiceConfig,
    TaskPipelineConfig,
)
from trinity_core.config.schema.run import ClusterConfig, Config, StageConfig
from trinity_core.config.schema.synchronizer import SynchronizerConfig
from trinity_core.config.schema.trainer import TrainerConfig
from trinity_core.config.schema.verl import VerlConfig

__all__ = [
    "AlgorithmConfig",
    "AuxiliaryModelConfig",
    "BufferConfig",
    "ClusterConfig",
    "Config",
    "DataJuicerConfig",
    "DataProcessorConfig",
    "EarlierRolloutsConfig",
    "ExperienceBufferConfig",
    "ExperienceInputConfig",
    "ExperiencePipelineConfig",
    "ExplorerConfig",
    "ExplorerInputConfig",
    "ExternalModelConfig",
    "FormatConfig",
    "HumanVerdictsConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "MonitorConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "OverRolloutConfig",
    "ReplayBufferConfig",
    "RolloutArgs",
    "RolloutModelConfig",
    "ServiceConfig",
    "StageConfig",
    "SynchronizerConfig",
    "TaskPipelineConfig",
    "TaskSelectorConfig",
    "TasksetConfig",
    "TrainerConfig",
    "TrainerInputConfig",
    "VerlConfig",
]
