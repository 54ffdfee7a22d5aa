"""Workflows whose answers a teacher scores token by token: another model, or the policy itself with a hint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import field_validator
from tokenizers.decoders import DecodeStream

from trinity_core.base.errors import DataError, InputError, TrinityError
from trinity_core.base.signatures import Arguments
from trinity_core.data.experience import Experience
from trinity_core.workflows.base import WORKFLOWS, SimpleWorkflow, all_of
from trinity_core.workflows.builtin import BoxedArguments, MathBoxedWorkflow
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS
from trinity_core.workflows.rollout_model import Completion, Message, RolloutModel, opened_thought

Taught = np.ndarray | str
"""The teacher's log-probs of an answer's tokens (or, if the trainer computes them, its prompt), or why there are none.
"""


async def taught_by(model: RolloutModel, prompt: Iterable[int], answer: Iterable[int]) -> Taught:
    """Return the model's log-probs, at temperature 1, of an answer's tokens after a prompt, or why there are none."""
    before, sampled = [int(token) for token in prompt], [int(token) for token in answer]
    try:
        logprobs = (await model.logprobs([*before, *sampled]))[len(before) - 1 :]
    except InputError as error:
        return str(error)
    return logprobs if np.isfinite(logprobs).all() else "some are not finite"


def carried_over(
    logprobs: np.ndarray, ends: Sequence[int], teacher_logprobs: np.ndarray, teacher_ends: Sequence[int]
) -> np.ndarray:
    """Return a teacher's log-probs for the policy's tokens of one text: float32 [T].

    `logprobs` [T] are the policy's, `teacher_logprobs` [U] those of the teacher's own tokens; `ends` and
    `teacher_ends` say where in the text each token ends (`token_ends`). Where tokens of both end, the text is cut;
    within each piece the teacher's log-prob of the piece minus the policy's is shared equally by the policy's tokens.
    So the sum over the answer is exact, and so is each token that both have (the merging of spans of TRL's GOLD, on
    sampled tokens). Tokens after the last cut, of a character that was cut off, keep the policy's log-probs.
    """
    cuts = sorted({end for end in ends if end >= 0} & {end for end in teacher_ends if end >= 0})
    last = {end: index + 1 for index, end in enumerate(ends)}
    teacher_last = {end: index + 1 for index, end in enumerate(teacher_ends)}
    result = np.asarray(logprobs, dtype=np.float64).copy()
    for (start, end), (teacher_start, teacher_end) in zip(
        pairwise([0, *(last[cut] for cut in cuts)]), pairwise([0, *(teacher_last[cut] for cut in cuts)]), strict=True
    ):
        gap = np.sum(teacher_logprobs[teacher_start:teacher_end], dtype=np.float64) - result[start:end].sum()
        result[start:end] += gap / (end - start)
    return result.astype(np.float32)


def token_ends(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text of tokens, special ones included, and where in it each token ends, in characters; -1 within a
    character. Linear in the number of tokens."""
    stream, text, ends = DecodeStream(skip_special_tokens=False), "", []
    for token in tokens:
        piece = stream.step(tokenizer.backend_tokenizer, int(token))
        text += piece or ""
        ends.append(-1 if piece is None else len(text))
    return text, ends


class Distilling(SimpleWorkflow):
    """The teacher's log-probs are at temperature 1, and so must the policy's be: the trainer refuses others. The reward
    is only measured, not part of the loss."""

    by_trainer = False
    """True if the trainer computes the teacher's distributions."""

    def distilled(
        self, completions: Sequence[Completion], taught: Sequence[Taught | None], rewards: Sequence[Reward | None]
    ) -> list[Experience]:
        """Return the rollouts, in the order of their runs."""
        scored = zip(completions, taught, rewards, strict=True)
        return [self._distilled(*rollout, run) for run, rollout in enumerate(scored)]

    def _distilled(self, completion: Completion, taught: Taught | None, reward: Reward | None, run: int) -> Experience:
        """Return one rollout; without a teacher's log-probs, or if its prompt is too long, it carries no loss."""
        if isinstance(taught, str):
            return self.experience(completion, Reward(error=f"the teacher gave no log-probs: {taught}"), run)
        experience = self.experience(completion, reward, run)
        usable = None if completion.finish_reason == "prompt_too_long" else taught
        experience.action_mask = completion.loss_mask & (usable is not None)
        experience.metrics[f"accuracy_{VERIFIER_ERRORS}"] = experience.metrics.pop(VERIFIER_ERRORS, 0.0)
        if self.by_trainer:
            experience.teacher_prompt = completion.prompt_tokens if usable is None else usable
            return experience
        experience.teacher_logprobs = completion.logprobs if usable is None else usable
        if usable is not None:
            experience.metrics["kl_divergence"] = float(np.sum(completion.logprobs - usable))
        return experience


