"""Agents that nobody here wrote, an auxiliary model and a lost engine: the OpenAI API on a real engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import agents
import openai
import pytest
import torch
from inference.openai_server import serving
from inference.test_openai_api import ASK, answer, checked
from inference.test_openai_api_scripted import Speaker, say
from transformers import AutoModelForCausalLM

from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.inference.requests import EngineLost, WeightSource

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 3}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes calls otherwise than the model does: what continues must be what was sampled."""
PARSING = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "chat_template": TEMPLATE}


def adds(api, session):
    """What an agent of openai-agents says in the end, and what it added."""
    agents.set_tracing_disabled(True)
    added = []

    @agents.function_tool
    def add(x: int, y: int) -> str:
        """Adds."""
        added.append((x, y))
        return str(x + y)

    async def main():
        client = openai.AsyncOpenAI(base_url=api.server.base_url(session), api_key=api.server.key, max_retries=0)
        model = agents.OpenAIChatCompletionsModel("policy", client)
        agent = agents.Agent("adder", instructions="Add.", tools=[add], model=model)
        return (await agents.Runner.run(agent, "2 + 3?")).final_output

    return asyncio.run(main()), added


def learn(folder: Path, sequence, target: Path) -> None:
    """Train the model of `folder` on the masked tokens of one sequence until it knows them by heart."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(sequence.tokens, dtype=torch.long)[None]
    mask = torch.zeros(tokens.shape[1], dtype=torch.bool)
    mask[sequence.prompt_length :] = torch.tensor(sequence.mask)
    labels = tokens.masked_fill(~mask, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    for _ in range(200):
        loss = model(input_ids=tokens, labels=labels).loss
        if loss.item() < 1e-4:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(target)
    load_tokenizer(str(folder)).save_pretrained(target)


@pytest.fixture
def adder(tiny_engine, tiny_folder, tmp_path):
    """The engine with weights that know what an agent's model should say; its own come back afterwards."""
    speaker = Speaker(tokenizer=load_tokenizer(str(tiny_folder)))
    say(speaker, CALL, "It is 5.")
    with serving(tiny_folder, speaker, **PARSING) as scripted:
        session = scripted.session()
        assert adds(scripted, session) == ("It is 5.", [(2, 3)])
    [lesson] = session.sequences()
    learn(tiny_folder, lesson, tmp_path)
    asyncio.run(tiny_engine.load(WeightSource("folder", str(tmp_path)), 0))
    yield tiny_engine
    asyncio.run(tiny_engine.load(WeightSource("folder", str(tiny_folder)), 0))


def test_openai_agents_call_a_tool_that_the_model_asks_for(adder, tiny_folder):
    with serving(tiny_folder, adder, **PARSING) as api:
        session = api.session(seed=1)
        assert adds(api, session) == ("It is 5.", [(2, 3)])
        [sequence] = checked(session, adder)
    text = api.tokenizer.decode(sequence.tokens)
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in text and text.endswith("It is 5.<|im_end|>")
    assert sequence.mask.sum() == session.sampled_tokens


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


@dataclass
class Mortal:
    """An engine that is lost once, amid its second call, when it has sampled some tokens; its heir is not."""

    engine: object
    calls: int = 0
    losses: int = 1

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, requests):
        self.calls += 1
        if self.calls != 2 or not self.losses:
            return await self.engine.generate(requests)
        self.losses -= 1
        keys = [request.key for request in requests]
        answering = asyncio.ensure_future(self.engine.generate(requests))
        while not any(sample is not None and len(sample.tokens) > 3 for sample in await self._said(keys)):
            assert not answering.done(), "the answer came before the engine could be lost"
            await asyncio.sleep(0.001)
        await self.engine.abort(keys)
        await answering
        raise EngineLost("it is gone")

    async def _said(self, keys):
        return (await self.engine.so_far(dict.fromkeys(keys, 0))).values()

    async def successor(self, model_path):
        return Mortal(self.engine, losses=0)


def test_a_conversation_survives_the_loss_of_its_engine(tiny_engine, tiny_folder):
    mortal = Mortal(tiny_engine)
    with serving(tiny_folder, mortal) as api:
        lost, other = api.session(seed=1), api.session(seed=2)
        args = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
        messages = [*ASK, answer(api.client(lost), **args).choices[0].message, {"role": "user", "content": "And then?"}]
        answer(api.client(lost), messages, **args)
        answer(api.client(other))
        assert mortal.losses == 0 and api.pool.restarts == 1
        [sequence] = checked(lost, tiny_engine)
        assert sequence.mask.sum() == lost.sampled_tokens == 80
        assert len(checked(other, tiny_engine)) == 1
