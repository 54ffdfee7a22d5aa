"""The resources of an explorer, opened once: task sets, engines, rewards, store, weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from trinity_core.base.errors import TrinityError
from trinity_core.base.processes import cores
from trinity_core.config import Config, RolloutModelConfig
from trinity_core.config.paths import api_address_file
from trinity_core.config.rules.explorer import key_in, key_of_endpoint
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.formats import Message
from trinity_core.data.joined import JoinedInputs, open_inputs
from trinity_core.data.rejected import FAILED_IN_A_ROW, RejectedRows
from trinity_core.data.schedule import TaskSchedule, open_tasksets
from trinity_core.data.task import Task
from trinity_core.data.taskset import Taskset
from trinity_core.data.tokenizer import auxiliary_encoder, endless_answers, policy_encoder, stop_tokens
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync.versions import WeightVersions, run_versions
from trinity_core.pipelines.data_juicer.client import DataJuicer
from trinity_core.pipelines.data_juicer.local import LocalDataJuicer, open_data_juicer
from trinity_core.pipelines.named_parts import require_names
from trinity_core.pipelines.operators import Operators, pipeline
from trinity_core.pipelines.own_process import OwnProcess
from trinity_core.rollout.inference.engine_model import EngineModel, auxiliary_model, policy_limits
from trinity_core.rollout.inference.external_model import Endpoint, ExternalModel, usual_sampling
from trinity_core.rollout.inference.pool import START_SECONDS, EnginePool
from trinity_core.rollout.inference.remote import RemoteEngine, as_handle
from trinity_core.rollout.inference.requests import WeightSource
from trinity_core.rollout.inference.reward_engine import RewardEngines, is_reward_model
from trinity_core.rollout.inference.tool_parsing import ToolCallReader, asks_template, parser_of
from trinity_core.rollout.openai_api import api_settings
from trinity_core.rollout.openai_api.server import ApiServer
from trinity_core.rollout.records import ExploredFile, OperatorInput
from trinity_core.rollout.runner import EvaluationProgress, Outcome, Pace, TaskRunner, check_failures
from trinity_core.rollout.step_source import ServedSteps, StepSource, TaskSteps, one_answer_each
from trinity_core.rollout.workflow_loops import WorkflowLoop
from trinity_core.workflows import WORKFLOWS, RewardPool, RolloutModel, load_plugins
from trinity_core.workflows.rewards.models import ModelRewards
from trinity_core.workflows.rewards.pool import usual_workers

log = logging.getLogger(__name__)

EXTERNAL_SHARE = 0.9
"""Fraction of `explorer.max_timeout` for a request to `explorer.external_model` including retries, so that a slow
endpoint does not look like a slow workflow."""
JUDGE_SHARE = EXTERNAL_SHARE / 2
"""Fraction for a request to a judge: the policy's answer also takes time."""


