"""Asks OpenAI-compatible endpoints what task operators want to know."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from trinity_core import errors
from trinity_core.addresses import API_KEY, BASE_URL
from trinity_core.config.schema.external import ExternalModelConfig
from trinity_core.errors import ModelError
from trinity_core.inference.endpoint import Endpoint
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question

BUDGET = 800.0
"""Seconds for a question with all its retries."""


class EndpointModels:
    """See `TaskModels`."""

    def ask(self, model: AskedModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
        """See `TaskModels.ask`. Raises ModelError where nothing says the address or the key."""
        return asyncio.run(_ask_all(model, questions))


async def _ask_all(model: AskedModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
    address = model.base_url or os.environ.get(BASE_URL, "")
    if not address:
        raise ModelError(f"nothing says where the model {model.name} is: give base_url, or set {BASE_URL}")
    variable = model.api_key_env or (API_KEY if API_KEY in os.environ else None)
    settings = ExternalModelConfig(base_url=address, model_name=model.name, api_key_env=variable)
    endpoint = Endpoint(settings, _key(variable, address), BUDGET, section="the operator")
    try:
        return list(await asyncio.gather(*(_ask(endpoint, question) for question in questions)))
    finally:
        await endpoint.close()


async def _ask(endpoint: Endpoint, question: Question) -> str | NoAnswer:
    messages = [{"role": "system", "content": question.system}] if question.system else []
    body: dict[str, Any] = {
        "model": endpoint.settings.model_name,
        "messages": [*messages, {"role": "user", "content": question.text}],
        "temperature": question.temperature,
        "max_tokens": question.max_tokens,
        "seed": question.seed,
    }
    try:
        answer = await endpoint.ask({key: value for key, value in body.items() if value is not None})
    except errors.Unanswered as error:
        return NoAnswer(str(error))
    if answer.finish_reason != "stop":
        return NoAnswer(f"it did not come to its end ({answer.finish_reason}); give it more max_tokens")
    return answer.text


def _key(variable: str | None, address: str) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ModelError(f"the variable {variable}, which is to hold the key of {address}, is not set")
    return key
