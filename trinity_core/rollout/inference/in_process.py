"""vLLM inside the engine's own process, stepped by one thread: the engine on the CPU.

It starts ten times sooner than `AsyncLLM` with its processes. Only the stepping thread touches vLLM (OpenMP keeps a
team of threads for each thread that enters it); callers queue jobs and await their futures. The queued jobs run between
two steps, so weights change between tokens, never within one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.lazy import lean_imports
from trinity_core.base.threads import DaemonThreads
from trinity_core.rollout.inference import vllm_types
from trinity_core.rollout.inference.engine import Engine
from trinity_core.rollout.inference.requests import EngineLost, Request, Sample, SampleBatch, WeightSource
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.rollout.inference.weight_receiver import check_there, digests_before_packing

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

STOP_SECONDS = 60.0
"""Time for the step in progress to end and for vLLM to release its resources."""

Job = Callable[[], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """One `generate`: its samples so far and the future of all of them."""

    future: Future[Sequence[Sample]]
    samples: list[Sample | None]
    left: int

    def place(self, slot: int, sample: Sample) -> None:
        self.samples[slot] = sample
        self.left -= 1
        if not self.left and not self.future.done():
            self.future.set_result([sample for sample in self.samples if sample is not None])


@cache
def _freeze_imports() -> None:
    """Exclude imported objects from the seven garbage collections of vLLM's startup (2 s of a core).

    Once a process: objects of an earlier engine must be collected before the next one starts, because that ends the
    process's groups.
    """
    gc.freeze()


def _has(module: object, name: str) -> bool:
    try:
        return hasattr(module, name)
    except Exception:  # noqa: BLE001 - of any other library
        return False


def pass_over_proxies() -> None:
    """Make vLLM's search of imported modules for copies of its kernels skip names that raise on access outside their
    context, such as Flask's `request`: otherwise the engine would not start with a plugin that imports Flask."""
    from vllm.triton_utils import dispatcher

    vars(dispatcher)["hasattr"] = _has


def inspect_models_here() -> None:
    """Let vLLM inspect a model's class in this process, which loads the class anyway.

    So as not to initialise CUDA, which this engine does not use, it starts another process for that, which imports all
    of vLLM (ten seconds of a core), at a machine's first engine of each architecture.
    """
    from vllm.model_executor.models import registry

    vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()


