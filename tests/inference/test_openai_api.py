"""The OpenAI API with the unmodified `openai` client, on a real engine: what clients see, and what sessions record."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import openai
import pytest
from inference.conversations import converse_all, every_answer_is_a_call, gaps
from inference.openai_server import serving

from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.task import Task
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.requests import Sampling
from trinity_core.rollout.openai_api.model import ApiModels
from trinity_core.rollout.runner import TaskRunner
from trinity_core.rollout.workflow_loops import WorkflowLoop
from trinity_core.workflows import RewardPool
from trinity_core.workflows.conversation import ConversationWorkflow

ASK = [{"role": "user", "content": "Mia has 2 apples and buys 3. How many has she?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


@pytest.fixture(scope="module")
def api(tiny_engine, tiny_folder):
    with serving(tiny_folder, tiny_engine) as served:
        yield served


@pytest.fixture(scope="module")
def talking(tiny_engine, tiny_folder):
    """A server where every answer that may call a tool does."""
    with serving(
        tiny_folder, tiny_engine, tool_call_parser=every_answer_is_a_call(), enable_auto_tool_choice=True
    ) as served:
        yield served


def answer(client, messages=ASK, **args):
    return client.chat.completions.create(model="policy", messages=messages, **({"max_tokens": 12} | args))


def streamed(client, messages=ASK, **args):
    """The text of a streamed answer, the number of its parts, and how it ended."""
    chunks = [chunk.choices[0] for chunk in answer(client, messages, stream=True, **args) if chunk.choices]
    text = "".join(choice.delta.content or "" for choice in chunks)
    return text, len(chunks), chunks[-1].finish_reason


def whole(client, messages=ASK, **args):
    return [answer(client, messages, **args).choices[0].message.content]


def refused(call, *args, **named):
    with pytest.raises(openai.APIStatusError) as caught:
        call(*args, **named)
    return caught.value.status_code, caught.value.body


# ---- what clients see ----


def test_models_are_listed(api, tiny_folder):
    models = api.client().models
    assert [model.id for model in models.list()] == ["policy", str(tiny_folder)]
    assert models.retrieve("policy").max_model_len == 256 and models.retrieve(str(tiny_folder)).id == str(tiny_folder)
    assert refused(models.retrieve, "other")[0] == 404


def test_a_chat_answer_has_text_and_usage(api):
    completion = answer(api.client(), seed=1, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert 2 <= completion.usage.completion_tokens <= 24
    assert completion.choices[0].message.content != completion.choices[1].message.content


def test_streamed_text_is_that_of_the_whole_answer(api):
    for seed in range(2):
        choice = answer(api.client(), seed=seed, max_tokens=40).choices[0]
        text, _, reason = streamed(api.client(), seed=seed, max_tokens=40)
        assert (text, reason) == (choice.message.content, choice.finish_reason)
    _, parts, _ = streamed(api.client(), seed=1, max_tokens=100, extra_body={"ignore_eos": True})
    assert parts > 3


def test_stop_strings_end_an_answer(api):
    args = {"seed": 5, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    [text] = whole(api.client(), **args)
    stop = text[8:10]
    cut = answer(api.client(), stop=[stop], **args).choices[0]
    assert cut.message.content == text[: text.index(stop)] and cut.finish_reason == "stop"
    assert streamed(api.client(), stop=[stop], **args)[0] == cut.message.content


def test_logprobs_are_those_of_the_model(api, tiny_engine):
    completion = answer(api.client(), seed=3, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    choice = completion.choices[0]
    content = choice.logprobs.content
    assert len(content) == len(choice.token_ids) and all(len(place.top_logprobs) == 3 for place in content)
    tokens = [*completion.prompt_token_ids, *choice.token_ids]
    expected = asyncio.run(tiny_engine.score(tokens))[-len(content) :]
    np.testing.assert_allclose([place.logprob for place in content], expected, atol=1e-5)


def test_completions_of_a_text(api):
    client = api.client()
    both = client.completions.create(model="policy", prompt=["Mia has", "Tom has"], max_tokens=4, seed=1, logprobs=1)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert len(both.choices[0].logprobs.token_logprobs) == both.usage.completion_tokens / 2
    parts = client.completions.create(model="policy", prompt="Mia has", max_tokens=4, seed=1, stream=True)
    assert "".join(part.choices[0].text for part in parts) == both.choices[0].text


def test_errors_are_openais(api):
    client = api.client()
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        answer(api.client(key="sk-wrong"))
    assert (wrong_key.value.type, wrong_key.value.code) == ("authentication_error", "invalid_api_key")
    for unknown in ({}, {"tools": [ADD]}, {"stream": True}):
        with pytest.raises(openai.NotFoundError) as no_model:
            client.chat.completions.create(model="other", messages=ASK, **unknown)
        assert (no_model.value.type, no_model.value.code) == ("invalid_request_error", "model_not_found")
    assert refused(client.models.retrieve, "other")[1]["code"] == "model_not_found"
    assert refused(client.get, "/nothing", cast_to=object)[1]["code"] == "not_found"
    for more in ({}, {"max_tokens": 100}):
        with pytest.raises(openai.BadRequestError) as too_long:
            answer(client, [{"role": "user", "content": "word " * 600}], **more)
        assert too_long.value.type == "invalid_request_error" and too_long.value.code == "context_length_exceeded"
    for wrong in ({"max_tokens": 10_000}, {"temperature": -1}, {"messages": []}, {"top_p": "much"}, {"n": 129}):
        with pytest.raises(openai.BadRequestError) as not_valid:
            answer(client, **wrong)
        assert not_valid.value.type == "invalid_request_error" and not_valid.value.code is None
    assert "tool_call_parser" in refused(answer, client, tools=[ADD])[1]["message"]
    for wrong in ({"top_logprobs": 21}, {"logit_bias": {"999999": 1}}):
        status, body = refused(answer, client, stream=True, logprobs=True, **wrong)
        assert (status, body) == refused(answer, client, logprobs=True, **wrong)
        assert status == 400 and body["type"] == "invalid_request_error" and body["param"]
    for wrong in ({"prompt_logprobs": 1}, {"use_beam_search": True}):
        assert refused(answer, api.client(api.session()), extra_body=wrong)[0] == 400
    ended = api.session()
    api.server.close(ended)
    status, body = refused(answer, api.client(ended))
    assert (status, body["code"]) == (410, "session_ended")
    ended.name = "nobody"
    assert refused(answer, api.client(ended))[0] == 404


# ---- answers in a grammar ----

COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
    "required": ["n", "sure"],
    "additionalProperties": False,
}
YES_OR_NO = {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "count", "schema": COUNT}}}


@pytest.mark.parametrize("where", ["session", "judge"])
def test_answers_follow_a_schema(tiny_engine, tiny_folder, where):
    with serving(tiny_folder, tiny_engine, judge=True) as api:
        client = api.client(api.session(seed=1) if where == "session" else None)
        ask = {"model": "judge" if where == "judge" else "policy", "messages": ASK, "max_tokens": 100, "seed": 0}
        choices = client.chat.completions.create(**ask, **AS_JSON, n=8).choices
        chosen = client.chat.completions.create(**ask, **YES_OR_NO, n=8).choices
        [alone] = client.chat.completions.create(**ask, **AS_JSON).choices
        parts = client.chat.completions.create(**ask, **AS_JSON, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == alone.message.content and {choice.message.content for choice in chosen} <= {"yes", "no"}
    # White space is allowed, and this model was never trained.
    whole = [json.loads(choice.message.content) for choice in choices if choice.finish_reason == "stop"]
    assert whole and all(parsed.keys() == {"n", "sure"} and parsed["n"] in (1, 2, 3) for parsed in whole)


FORCED = ["required", {"type": "function", "function": {"name": "count"}}]


@pytest.fixture(scope="module")
def calling(tiny_engine, tiny_folder):
    """A server that reads calls as Qwen's models write them, and leaves tools out of its short prompts."""
    template = (
        "{% for d in documents or [] %}{{ d.text }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    reads = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "chat_template": template}
    with serving(tiny_folder, tiny_engine, **reads) as served:
        yield served


@pytest.mark.parametrize(
    ("where", "choice", "strict"),
    [
        ("session", FORCED[0], {}),
        ("session", FORCED[1], {"strict": False}),
        ("outside", FORCED[0], {"strict": False}),
        ("outside", FORCED[1], {"strict": True}),
    ],
)
def test_arguments_of_a_forced_call_follow_the_tools_schema(calling, choice, strict, where):
    """This model was never trained, so valid arguments are the grammar's."""
    client = calling.client(calling.session(seed=1) if where == "session" else None)
    tools = [{"type": "function", "function": {"name": "count", "parameters": COUNT, **strict}}]
    forced = {"tools": tools, "tool_choice": choice, "max_tokens": 150, "seed": 0}
    choices = answer(client, n=24, **forced).choices
    calls = [call.function for one in choices for call in one.message.tool_calls or ()]  # white space is allowed
    assert len(calls) >= 3 and {call.name for call in calls} == {"count"}
    for call in calls:
        arguments = json.loads(call.arguments)
        assert arguments.keys() == COUNT["properties"].keys() and arguments["n"] in (1, 2, 3)
        assert isinstance(arguments["sure"], bool)


@pytest.mark.parametrize("where", ["session", "outside"])
def test_control_tokens_in_documents_stay_text(calling, tiny_folder, where):
    client, read = calling.client(calling.session(seed=1) if where == "session" else None), "as<|im_end|>is"
    tokenizer = load_tokenizer(str(tiny_folder))
    body = {"documents": [{"title": "one", "text": read}], "return_token_ids": True}
    tokens = answer(client, extra_body=body).model_dump()["prompt_token_ids"]
    assert tokenizer.decode(tokens).startswith(read) and tokenizer.eos_token_id not in tokens


def test_tokens_free_under_a_grammar_carry_loss(api, tiny_engine, monkeypatch):
    """A grammar of any text excludes special tokens and partial characters, which this model samples often."""
    monkeypatch.setattr("trinity_core.rollout.inference.guided.FREE_GAP", 1.0)
    any_text = {"extra_body": {"structured_outputs": {"regex": "(.|\\n)*"}}}
    for args, is_free in ((any_text, True), (YES_OR_NO, False), ({**any_text, "temperature": 0.7}, False)):
        session = api.session(seed=3)
        answer(api.client(session), **args)
        [sequence] = session.sequences()
        assert (sequence.mask.mean() > 0.9) == is_free and (len(sequence.answers) == 1) == bool(sequence.mask.any())
        if is_free:
            scores = asyncio.run(tiny_engine.score(sequence.tokens.tolist()))[sequence.prompt_length - 1 :]
            np.testing.assert_allclose(sequence.logprobs[sequence.mask], np.array(scores)[sequence.mask], atol=1.0)


def test_a_grammar_that_cannot_be_is_refused(calling):
    schema = {"type": "no type"}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
    for wrong in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"extra_body": {"structured_outputs": {"regex": "("}}},
        {"tools": [tool], "tool_choice": "required"},
    ):
        for args in ({}, {"stream": True}):
            assert refused(answer, calling.client(), **wrong, **args)[0] == 400


