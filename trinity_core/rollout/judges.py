"""The models of a run beside its engines: the endpoint of an evaluation, and judges (reward models, language models,
endpoints)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.config.rules.explorer import key_in, key_of_endpoint
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.data.formats import Message
from trinity_core.errors import TrinityError
from trinity_core.inference.endpoint import Endpoint
from trinity_core.inference.external_model import ExternalModel, usual_sampling
from trinity_core.inference.pool import START_SECONDS
from trinity_core.inference.reward_engine import RewardEngines, is_reward_model
from trinity_core.rollout.workflow_loops import WorkflowLoops
from trinity_core.workflows import WORKFLOWS, RolloutModel

log = logging.getLogger(__name__)

EXTERNAL_SHARE = 0.9
"""Of `explorer.max_timeout`, for a request to `explorer.external_model` with its retries: a slow endpoint is not a
workflow that takes too long."""
JUDGE_SHARE = EXTERNAL_SHARE / 2
"""The same for a judge: the policy's answer takes its time too."""


@dataclass
class Judges:
    """See `trinity_core.workflows.rewards.models.RewardModels`."""

    config: Config
    models: Mapping[str, RolloutModel]
    reward_models: Mapping[str, RewardEngines]
    loops: WorkflowLoops
    _endpoints: dict[tuple[str, str, str | None], ExternalModel] = field(default_factory=dict)

    def judge(self, name: str | None) -> RolloutModel:
        """See `RewardModels.judge`."""
        return _named(self.models, name, "language model")

    def endpoint(self, base_url: str, model_name: str, api_key_env: str | None) -> ExternalModel:
        """See `RewardModels.endpoint`. One client for each endpoint, which limits the requests in flight."""
        known = (base_url, model_name, api_key_env)
        if known not in self._endpoints:
            settings = ExternalModelConfig(base_url=base_url, model_name=model_name, api_key_env=api_key_env)
            key = key_in(self.config, api_key_env, "reward_fn_args.api_key_env")
            budget = JUDGE_SHARE * self.config.explorer.max_timeout
            endpoint = Endpoint(settings, key, budget, section="reward_fn_args")
            self._endpoints[known] = ExternalModel(endpoint, outside=self.loops.outside)
        return self._endpoints[known]

    async def rated(self, name: str | None, conversations: Sequence[Sequence[Message]]) -> list[float | str]:
        """See `RewardModels.rated`."""
        return await self.loops.outside(_named(self.reward_models, name, "reward model").rate(conversations))


def external_model(config: Config, external: ExternalModelConfig, loops: WorkflowLoops) -> ExternalModel:
    """The model of `explorer.external_model`. Raises TrinityError if its key is not set."""
    endpoint = Endpoint(external, key_of_endpoint(config), EXTERNAL_SHARE * config.explorer.max_timeout)
    return ExternalModel(endpoint, usual_sampling(config), loops.outside)


def _named(models: Mapping[str, Any], name: str | None, kind: str) -> Any:
    if not models:
        raise TrinityError(f"the reward needs a {kind}, and the run has none; add one to explorer.auxiliary_models")
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        raise TrinityError(
            f"the reward asks for the {kind} '{name}'; explorer.auxiliary_models has {', '.join(models)}"
        )
    return models[name]


def name_of(model: AuxiliaryModelConfig) -> str:
    """The name by which rewards find a model."""
    return model.name or model.model_path


def apart(
    config: Config, auxiliary: Sequence[Sequence[Any]]
) -> tuple[Config, list[Sequence[Any]], dict[str, RewardEngines]]:
    """The configuration with language models alone among the auxiliary models, their engines, and the reward models."""
    models, engines, reward_models = [], [], {}
    for model, group in zip(config.explorer.auxiliary_models, auxiliary, strict=True):
        if is_reward_model(model.model_path):
            patience = config.explorer.engine_timeout
            reward_models[name_of(model)] = RewardEngines(group, name_of(model), START_SECONDS, patience)
        else:
            models.append(model)
            engines.append(group)
    if reward_models and not _asks_reward_models(config):
        log.warning(
            "nothing asks the reward model %s: set default_workflow_type: math_rm_workflow, or default_reward_fn_type: "
            "reward_model, or take it out of explorer.auxiliary_models",
            ", ".join(reward_models),
        )
    return config.with_values({"explorer.auxiliary_models": models}), engines, reward_models


def _asks_reward_models(config: Config) -> bool:
    """Whether a task set is scored by a reward model, or by a workflow of the user's own, which may ask one."""
    given = config.buffer.explorer_input
    for taskset in (*given.tasksets, *given.eval_tasksets):
        workflow = WORKFLOWS.resolve(taskset.default_workflow_type or "math_workflow")
        reward = taskset.default_reward_fn_type or getattr(workflow, "default_reward", None)
        if reward == "reward_model" or not workflow.__module__.startswith("trinity_core."):
            return True
    return False
