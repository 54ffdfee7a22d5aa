"""Trinity-RFT's workflow and reward classes, and how they are played here."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from trinity_core.base.errors import TrinityError
from trinity_core.base.threads import InterruptibleThreads, call_in
from trinity_core.compat.experience import Experience, as_recorded
from trinity_core.compat.model import ModelWrapper
from trinity_core.data.experience import STEP_REWARD
from trinity_core.data.experience import Experience as Recorded
from trinity_core.data.task import Task as OurTask
from trinity_core.workflows.base import Workflow as OurWorkflow
from trinity_core.workflows.base import all_of, runs_of
from trinity_core.workflows.builtin import THINK_PROMPT, THINK_SCORE
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS, RewardFn, RewardItem
from trinity_core.workflows.rewards.functions import INPUTS, REWARD_FNS, accepted
from trinity_core.workflows.rewards.pool import RewardRunner
from trinity_core.workflows.rollout_model import opened_thought


class RewardClass:
    """Trinity-RFT's `RewardFn`: `__init__` takes `reward_fn_args`, a call returns named parts of the reward."""

    def __init__(self, **args: Any) -> None: ...

    def __call__(self, **inputs: Any) -> dict[str, float]:
        """Return the parts, from `response`, `truth` and further inputs of a workflow."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__()")


SCORING: ContextVar[tuple[RewardRunner, asyncio.AbstractEventLoop, Mapping[str, Any]] | None]
SCORING = ContextVar("scoring", default=None)
"""The reward runner of this thread's workflow, its loop, and the row."""


class PooledReward(RewardClass):
    """One of this project's reward functions, which runs in the pool's processes.

    If the verifier fails, the only part is NaN, which `as_recorded` treats as no reward.
    """

    function: ClassVar[str] = ""
    """Its name in `REWARD_FNS`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments that Trinity-RFT's class of this name has, and the function has not."""

    def __init__(self, **args: Any) -> None:
        scoring = SCORING.get()
        if scoring is None:
            raise TrinityError(f"{type(self).__name__} needs the run's reward workers: make it where a workflow runs")
        self._scoring, self._args = scoring, {**self.defaults, **args}

    def __call__(self, response: str = "", truth: Any = None, prompt: Any = None, **inputs: Any) -> dict[str, float]:
        """Return the parts. `inputs` that the function does not take are ignored."""
        (rewards, loop, row), function = self._scoring, REWARD_FNS.resolve(self.function)
        parameters = inspect.signature(function).parameters.keys() - set(INPUTS)
        args = self._args | {name: value for name, value in inputs.items() if name in parameters}
        work = rewards.score(self.function, [RewardItem(response, truth, str(prompt or ""), row, args)])
        [reward] = call_in(loop, work)
        return {VERIFIER_ERRORS: math.nan} if reward.parts is None else dict(reward.parts)


def reward_class(name: str) -> type[RewardClass]:
    """Return the reward class of that name: the plugin's own, or one that calls the reward function.

    As in Trinity-RFT, `math_reward` also scores the form `<think>…</think> <answer>…</answer>`.
    """
    upstream: type[RewardClass] | None = getattr(REWARD_FNS.resolve(name), "upstream", None)
    defaults = {"think_score": THINK_SCORE} if name == "math_reward" else {}
    return upstream or type(name, (PooledReward,), {"function": name, "defaults": defaults})


def as_function(kind: type[RewardClass]) -> RewardFn:
    """Return a reward function that makes an object for each answer. Its arguments are those of `__init__`."""

    def score(*, prompt: str, response: str, truth: Any, task: Mapping[str, Any], **args: Any) -> dict[str, float]:
        reward = kind(**args)
        return reward(**accepted(reward, {"response": response, "truth": truth, "prompt": prompt}))

    score.__module__, score.__qualname__ = kind.__module__, kind.__qualname__
    *inputs, _ = inspect.signature(score).parameters.values()
    own = [
        parameter if parameter.kind is parameter.VAR_KEYWORD else parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in INPUTS
    ]
    vars(score).update(upstream=kind, __signature__=inspect.Signature([*inputs, *own]))
    return score


MATH_REWARD = reward_class("math_reward")


