"""The `trainer` section: how one update is computed, and when a checkpoint is saved."""

from __future__ import annotations

from pydantic import Field

from trinity_core.config.schema.trainer_keys import TrainerKeys
from trinity_core.config.schema.verl import VerlConfig


class TrainerConfig(TrainerKeys):
    """The DeepSpeed workers that train."""

    trainer_config: VerlConfig = Field(default_factory=VerlConfig)
    """Settings in veRL's words."""
    trainer_config_path: str = ""
    """YAML file with the same settings; give this or `trainer_config`."""
