"""Errors for names of workflows that do not exist here."""

from __future__ import annotations

import pytest

from trinity_core.workflows.base import unknown_workflow


@pytest.mark.parametrize("name", ["alfworld_workflow", "bots_math_boxed_workflow", "env_workflow_"])
def test_unknown_workflows_list_what_there_is(name: str) -> None:
    meant = name == "env_workflow_"
    assert ("did you mean 'env_workflow'" in unknown_workflow(name)) == meant
    assert ("command_workflow" in unknown_workflow(name)) != meant
