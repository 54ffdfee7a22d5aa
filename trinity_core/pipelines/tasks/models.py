"""Models that task operators ask, as they see them. `trinity_core.inference.task_models` asks the endpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trinity_core.errors import InputError

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""The variables by which OpenAI's own clients find an endpoint and its key."""


@dataclass(frozen=True, slots=True)
class EndpointName:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    model: str
    api_key_env: str | None = None
    """The variable that holds the key; None sends none."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a model is asked."""

    system: str
    """"" for none."""
    text: str
    temperature: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None


class TaskModels(Protocol):
    """Asks models."""

    def ask(self, endpoint: EndpointName, questions: Sequence[Question]) -> list[str | NoAnswer]:
        """The answer to each question, in their order, or why there is none.

        Raises TransientFault where the endpoint is away, TrinityError where it refuses every request.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why a question has no answer."""

    why: str


def endpoint_of(operator: str, model: str, base_url: str | None, api_key_env: str | None) -> EndpointName:
    """The endpoint of an operator's arguments; what they leave out is taken from OpenAI's variables.

    Raises InputError without a model or an address.
    """
    address = base_url or os.environ.get(BASE_URL, "")
    if not model:
        raise InputError(f"{operator}: api_or_hf_model must name the model at the endpoint")
    if not address:
        raise InputError(f"{operator}: give base_url, the address of an OpenAI-compatible endpoint, or set {BASE_URL}")
    key = api_key_env if api_key_env is not None else (API_KEY if API_KEY in os.environ else None)
    return EndpointName(address, model, key)
