"""Workflows turn a task into experiences.

Answers that could not be judged carry no reward and no loss: a broken verifier is never a wrong answer.
`run_workflow` passes every workflow's experiences through `exclude_unscored`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel

from trinity_core.base.errors import TransientFault, TrinityError, closest
from trinity_core.base.registry import Registry
from trinity_core.base.signatures import any_arguments
from trinity_core.data.experience import Experience, require_json
from trinity_core.data.formats import Message
from trinity_core.data.task import Task
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS, Reward, RewardItem
from trinity_core.workflows.rewards.pool import RewardRunner
from trinity_core.workflows.rollout_model import Completion, RolloutModel


def exclude_unscored(experiences: Sequence[Experience]) -> None:
    """Mask every experience that was not judged, in place, and count it in the metric `verifier_errors`.

    An experience is judged if it has a reward, token rewards or a teacher's log-probs or prompt, and its metrics report
    no verifier error. The last turn of a run judges the run: an earlier turn without a reward gets the last turn's, and
    all turns are excluded if the last one was not judged. Expert data is unchanged.
    """
    for turns in runs_of([experience for experience in experiences if not experience.is_expert]):
        final = turns[-1]
        for experience in turns:
            if not _is_judged(final) or _failed(experience):
                _exclude(experience)
            elif not _is_judged(experience):
                experience.reward = final.total_reward
                if experience.reward is None:
                    _exclude(experience)


def runs_of(experiences: Sequence[Experience]) -> list[list[Experience]]:
    """Return the turns of each run in order. Experiences that share both run and turn are separate runs."""
    by_run: dict[tuple[str, int], list[Experience]] = defaultdict(list)
    for experience in experiences:
        by_run[experience.group, experience.run].append(experience)
    runs: list[list[Experience]] = []
    for members in by_run.values():
        numbered = len({experience.turn for experience in members}) == len(members)
        runs += (
            [sorted(members, key=lambda experience: experience.turn)]
            if numbered
            else [[experience] for experience in members]
        )
    return runs


def _failed(experience: Experience) -> bool:
    return experience.metrics.get(VERIFIER_ERRORS, 0.0) > 0


def _is_judged(experience: Experience) -> bool:
    teaching = (experience.teacher_logprobs, experience.teacher_prompt)
    scores = (experience.reward, experience.token_rewards, *teaching)
    return not _failed(experience) and any(score is not None for score in scores)


def _exclude(experience: Experience) -> None:
    experience.reward = experience.token_rewards = None
    experience.action_mask = np.zeros_like(experience.action_mask)
    experience.metrics = {**experience.metrics, VERIFIER_ERRORS: 1.0}


class CountedRewards:
    """A `RewardRunner` that counts the errors it returns to a workflow, to detect a workflow that ignores them."""

    def __init__(self, rewards: RewardRunner) -> None:
        self._rewards = rewards
        self.errors = 0

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        return self._count_errors(await self._rewards.score(name, items))

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        return self._count_errors(self._rewards.score_sync(name, items))

    def warn_if_ignored(self, workflow: str, experiences: Sequence[Experience]) -> None:
        """Log a warning if verifiers failed and no metric of an experience shows it (`…verifier_errors`)."""
        counted = any(
            value > 0
            for experience in experiences
            for name, value in experience.metrics.items()
            if name.endswith(VERIFIER_ERRORS)
        )
        if self.errors and not counted:
            log.warning(
                "workflow '%s' got %d rewards with an error and returned none of its answers as unscored; pass the "
                "Reward itself (`answer.experience(reward=reward)`), so that a broken verifier is no wrong answer",
                workflow,
                self.errors,
            )

    def _count_errors(self, rewards: list[Reward]) -> list[Reward]:
        self.errors += sum(reward.error is not None for reward in rewards)
        return rewards


T = TypeVar("T")
log = logging.getLogger(__name__)


class Workflow:
    """One task's rollouts. Subclass it, write `run`, and register it: `@WORKFLOWS.register("name")`.

    `run` may be `async` or plain. A plain `run` is called in a thread and uses the `…_sync` methods of model and
    rewards.
    """

    arguments: ClassVar[type[BaseModel] | None] = None
    """A pydantic model to check the task set's `workflow_args`; None: no check."""
    needs_prompt: ClassVar[bool] = True
    """True if a row needs a prompt; False if the workflow makes its own for rows without one."""
    asks_models: ClassVar[bool] = False
    """True if it uses an auxiliary model, or the endpoint `base_url` of its arguments: a run without either is
    refused."""

    def __init__(
        self,
        task: Task,
        model: RolloutModel,
        auxiliary: Sequence[RolloutModel] = (),
        rewards: RewardRunner | None = None,
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary = auxiliary
        """Further models, such as judges."""
        self._rewards = rewards

    @property
    def rewards(self) -> RewardRunner:
        """Runs reward functions. Raises TrinityError in a run without a reward runner."""
        if self._rewards is None:
            raise TrinityError(f"workflow '{self.task.workflow}' needs a reward runner and was given none")
        return self._rewards

    def run(self) -> Any:
        """Return all `task.repeat_times` rollouts of the task, as a list of Experience (or a coroutine that returns
        it)."""
        raise NotImplementedError(f"{type(self).__name__} has no run()")


WORKFLOWS: Registry[type[Workflow]] = Registry(
    "workflow", functions=lambda flow: (getattr(flow, "arguments", None) or any_arguments,)
)


class NothingReturned(Exception):
    """A workflow, or a rollout of an agent, returned no experience; another attempt may."""


async def run_workflow(
    task: Task,
    model: RolloutModel,
    auxiliary: Sequence[RolloutModel] = (),
    rewards: RewardRunner | None = None,
    threads: Executor | None = None,
) -> list[Experience]:
    """Run the task's workflow, set group and task of its experiences, and exclude those that were not judged.

    Experiences with a group other than the task's form a group of that name below the task's. A plain `run` is called
    in `threads` (by default the loop's own). Raises TrinityError if the workflow does not exist, returns something
    other than experiences, rewards that are not finite, or an `info` that is not JSON; NothingReturned if it returns
    none. Exceptions of the workflow are not caught; the experiences that a RolloutsFailed carries are complete.
    """
    counted = None if rewards is None else CountedRewards(rewards)
    # The user's code may change these, and the task may be retried or its row drawn again.
    copies = {name: copy.deepcopy(getattr(task, name)) for name in ("raw", "workflow_args", "reward_fn_args")}
    workflow = WORKFLOWS.resolve(task.workflow)(replace(task, **copies), model, auxiliary, counted)
    try:
        if inspect.iscoroutinefunction(workflow.run):
            experiences = await workflow.run()
        else:
            experiences = await asyncio.get_running_loop().run_in_executor(threads, workflow.run)
    except RolloutsFailed as failure:
        _complete(failure.experiences, task)
        raise
    if not experiences:
        raise NothingReturned(f"workflow '{task.workflow}' returned no experience")
    if not isinstance(experiences, list) or not all(isinstance(experience, Experience) for experience in experiences):
        raise TrinityError(f"workflow '{task.workflow}' must return a list of Experience", key=task.workflow)
    _complete(experiences, task)
    _warn_if_short(experiences, task)
    if counted is not None:
        counted.warn_if_ignored(task.workflow, experiences)
    return experiences


def _complete(experiences: Sequence[Experience], task: Task) -> None:
    """Set group and task of a workflow's experiences, and exclude those that were not judged."""
    unnumbered = (
        len(experiences) == task.repeat_times
        and not task.retried
        and not any(experience.run or experience.turn for experience in experiences)
    )
    for number, experience in enumerate(experiences):
        _plain_numbers(experience, task.workflow)
        if experience.group not in ("", task.group):
            experience.group = f"{task.group}/{experience.group.removeprefix(task.group)}"
        experience.group, experience.task_index = experience.group or task.group, task.index
        experience.info = {**experience.info, "taskset": task.taskset}
        require_json(experience.info, f"workflow '{task.workflow}'", task.workflow)
        if unnumbered:
            experience.run = number
    exclude_unscored(experiences)


def _warn_if_short(experiences: Sequence[Experience], task: Task) -> None:
    """Log a warning if there are fewer rollouts than the task has. Expert data does not count."""
    turns = [
        (experience.run, experience.turn)
        for experience in experiences
        if not experience.is_expert and experience.group == task.group
    ]
    alone = len(set(turns)) < len(turns)
    rollouts = len(turns) if alone else len({run for run, _ in turns})
    if rollouts < len(task.runs):
        message = "workflow '%s' returned %d of the %d rollouts (repeat_times) of task %s: its group is too small"
        log.warning(message, task.workflow, rollouts, len(task.runs), task.group)


def _plain_numbers(experience: Experience, workflow: str) -> None:
    """Convert a workflow's values to plain numbers and text, as the store and the trainer expect. Metrics that are not
    finite are dropped.

    Raises TrinityError for a number used by training or selectors that is not finite: a step with it could not be
    trained on.
    """
    try:
        metrics = {str(name): float(value) for name, value in experience.metrics.items()}
        if experience.reward is not None:
            experience.reward = float(experience.reward)
        experience.run, experience.turn = int(experience.run), int(experience.turn)
    except (TypeError, ValueError) as error:
        raise TrinityError(
            f"workflow '{workflow}' gave a reward, metric, run or turn that is not a number: {error}", key=workflow
        ) from error
    experience.state = str(experience.state)
    taught = experience.teacher_logprobs
    read = {
        "reward": experience.reward,
        "token_rewards": experience.token_rewards,
        "teacher_logprobs": None if taught is None else taught[experience.action_mask],
        "metrics['accuracy']": metrics.get("accuracy"),
    }
    for name, value in read.items():
        if value is not None and not np.isfinite(value).all():
            raise TrinityError(f"workflow '{workflow}' gave the {name} {value}", key=workflow)
    experience.metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if left_out := metrics.keys() - experience.metrics.keys():
        log.warning(
            "workflow '%s' gave metrics that are not finite, which are left out: %s", workflow, sorted(left_out)
        )


async def all_of(rollouts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. If one raises, the others are cancelled."""
    running = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for rollout in running:
            rollout.cancel()


class RolloutsFailed(Exception):
    """Some rollouts of a task failed and others succeeded; another attempt at these may succeed."""

    def __init__(self, errors: Mapping[int, Exception | SystemExit], experiences: list[Experience]) -> None:
        """`errors`: by rollout, in the order in which they failed. `experiences`: of the rollouts that succeeded."""
        self.errors, self.experiences = errors, experiences
        self.first = next(iter(errors.values()))
        super().__init__(f"{len(errors)} rollouts failed, the first with {self.first!r}")


async def all_rollouts(task: Task, rollout: Callable[[int], Coroutine[Any, Any, list[Experience]]]) -> list[Experience]:
    """Run the task's rollouts concurrently, by their number, and return their experiences in order.

    Once all have ended, raises RolloutsFailed if some of them raised, and the first error if all did. TrinityError and
    TransientFault, which no other attempt can avoid, are raised at once, and cancel the others.
    """
    errors: dict[int, Exception | SystemExit] = {}

    async def isolated(run: int) -> list[Experience]:
        try:
            return await rollout(run)
        except (TrinityError, TransientFault):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it costs this rollout only
            errors[run] = error
            return []

    rollouts = await all_of([isolated(run) for run in task.runs])
    experiences = [experience for of_rollout in rollouts for experience in of_rollout]
    if errors:
        failure = RolloutsFailed(errors, experiences)
        raise failure.first if len(errors) == len(task.runs) else failure
    return experiences


class SimpleWorkflow(Workflow):
    """One question, one answer: all repeats in one call of the engine, each scored by the task's reward function."""

    default_reward: str | None = None
    """The reward function of tasks without one."""

    @classmethod
    def own_reward(cls, workflow_args: Mapping[str, Any]) -> str | None:
        """Return the reward function of tasks without one, by the `workflow_args`."""
        return cls.default_reward

    @classmethod
    def passes_reference(cls) -> bool:
        """True if the reward function gets the reference answer as the row has it; code of a plugin may change it."""
        return cls.__module__.startswith("trinity_core.")

    async def run(self) -> list[Experience]:
        """Return `repeat_times` experiences, in the order of their runs."""
        completions = await self.answers()
        rewards = await self.rewards.score(self.reward_name, [self.reward_item(answer) for answer in completions])
        return [
            self.experience(completion, reward, run)
            for run, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
        ]

    async def answers(self) -> list[Completion]:
        """Return the policy's answers, one for each run."""
        task = self.task
        return await self.model.chat(
            self.messages,
            n=task.repeat_times,
            tools=task.tools,
            seeds=task.rollout_seeds(),
            chat_template=self.chat_template,
            **task.sampling,
        )

    @property
    def reward_name(self) -> str:
        """The task's reward function, else the workflow's own. Raises TrinityError if there is neither."""
        name = self.task.reward_fn or self.own_reward(self.task.workflow_args)
        if name is None:
            raise TrinityError(
                f"task set '{self.task.taskset}' names no reward function and workflow '{self.task.workflow}' has none "
                "of its own; set default_reward_fn_type",
                key="default_reward_fn_type",
            )
        return name

    @classmethod
    def own_system_prompt(cls, workflow_args: Mapping[str, Any]) -> str | None:
        """System prompt for tasks without one; None: none."""
        return None

    @property
    def messages(self) -> list[Message]:
        """The task's conversation, with `own_system_prompt` first if it has no system message."""
        messages, prompt = self.task.messages, self.own_system_prompt(self.task.workflow_args)
        if prompt is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": prompt}, *messages]

    @property
    def chat_template(self) -> str | None:
        """The chat template; None: the model's own."""
        return self.task.format.chat_template

    @property
    def prompt_text(self) -> str:
        """The last message of the prompt, for people and reward functions."""
        return str(self.task.messages[-1].get("content", ""))

    def reward_item(self, completion: Completion) -> RewardItem:
        """Return the input of the reward function. Its response begins with a `<think>` that stands in the prompt."""
        task, length = self.task, len(completion.tokens)
        return RewardItem(
            completion.opened + completion.text,
            task.truth,
            self.prompt_text,
            task.raw,
            task.reward_fn_args,
            length,
            self.messages,
        )

    def experience(self, completion: Completion, reward: Reward | None, run: int) -> Experience:
        """Return one rollout, unscored if the verifier failed or there is no reward."""
        return completion.experience(
            reward=reward,
            group=self.task.group,
            run=run,
            task_index=self.task.index,
            metrics={
                "response_length": float(len(completion.tokens)),
                "truncated": float(completion.finish_reason != "stop"),
            },
            info={
                "prompt": self.prompt_text,
                "response": completion.text,
                "truth": plain(self.task.truth),
                "workflow": self.task.workflow,
                "finish_reason": completion.finish_reason,
            },
        )


def plain(value: Any) -> Any:
    """Return a value that JSON can hold: dates, bytes and decimals of columnar files become text."""
    return value if value is None or isinstance(value, str | int | float) else str(value)


def unknown_workflow(name: str) -> str:
    """Return a message with the alternative to an unknown name, and how to register a custom workflow."""
    if meant := closest(name, WORKFLOWS, similar=0.9):  # a less similar name belongs to another workflow
        return f"there is no workflow '{name}'; did you mean '{meant}'? Your own is found through --plugin-dir."
    return (
        f"there is no workflow '{name}'; there are {', '.join(sorted(WORKFLOWS))}. docs/porting.md says how one of "
        "Trinity-RFT is run; your own is found through --plugin-dir or as package.module.Name."
    )
