"""Engine: one vLLM that generates for the explorer. A plain class; its Ray actor is asynchronous.

Two implementations: vLLM in this process (`in_process.py`, CPU), and in separate processes (`async_llm.py`, GPU). Any
number of calls may be in flight. After every load the engine verifies that it holds the version: its parameters must
consist of the published tensors, and its log-probs of the weight check's tokens must agree with the trainer's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trinity_core.base.errors import InputError, TrinityError, WeightSyncError
from trinity_core.base.layout import JobLayout, step_of
from trinity_core.exchange.checkpoints.adapters import is_adapter
from trinity_core.exchange.checkpoints.hub_names import HubNames
from trinity_core.exchange.sync.versions import WeightVersions
from trinity_core.exchange.sync.weight_check import RankDigests, verify_parameters, verify_weights
from trinity_core.exchange.tracking.logs import logged, move_log, start_log
from trinity_core.rollout.inference import vllm_types
from trinity_core.rollout.inference.requests import Request, Sample, SampleBatch, WeightSource, WeightSyncReport
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.rollout.inference.weight_receiver import EMBEDDINGS, HEAD

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)


class Engine(ABC):
    """One running vLLM.

    Raises `TrinityError` for errors that no retry can fix (a missing model, an invalid request), `WeightSyncError` if
    its weights are not the trainer's. After any other error except `TransientFault` the engine is unusable.
    """

    def __init__(self, settings: EngineSettings) -> None:
        start_log()
        self.settings = settings
        self.version = 0
        """Version of the weights in use; 0 is the model folder itself."""
        self._adapter: LoRARequest | None = None
        """The adapter in use; None in an engine without one."""
        self._loads = 0
        self._starting: asyncio.Task[float] | None = None
        self._finished_tokens = 0
        self._checked: tuple[int, RankDigests] = (0, ())
        """The last checked version, with the parameter digests at that time."""
        self._asleep = False

    async def start(self) -> float:
        """Load the model; return the seconds until it can generate. A second call waits for the first."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._timed_start())
        if self._starting.done():
            return self._starting.result()
        return await asyncio.shield(self._starting)

    async def _timed_start(self) -> float:
        began = time.perf_counter()
        with logged(f"the start of an engine with {self.settings.model_path}", log):
            await self._start()
            if self.settings.lora_rank:
                await self._load(WeightSource("folder", self.settings.adapter_path), self.version)
            if self.settings.sleeps:
                await self.sleep()
        return time.perf_counter() - began

    async def sleep(self) -> None:
        """Release the GPU's memory until `wake`. Requests in flight are aborted, KV cache and weights dropped, except
        for the base of an adapter."""
        if not self._asleep:
            await self._sleep()
            self._asleep = True

    async def wake(self) -> None:
        """Take the GPU's memory back. A version must be loaded before the next request."""
        if self._asleep:
            await self._wake()
            self._asleep = False

    async def move_log(self, environment: Mapping[str, str]) -> None:
        """Continue the log in the folder of the run that takes over this engine (its `log_environment`)."""
        move_log(environment)

    async def describe(self) -> tuple[EngineSettings, dict[str, Any]]:
        """Return its settings and, for a Ray actor, the options of a replacement."""
        return self.settings, present_options()

    async def successor(self, model_path: str) -> Self:
        """Stop this engine; return a new one with the same settings, not started."""
        await self.stop()
        return type(self)(replace(self.settings, model_path=model_path))

    @abstractmethod
    async def generate(self, requests: Sequence[Request]) -> SampleBatch:
        """Sample all requests; the batch is in their order."""

    async def so_far(self, known: Mapping[str, int]) -> dict[str, Sample]:
        """Return samples of requests in flight by key, from the first token that is not `known` up to the second
        newest."""
        samples = {key: vllm_types.sample_so_far(self._vllm, key, count, self.version) for key, count in known.items()}
        return {key: sample for key, sample in samples.items() if sample is not None}

    @abstractmethod
    async def abort(self, keys: Sequence[str]) -> None:
        """Cancel requests; their samples have the stop reason `abort`."""

    async def load(self, source: WeightSource, version: int) -> WeightSyncReport:
        """Load `version` of the weights between two tokens, and check that the engine holds it.

        Requests in flight continue: their KV cache is recomputed, and each token keeps the version that sampled it.
        Raises `VersionGone` or `DataError` if the weights are not available (load another version before sampling: a
        GPU engine may stay paused), `WeightSyncError` if a parameter or a log-prob differs from the trainer's.
        """
        began = time.perf_counter()
        await self._load(source, version)
        loaded = time.perf_counter()
        published = _published(source, version)
        gap = None if published is None else await self._check(*published)
        ended = time.perf_counter()
        return WeightSyncReport(version, ended - began, gap, ended - loaded)

    async def _check(self, versions: WeightVersions, version: int) -> float | None:
        """Check the parameters; return the gap of the weight check if `version` has one."""
        values = await asyncio.to_thread(versions.values, version, self.settings.compute_dtype)
        if values:
            ranks = await self._parameter_digests()
            if all(map(is_adapter, values)):  # the base is not compared
                ranks = [{name: value for name, value in rank.items() if is_adapter(name)} for rank in ranks]
            if EMBEDDINGS in values:
                values.setdefault(HEAD, values[EMBEDDINGS])
            checked, before = self._checked
            try:
                verify_parameters(version, values, ranks, before, checked)
            except WeightSyncError:  # some models' tensors have other module names in vLLM than on the hub
                hub_names = HubNames.of_config(vllm_types.text_config(self.settings))
                on_hub = {hub_names.name(name): value for name, value in values.items()}
                if on_hub.keys() == values.keys():
                    raise
                verify_parameters(version, on_hub, ranks, before, checked)
            self._checked = (version, ranks)
        if (check := versions.check(version)) is None:
            return None
        engine = "fp8" if self.settings.is_lossy else self.settings.compute_dtype
        return verify_weights(check, await self.score(check.tokens), engine, digests_agree=bool(values))

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that the next prompts are computed as by a newly started engine. Not with requests
        in flight."""

    async def sampled(self) -> int:
        """Return a number that grows with every sampled token, as a sign of life."""
        return self._finished_tokens + vllm_types.tokens_in_flight(self._vllm)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs (temperature 1, nats) of tokens 1 … of a sequence, each given the tokens before it.

        Raises `InputError` for an empty sequence, and for one that leaves no room for the token that vLLM samples after
        it.
        """
        if not len(tokens):
            raise InputError("an empty sequence cannot be scored", key="tokens")
        most = self.settings.max_model_len - 1
        if len(tokens) > most:
            raise InputError(
                f"a sequence of {len(tokens)} tokens cannot be scored: max_model_len allows {most}",
                key="model.max_model_len",
            )
        return await self._score(list(tokens))

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group in which the trainer pushes weights; see `trinity_core.exchange.sync.nccl`."""
        raise TrinityError(
            "weights cannot be pushed to an engine on the CPU; set synchronizer.sync_method: memory",
            key="synchronizer.sync_method",
        )

    @abstractmethod
    async def stop(self) -> None:
        """End vLLM; requests in flight fail. An engine that has not started may be stopped too."""

    # ---- vLLM ----

    @property
    @abstractmethod
    def _vllm(self) -> LLMEngine | AsyncLLM:
        """vLLM's engine, once it has started."""

    @abstractmethod
    async def _start(self) -> None:
        """Start vLLM; returns when it can generate."""

    def _put_in_use(self, version: int) -> None:
        self._loads += 1
        self._adapter = vllm_types.lora_request(self.settings, self._loads)
        self.version = version

    @abstractmethod
    async def _sleep(self) -> None:
        """Free the GPU's memory; on the CPU, refuse work until `wake`."""

    @abstractmethod
    async def _wake(self) -> None:
        """Undo `_sleep`."""

    @abstractmethod
    async def _load(self, source: WeightSource, version: int) -> None:
        """Put `version` of the weights in use."""

    @abstractmethod
    async def _parameter_digests(self) -> list[dict[str, int | None]]:
        """Return each rank's parameter digests; see `trinity_core.exchange.sync.weight_check`."""

    @abstractmethod
    async def _score(self, tokens: list[int]) -> list[float]:
        """See `score`."""