# ---- what sessions record ----


def checked(session, engine):
    """The sequences of a session, checked to have the model's log-probs for exactly these tokens."""
    sequences = session.sequences()
    for sequence in sequences:
        tokens = sequence.tokens[:255].tolist()  # an engine scores no sequence that fills it
        expected = np.array(asyncio.run(engine.score(tokens)))[sequence.prompt_length - 1 :]
        mask = sequence.mask[: len(expected)]
        np.testing.assert_allclose(sequence.logprobs[: len(expected)][mask], expected[mask], atol=1e-5)
        assert (sequence.versions[sequence.mask] == 0).all()
    return sequences


def test_a_conversation_is_one_sequence(api, tiny_engine):
    session, messages = api.session(seed=4), list(ASK)
    for turn in range(4):
        ask = streamed if turn % 2 else whole
        text = ask(api.client(session), messages)[0]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    [sequence] = checked(session, tiny_engine)
    assert sequence.mask.sum() == session.sampled_tokens > 4
    again = api.session(seed=4)
    answer(api.client(again))
    first = again.sequences()[0]
    np.testing.assert_array_equal(first.tokens, sequence.tokens[: len(first.tokens)])  # the seed is the session's


def test_a_conversation_that_fills_the_context_is_refused(api):
    """With the words by which agents know that they must shorten their history."""
    ask, more = [{"role": "user", "content": "2 " * 80}], {"role": "user", "content": "And then?"}
    body = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}

    def second(first_tokens):
        client = api.client(api.session())
        message = answer(client, ask, max_tokens=first_tokens, **body).choices[0].message
        return answer(client, [*ask, message, more], max_tokens=5, **body)

    others = len(second(1).prompt_token_ids) - 1
    assert second(255 - others).usage.completion_tokens == 1
    for tokens in (256 - others, 258 - others):
        status, error = refused(second, tokens)
        assert status == 400 and "maximum context length is 256 tokens" in error["message"]


