"""The Responses API: vLLM's, whose answers are recorded and continued like those of chat completions."""

from __future__ import annotations

import json

import openai
import pytest
from inference.test_openai_api_scripted import ADD, CALL, api, folder, say, speaker  # noqa: F401

FUNCTION = {"type": "function", **ADD["function"]}


def test_clients_of_the_responses_api_are_recorded(api, speaker):  # noqa: F811
    say(speaker, f"I add.</think>{CALL}", "So it is.</think>5", "Yes.</think>5")
    session = api.session()
    client = api.client(session)
    messages = [{"role": "user", "content": "2 + 3?"}]
    first = client.responses.create(model="policy", input=messages, tools=[FUNCTION])
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"x": 2, "y": 3} and first.usage.output_tokens > 0
    messages += [item.model_dump() for item in first.output]
    messages.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    with client.responses.stream(model="policy", input=messages, tools=[FUNCTION]) as stream:
        kinds = [event.type for event in stream]
        second = stream.get_final_response()
    assert (second.output_text, kinds[0], kinds[-1]) == ("5", "response.created", "response.completed")
    messages += [*(item.model_dump() for item in second.output), {"role": "user", "content": "sure?"}]
    client.responses.create(model="policy", input=messages, tools=[FUNCTION])
    [sequence] = session.sequences()
    assert len(sequence.answers) == 3 and sequence.mask.sum() == session.sampled_tokens


def test_responses_are_sampled_as_the_session_says(api, speaker):  # noqa: F811
    say(speaker, "Hm.</think>5")
    speaker.calls.clear()
    session = api.session(pinned={"temperature": 0.7, "top_p": 1.0, "bad_words": []}, seed=3, max_tokens=11)
    api.client(session).responses.create(model="policy", input="?", temperature=0.1, top_p=0.5)
    [[request]] = speaker.calls
    assert (request.params.temperature, request.params.top_p, request.sampling.max_tokens) == (0.7, 1.0, 11)
    assert request.seed is not None


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        ({"model": "other", "input": "?"}, 404, "model_not_found"),
        ({"model": "policy", "input": "?", "previous_response_id": "resp_1"}, 404, "not_found"),
        ({"model": "policy", "input": "?", "background": True}, 400, None),
        ({"model": "policy", "input": "?", "temperature": -1}, 400, None),
        ({"model": "policy", "input": "?", "temperature": "warm"}, 400, None),
        ({"model": "policy", "input": [{"role": "user"}, 3]}, 400, None),
    ],
)
def test_errors_are_those_of_the_api(api, wrong, status, code):  # noqa: F811
    with pytest.raises(openai.APIStatusError) as error:
        api.client(api.session()).responses.create(**wrong)
    assert (error.value.status_code, error.value.code) == (status, code)