def present_options() -> dict[str, Any]:
    """Return the options for a replacement of this process's actor: its name, GPUs, current environment, and its bundle
    if its placement group has one bundle a node. Empty outside of an actor."""
    import ray

    if not ray.is_initialized():
        return {}
    from ray.util.placement_group import get_current_placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    context, group = ray.get_runtime_context(), get_current_placement_group()
    environment = dict(context.runtime_env)
    variables = environment.get("env_vars", {})  # the log's variables have changed in an engine of an earlier stage
    environment["env_vars"] = {name: os.environ.get(name, value) for name, value in variables.items()}
    options = {
        "num_gpus": float(context.get_assigned_resources().get("GPU", 0.0)),
        "runtime_env": environment,
    }
    if name := context.get_actor_name():
        options["name"] = name
    if group is not None:
        nodes = placement_group_table(group)["bundles_to_node_id"]
        bundle = next(number for number, node in nodes.items() if node == context.get_node_id())
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    return options


def _published(source: WeightSource, version: int) -> tuple[WeightVersions, int] | None:
    """Return the versions and the number under which `source` was published; for a converted checkpoint, those of its
    step.

    None for another folder, or if its version is gone.
    """
    from trinity_core.exchange.sync.versions import open_versions

    if source.method != "folder":
        return open_versions(source.method, Path(source.path)), version
    folder = Path(source.path).absolute()
    step, job_dir = step_of(folder.parent.parent), folder.parent.parent.parent
    layout = JobLayout(job_dir)
    if step is None or folder not in (layout.huggingface(step), layout.adapter(step)):
        return None
    versions = open_versions("checkpoint", job_dir)
    return (versions, step) if versions.has(step) else None
