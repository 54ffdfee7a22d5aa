"""The external endpoint of an evaluation, in place of engines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trinity_core.config import Config
from trinity_core.config.external_rules import key_of_endpoint
from trinity_core.config.schema.external import ExternalModelConfig
from trinity_core.data.task import Task
from trinity_core.inference.endpoint import Answer, Endpoint
from trinity_core.inference.external_model import ExternalModel, usual_sampling
from trinity_core.rollout.workflow_loops import WorkflowLoops

SHARE = 0.9
"""Of `explorer.max_timeout`, for a request with its retries: a slow endpoint is not a workflow that takes too long."""


@dataclass(frozen=True)
class EndpointOutside:
    """An endpoint in the explorer's own loop, asked by workflows from theirs."""

    endpoint: Endpoint
    loops: WorkflowLoops

    async def ask(self, body: dict[str, Any]) -> Answer:
        """See `Endpoint.ask`."""
        return await self.loops.outside(self.endpoint.ask(body))


def external_model(config: Config, external: ExternalModelConfig, loops: WorkflowLoops) -> ExternalModel:
    """The model of `explorer.external_model`. Raises TrinityError if its key is not set."""
    key = key_of_endpoint(config)
    budget = SHARE * config.explorer.max_timeout
    endpoint = EndpointOutside(Endpoint(external, key, budget=budget), loops)
    return ExternalModel(endpoint, external, key, usual_sampling(config), budget)


def one_answer_each(tasks: Sequence[Task]) -> list[Task]:
    """Each repeat as a task of its own, so that a request that fails costs one answer and not all of its question."""
    return [
        replace(task, repeat_times=1, group=f"{task.group}/{run}", workflow_args=copy.deepcopy(task.workflow_args))
        for task in tasks
        for run in range(task.repeat_times)
    ]
