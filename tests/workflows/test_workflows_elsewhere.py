"""Errors for names of workflows that do not exist here."""

from __future__ import annotations

import pytest

from trinity_core.workflows.base import unknown_workflow


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alfworld_workflow", "env_workflow plays environments"),
        ("OPD_webshop_workflow", "env_workflow plays environments"),
        ("on_policy_distill_sciqa_workflow", "on_policy_distill_math_workflow learns from a teacher"),
        ("as_react_workflow", "an AgentWorkflow runs an agent"),
        ("simple_mm_workflow", "models see text alone"),
        ("medicine_ruler_workflow", "ask a judge"),
        ("bots_math_boxed_workflow", "math_boxed_workflow and math_workflow score answers"),
        ("learn2ask_workflow", "there are async_math_workflow, command_workflow, env_workflow"),
    ],
)
def test_unknown_workflows_name_what_is_nearest(name: str, said: str) -> None:
    assert said in unknown_workflow(name) and "docs/porting.md" in unknown_workflow(name)


def test_misspelt_names_are_slips() -> None:
    assert "did you mean 'math_workflow'?" in unknown_workflow("math_workfow")
