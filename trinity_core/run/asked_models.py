"""The models that task operators ask: those of the configuration, whose engines run as long as a curation needs them,
and OpenAI-compatible endpoints."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from trinity_core.base.addresses import API_KEY, BASE_URL
from trinity_core.base.errors import DataError, InputError, ModelError, TransientFault, Unanswered
from trinity_core.config import AuxiliaryModelConfig, Config
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tokenizer import auxiliary_encoder, policy_encoder, stop_tokens
from trinity_core.hosting.actors import Actors
from trinity_core.hosting.cluster import Cluster, close_cluster, open_cluster, placement_of
from trinity_core.hosting.faults import first_error_stays
from trinity_core.hosting.placement import AnyNode, alone
from trinity_core.pipelines.tasks import asked_models
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question, policy_as_judge
from trinity_core.rollout.inference.engine_model import EngineModel, auxiliary_model
from trinity_core.rollout.inference.external_model import Endpoint, ExternalModel
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.remote import as_handle
from trinity_core.rollout.inference.reward_engine import is_reward_model
from trinity_core.run.nodes import reserve
from trinity_core.workflows.rollout_model import RolloutModel

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
ENDPOINT_SECONDS = 800.0
"""Time for a question to an endpoint, including retries."""
T = TypeVar("T")


class RunModels:
    """See `TaskModels`. A context manager: the engines start with the first question and end with the context."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._runner = asyncio.Runner()
        self._cluster: Cluster | None = None
        self._engines: list[Any] = []
        self._nodes = AnyNode()
        self._models: dict[str, EngineModel] = {}

    def __enter__(self) -> RunModels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_stays(error is None):
            self._runner.close()
            if self._cluster is not None:
                self._cluster.kill(self._engines)
                if self._cluster.alive():
                    self._nodes.release()
                close_cluster(self._cluster)

    def ask(self, model: AskedModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
        """See `TaskModels.ask`. Raises ModelError if engines cannot start, TransientFault if they are lost."""
        models = {} if model.base_url else asked_models(self._config)
        if model.name not in models:
            return ask_endpoint(model, questions)
        if not self._models:
            try:
                self._start(models)
            except TransientFault:
                raise
            except Exception as error:
                raise ModelError(f"the model {model.name} cannot be started: {error}", key=model.name) from error
        return self._run(_answers(self._models[model.name], questions))

    def _start(self, asked: dict[str, AuxiliaryModelConfig]) -> None:
        """Start the engines of all models at once, so that none waits for another to free its GPU."""
        by_path = {model.model_path: model for model in asked.values()}
        if unable := [path for path in by_path if is_reward_model(path)]:
            raise InputError(
                f"{unable[0]} is a reward model, which writes no text; operators need a language model", key=unable[0]
            )
        encoders = {path: _encoder(self._config, model) for path, model in by_path.items()}
        config = _of_curation(self._config, list(by_path.values()))
        log.info("starting %s for the task pipeline", ", ".join(by_path))
        placement = alone(config, placement_of(config))
        self._cluster = open_cluster(config, placement.gpu_per_node)
        placement = reserve(self._cluster, config, placement)
        self._nodes = placement.nodes
        groups = Actors(self._cluster, config, placement).start_auxiliary()
        self._engines = [engine for group in groups for engine in group]
        started = self._run(_started(config, list(by_path.values()), encoders, groups))
        self._models = {name: started[model.model_path] for name, model in asked.items()}

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._cluster is not None, "engines are started first"
        return self._runner.run(_checked(work, self._cluster.check))


def _of_curation(config: Config, models: Sequence[AuxiliaryModelConfig]) -> Config:
    """Return the configuration for a curation's engines, whose names and logs differ from those of the run that
    follows."""
    return config.with_values({
        "name": f"{config.name}_curation", "mode": "bench",
        "explorer.auxiliary_models": list(models), "explorer.external_model": None,
    })  # fmt: skip


def _encoder(config: Config, model: AuxiliaryModelConfig) -> ChatEncoder:
    if model == policy_as_judge(config):
        return policy_encoder(config.model)
    return auxiliary_encoder(model)


async def _started(
    config: Config, models: Sequence[AuxiliaryModelConfig], encoders: dict[str, ChatEncoder], groups: list[list[Any]]
) -> dict[str, EngineModel]:
    """Return path → model, once its engines have loaded it."""
    patience = config.explorer.engine_timeout
    pools = [
        EnginePool([as_handle(engine) for engine in group], model.model_path, patience=patience)
        for model, group in zip(models, groups, strict=True)
    ]
    await asyncio.gather(*(pool.start() for pool in pools))
    loaded = {}
    for model, pool in zip(models, pools, strict=True):
        encoder = encoders[model.model_path]
        stops = stop_tokens(model.model_path, encoder)
        loaded[model.model_path] = auxiliary_model(config, model, pool, encoder, stops)
    return loaded


def ask_endpoint(model: AskedModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
    """Like `TaskModels.ask`, of endpoints only. Raises ModelError if the address or the key is missing."""

    async def ask() -> list[str | NoAnswer]:
        endpoint = _endpoint(model)
        try:
            return await _answers(ExternalModel(endpoint), questions)
        finally:
            await endpoint.close()

    return asyncio.run(ask())


def _endpoint(model: AskedModel) -> Endpoint:
    address = model.base_url or os.environ.get(BASE_URL, "")
    if not address:
        raise ModelError(f"the model {model.name} has no address: give base_url, or set {BASE_URL}", key="base_url")
    variable = model.api_key_env or (API_KEY if API_KEY in os.environ else None)
    key = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and not key:
        raise ModelError(f"the variable {variable}, which is to hold the key of {address}, is not set", key=variable)
    settings = ExternalModelConfig(base_url=address, model_name=model.name, api_key_env=variable)
    return Endpoint(settings, key, ENDPOINT_SECONDS, section="the operator")


async def _answers(model: RolloutModel, questions: Sequence[Question]) -> list[str | NoAnswer]:
    return list(await asyncio.gather(*(_answer(model, question) for question in questions)))


async def _answer(model: RolloutModel, question: Question) -> str | NoAnswer:
    system = [{"role": "system", "content": question.system}] if question.system else []
    seeds = None if question.seed is None else [question.seed]
    sampling: dict[str, Any] = {"temperature": question.temperature, "max_tokens": question.max_tokens}
    try:
        [answer] = await model.chat([*system, {"role": "user", "content": question.text}], seeds=seeds, **sampling)
    except (DataError, Unanswered) as error:
        return NoAnswer(str(error))
    if answer.finish_reason != "stop":
        return NoAnswer(f"it was cut off ({answer.finish_reason}); raise max_tokens")
    return answer.text


async def _checked(work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    """Await `work` while calling `check`, which may raise."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            check()
        return task.result()
    finally:
        task.cancel()