class DistillArguments(BoxedArguments):
    """`workflow_args` of `on_policy_distill_math_workflow`."""

    teacher: str | None = None
    """Name of the auxiliary model that teaches this task set; by default the first one."""
    align_by_text: bool = False
    """The teacher may have another tokenizer: its own chat template writes its prompt, its own tokens of the answer's
    text are scored, and their log-probs carried over to the policy's (`carried_over`)."""


@WORKFLOWS.register("on_policy_distill_math_workflow")
class DistillMathWorkflow(MathBoxedWorkflow, Distilling):
    """For the algorithm `on_policy_distill`. Task sets may have teachers of their own."""

    arguments: ClassVar[type[DistillArguments]] = DistillArguments
    asks_models = True

    async def run(self) -> list[Experience]:
        """Return `repeat_times` experiences with the teacher's log-probs."""
        teacher = self.teacher
        completions = await self.answers()
        taught = await all_of([self._taught(teacher, completion) for completion in completions])
        rewards = await self.rewards.score(self.reward_name, [self.reward_item(one) for one in completions])
        return self.distilled(completions, taught, rewards)

    @property
    def teacher(self) -> RolloutModel:
        """The model that `workflow_args.teacher` names, or the first. Raises TrinityError if there is none."""
        name = self._arguments.teacher
        for model in self.auxiliary:
            if name is None or name == model.name:
                return model
        names = ", ".join(model.name for model in self.auxiliary) or "no model"
        raise TrinityError(
            f"workflow '{self.task.workflow}' needs the teacher{f' {name!r}' * (name is not None)}: "
            f"explorer.auxiliary_models has {names}",
            key="explorer.auxiliary_models",
        )

    @property
    def _arguments(self) -> DistillArguments:
        return DistillArguments.model_validate(self.task.workflow_args)

    async def _taught(self, teacher: RolloutModel, completion: Completion) -> Taught | None:
        if completion.finish_reason == "prompt_too_long":
            return None
        if self._arguments.align_by_text:
            return await self._taught_by_text(teacher, completion)
        self._require_same_tokens(teacher, completion)
        return await taught_by(teacher, completion.prompt_tokens, completion.tokens)

    async def _taught_by_text(self, teacher: RolloutModel, completion: Completion) -> Taught:
        """Score the teacher's own tokens of the answer; the end of the turn is one piece, if the policy sampled it."""
        tokens = completion.tokens.tolist()
        ended = tokens[-1] in self.model.turn_ends and bool(teacher.turn_ends)
        text, ends = token_ends(self.model.tokenizer, tokens[: len(tokens) - ended])
        prompt = list(teacher.prompt_tokens(self.messages, self.task.tools))
        if not opened_thought(teacher.tokenizer.decode(prompt[-16:])):
            prompt += teacher.tokenizer.encode(completion.opened, add_special_tokens=False)
        answer = teacher.tokenizer.encode(text, add_special_tokens=False)
        written, teacher_ends = token_ends(teacher.tokenizer, answer)
        if written != text:
            return "its tokenizer does not give back the answer's text"
        if ended:
            answer, ends = [*answer, teacher.turn_ends[0]], [*ends, len(text) + 1]
            teacher_ends = [*teacher_ends, len(text) + 1]
        scored = await taught_by(teacher, prompt, answer)
        return scored if isinstance(scored, str) else carried_over(completion.logprobs, ends, scored, teacher_ends)

    def _require_same_tokens(self, teacher: RolloutModel, completion: Completion) -> None:
        tokens = [int(token) for token in (*completion.prompt_tokens, *completion.tokens)]
        ours, theirs = (model.tokenizer.convert_ids_to_tokens(tokens) for model in (self.model, teacher))
        if ours != theirs:
            raise TrinityError(
                "the teacher's tokenizer is not the policy's: the same token ids stand for other tokens. Set "
                "workflow_args.align_by_text: true",
                key="workflow_args.align_by_text",
            )


