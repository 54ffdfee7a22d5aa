"""The configuration of a run: its settings, loading and checking.

`load_config` reads a YAML file, `stages` splits it into runs, `train_settings` and `store_url` derive settings of the
trainer and the store. Imports neither torch nor ray.
"""

from trinity_core.config.findings import ConfigError, Finding
from trinity_core.config.load import config_from_dict, config_from_text, load_config, stages, to_dict, to_yaml
from trinity_core.config.notices import notices
from trinity_core.config.paths import store_url
from trinity_core.config.resolve import resolve
from trinity_core.config.schema import *  # noqa: F403
from trinity_core.config.schema import __all__ as _sections
from trinity_core.config.secrets import public_dict
from trinity_core.config.training import CriticSettings, TrainSettings, train_settings

__all__ = [
    "ConfigError",
    "CriticSettings",
    "Finding",
    "TrainSettings",
    "config_from_dict",
    "config_from_text",
    "load_config",
    "notices",
    "public_dict",
    "resolve",
    "stages",
    "store_url",
    "to_dict",
    "to_yaml",
    "train_settings",
    *_sections,
]
