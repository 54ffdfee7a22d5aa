"""Conversations of several turns, token for token as they were sampled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raising
from workflows.chatting import END, Turns

from trinity_core.base.errors import TrinityError
from trinity_core.workflows import Trajectory

ASK = [{"role": "user", "content": "ab?"}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def played(model, said, **how) -> Trajectory:
    """A conversation with `said` as the user's turns after the policy's."""

    async def main():
        trajectory = Trajectory(model, ASK, **how)
        await trajectory.act()
        for text in said:
            if trajectory.finished:
                break
            trajectory.add(user(text))
            await trajectory.act()
        return trajectory

    return asyncio.run(main())


sampled = st.lists(st.sampled_from([1, ord("a"), ord("b")]), max_size=6)


@given(st.lists(st.tuples(sampled, st.text("ab", max_size=5)), min_size=1, max_size=5), sampled, st.booleans())
def test_tokens_are_those_that_were_sampled(turns, last, ends):
    turns_of_policy = [[*tokens, END] for tokens, _ in turns] + [[*last, END] if ends else [*last, ord("a")]]
    model = Turns(*turns_of_policy)
    trajectory = played(model, [text for _, text in turns])
    one = trajectory.experience(1.0)
    steps = trajectory.step_experiences([None] * trajectory.turns)
    assert one.info.get("turns", trajectory.messages) == trajectory.messages
    assert ("turns" in one.info) == (trajectory.turns > 1), "for people; the store need not hold one turn twice"
    place = one.prompt_length
    for number, (tokens, step) in enumerate(zip(turns_of_policy, steps, strict=True)):
        prompt = model.asked[number][0]
        assert one.tokens[: len(prompt) + len(tokens)].tolist() == [*prompt, *tokens]
        assert step.tokens.tolist() == [*prompt, *tokens] and step.prompt_length == len(prompt)
        assert step.turn == number and step.action_mask.all()
        answer = slice(len(prompt) - one.prompt_length, len(prompt) - one.prompt_length + len(tokens))
        assert one.action_mask[answer].all() and (one.versions[answer] == number + 1).all()
        assert one.logprobs[answer].tolist() == step.logprobs.tolist()
        between = slice(place - one.prompt_length, answer.start)
        assert not one.action_mask[between].any() and not one.logprobs[between].any()
        assert (one.versions[between] == -1).all()
        if number:
            said = model.tokenizer.decode(one.tokens[place - 1 : len(prompt)])
            assert said == f"><u{turns[number - 1][1]}><a"
        place = len(prompt) + len(tokens)
    assert place == len(one.tokens) and one.truncated is trajectory.finished is not ends


def test_each_turn_has_its_seed_sampling_and_tools():
    model = Turns("one", "two")
    trajectory = played(model, ["more"], seed=lambda turn: 70 + turn, tools=[{}, {}], temperature=0.5)
    assert [how for _, how in model.asked] == [{"seeds": [70 + turn], "temperature": 0.5} for turn in (0, 1)]
    assert model.tokenizer.decode(model.asked[1][0]) == "[2]<uab?><aone><umore><a"
    assert trajectory.messages[1::2] == [{"role": "assistant", "content": text} for text in ("one", "two")]


def test_a_conversation_without_room_ends_with_its_last_turn():
    model = Turns("one", "two", max_model_len=30)
    trajectory = played(model, ["a" * 30, "never said"])
    one = trajectory.experience(0.0)
    assert trajectory.finished and trajectory.turns == 1
    assert one.truncated and model.tokenizer.decode(one.tokens.tolist()) == "<uab?><aone>"
    assert one.metrics == {"response_length": 4.0, "truncated": 1.0}
    with pytest.raises(TrinityError):
        asyncio.run(trajectory.act())


async def test_a_turn_that_was_cut_can_be_answered():
    model = Turns([ord("a")], "two")

    trajectory = Trajectory(model, ASK)
    await trajectory.act()
    assert trajectory.finished
    trajectory.add(user("more"))
    await trajectory.act()
    assert not trajectory.finished
    one = trajectory.experience(1.0)
    assert model.tokenizer.decode(one.tokens.tolist()) == "<uab?><aa><umore><atwo>"
    assert one.action_mask.tolist() == [True, *[False] * 10, *[True] * 4] and not one.truncated


def test_tokens_that_a_grammar_forced_are_counted_in_every_turn():
    class Guided(Turns):
        async def generate(self, *args, **how):
            [answer] = await super().generate(*args, **how)
            answer.free = np.arange(len(answer.tokens)) > 0  # the first one is forced
            return [answer]

    trajectory = played(Guided("one", "two"), ["more"])
    whole, steps = trajectory.experience(1.0), trajectory.step_experiences([None, 1.0])
    assert whole.metrics["guided_tokens"] == 2 and [step.metrics["guided_tokens"] for step in steps] == [1, 1]
    assert whole.action_mask.sum() == 6 and [step.action_mask.sum() for step in steps] == [3, 3]


def test_steps_have_their_states():
    trajectory = played(Turns("one", "two"), ["more"])
    assert [one.state for one in trajectory.step_experiences([0.0, 1.0], states=["start", "more"])] == ["start", "more"]
    first, second = (one.state for one in trajectory.step_experiences([0.0, 1.0]))
    assert first and second and first != second, "by default the conversation so far"


def test_later_turns_end_as_the_template_of_the_first_ends_them():
    model = Turns("ab", "b")
    played(model, ["a"], chat_template="another")
    assert model.templates == ["another", "another"]


def test_a_template_that_hides_answers_is_refused():
    class Hides(Turns):
        def render(self, messages, tools=None, **_):
            return "always the same"

    with raising(TrinityError, key="model.custom_chat_template"):
        played(Hides("one", "two"), ["more"])
