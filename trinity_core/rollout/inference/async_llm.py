"""vLLM in separate processes (`AsyncLLM`): the engine on one or several GPUs (tensor parallel)."""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trinity_core.base.threads import DaemonThreads
from trinity_core.exchange.sync.versions import VersionGone, open_versions
from trinity_core.rollout.inference import vllm_types
from trinity_core.rollout.inference.engine import Engine
from trinity_core.rollout.inference.requests import Request, Sample, SampleBatch, WeightSource
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.rollout.inference.weight_receiver import check_there

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


KEPT_LINES = 1000
"""Number of log lines of vLLM's processes that are kept."""
REASON_SECONDS = 5.0
"""Time for failed processes to end and flush their output."""
REASON = re.compile(r"(?:^|[\s\])])((?:\w+\.)*\w*(?:Error|Exception): .+)")


class AsyncLLMEngine(Engine):
    """Steps vLLM in its own processes; receives weights that the trainer pushes (`trinity_core.exchange.sync.nccl`)."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._engine: AsyncLLM | None = None
        self._changing = asyncio.Lock()
        """Held while weights change."""

    async def _start(self) -> None:
        self._engine = await asyncio.to_thread(self._build)  # takes minutes, in which other calls are answered
        await self._vllm.collective_rpc("end_with", args=(os.getpid(),))
        await self._vllm.collective_rpc("take_trainers_tensors")
        await self._vllm.update_weight_version(str(self.version))

    def _build(self) -> AsyncLLM:
        vllm_types.check_model(self.settings.model_path)
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**vllm_types.engine_arguments(self.settings))
        # Prompts arrive in whole batches, as for vLLM's class LLM, which takes as many tokens a step as the GPU's
        # memory allows (8,192 or 16,384). AsyncLLM's default for other contexts is 2,048.
        with reasons_of_children():
            return AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)

    @property
    def _vllm(self) -> AsyncLLM:
        assert self._engine is not None, "the engine has not started"
        return self._engine

    async def generate(self, requests: Sequence[Request]) -> SampleBatch:
        return SampleBatch.pack(await asyncio.gather(*(self._sample(request) for request in requests)))

    async def _sample(self, request: Request) -> Sample:
        prompt = vllm_types.tokens_prompt(request.prompt.tolist())
        with vllm_types.refusals():
            async for output in self._vllm.generate(
                prompt, vllm_types.sampling_params(request), request.key, lora_request=self._adapter
            ):
                if output.finished:
                    sample = vllm_types.sample(output.outputs[0], self.version)
                    self._finished_tokens += len(sample.tokens)
                    return sample
        return vllm_types.ABORTED

    async def abort(self, keys: Sequence[str]) -> None:
        await self._vllm.abort(list(keys))

    async def _sleep(self) -> None:
        async with self._changing:
            await self._vllm.sleep(level=self.settings.sleep_level, mode="abort")

    async def _wake(self) -> None:
        async with self._changing:
            await self._vllm.wake_up()

    async def _load(self, source: WeightSource, version: int) -> None:
        """Generation pauses during a load. After a failed load it stays paused: what the workers hold is unknown."""
        async with self._changing:
            if source.pushed:
                self._check_received(version)
                return
            await asyncio.to_thread(check_there, source.method, source.path, version)
            await self._vllm.pause_generation(mode="keep", clear_cache=False)
            try:
                await self._vllm.collective_rpc("receive_weights", args=(source.method, source.path, version))
            except Exception as error:  # vLLM's processes send their errors as text
                if source.method != "folder" and not open_versions(source.method, Path(source.path)).has(version):
                    raise VersionGone(f"version {version} of the weights was removed while it was loaded") from error
                raise
            await self._resume_with(version)

    async def _resume_with(self, version: int) -> None:
        await self._vllm.reset_prefix_cache(reset_running_requests=True)
        await self._vllm.update_weight_version(str(version))
        self._put_in_use(version)
        await self._vllm.resume_generation()

    def _check_received(self, version: int) -> None:
        """Check that the pushed weights, which are already in use, have this version."""
        if self.version != version:
            raise VersionGone(f"version {version} of the weights is not what the engine holds: that is {self.version}")

    async def _parameter_digests(self) -> list[dict[str, int | None]]:
        digests: list[dict[str, int | None]] = await self._vllm.collective_rpc("parameter_digests")
        return digests

    async def reset_prefix_cache(self) -> None:
        await self._vllm.reset_prefix_cache()

    async def _score(self, tokens: list[int]) -> list[float]:
        prompt = vllm_types.tokens_prompt(tokens)
        scores: Any = None
        key = f"score-{uuid4().hex}"
        with vllm_types.refusals():
            async for output in self._vllm.generate(prompt, vllm_types.score_params(), key, lora_request=self._adapter):
                scores = output.prompt_logprobs if output.prompt_logprobs is not None else scores
        return vllm_types.prompt_logprobs(scores)

    # ---- weights that the trainer pushes; see `trinity_core.exchange.sync.nccl` ----

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._vllm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_weight_update(self) -> None:
        """Pause generation and prepare to receive."""
        await self._changing.acquire()
        await self._vllm.pause_generation(mode="keep", clear_cache=False)
        await self._vllm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the tensors that the trainer is sending."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._vllm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Use the received weights as this version. The weight check follows when the explorer calls `load`."""
        await self._vllm.finish_weight_update()
        await self._resume_with(int(weight_version or 0))
        self._changing.release()

    async def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


@contextmanager
def reasons_of_children() -> Iterator[None]:
    """If vLLM's processes do not start, raise their reason: vLLM raises "See root cause above", which is in a log.

    Standard error of child processes is relayed through this process for their lifetime, to its original destination.
    """
    last_lines: deque[bytes] = deque(maxlen=KEPT_LINES)
    reading, writing = os.pipe()
    own_stderr, log_file = os.dup(2), os.dup(2)

    def pass_on() -> None:
        with os.fdopen(reading, "rb") as lines, os.fdopen(log_file, "wb", buffering=0) as output:
            for line in lines:
                last_lines.append(line)
                output.write(line)

    passing = DaemonThreads("stderr").submit(pass_on)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        try:
            yield
        finally:
            os.dup2(own_stderr, 2)
            os.close(own_stderr)
    except RuntimeError as error:
        wait([passing], REASON_SECONDS)
        reason = reason_in([line.decode(errors="replace") for line in last_lines])
        raise RuntimeError(f"the engine does not start: {reason or error}") from error


def reason_in(lines: Sequence[str]) -> str:
    """Return the last error in a log, other than one that refers to another; "" if there is none."""
    errors = [match[1].strip() for line in lines if (match := REASON.search(line)) and "root cause" not in line]
    return errors[-1] if errors else ""
