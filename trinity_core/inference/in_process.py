"""vLLM inside the actor's own process, stepped by one thread: the engine where there is no GPU.

It starts ten times sooner than `AsyncLLM` with its processes. Everything that touches vLLM happens on the one thread
(OpenMP keeps a team of threads for each thread that enters it); others hand it jobs and wait for their futures. Between
two steps all jobs that have come are done, so weights change between tokens, never within one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.imports import without_sklearn
from trinity_core.inference import vllm_types
from trinity_core.inference.requests import EngineLost, Request, Sample, WeightSource
from trinity_core.inference.settings import EngineSettings
from trinity_core.threads import DaemonThreads

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

Job = Callable[[], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """One `generate`: its samples as they come, and who waits for all of them."""

    future: Future[list[Sample]]
    samples: list[Sample | None]
    left: int

    def place(self, slot: int, sample: Sample) -> None:
        self.samples[slot] = sample
        self.left -= 1
        if not self.left and not self.future.done():
            self.future.set_result([sample for sample in self.samples if sample is not None])


@dataclass
class InProcessBackend:
    """The stepping thread and what it holds. All methods but `start` may be called from any thread."""

    settings: EngineSettings
    version: int = 0
    _jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    _waiting: dict[str, tuple[_Call, int]] = field(default_factory=dict)
    """By request id: its call and its place in it. Touched by the stepping thread only."""
    _pending: set[Future[Any]] = field(default_factory=set)
    """Futures not done yet, so that all fail when the thread does."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _engine: LLMEngine | None = None
    _fault: BaseException | None = None
    _stopped: bool = False

    def start(self) -> Future[None]:
        """Build the engine on its thread; done when it can generate."""
        started: Future[None] = Future()
        loop = DaemonThreads("vllm").submit(self._run, started)
        loop.add_done_callback(lambda loop: self._ended(loop, started))
        return started

    def generate(self, requests: Sequence[Request]) -> Future[list[Sample]]:
        """Sample all requests; the result is in their order."""
        call = _Call(Future(), [None] * len(requests), len(requests))
        if not requests:
            call.future.set_result([])
            return call.future
        self._submit(call.future, lambda: self._add(call, requests))
        return call.future

    def abort(self, keys: Sequence[str]) -> None:
        """Give requests up; their samples are empty, with the reason `abort`."""
        self._jobs.put(lambda: self._abort(keys))

    def load(self, source: WeightSource, version: int) -> Future[float]:
        """Load weights between two steps; the result is the seconds that took. Requests in flight go on with the new
        weights, their KV cache computed anew, and each token keeps the version that chose it."""
        future: Future[float] = Future()
        self._submit(future, lambda: _answer(future, lambda: self._load(source, version)))
        return future

    def score(self, tokens: Sequence[int]) -> Future[list[float]]:
        """Log-probs (temperature 1) of tokens 1 … of a sequence, each after those before it."""
        future: Future[list[float]] = Future()
        self._submit(future, lambda: _answer(future, lambda: self._score(list(tokens))))
        return future

    def stop(self) -> None:
        """End the thread after the step in progress; what is in flight fails."""
        self._jobs.put(None)

    def _submit(self, future: Future[Any], job: Job) -> None:
        with self._lock:
            if self._stopped:
                raise _told(self._fault)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._jobs.put(job)

    def _ended(self, loop: Future[None], started: Future[None]) -> None:
        with self._lock:
            self._stopped, self._fault = True, loop.exception()
        fault = _told(self._fault)
        for future in (started, *self._pending.copy()):
            if not future.done():
                future.set_exception(fault)

    # ---- on the stepping thread ----

    def _run(self, started: Future[None]) -> None:
        self._engine = self._build()
        started.set_result(None)
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
        without_sklearn()
        vllm_types.check_model(self.settings.model_path)
        vllm_types.check_compiler(self.settings)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        began = time.perf_counter()
        engine = LLMEngine.from_engine_args(EngineArgs(**vllm_types.engine_arguments(self.settings)))
        engine.set_weight_version(str(self.version))
        engine.collective_rpc("use_seeded_sampler")
        log.info("engine built in %.1f s", time.perf_counter() - began)
        return engine

    @property
    def _vllm(self) -> LLMEngine:
        assert self._engine is not None, "the engine has not started"
        return self._engine

    def _add(self, call: _Call, requests: Sequence[Request]) -> None:
        from vllm.exceptions import VLLMValidationError

        for slot, request in enumerate(requests):
            prompt: Any = {"prompt_token_ids": request.prompt.tolist()}
            try:
                self._vllm.add_request(request.key, prompt, vllm_types.sampling_params(request))
            except (ValueError, VLLMValidationError) as error:
                self._abort([earlier.key for earlier in requests[:slot]])
                call.future.set_exception(TrinityError(f"the engine refuses a request: {error}"))
                return
            self._waiting[request.key] = (call, slot)

    def _abort(self, keys: Sequence[str]) -> None:
        """Give up those of `keys` that are still in flight."""
        known = [key for key in keys if key in self._waiting]
        self._vllm.abort_request(known)
        for key in known:
            call, slot = self._waiting.pop(key)
            call.place(slot, vllm_types.ABORTED)

    def _step(self) -> None:
        for output in self._vllm.step():
            self._place(output)

    def _place(self, output: Any) -> None:
        if output.finished and (found := self._waiting.pop(output.request_id, None)):
            call, slot = found
            call.place(slot, vllm_types.sample(output.outputs[0], self.version))

    def _load(self, source: WeightSource, version: int) -> float:
        began = time.perf_counter()
        self._vllm.collective_rpc("receive_weights", args=(source.method, source.path, version))
        self._vllm.reset_prefix_cache(reset_running_requests=True)
        self._vllm.set_weight_version(str(version))
        self.version = version
        return time.perf_counter() - began

    def _score(self, tokens: list[int]) -> list[float]:
        """Steps the engine until the score is there; others in flight go on meanwhile."""
        prompt: Any = {"prompt_token_ids": tokens}
        key = f"probe-{time.monotonic_ns()}"
        self._vllm.add_request(key, prompt, vllm_types.score_params())
        while True:
            for output in self._vllm.step():
                if output.request_id == key:
                    return vllm_types.prompt_logprobs(output.prompt_logprobs)  # type: ignore[union-attr]
                self._place(output)


def _told(fault: BaseException | None) -> BaseException:
    """What a caller is told of an engine that ended by `fault`."""
    if fault is None:
        return EngineLost("the engine was stopped")
    if isinstance(fault, TrinityError | TransientFault):
        return fault
    lost = EngineLost(f"the engine failed with {type(fault).__name__}: {fault}")
    lost.__cause__ = fault
    return lost


def _answer(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work of one caller. An error with a message for the user is the caller's; any other ends the engine."""
    try:
        result = work()
    except (TrinityError, TransientFault) as error:
        future.set_exception(error)
    else:
        future.set_result(result)