class SelfDistillArguments(Arguments):
    """`workflow_args` of `self_distill_workflow`."""

    demonstration: Literal["row", "group"] = "row"
    """`row`: the task's own reference answer; `group`: the answer of another rollout that has the highest reward of the
    group (SDPO), none if all rewards are equal."""
    teacher: Literal["engine", "trainer"] = "engine"
    """What computes the teacher's log-probs: the engine, of the sampled tokens (`opsd`, `sdpo`), or the trainer, of the
    whole vocabulary (`opsd_full`, whose default it is)."""
    demonstration_key: str | None = None
    """Column of the reference answer; by default `format.response_key`."""
    hint: str = (
        "{question}\n\nFor orientation, this is a good answer to it:\n{demonstration}\n\n"
        "Now give your own answer, with your own reasoning."
    )
    """What the teacher reads in place of the last message."""

    @field_validator("hint")
    @classmethod
    def _shows_the_demonstration(cls, hint: str) -> str:
        if "{demonstration}" not in hint:
            raise ValueError("must contain {demonstration}: the teacher would know no more than the policy")
        return hint


@WORKFLOWS.register("self_distill_workflow")
class SelfDistillWorkflow(Distilling):
    """For the algorithms `opsd`, `opsd_full` and `sdpo`: the policy that sees a demonstration teaches the policy that
    does not (OPSD, arXiv 2601.18734; SDFT, 2601.19897; SDPO, 2601.20802).

    The sampled tokens are scored after the teacher's prompt as they are. A rollout without a demonstration carries no
    loss, and counts as 0 in the metric `has_demonstration`. A task set without a reward function has no rewards.
    """

    arguments = SelfDistillArguments

    async def run(self) -> list[Experience]:
        """Return `repeat_times` experiences with the log-probs, or the prompt, of the policy with the demonstration."""
        self.by_trainer = self._arguments.teacher == "trainer"
        completions = await self.answers()
        rewards = await self._rewards_of(completions)
        shown = [self._demonstration(run, completions, rewards) for run in range(len(completions))]
        taught = await all_of([self._taught(one, text) for one, text in zip(completions, shown, strict=True)])
        experiences = self.distilled(completions, taught, rewards)
        for experience, text in zip(experiences, shown, strict=True):
            experience.metrics["has_demonstration"] = float(text is not None)
        return experiences

    async def _rewards_of(self, completions: Sequence[Completion]) -> list[Reward] | list[None]:
        if self.task.reward_fn is None and self._arguments.demonstration == "row":
            return [None] * len(completions)
        return await self.rewards.score(self.reward_name, [self.reward_item(one) for one in completions])

    def _demonstration(
        self, run: int, completions: Sequence[Completion], rewards: Sequence[Reward | None]
    ) -> str | None:
        if self._arguments.demonstration == "row":
            key = self._arguments.demonstration_key
            if key is not None and key not in self.task.raw:
                raise DataError(f"{self.task.location}: no column '{key}'", key="workflow_args.demonstration_key")
            text = self.task.truth if key is None else self.task.raw[key]
            return None if text is None else str(text)
        values = [None if reward is None else reward.value for reward in rewards]
        judged = [value for value in values if value is not None]
        if not judged or max(judged) == min(judged):
            return None
        others = [other for other, value in enumerate(values) if other != run and value == max(judged)]
        return completions[others[0]].text if others else None

    async def _taught(self, completion: Completion, demonstration: str | None) -> Taught | None:
        if demonstration is None or completion.finish_reason == "prompt_too_long":
            return None
        *earlier, last = self.messages
        texts = {"{question}": str(last["content"]), "{demonstration}": demonstration}
        hint = re.sub(r"\{question\}|\{demonstration\}", lambda match: texts[match[0]], self._arguments.hint)
        messages: list[Message] = [*earlier, {**last, "content": hint}]
        prompt = self.model.prompt_tokens(messages, self.task.tools, chat_template=self.chat_template)
        if not self.by_trainer:
            return await taught_by(self.model, prompt, completion.tokens)
        length, most = len(prompt) + len(completion.tokens), self.model.max_model_len
        return np.asarray(prompt, dtype=np.int32) if length <= most else f"{length} tokens exceed max_model_len {most}"

    @property
    def _arguments(self) -> SelfDistillArguments:
        return SelfDistillArguments.model_validate(self.task.workflow_args)