@dataclass
class GenerationConfig:
    """Sampling arguments of a task; None: as in the `model` section."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    repetition_penalty: float | None = None
    structured_output: dict[str, Any] | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclass
class Task(dict[str, Any]):
    """A row with its format, sampling and scoring. A workflow object may change its own."""

    workflow: Any = None
    repeat_times: int | None = None
    format_args: Any = None
    """The task set's `format`."""
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: type[RewardClass] | None = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)

    @property
    def task_desc(self) -> Any:
        """The prompt's column; None if the row has none."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """The column of the reference answer; None if the row has none."""
        return self.raw_task.get(self.format_args.response_key)


class Workflow:
    """Base of Trinity-RFT's workflows: `run`, or `run_async` with `is_async`, returns a list of Experience.

    Called with the arguments of this project's workflows, a class returns a `PlayedWorkflow`.
    """

    can_reset: ClassVar[bool] = False
    can_repeat: ClassVar[bool] = False
    """True if one object makes all runs of a task, False if each run has its own object."""
    is_async: ClassVar[bool] = False
    arguments: ClassVar[Any] = None
    asks_models: ClassVar[bool] = False
    needs_prompt: ClassVar[bool] = False
    repeat_times: int = 1
    run_id_base: int = 0
    # older names, which some classes override
    resettable = property(lambda self: self.can_reset)
    repeatable = property(lambda self: self.can_repeat)
    asynchronous = property(lambda self: self.is_async)

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return an object of the class, or a `PlayedWorkflow` that runs the class."""
        if not (args and isinstance(args[0], OurTask)):
            return super().__new__(cls)
        played = PlayedWorkflow(*args, **options)
        played.kind = cls
        return played

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Any = None) -> None:
        self.task, self.model = task, model
        self.auxiliary_model_wrappers: list[ModelWrapper] | None = auxiliary_models
        clients = ModelWrapper.get_openai_async_client if self.asynchronous else ModelWrapper.get_openai_client
        self.auxiliary_models = [clients(client) for client in auxiliary_models] if auxiliary_models else None
        self.logger = logging.getLogger(type(self).__module__)

    @property
    def rollout_args(self) -> Any:
        """The task's sampling, as arguments of `chat`; a class may set its own, such as `task.rollout_args`."""
        return self.__dict__.get("rollout_args") or asdict(self.task.rollout_args)

    @rollout_args.setter
    def rollout_args(self, args: Any) -> None:
        self.__dict__["rollout_args"] = args

    def reset(self, task: Task) -> None:
        """Take another task; here each task has new objects."""
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times, self.run_id_base = repeat_times, run_id_base
        self.task.rollout_args.n = repeat_times


class MultiTurnWorkflow(Workflow):
    """Makes one Experience of a whole conversation."""

    def process_messages_to_experience(
        self, messages: Any, reward: float | None, info: Mapping[str, Any] = {}, truncate_status: str | None = None
    ) -> Experience:
        """As in Trinity-RFT, a conversation that outgrew the context has reward 0, and numbers in `info` are
        metrics."""
        experience: Experience = self.model.convert_messages_to_experience(messages)
        experience.reward = 0.0 if experience.truncate_status == "response_truncated" else reward
        experience.truncate_status, experience.info = experience.truncate_status or truncate_status, dict(info)
        experience.metrics = {name: float(value) for name, value in info.items() if isinstance(value, int | float)}
        return experience

    async def process_messages_to_experience_async(self, *args: Any, **options: Any) -> Experience:
        return self.process_messages_to_experience(*args, **options)


