"""Asks OpenAI-compatible endpoints what task operators want to know."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from trinity_core import errors
from trinity_core.config.schema.external import ExternalModelConfig
from trinity_core.errors import InputError
from trinity_core.inference.endpoint import Endpoint
from trinity_core.pipelines.tasks.models import EndpointName, NoAnswer, Question

BUDGET = 800.0
"""Seconds for a question with all its retries."""


class EndpointModels:
    """See `TaskModels`."""

    def ask(self, endpoint: EndpointName, questions: Sequence[Question]) -> list[str | NoAnswer]:
        """See `TaskModels.ask`."""
        return asyncio.run(_ask_all(endpoint, questions))


async def _ask_all(name: EndpointName, questions: Sequence[Question]) -> list[str | NoAnswer]:
    settings = ExternalModelConfig(base_url=name.base_url, model_name=name.model, api_key_env=name.api_key_env)
    endpoint = Endpoint(settings, _key(name), BUDGET, section="the operator")
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


def _key(name: EndpointName) -> str:
    if name.api_key_env is None:
        return ""
    key = os.environ.get(name.api_key_env, "")
    if not key:
        raise InputError(f"the variable {name.api_key_env}, which is to hold the key of {name.base_url}, is not set")
    return key
