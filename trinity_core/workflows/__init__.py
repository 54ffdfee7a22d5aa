"""Workflows turn tasks into experiences: they call the policy and score its answers."""

from trinity_core.base.plugins import load_plugins
from trinity_core.base.registry import Registry
from trinity_core.workflows.agent import AgentWorkflow, CommandWorkflow, RolloutSession
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow, Workflow, run_workflow
from trinity_core.workflows.builtin import (
    MathBoxedWorkflow,
    MathRewardModelWorkflow,
    MathRulerWorkflow,
    MathWorkflow,
    RubricJudgeWorkflow,
    SimpleChatWorkflow,
)
from trinity_core.workflows.conversation import ConversationWorkflow, MultiTurnWorkflow, ToolCallWorkflow
from trinity_core.workflows.distillation import DistillMathWorkflow, SelfDistillWorkflow
from trinity_core.workflows.environments import ENVIRONMENTS, Environment, EnvironmentFailed, Step
from trinity_core.workflows.environments.workflow import EnvArguments, EnvWorkflow
from trinity_core.workflows.rewards import REWARD_FNS, Reward, RewardItem, RewardPool, RewardRunner
from trinity_core.workflows.rewards.models import model_reward
from trinity_core.workflows.rollout_model import Completion, RecordingModel, RolloutModel
from trinity_core.workflows.tools import TOOLS, Toolbox
from trinity_core.workflows.trajectory import Trajectory

__all__ = [
    "ENVIRONMENTS",
    "REWARD_FNS",
    "TOOLS",
    "WORKFLOWS",
    "AgentWorkflow",
    "CommandWorkflow",
    "Completion",
    "ConversationWorkflow",
    "DistillMathWorkflow",
    "EnvArguments",
    "EnvWorkflow",
    "Environment",
    "EnvironmentFailed",
    "MathBoxedWorkflow",
    "MathRewardModelWorkflow",
    "MathRulerWorkflow",
    "MathWorkflow",
    "MultiTurnWorkflow",
    "RecordingModel",
    "Registry",
    "Reward",
    "RewardItem",
    "RewardPool",
    "RewardRunner",
    "RolloutModel",
    "RolloutSession",
    "RubricJudgeWorkflow",
    "SelfDistillWorkflow",
    "SimpleChatWorkflow",
    "SimpleWorkflow",
    "Step",
    "ToolCallWorkflow",
    "Toolbox",
    "Trajectory",
    "Workflow",
    "load_plugins",
    "model_reward",
    "run_workflow",
]
