"""Environments that a policy acts in by text, by name."""

from trinity_core.workflows.environments.openenv import OpenEnv, OpenEnvTools
from trinity_core.workflows.environments.process import ProcessEnvironment
from trinity_core.workflows.environments.protocol import ENVIRONMENTS, Environment, EnvironmentFailed, Step
from trinity_core.workflows.environments.reasoning import ReasoningGym

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFailed",
    "OpenEnv",
    "OpenEnvTools",
    "ProcessEnvironment",
    "ReasoningGym",
    "Step",
]
