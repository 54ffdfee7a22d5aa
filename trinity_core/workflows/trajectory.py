"""`Trajectory`: one rollout of several turns, token for token as it was sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from hashlib import blake2b
from typing import Any

import numpy as np

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.data.control_tokens import encode
from trinity_core.data.experience import Experience
from trinity_core.data.formats import Message, Tool
from trinity_core.data.turns import Call, continued_prompt, joined, text_after_answer
from trinity_core.workflows.rewards import Reward
from trinity_core.workflows.rollout_model import Completion, RolloutModel, with_reward


def returns(rewards: Sequence[Reward | float | None], discount: float) -> list[Reward | float | None]:
    """Return for each turn its reward plus the later ones, discounted by `discount` for each turn in between.

    A turn without a reward counts as 0, but if the last one has none, no turn gets one. If a verifier failed, no turn
    is judged: each gets the `Reward` with the error.
    """
    failed = next((reward for reward in rewards if isinstance(reward, Reward) and reward.error is not None), None)
    if failed is not None or not rewards or rewards[-1] is None:
        return [failed] * len(rewards)
    values, later = [], 0.0
    for reward in reversed(rewards):
        value = reward.value if isinstance(reward, Reward) else reward
        later = (value or 0.0) + discount * later
        values.append(later)
    return list(reversed(values))


class Trajectory:
    """A conversation of the policy with tools, an environment or a user.

    `act` samples the policy's next turn and appends it; `add` appends messages of others, which are context and carry
    no loss. Each turn is sampled on the recorded token ids: sampled tokens are never tokenised again.
    """

    def __init__(
        self,
        model: RolloutModel,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        seed: Callable[[int], int] | None = None,
        chat_template: str | None = None,
        **sampling: Any,
    ) -> None:
        """`messages`: the conversation up to the policy's first turn. `seed`: returns the seed of each turn, by its
        number.

        `sampling`: see `RolloutModel.chat`.
        """
        self.messages: list[Message] = list(messages)
        self._model, self._tools, self._template = model, tools, chat_template
        self._seed, self._sampling = seed, sampling
        self._asked = str(messages[-1].get("content", "")) if messages else ""
        self._calls: list[Call] = []
        self._answered = 0
        """Number of messages up to and including the newest answer."""
        self._full = False

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return len(self._calls)

    @property
    def finished(self) -> bool:
        """True if the policy's last turn was cut off, or the context has no room for another."""
        return self._full or (bool(self._calls) and self._calls[-1].sample.reason != "stop")

    def copied(self) -> Trajectory:
        """Return a copy with the same turns, which continues independently."""
        other = copy(self)
        other.messages, other._calls = self.messages.copy(), self._calls.copy()
        return other

    async def act(self, **sampling: Any) -> Completion:
        """Sample the policy's next turn and append it to the conversation. `sampling` overrides the defaults.

        If the context has no room for a turn, nothing is sampled, the `finish_reason` is `prompt_too_long`, and the
        conversation ends with the turn before. Raises TrinityError for a turn after that.
        """
        if self._full:
            raise TrinityError("the context has no room for a turn: check `Trajectory.finished` before `act`")
        answer = await self._sample(None if self._seed is None else [self._seed(self.turns)], sampling)
        self._full = answer.finish_reason == "prompt_too_long"
        if not self._full or not self._calls:
            self._calls.append(Call(answer.prompt_tokens, answer, answer.temperature, answer.free))
            self.messages.append(self._model.message(answer, self._tools))
            self._answered = len(self.messages)
        return answer

    def add(self, *messages: Message) -> None:
        """Append messages of a tool, an environment or a user."""
        self.messages.extend(messages)

    def experience(self, reward: Reward | float | None = None, **fields: Any) -> Experience:
        """Return all turns as one sequence, with `fields` (run, metrics, info …) set on it.

        Pass the `Reward` unchanged from `rewards.score`.
        """
        calls = self._all_calls()
        if len(calls) > 1:  # for people; with one turn, prompt and response show it already
            fields["info"] = {"turns": [dict(message) for message in self.messages]} | fields.get("info", {})
        return self._experience(calls, reward, fields)

    def step_experiences(
        self,
        rewards: Sequence[Reward | float | None],
        discount: float | None = None,
        states: Sequence[str] | None = None,
        **fields: Any,
    ) -> list[Experience]:
        """Return one experience for each turn, numbered by `turn`, each with its reward and all with `fields`.

        A turn whose reward is None gets that of the last turn. With `discount` later rewards are added: see `returns`.
        `states`: the state in which each turn began, equal for equal ones, for algorithms that compare turns (default:
        the conversation so far).
        """
        values = list(rewards) if discount is None else returns(rewards, discount)
        steps = []
        for turn, (call, judgement, value) in enumerate(zip(self._all_calls(), rewards, values, strict=True)):
            so_far = blake2b(call.prompt.tobytes(), digest_size=16).hexdigest()
            own_fields = {"turn": turn, "state": states[turn] if states else so_far, **fields}
            if isinstance(judgement, Reward) and not isinstance(value, Reward):
                own_fields["metrics"] = judgement.metrics | fields.get("metrics", {})
            steps.append(self._experience([call], value, own_fields))
        return steps

    async def _sample(self, seeds: list[int] | None, sampling: dict[str, Any]) -> Completion:
        options = {"seeds": seeds, **self._sampling, **sampling}
        if not self._calls:
            [first] = await self._model.chat(
                self.messages.copy(), 1, self._tools, chat_template=self._template, **options
            )
            return first
        prompt = continued_prompt(self._calls[-1], self._tokens_after_answer())
        try:
            [answer] = await self._model.generate(prompt.tolist(), 1, chat_template=self._template, **options)
        except DataError:  # the context is full, and prompts are not truncated; the conversation ends in any case
            nothing = np.zeros(1, dtype=np.int32)
            return Completion(prompt, nothing, nothing.astype(np.float32), -1, "", "prompt_too_long")
        return answer

    def _tokens_after_answer(self) -> list[int]:
        """Return the tokens that the template writes after the newest answer. Raises TrinityError if they cannot be
        determined."""

        def render(messages: Sequence[Any], prompt: bool) -> str:
            return self._model.render(messages, self._tools, chat_template=self._template, prompt=prompt)

        messages = [_renderable(message) for message in self.messages]
        try:
            text = text_after_answer(render, messages, self._answered)
        except DataError:  # some templates write one tool call a turn and refuse more
            text = None
        if text is None:  # tool calls hide the end of the answer; render a plain one instead
            answer = {"role": "assistant", "content": ""}
            earlier, later = messages[: self._answered - 1], messages[self._answered :]
            text = text_after_answer(render, [*earlier, answer, *later], self._answered)
        if text is None:
            raise TrinityError(
                "the chat template does not show where an answer ends, so the conversation cannot go on after it; "
                "set model.custom_chat_template to one that writes answers as they are",
                key="model.custom_chat_template",
            )
        return encode(self._model.tokenizer, text)

    def _all_calls(self) -> list[Call]:
        if not self._calls:
            raise TrinityError("a trajectory without a turn has no experience: call `act` first")
        return self._calls

    def _experience(self, calls: Sequence[Call], reward: Reward | float | None, fields: dict[str, Any]) -> Experience:
        sequence = joined(calls)
        truncated = sequence.truncated or (self._full and len(sequence.tokens) == len(self._calls[-1].tokens))
        response = self._model.tokenizer.decode(sequence.tokens[sequence.prompt_length :].tolist())
        metrics = {"response_length": float(sequence.mask.sum()), "truncated": float(truncated)}
        if guided := [call.free for call in calls if call.free is not None]:
            metrics["guided_tokens"] = float(sum((~free).sum() for free in guided))
        fields = {
            **fields,
            "metrics": metrics | fields.get("metrics", {}),
            "info": {"prompt": self._asked, "response": response} | fields.get("info", {}),
        }
        experience = sequence.experience(**with_reward(reward, fields))
        experience.truncated = truncated
        if self._calls[0].sample.reason == "prompt_too_long":
            experience.action_mask[:] = False
        return experience


def _renderable(message: Message) -> Message:
    """Return the message with tool arguments that every template can render: templates expect an object, but a model
    may write anything. Nothing is lost, because the recorded tokens hold what was sampled."""

    def with_object(function: dict[str, Any]) -> dict[str, Any]:
        return function if isinstance(function.get("arguments"), dict) else {**function, "arguments": {}}

    if not message.get("tool_calls"):
        return message
    return {
        **message,
        "tool_calls": [{**call, "function": with_object(call["function"])} for call in message["tool_calls"]],
    }