class BaseSimpleWorkflow(Workflow):
    """One question, scored by the task's reward class."""

    needs_prompt = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Any = None) -> None:
        self.reset(task)
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def reset(self, task: Task) -> None:
        """Take a task. Raises TrinityError if it has no reward class."""
        self.task, self.format_args, self.raw_task = task, task.format_args, task.raw_task
        self.system_prompt, self.reply_prefix = task.format_args.system_prompt, task.format_args.reply_prefix
        self.task_desc, self.truth = task.task_desc, task.truth
        self.workflow_args, self.reward_fn_args = task.workflow_args, task.reward_fn_args
        if task.reward_fn is None:
            raise TrinityError(f"{type(self).__name__} needs a reward function; set default_reward_fn_type")
        self.reward_fn = task.reward_fn(**self.reward_fn_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """Return system prompt, question, and the first words of the answer."""
        parts = (("system", self.system_prompt), ("user", self.task_desc), ("assistant", self.reply_prefix))
        return [{"role": role, "content": text} for role, text in parts if text or role == "user"]

    def scored(self, responses: list[Experience]) -> list[Experience]:
        """Set each answer's reward and the reward's parts."""
        for i, response in enumerate(responses):
            answer = opened_thought(response.prompt_text or "") + (response.response_text or "")
            parts = self.reward_fn(response=answer, truth=self.truth)
            response.reward, response.eid.run = sum(parts.values()), i + self.run_id_base
            response.metrics |= parts
        return responses


class SimpleWorkflow(BaseSimpleWorkflow):
    """One call for all runs."""

    can_reset = can_repeat = True

    def run(self) -> list[Experience]:
        return self.scored(self.model.chat(self.format_messages(), **self.rollout_args))


class AsyncSimpleWorkflow(BaseSimpleWorkflow):
    """One call for each run."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        return self.scored(await self.model.chat_async(self.format_messages(), **self.rollout_args))


class MathWorkflow(SimpleWorkflow):
    """A mathematical problem, with DeepSeek-R1's prompt if the task has none."""

    def reset(self, task: Task) -> None:
        task.reward_fn = task.reward_fn or MATH_REWARD
        if getattr(task.reward_fn, "function", None) == "math_reward" and task.format_args.system_prompt is None:
            task.format_args.system_prompt = THINK_PROMPT
        super().reset(task)


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    """`MathWorkflow`, run by `run_async`."""


class StepWiseRewardWorkflow(Workflow):
    """Implement `step` and `reward`, or `step_async` and `reward_async`, and `max_step_num`.

    `step(step_num)` returns whether another step follows; `reward(exps, step_num)` is the step's reward.
    """

    max_step_num: Any = None
    each_step: ClassVar[bool] = True
    """True if each step has its own reward."""

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Any = None, use_openai_client: bool = True
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client() if use_openai_client else None

    async def step_async(self, **of: Any) -> bool:
        return bool(self.step(**of))  # type: ignore[attr-defined]  # a subclass writes it

    async def reward_async(self, exps: list[Experience], **of: Any) -> float:
        return float(self.reward(exps, **of))  # type: ignore[attr-defined]  # a subclass writes it

    def run(self) -> list[Experience]:
        """`run_async` without an event loop: `step` and `reward` are plain functions, which may start one."""
        try:
            self.run_async().send(None)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        raise TypeError(f"{type(self).__name__} awaits in a step: derive it from the Async class")

    async def run_async(self) -> list[Experience]:
        """Return the answers of all steps, numbered by step."""
        experiences: list[Experience] = []
        for step in range(self.max_step_num):
            goes_on = await self.step_async(step_num=step)
            step_experiences = self.model.extract_experience_from_history()
            reward = await self.reward_async(step_experiences, step_num=step) if self.each_step else None
            for experience in step_experiences:
                experience.eid.step, experience.reward = step, reward
            experiences += step_experiences
            if not goes_on:
                break
        if not self.each_step:
            reward = await self.reward_async(experiences)
            for experience in experiences:
                experience.reward = reward
                experience.info[STEP_REWARD] = (
                    0.0 if experience is not experiences[-1] or math.isnan(reward) else reward
                )
                experience.metrics["actual_env_steps"] = float(step + 1)
        return experiences


class RewardPropagationWorkflow(StepWiseRewardWorkflow):
    """All steps share one reward: `reward(exps)`, after the last step."""

    each_step = False


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """`StepWiseRewardWorkflow`, run by `run_async`."""

    is_async = True


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """`RewardPropagationWorkflow`, run by `run_async`."""

    is_async = True


class PlayedWorkflow(OurWorkflow):
    """Runs a Trinity-RFT class: its objects run in their own threads, so that a blocking call delays no other
    rollout."""

    kind: type[Workflow] = Workflow

    async def run(self) -> list[Recorded]:
        loop, threads = asyncio.get_running_loop(), InterruptibleThreads("workflow")

        async def played(run: int, flow: Any) -> list[Recorded]:
            return await loop.run_in_executor(threads, self._play, loop, run, flow)

        first = await loop.run_in_executor(threads, self._object, loop, 0)
        others = 0 if first.repeatable else self.task.repeat_times - 1
        runs = await all_of([played(0, first), *(played(run, None) for run in range(1, others + 1))])
        return [experience for experiences in runs for experience in experiences]

    def _object(self, loop: asyncio.AbstractEventLoop, run: int) -> Any:
        SCORING.set((self.rewards, loop, self.task.raw))
        task, auxiliary = self._task(), [ModelWrapper(judge, loop, model_path="auxiliary") for judge in self.auxiliary]
        sampling, template = self.task.sampling, self.task.format.chat_template

        def of_run(call: int, answer: int) -> int:
            return self.task.rollout_seed(run, call, f"answer {answer}" if answer else "")

        def of_all(call: int, answer: int) -> int:  # the first call's are those of this project's own workflows
            return self.task.rollout_seed(answer, call)

        model = ModelWrapper(self.model, loop, sampling, of_run, template)
        flow = self.kind(task=task, model=model, auxiliary_models=auxiliary or None)
        model.seed = of_all if flow.repeatable else of_run
        return flow

    def _play(self, loop: asyncio.AbstractEventLoop, run: int, flow: Any) -> list[Recorded]:
        SCORING.set((self.rewards, loop, self.task.raw))
        flow = flow or self._object(loop, run)
        if flow.repeatable:
            flow.set_repeat_times(self.task.repeat_times, 0)
        experiences = asyncio.run(flow.run_async()) if flow.asynchronous else flow.run()
        results = [as_recorded(experience, flow.model.sampled) for experience in experiences]
        for experience in results:
            experience.run = experience.run if flow.repeatable else run
        for *earlier, last in runs_of(results):
            if last.logprobs is None and not last.is_expert:  # the workflow's own tokens, whose last turn is judged
                for experience in earlier:
                    experience.is_expert = False
        return results

    def _task(self) -> Task:
        task, form = self.task, self.task.format.model_dump()
        form["system_prompt"] = task.raw.get(task.format.system_prompt_key or "") or task.format.system_prompt
        return Task(
            workflow=self.kind,
            repeat_times=task.repeat_times,
            format_args=SimpleNamespace(**form, reply_prefix=None, image_key=None, video_key=None),
            rollout_args=GenerationConfig(**task.sampling),
            workflow_args=dict(task.workflow_args),
            reward_fn_args=dict(task.reward_fn_args),
            is_eval=task.is_eval,
            reward_fn=None if task.reward_fn is None else reward_class(task.reward_fn),
            raw_task=dict(task.raw),
            task_id=task.group,
            index={"index": task.index, "taskset_id": task.taskset},
        )