@dataclass
class Resources:
    config: Config
    pool: EnginePool
    model: EngineModel | ExternalModel
    runner: TaskRunner
    reward_pool: RewardPool
    steps: StepSource | None
    """None without a task set to explore: the explorer then only evaluates."""
    eval_tasksets: list[Taskset]
    weights: WeightVersions
    source: WeightSource
    operators: Operators
    data_juicer: DataJuicer | LocalDataJuicer | None
    operator_input: OperatorInput
    api: ApiServer | None
    evaluation: EvaluationProgress | None = None
    """The evaluation in progress."""

    @cached_property
    def store(self) -> ExperienceStore:
        """Created when exploring begins: an evaluation must not leave an empty store, which would look like a run's."""
        return open_run_store(self.config)

    @cached_property
    def explored_file(self) -> ExploredFile:
        return ExploredFile(self.config, self.store)

    def usage(self) -> tuple[float, float, float]:
        """Return totals so far: seconds of engines and of verifiers, and sampled tokens."""
        return self.pool.busy.seconds, self.runner.scoring.seconds, self.pool.tokens

    async def evaluated(self, taskset: Taskset, version: int, rows: Sequence[int] | None = None) -> list[Outcome]:
        """Let the model answer an eval set, or these rows of it. Raises TrinityError if every task fails, of at least
        `FAILED_IN_A_ROW` rows."""
        title, tasks = f"version {version} on {taskset.name}", self._eval_tasks(taskset, rows)
        self.evaluation = progress = EvaluationProgress(f"evaluates {title}", len(tasks))
        try:
            outcomes = await self.runner.run(tasks, self._at_once_in_eval(taskset), ended=progress.one_more)
        finally:
            self.evaluation = None
        if rows is None or len(outcomes) >= FAILED_IN_A_ROW:
            check_failures(f"the evaluation of {title}", outcomes)
        return outcomes

    def _at_once_in_eval(self, taskset: Taskset) -> int:
        """Return the number of concurrent workflows in an evaluation: it has as many answers in flight as an explore
        step."""
        if self.config.external_model:
            return self.runner.at_once
        repeats = self.config.algorithm.repeat_times
        return max(self.runner.at_once, self.runner.at_once * repeats // taskset.config.repeat_times)

    def _eval_tasks(self, taskset: Taskset, rows: Sequence[int] | None) -> list[Task]:
        """Return the tasks of an evaluation; for an external model one task for each answer."""
        tasks = taskset.tasks() if rows is None else [taskset[row] for row in rows]
        return one_answer_each(tasks) if self.config.external_model else tasks

    def close(self) -> None:
        self.runner.workflow_loop.close()
        if self.api is not None:
            self.api.stop()
            if api_settings.is_told(self.config) and self.config.mode != "serve":  # clients of mode serve come back
                api_address_file(self.config).unlink(missing_ok=True)
        self.reward_pool.close()
        self.operators.close()
        if isinstance(self.data_juicer, LocalDataJuicer):
            self.data_juicer.close()
        if "store" in vars(self):
            self.store.close()


@dataclass(frozen=True, slots=True)
class _Read:
    """Read from disk in a thread while the engines load."""

    config: Config
    """The configuration, with arguments of rewards and operators converted to their declared types."""
    encoder: ChatEncoder | None
    """None for an external model, which renders prompts itself."""
    stop_token_ids: tuple[int, ...]
    tasksets: list[Taskset]
    joined: JoinedInputs
    eval_tasksets: list[Taskset]
    others: list[tuple[ChatEncoder, tuple[int, ...]]]
    reader: ToolCallReader | None


async def open_resources(config: Config, engines: Sequence[Any], auxiliary: Sequence[Sequence[Any]]) -> Resources:
    """Open everything, engines and files in parallel. Raises `TrinityError` if a model, file or name is unusable."""
    await asyncio.to_thread(load_plugins, config.plugin_dir)
    config, auxiliary, reward_models = await asyncio.to_thread(apart, config, auxiliary)
    pool = _pool(config, engines, config.model.model_path, bool(config.cluster.colocate))
    others = [
        _pool(config, group, model.model_path)
        for group, model in zip(auxiliary, config.explorer.auxiliary_models, strict=True)
    ]
    reading = asyncio.create_task(asyncio.to_thread(_read, config))
    serving = asyncio.create_task(_serve(config, reading, pool, others))
    rating = (model.start() for model in reward_models.values())
    await asyncio.gather(reading, pool.start(), *(other.start() for other in others), *rating, serving)
    read, api = reading.result(), serving.result()
    config = read.config
    workflow_loop = WorkflowLoop()
    policy = _model(config, read, pool, workflow_loop)
    language_models = [
        auxiliary_model(config, model, other, encoder, stops, workflow_loop.outside)
        for model, other, (encoder, stops) in zip(config.explorer.auxiliary_models, others, read.others, strict=True)
    ]
    by_name = {model.name: model for model in language_models}
    reward_workers = config.explorer.reward_workers or usual_workers(cores())
    reward_pool = RewardPool(reward_workers, plugin_dir=config.plugin_dir)
    external = config.external_model
    at_once = external.requests_at_once if external else config.explorer.runner_per_model * len(engines)
    runner = TaskRunner(
        policy,
        ModelRewards(reward_pool, Judges(config, by_name, reward_models, workflow_loop)),
        at_once,
        config.explorer.max_timeout,
        config.explorer.max_retry_times,
        language_models,
        config.explorer.rollout_model.enable_history,
        api_settings.workflow_models(config, api, pool),
        workflow_loop,
        over_rollout=config.explorer.over_rollout,
        pace=Pace(config.explorer.dynamic_timeout),
    )
    data_juicer = open_data_juicer(config, serves_models=True)
    return Resources(
        config=config,
        pool=pool,
        model=policy,
        runner=runner,
        reward_pool=reward_pool,
        steps=_steps(config, read, runner, api, pool.on_gpu),
        eval_tasksets=read.eval_tasksets,
        weights=run_versions(config),
        source=WeightSource(config.synchronizer.sync_method, str(config.job_dir)),
        operators=_operators(config, data_juicer),
        data_juicer=data_juicer,
        operator_input=OperatorInput(config),
        api=api,
    )


def _operators(config: Config, data_juicer: DataJuicer | LocalDataJuicer | None) -> Operators:
    processed = config.data_processor.experience_pipeline
    if processed.own_process and processed.operators:
        return OwnProcess(config)
    return pipeline(processed.operators, data_juicer_server=data_juicer)


def _steps(config: Config, read: _Read, runner: TaskRunner, api: ApiServer | None, on_gpu: bool) -> StepSource | None:
    batch_size, name = config.buffer.batch_size, config.explorer.name
    if api is not None and api.served_sessions is not None and read.encoder is not None:
        repeats = config.algorithm.repeat_times
        return ServedSteps(api, api.served_sessions, read.encoder.tokenizer, name, batch_size, repeats)
    if not read.tasksets:
        return None
    schedule = TaskSchedule(read.tasksets, batch_size, config.seed, name)
    return TaskSteps(schedule, runner, config, config.is_synchronous and not on_gpu, read.joined)


def _model(config: Config, read: _Read, pool: EnginePool, workflow_loop: WorkflowLoop) -> EngineModel | ExternalModel:
    if read.encoder is not None:
        engine = pool.engines[0] if pool.engines else None
        settings = engine.settings if isinstance(engine, RemoteEngine) else None
        limits = replace(policy_limits(config, read.stop_token_ids), engine=settings)
        return EngineModel(pool, read.encoder, limits, reader=read.reader, outside=workflow_loop.outside)
    assert config.external_model is not None, "only an external model has no encoder"
    return external_model(config, config.external_model, workflow_loop)


async def _serve(
    config: Config, reading: asyncio.Task[_Read], pool: EnginePool, others: Sequence[EnginePool]
) -> ApiServer | None:
    """Start the server of the OpenAI API while the engines load; None if no model is to be served."""
    if not api_settings.is_served(config):
        return None
    read = await reading
    stops = [item[1] for item in read.others]
    api = api_settings.api_server(config, (pool, read.stop_token_ids), list(zip(others, stops, strict=True)))
    await api.start()
    if api_settings.is_told(config):
        api_settings.write_address(config, api)
    return api


def _pool(config: Config, engines: Sequence[Any], model_path: str, sleeps: bool = False) -> EnginePool:
    patience, load_seconds = config.explorer.engine_timeout, config.synchronizer.sync_timeout
    handles = [as_handle(engine) for engine in engines]
    return EnginePool(handles, model_path, sleeps=sleeps, patience=patience, load_seconds=load_seconds)


def _with_parser(config: Config, encoder: ChatEncoder) -> RolloutModelConfig:
    """Return the policy's settings, with the tool parser of its chat template if that is configured."""
    rollout = config.explorer.rollout_model
    return rollout.with_values({"tool_call_parser": parser_of(encoder)}) if asks_template(config) else rollout


def _read(config: Config) -> _Read:
    config = require_names(config)
    external = config.external_model
    encoder = None if external else policy_encoder(config.model)
    rejected = RejectedRows.of(config, config.explorer.name)
    tasksets = [] if external else open_tasksets(config, encoder, rejected)
    joined = open_inputs(config, tasksets, rejected)
    evals = open_tasksets(config, encoder, rejected, is_eval=True)
    others = []
    for model in config.explorer.auxiliary_models:
        other = auxiliary_encoder(model)
        others.append((other, stop_tokens(model.model_path, other)))
    stops = stop_tokens(config.model.model_path, encoder) if encoder else ()
    if encoder and (warning := endless_answers(encoder)):
        log.warning("%s: %s", config.model.model_path, warning)
    path = config.model.model_path
    reader = None
    if encoder:
        reader = ToolCallReader.of(_with_parser(config, encoder), encoder.tokenizer, path, encoder.template_args)
    return _Read(config, encoder, stops, tasksets, joined, evals, others, reader)


@dataclass
class Judges:
    """See `trinity_core.workflows.rewards.models.RewardModels`."""

    config: Config
    models: Mapping[str, RolloutModel]
    reward_models: Mapping[str, RewardEngines]
    workflow_loop: WorkflowLoop
    _endpoints: dict[str, ExternalModel] = field(default_factory=dict)

    def judge(self, name: str | None) -> RolloutModel:
        return _named(self.models, name, "language model")

    def endpoint(self, settings: ExternalModelConfig) -> ExternalModel:
        """See `RewardModels.endpoint`. One client for each endpoint, which limits its requests."""
        name = settings.model_dump_json()
        if name not in self._endpoints:
            key = key_in(self.config, settings.api_key_env, "reward_fn_args.api_key_env")
            budget = JUDGE_SHARE * self.config.explorer.max_timeout
            endpoint = Endpoint(settings, key, budget, section="reward_fn_args")
            self._endpoints[name] = ExternalModel(endpoint, outside=self.workflow_loop.outside)
        return self._endpoints[name]

    async def rated(self, name: str | None, conversations: Sequence[Sequence[Message]]) -> list[float | str]:
        return await self.workflow_loop.outside(_named(self.reward_models, name, "reward model").rate(conversations))


def external_model(config: Config, external: ExternalModelConfig, workflow_loop: WorkflowLoop) -> ExternalModel:
    """Return the model of `explorer.external_model`. Raises TrinityError if its key is not set."""
    endpoint = Endpoint(external, key_of_endpoint(config), EXTERNAL_SHARE * config.explorer.max_timeout)
    return ExternalModel(endpoint, usual_sampling(config), workflow_loop.outside)


def _named(models: Mapping[str, Any], name: str | None, kind: str) -> Any:
    if not models:
        raise TrinityError(
            f"the reward needs a {kind}, and the run has none; add one to explorer.auxiliary_models",
            key="explorer.auxiliary_models",
        )
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        raise TrinityError(
            f"the reward asks for the {kind} '{name}'; explorer.auxiliary_models has {', '.join(models)}",
            key="explorer.auxiliary_models",
        )
    return models[name]


def apart(
    config: Config, auxiliary: Sequence[Sequence[Any]]
) -> tuple[Config, list[Sequence[Any]], dict[str, RewardEngines]]:
    """Return the configuration with only language models as auxiliary models, their engines, and the reward models."""
    models, engines, reward_models = [], [], {}
    for model, group in zip(config.explorer.auxiliary_models, auxiliary, strict=True):
        if is_reward_model(model.model_path):
            patience = config.explorer.engine_timeout
            reward_models[model.called] = RewardEngines(group, model.called, START_SECONDS, patience)
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
    """True if a task set uses a reward model, or a user's own workflow, which may use one."""
    for taskset in config.buffer.explorer_input.all_tasksets:
        workflow = WORKFLOWS.resolve(taskset.default_workflow_type or "math_workflow")
        reward = taskset.default_reward_fn_type or getattr(workflow, "default_reward", None)
        if reward == "reward_model" or not workflow.__module__.startswith("trinity_core."):
            return True
    return False
