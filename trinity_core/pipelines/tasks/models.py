"""Models that task operators ask, as seen by the operators. `trinity_core.run.asked_models` implements them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from trinity_core.base.addresses import BASE_URL
from trinity_core.base.errors import InputError
from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.config.schema.explorer import RolloutModelConfig

POLICY = "policy"


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model of the configuration, or one behind an OpenAI-compatible endpoint."""

    name: str
    base_url: str | None = None
    """None: the configuration's model of this name, or else that of `OPENAI_BASE_URL`."""
    api_key_env: str | None = None
    """Variable that holds the key; None: `OPENAI_API_KEY`, if set."""


@dataclass(frozen=True, slots=True)
class Question:
    system: str
    text: str
    temperature: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None


class TaskModels(Protocol):
    def ask(self, model: AskedModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
        """Return the answer to each question, in order, or why there is none.

        Raises TransientFault if the model is away, EndpointError if it refuses every request, ModelError if it cannot
        be called at all.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why a question has no answer."""

    why: str


def asked_model(operator: str, name: str, base_url: str | None, api_key_env: str | None) -> AskedModel:
    """Return the model in an operator's arguments. Raises InputError without a name."""
    if not name:
        raise InputError(f"{operator}: api_or_hf_model must name the model", key="api_or_hf_model")
    return AskedModel(name, base_url, api_key_env)


def own_model(config: Config, asked: AskedModel) -> AuxiliaryModelConfig | None:
    """Return the configuration's model that is meant, or None if it is at an endpoint.

    A model is found by its name (`policy` for the run's own), its path, or the last part of its path.
    """
    if asked.base_url:
        return None
    lowered = asked.name.lower()
    for model in (*config.explorer.auxiliary_models, policy_as_judge(config)):
        if lowered in {name.lower() for name in (model.name or "", model.model_path, PurePath(model.model_path).name)}:
            return model
    return None


def policy_as_judge(config: Config) -> AuxiliaryModelConfig:
    engine = {name: getattr(config.explorer.rollout_model, name) for name in RolloutModelConfig.model_fields}
    same = ("model_path", "max_model_len", "max_prompt_tokens", "max_response_tokens", "trust_remote_code")
    shared = {name: getattr(config.model, name) for name in same}
    return AuxiliaryModelConfig().with_values(engine | shared | {"name": POLICY})


def unknown_model(config: Config, asked: AskedModel) -> str | None:
    """Return why this model cannot be called, or None."""
    if asked.base_url or own_model(config, asked) or os.environ.get(BASE_URL):
        return None
    names = ", ".join([*(model.called for model in config.explorer.auxiliary_models), POLICY])
    return (
        f"names no model of this configuration ({names}). Add it to explorer.auxiliary_models, or give the base_url of "
        f"an OpenAI-compatible endpoint that has it (or set {BASE_URL})."
    )