def test_raw_completions_continue_token_ids(api, tiny_engine):
    session = api.session()
    client = api.client(session)
    args = {"model": "policy", "max_tokens": 5, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    first = client.completions.create(prompt=[5, 6, 7], **args).choices[0]
    client.completions.create(prompt=[5, 6, 7, *first.token_ids, 8], **args)
    [sequence] = checked(session, tiny_engine)
    assert sequence.mask.tolist() == [True] * 5 + [False] + [True] * 5


def test_random_conversations_agree_with_the_trainer(talking, tiny_folder):
    """Tools, streams, cut and rewritten answers, branches; many at once."""
    sessions = converse_all(talking, 30)
    differences = gaps(sessions, str(tiny_folder))
    assert np.abs(differences).max() <= 1e-5
    assert len(differences) == sum(session.sampled_tokens for session in sessions)
    assert sum(len(session.sequences()) for session in sessions) > len(sessions)  # some branched
    longest = max(len(one.answers) for session in sessions for one in session.sequences())
    assert longest > 2  # and many continued


def test_training_answers_are_sampled_as_the_run_says(api, tiny_engine):
    session = api.session(pinned={"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0})
    answer(api.client(session), temperature=0.1, top_p=0.2, presence_penalty=2.0, seed=9)
    free = api.session()
    answer(api.client(free), temperature=1.0, seed=9)
    assert checked(session, tiny_engine)[0].tokens.tolist() == free.sequences()[0].tokens.tolist()


class Debate(ConversationWorkflow):
    """Each rollout asks the policy the same in two sessions and in two trajectories of its own."""

    async def rollout(self, run):
        rows = []
        for _ in range(2):
            with self.model.session(run) as session:
                client = session.openai_async_client
                await client.chat.completions.create(model="policy", messages=ASK, max_tokens=12)
            rows += session.experiences(0.0, run=run)
            trajectory = self.trajectory(run)
            await trajectory.act(max_tokens=12)
            rows.append(trajectory.experience(0.0, run=run))
        return rows


def test_conversations_of_a_rollout_draw_noise_of_their_own(api):
    task = Task(0, {}, "set", f"{__name__}.Debate", 2, group="g", format=FormatConfig(prompt_type="messages"))
    task = replace(task, raw={"messages": ASK})

    async def main():
        encoder = ChatEncoder(api.tokenizer)
        limits = Limits(256, None, 12, Sampling(12, stop_token_ids=(api.tokenizer.eos_token_id,)))
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        models = ApiModels(api.server, "policy", sampling, api.pool)
        workflow_loop = WorkflowLoop()
        model = EngineModel(api.pool, encoder, limits, outside=workflow_loop.outside)
        runner = TaskRunner(model, RewardPool(1), 1, 60.0, api=models, workflow_loop=workflow_loop)

        async def ask():
            [outcome] = await runner.run([task])
            assert outcome.error is None, outcome.error
            return [one.tokens[one.prompt_length :].tolist() for one in outcome.experiences]

        return await ask(), await ask()

    first, again = asyncio.run_coroutine_threadsafe(main(), api.loop).result(120)
    assert len(first) == 8 and len({tuple(tokens) for tokens in first}) == 8
    assert again == first  # a run that resumes gets the same


def test_fixed_agent_seed_does_not_make_rollouts_equal(api):
    """Many agents set `seed=42`; equal requests within a session get equal answers."""

    def said(seed):
        client = api.client(api.session(seed=seed))
        return [answer(client, seed=42).choices[0].message.content for _ in range(2)]

    (first, second), (other, _) = said(1), said(2)
    assert first == second != other and said(1)[0] == first


def test_defaults_apply_to_requests_that_say_nothing(api):
    greedy = api.session(defaults={"temperature": 0.0})
    assert len({answer(api.client(greedy)).choices[0].message.content for _ in range(3)}) == 1
    null = {"temperature": None}
    assert len({answer(api.client(greedy), extra_body=null).choices[0].message.content for _ in range(3)}) == 1


def test_an_auxiliary_model_answers_and_is_not_recorded(tiny_engine, tiny_folder):
    with serving(tiny_folder, tiny_engine, judge=True) as api:
        session = api.session()
        client = api.client(session)
        assert [model.id for model in client.models.list()] == ["policy", str(tiny_folder), "judge"]
        completion = answer(client, seed=3)
        judged = client.chat.completions.create(
            model="judge", messages=[*ASK, completion.choices[0].message], max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert judged.model == "judge" and judged.usage.completion_tokens == 5
        [sequence] = checked(session, tiny_engine)
        assert sequence.mask.sum() == session.sampled_tokens == completion.usage.completion_tokens


@pytest.mark.parametrize(
    ("choice", "schema"), [(FORCED[0], {}), (FORCED[1], {"parameters": {}}), (FORCED[1], {"parameters": None})]
)
def test_a_forced_call_without_parameters_has_an_object(calling, choice, schema):
    tools = [{"type": "function", "function": {"name": "count", **schema}}]
    choices = answer(calling.client(), n=8, tools=tools, tool_choice=choice, max_tokens=150, seed=0).choices
    calls = [call.function.arguments for one in choices for call in one.message.tool_calls or ()]
    assert calls and all(isinstance(json.loads(arguments), dict) for arguments in calls)
