"""Configures what an explorer serves through the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.files import private_folder, read_json, write_json
from trinity_core.config import Config, RolloutModelConfig
from trinity_core.config.paths import api_address_file
from trinity_core.config.training import dtype_of
from trinity_core.data.session_log import SessionLog, read_endings, session_log_path
from trinity_core.data.task_queue import queue_of
from trinity_core.data.tokenizer import configured_chat_template
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.openai_api.model import UNCHANGED, ApiModels
from trinity_core.rollout.openai_api.recorded_session import SessionTerms
from trinity_core.rollout.openai_api.served_model import ServedModel
from trinity_core.rollout.openai_api.served_sessions import Journal, ServedSessions
from trinity_core.rollout.openai_api.server import ApiServer

POLICY = "policy"
"""Name of the policy in requests, besides its model path."""

PoolAndStops = tuple[EnginePool, tuple[int, ...]]
"""The engines of a model, and the tokens that end its answers."""


def is_served(config: Config) -> bool:
    return is_policy_served(config) or any(model.enable_openai_api for model in config.explorer.auxiliary_models)


def is_policy_served(config: Config) -> bool:
    """An external model has no engines here."""
    return config.explorer.rollout_model.enable_openai_api and config.external_model is None


def api_server(config: Config, policy: PoolAndStops, auxiliary: Sequence[PoolAndStops]) -> ApiServer:
    """Return the server, not started. The policy comes first."""
    model, explorer = config.model, config.explorer
    models = []
    if is_policy_served(config):
        models.append(
            ServedModel(
                (POLICY, model.model_path), model.model_path, policy[0], model.max_model_len, policy[1],
                trust_remote_code=model.trust_remote_code,
                chat_template=configured_chat_template(model),
                template_args=_thinking(model.enable_thinking),
                sampling=tuple(sampling(config).items()),
                **_of_engines(explorer.rollout_model),
            )
        )  # fmt: skip
    for other, (pool, stops) in zip(explorer.auxiliary_models, auxiliary, strict=True):
        if other.enable_openai_api:
            models.append(
                ServedModel(
                    (other.called,), other.model_path, pool, other.max_model_len, stops,
                    trust_remote_code=other.trust_remote_code,
                    template_args=_thinking(other.enable_thinking),
                    recorded=False,
                    **_of_engines(other),
                )
            )  # fmt: skip
    buffer = config.layout.buffer
    log = SessionLog(session_log_path(buffer, explorer.name))
    listening = (explorer.listen_address, explorer.api_port) if is_told(config) else (LOOPBACK, 0)
    server = ApiServer(models, *listening, log)
    queues = [taskset for taskset in config.buffer.explorer_input.tasksets if taskset.storage_type == "queue"]
    server.queues = {str(taskset.name): queue_of(config, taskset) for taskset in queues}
    if config.mode == "serve":
        server.served_sessions = served_sessions(config, buffer)
        server.key = read_json(api_address_file(config)).get("api_key", server.key)
    return server


def served_sessions(config: Config, buffer: Path) -> ServedSessions:
    """Return the sessions that users open, including those of earlier processes."""
    return ServedSessions(
        Journal(buffer / f"serving-{config.explorer.name}"),
        SessionTerms(None, sampling(config), {**UNCHANGED, **sampling(config)}),
        config.explorer.feedback_timeout,
        config.algorithm.repeat_times,
        ended=read_endings(buffer),
    )


def workflow_models(config: Config, server: ApiServer | None, pool: EnginePool) -> ApiModels | None:
    """Return the opener of workflows' sessions, with the policy on `pool`; None if the policy is not served."""
    return ApiModels(server, POLICY, sampling(config), pool) if server and is_policy_served(config) else None


def sampling(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "temperature": model.temperature, "top_p": model.top_p, "top_k": max(model.top_k, 0),
        "repetition_penalty": model.repetition_penalty,
    }  # fmt: skip


def is_told(config: Config) -> bool:
    """True if external programs get the address. Not in an evaluation, which serves only its own workflows: its run may
    be serving."""
    return config.mode != "bench"


def write_address(config: Config, server: ApiServer) -> None:
    """Write the address to a file for programs outside the run."""
    path = api_address_file(config)
    private_folder(path.parent)
    write_json(path, {"base_url": server.base_url(), "api_key": server.key}, mode=0o600)


def _of_engines(model: RolloutModelConfig) -> dict[str, Any]:
    return {
        "dtype": dtype_of(model.dtype, on_gpu=False),
        "speculative_config": model.extra_engine_args.get("speculative_config"),
        "tool_call_parser": model.tool_call_parser,
        "reasoning_parser": model.reasoning_parser,
        "enable_auto_tool_choice": model.enable_auto_tool_choice,
        "log_requests": model.enable_log_requests,
    }


def _thinking(enabled: bool | None) -> tuple[tuple[str, bool], ...]:
    return () if enabled is None else (("enable_thinking", enabled),)
