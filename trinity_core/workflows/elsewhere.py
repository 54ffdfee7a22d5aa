"""What comes nearest here to a workflow of Trinity-RFT that is not built in."""

from __future__ import annotations

from trinity_core.slips import closest, distance
from trinity_core.workflows.base import WORKFLOWS

SLIPS = 2
"""Letters in which a misspelt name may differ from a built-in one; others are names of other workflows."""
NEAREST = (
    (("_mm_", "_vlm"), "models see text alone: there are no images or videos"),
    (
        ("alfworld", "sciworld", "scienceworld", "webshop", "sudoku", "frozenlake", "intercode", "env_"),
        "env_workflow plays environments, also those of an OpenEnv server (docs/environments.md)",
    ),
    (("distill", "opd", "sdpo"), "on_policy_distill_math_workflow learns from a teacher (docs/workflows.md)"),
    (
        ("agentscope", "react", "search", "agent"),
        "an AgentWorkflow runs an agent, whichever framework it is written in (docs/agents.md)",
    ),
    (
        ("ruler", "rubric", "judge"),
        "math_ruler_workflow and rubric_judge_workflow ask a judge (docs/rewards.md)",
    ),
    (("math", "boxed", "dapo"), "math_boxed_workflow and math_workflow score answers (docs/workflows.md)"),
)
"""Parts of names, and a sentence about what is here; the first that fits."""


def unknown_workflow(name: str) -> str:
    """What to write in place of a name that is not built in, and how a workflow of one's own is found."""
    meant = closest(name, WORKFLOWS)
    if meant and distance(name, meant) <= SLIPS:
        return f"there is no workflow '{name}'; did you mean '{meant}'? Your own is found through --plugin-dir."
    lower = name.lower()
    near = next((sentence for parts, sentence in NEAREST if any(part in lower for part in parts)), "")
    here = near or f"there are {', '.join(sorted(WORKFLOWS))}"
    return (
        f"there is no workflow '{name}'; {here}. docs/porting.md says how one of Trinity-RFT is rewritten; your own is "
        "found through --plugin-dir or as package.module.Name."
    )
