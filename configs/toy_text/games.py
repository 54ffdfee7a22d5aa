"""gymnasium's games as environments, and `frozen_lake_workflow`: a plugin of the recipes FrozenLake and Blackjack.

plugin_dir: configs/toy_text
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from toy_text import Blackjack, FrozenLake, Taxi

from trinity_core.workflows import ENVIRONMENTS, WORKFLOWS, EnvArguments, EnvWorkflow

ENVIRONMENTS.register("frozen_lake")(FrozenLake)
ENVIRONMENTS.register("taxi")(Taxi)
ENVIRONMENTS.register("blackjack")(Blackjack)


class FrozenLakeArguments(EnvArguments):
    """`workflow_args` of `frozen_lake_workflow`."""

    environment: Literal["frozen_lake"] = "frozen_lake"
    agent_max_steps: int = Field(10, ge=1)
    """Most turns of the policy, instead of `max_turns`."""
    env_max_steps: int = Field(8, ge=1)
    """Most moves; an answer that names no move is none."""
    is_slippery: bool = False

    @model_validator(mode="after")
    def _named_as_there(self) -> Self:
        if "max_turns" in self.model_fields_set:
            raise ValueError("frozen_lake_workflow has agent_max_steps in place of max_turns")
        return self

    @property
    def all_arguments(self) -> dict[str, Any]:
        """Those of `FrozenLake`."""
        return {"is_slippery": self.is_slippery, "max_steps": self.env_max_steps, **self.environment_args}


@WORKFLOWS.register("frozen_lake_workflow")
class FrozenLakeWorkflow(EnvWorkflow):
    """`env_workflow` on `frozen_lake`, with Trinity-RFT's arguments; the tasks' columns `size`, `p` and `seed` draw a
    map for each."""

    arguments: ClassVar[type[EnvArguments]] = FrozenLakeArguments

    def env_arguments(self) -> EnvArguments:
        """As of `env_workflow`, with `agent_max_steps` as the number of turns."""
        arguments = super().env_arguments()
        assert isinstance(arguments, FrozenLakeArguments)
        return arguments.model_copy(update={"max_turns": arguments.agent_max_steps})