class InProcessEngine(Engine):
    """Coroutines queue jobs for a stepping thread, which alone uses vLLM."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: dict[str, tuple[_Call, int]] = {}
        """Call of each request and its index in the call, by request key. Only the stepping thread uses it."""
        self._pending: set[Future[Any]] = set()
        """Futures not done yet; all fail when the thread ends."""
        self._lock = threading.Lock()
        self._stepping: Future[None] | None = None
        """Done when the thread has ended."""
        self._engine: LLMEngine | None = None
        self._fault: BaseException | None = None
        self._stopped = False

    async def _start(self) -> None:
        started: Future[None] = Future()
        self._stepping = DaemonThreads("vllm").submit(self._run, started)
        self._stepping.add_done_callback(lambda stepping: self._ended(stepping, started))
        await asyncio.wrap_future(started)

    async def generate(self, requests: Sequence[Request]) -> SampleBatch:
        """See `Engine.generate`. All requests enter vLLM between the same two steps."""
        assert not self._asleep, "the engine sleeps"
        if not requests:
            return SampleBatch.pack([])
        call = _Call(Future(), [None] * len(requests), len(requests))
        return SampleBatch.pack(await self._submit(call.future, lambda: self._add(call, requests)))

    async def abort(self, keys: Sequence[str]) -> None:
        """See `Engine.abort`; returns before the stepping thread has acted. The samples are empty."""
        self._jobs.put(lambda: self._abort(keys))

    async def _sleep(self) -> None:
        """vLLM has no sleep on the CPU: memory stays in use, and any request in the meantime is a caller's error."""
        await self._call(lambda: self._abort(list(self._waiting)))

    async def _wake(self) -> None:
        """Does nothing: `_sleep` released nothing."""

    async def _load(self, source: WeightSource, version: int) -> None:
        assert not self._asleep, "the engine sleeps"
        await asyncio.to_thread(check_there, source.method, source.path, version)  # generation continues
        await self._call(lambda: self._receive(source, version))

    async def _parameter_digests(self) -> list[dict[str, int | None]]:
        return await self._call(lambda: self._vllm.collective_rpc("parameter_digests"))

    async def reset_prefix_cache(self) -> None:
        await self._call(lambda: self._vllm.reset_prefix_cache())

    async def _score(self, tokens: list[int]) -> list[float]:
        return await self._call(lambda: self._step_until_scored(tokens))

    async def stop(self) -> None:
        """See `Engine.stop`; returns once the thread has finished its step, released the engine and ended.

        A thread still inside vLLM at process exit would end the process with a signal.
        """
        if self._stepping is None:
            return
        self._jobs.put(None)
        if (await asyncio.to_thread(wait, [self._stepping], STOP_SECONDS)).not_done:
            log.warning(
                "the engine's thread has not ended within %g s: a step of the engine takes longer, or hangs",
                STOP_SECONDS,
            )

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the stepping thread between two steps."""
        future: Future[T] = Future()
        return await self._submit(future, lambda: _answer(future, work))

    async def _submit(self, future: Future[T], job: Job) -> T:
        with self._lock:
            if self._stopped:
                raise _reason(self._fault)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._jobs.put(job)
        return await asyncio.wrap_future(future)

    def _ended(self, stepping: Future[None], started: Future[None]) -> None:
        with self._lock:
            self._stopped, self._fault = True, stepping.exception()
        reason = _reason(self._fault)
        for future in (started, *self._pending.copy()):
            if not future.done():
                future.set_exception(reason)

    # ---- on the stepping thread ----

    def _run(self, started: Future[None]) -> None:
        self._engine = self._build()
        started.set_result(None)
        self._work()
        engine, self._engine = self._vllm, None
        engine.engine_core.shutdown()

    def _work(self) -> None:
        while True:
            if self._waiting:
                self._step()
                jobs = [self._jobs.get() for _ in range(self._jobs.qsize())]
            else:
                jobs = [self._jobs.get()]
            for job in jobs:
                if job is None:
                    return
                job()

    def _build(self) -> LLMEngine:
        vllm_types.check_model(self.settings.model_path)
        vllm_types.check_compiler(self.settings)
        with lean_imports():
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            if self.settings.lora_rank:
                from trinity_core.rollout.inference.one_adapter import use_one_adapter

                use_one_adapter()
            pass_over_proxies()
            inspect_models_here()
            _freeze_imports()
            began = time.perf_counter()
            # the base of an adapter is never reloaded
            with digests_before_packing(self.settings.compute_dtype) if self.settings.lora_rank else nullcontext():
                engine = LLMEngine.from_engine_args(EngineArgs(**vllm_types.engine_arguments(self.settings)))
        engine.set_weight_version(str(self.version))
        engine.collective_rpc("take_trainers_tensors")
        engine.collective_rpc("use_seeded_sampler")
        log.info("engine built in %.1f s", time.perf_counter() - began)
        return engine

    @property
    def _vllm(self) -> LLMEngine:
        assert self._stepping is not None, "the engine has not started"
        if self._engine is None:
            raise _reason(self._fault)
        return self._engine

    def _add(self, call: _Call, requests: Sequence[Request]) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        for slot, request in enumerate(requests):
            prompt = vllm_types.tokens_prompt(request.prompt.tolist())
            try:
                with vllm_types.refusals():
                    self._vllm.add_request(
                        request.key, prompt, vllm_types.sampling_params(request), lora_request=self._adapter
                    )
            except TrinityError as error:
                self._abort([earlier.key for earlier in requests[:slot]])
                call.future.set_exception(error)
                return
            self._waiting[request.key] = (call, slot)

    def _abort(self, keys: Sequence[str]) -> None:
        waiting = [key for key in keys if key in self._waiting]
        self._vllm.abort_request(waiting)
        for key in waiting:
            call, slot = self._waiting.pop(key)
            call.place(slot, vllm_types.ABORTED)

    def _step(self) -> None:
        for output in self._vllm.step():
            self._place(output)

    def _place(self, output: Any) -> None:
        if output.finished and (waiting := self._waiting.pop(output.request_id, None)):
            call, slot = waiting
            sample = vllm_types.sample(output.outputs[0], self.version)
            self._finished_tokens += len(sample.tokens)
            call.place(slot, sample)

    def _receive(self, source: WeightSource, version: int) -> None:
        self._vllm.collective_rpc("receive_weights", args=(source.method, source.path, version))
        self._vllm.reset_prefix_cache(reset_running_requests=True)
        self._vllm.set_weight_version(str(version))
        self._put_in_use(version)

    def _step_until_scored(self, tokens: list[int]) -> list[float]:
        """Step the engine until the sequence is scored; other requests in flight continue."""
        prompt = vllm_types.tokens_prompt(tokens)
        key = f"score-{time.monotonic_ns()}"
        with vllm_types.refusals():
            self._vllm.add_request(key, prompt, vllm_types.score_params(), lora_request=self._adapter)
        while True:
            for output in self._vllm.step():
                if output.request_id == key:
                    return vllm_types.prompt_logprobs(output.prompt_logprobs)  # type: ignore[union-attr]
                self._place(output)


def _reason(fault: BaseException | None) -> BaseException:
    """Return the error of calls to an engine that ended with `fault` (None: it was stopped)."""
    if fault is None:
        return EngineLost("the engine was stopped")
    if isinstance(fault, TrinityError | TransientFault):
        return fault
    lost = EngineLost(f"the engine failed with {type(fault).__name__}: {fault}")
    lost.__cause__ = fault
    return lost


def _answer(future: Future[T], work: Callable[[], T]) -> None:
    """Run one caller's work, unless it was cancelled. An error meant for the user goes to the caller; any other ends
    the engine."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except (TrinityError, TransientFault) as error:
        future.set_exception(error)
    else:
        future.set_result(result)
