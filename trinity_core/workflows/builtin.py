"""The built-in workflows."""

from __future__ import annotations

from trinity_core.signatures import Arguments
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow


@WORKFLOWS.register("simple_workflow")
class SimpleChatWorkflow(SimpleWorkflow):
    """One question, one answer, scored by the task set's `default_reward_fn_type`."""

    arguments = Arguments


@WORKFLOWS.register("async_math_workflow")
@WORKFLOWS.register("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """A problem with a checkable answer: `math_reward` if the task set names no reward function."""

    arguments = Arguments
    default_reward = "math_reward"
