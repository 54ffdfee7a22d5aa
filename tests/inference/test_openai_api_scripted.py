"""The OpenAI API on an engine that says what a test wants: tools, reasoning, lost engines, failing agents."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, field

import httpx
import numpy as np
import openai
import pytest
from inference.openai_server import serving
from rollout.fakes import FakeEngine

from trinity_core.data.task import Task
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.inference.openai_api.book import SessionBook
from trinity_core.inference.openai_api.journal import Journal
from trinity_core.inference.openai_api.live import SessionTerms
from trinity_core.inference.openai_api.model import ApiModels
from trinity_core.inference.requests import EngineLost, Sample, SampleBatch, WeightSource
from trinity_core.rollout.metrics import step_numbers
from trinity_core.rollout.runner import TaskRunner
from trinity_core.workflows import WORKFLOWS, AgentWorkflow, Reward, RewardPool, Workflow

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 3}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "strict": True,
        "parameters": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    },
}
ASK = [{"role": "user", "content": "2 + 3?"}]
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.content else '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes tool calls otherwise than the model does, and drops thoughts: a rendering is not what was sampled."""


@dataclass
class Speaker(FakeEngine):
    """Says its texts in turn; in the calls of `dies_in` it is lost after half of the text."""

    tokenizer: object = None
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    heard: list[list[int]] = field(default_factory=list)
    growing: dict[str, list[int]] = field(default_factory=dict)

    async def generate(self, requests) -> SampleBatch:
        self.calls.append(list(requests))
        return SampleBatch.pack(await asyncio.gather(*(self.say(request) for request in requests)))

    async def say(self, request) -> Sample:
        number = len(self.heard)
        self.heard.append(request.prompt.tolist())
        text = self.texts.pop(0)
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        sampled = self.growing[request.key] = []
        known = next((k for k in range(len(tokens), 0, -1) if request.prompt[-k:].tolist() == tokens[:k]), 0)
        for token in tokens[known:]:
            await asyncio.sleep(self.seconds)
            sampled.append(token)
            if number in self.dies_in and len(sampled) > len(tokens) // 2:
                self.texts.insert(0, text)
                raise EngineLost("it is gone")
        return self.sample(sampled)

    def sample(self, tokens) -> Sample:
        count = len(tokens)
        return Sample(
            np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.full(count, self.version, np.int32), "stop"
        )

    async def so_far(self, known):
        return {key: self.sample(self.growing[key][count:-1]) for key, count in known.items() if key in self.growing}

    async def successor(self, model_path: str) -> Speaker:
        return Speaker(tokenizer=self.tokenizer, texts=self.texts, heard=self.heard, seconds=self.seconds)


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """The small model with tokens for thoughts and tool calls, as reasoning models have them."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("thinking") / "model")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def speaker(folder):
    return Speaker(tokenizer=load_tokenizer(str(folder)))


@pytest.fixture(scope="module")
def api(speaker, folder):
    parsing = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1", "enable_auto_tool_choice": True}
    with serving(folder, speaker, max_model_len=1024, chat_template=TOOLS_TEMPLATE, **parsing) as served:
        yield served


def say(speaker, *texts, dies_in=(), seconds=0.0):
    speaker.texts[:], speaker.heard[:] = texts, []
    speaker.seconds, speaker.dies_in = seconds, dies_in


def ask(client, messages, **args):
    return client.chat.completions.create(model="policy", messages=messages, tools=[ADD], **args).choices[0].message


def stream(client, messages, **args):
    """A streamed answer as a message, put together as `openai` says."""
    message = {"role": "assistant", "content": ""}
    for chunk in client.chat.completions.create(model="policy", messages=messages, tools=[ADD], stream=True, **args):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                if part.id:
                    calls.append({"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}})
                function = calls[-1]["function"]
                function["name"] += part.function.name or ""
                function["arguments"] += part.function.arguments or ""
    return message


def texts_of(session, tokenizer):
    return [tokenizer.decode(sequence.tokens) for sequence in session.sequences()]


@pytest.mark.parametrize("ask", [ask, stream])
def test_a_tool_is_called_and_its_result_continues(api, speaker, ask):
    say(speaker, f"I add.</think>{CALL}", "So it is.</think>5")
    session = api.session()
    client = api.client(session)
    message = ask(client, ASK)
    given = message if isinstance(message, dict) else message.model_dump()
    [call] = given["tool_calls"]
    assert call["function"]["name"] == "add" and call["function"]["arguments"].replace(" ", "") == '{"x":2,"y":3}'
    ask(client, [*ASK, message, {"role": "tool", "tool_call_id": call["id"], "content": "5"}])
    [text] = texts_of(session, speaker.tokenizer)
    said = f"I add.</think>{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nSo it is.</think>5"
    assert text.endswith(f"{said}<|im_end|>")
    assert speaker.heard[1][: len(speaker.heard[0])] == speaker.heard[0]


@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents_work_unchanged(api, speaker, streams):
    import agents

    agents.set_tracing_disabled(True)
    added = []

    @agents.function_tool
    def add(x: int, y: int) -> str:
        """Adds."""
        added.append((x, y))
        return str(x + y)

    say(speaker, f"I add.</think>{CALL}", "So it is.</think>It is 5.")
    session = api.session()

    async def main():
        client = openai.AsyncOpenAI(base_url=api.server.base_url(session), api_key=api.server.key)
        model = agents.OpenAIChatCompletionsModel("policy", client)
        agent = agents.Agent("adder", instructions="Add.", tools=[add], model=model)
        if not streams:
            return await agents.Runner.run(agent, "2 + 3?")
        result = agents.Runner.run_streamed(agent, "2 + 3?")
        async for _ in result.stream_events():
            pass
        return result

    assert asyncio.run(main()).final_output == "It is 5." and added == [(2, 3)]
    [text] = texts_of(session, speaker.tokenizer)
    assert f"I add.</think>{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in text and "It is 5.<|im_end|>" in text


def test_reasoning_stays_in_the_recorded_tokens(api, speaker):
    say(speaker, "Two, three, five.</think>5", "Yes.</think>sure")
    session = api.session()
    client = api.client(session)
    message = client.chat.completions.create(model="policy", messages=ASK).choices[0].message
    assert (message.content, message.reasoning) == ("5", "Two, three, five.")
    again = [*ASK, {"role": "assistant", "content": "5"}, {"role": "user", "content": "sure?"}]
    client.chat.completions.create(model="policy", messages=again)
    [text] = texts_of(session, speaker.tokenizer)
    assert "Two, three, five.</think>5<|im_end|>\n<|im_start|>user\nsure?" in text


def test_requests_are_logged_where_that_is_wanted(speaker, folder, caplog):
    say(speaker, "four", "five")
    with caplog.at_level("INFO", "trinity_core"), serving(folder, speaker, log_requests=True) as api:
        answer = {"messages": ASK, "model": "policy", "temperature": 0.5}
        api.client().chat.completions.create(**answer)
        api.client().completions.create(model="policy", prompt="two and two")
    chat, completion = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    assert "user\\n2 + 3?" in chat and "temperature=0.5" in chat
    count = len(speaker.tokenizer.encode("two and two"))
    assert f": {count} tokens, 'two and two', " in completion


def test_an_engine_lost_in_mid_stream_is_not_noticed(api, speaker):
    say(speaker, "hm</think>one two three four five six", seconds=0.02, dies_in=(0,))
    session, before = api.session(), api.pool.restarts
    message = stream(api.client(session), ASK)
    assert message["content"] == "one two three four five six"
    assert api.pool.restarts == before + 1
    [sequence] = session.sequences()
    assert speaker.tokenizer.decode(sequence.tokens[sequence.prompt_length :]).endswith("four five six<|im_end|>")


def test_a_parser_that_the_model_cannot_serve_is_refused(speaker, tiny_folder):
    with (
        pytest.raises(TrinityError, match="cannot be served as configured"),
        serving(tiny_folder, speaker, reasoning_parser="deepseek_r1"),
    ):
        pass


# ---- agents as workflows ----


class Crashing(AgentWorkflow):
    """Asks three times; at the first attempt it crashes in its third turn."""

    attempts = 0

    async def rollout(self, session, run):
        messages, attempt = list(ASK), Crashing.attempts
        Crashing.attempts += 1
        for turn in range(3):
            if turn == 2 and attempt == 0:
                raise RuntimeError("the agent crashed")
            answer = await session.openai_async_client.chat.completions.create(
                model=session.model_name, messages=messages
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
        return Reward({"accuracy": 1.0})


class Plain(Workflow):
    """A synchronous agent on the workflow's own session."""

    def run(self):
        client = self.model.openai_client
        client.chat.completions.create(model=self.model.model_name, messages=ASK)
        experiences = self.model.extract_experience_from_history()
        for one in experiences:
            one.reward = 0.5
        return experiences


class TooLong(AgentWorkflow):
    """Its first rollout never gets an answer, which it counts as wrong."""

    def rollout(self, session, run):
        question = "word " * 2000 if run == 0 else "?"
        try:
            session.openai_client.chat.completions.create(
                model=session.model_name, messages=[{"role": "user", "content": question}]
            )
        except openai.BadRequestError:
            return 0.0
        return 1.0


class Quiet(AgentWorkflow):
    """A plain `rollout`, which cannot be judged."""

    def rollout(self, session, run):
        session.openai_client.chat.completions.create(model=session.model_name, messages=ASK)


def run(api, monkeypatch, workflow, **args):
    monkeypatch.setitem(WORKFLOWS, "agent", workflow)
    task = Task(0, {}, "set", "agent", group="g", **args)

    class Model:
        tokenizer = api.tokenizer

    async def main():
        models = ApiModels(api.server, "policy", {"temperature": 1.0, "top_p": 1.0, "top_k": 0}, api.pool)
        runner = TaskRunner(Model(), RewardPool(1), 4, 60.0, 1, api=models)
        return await runner.run([task])

    [outcome] = asyncio.run(main())
    return outcome


def test_an_agent_that_crashes_is_tried_again(api, speaker, monkeypatch):
    Crashing.attempts = 0
    say(speaker, *(f"hm</think>answer {i}" for i in range(5)))
    outcome = run(api, monkeypatch, Crashing)
    assert outcome.error is None and outcome.retries == 1
    [one] = outcome.experiences
    text = speaker.tokenizer.decode(one.tokens)
    assert [f"answer {i}<" in text for i in range(5)] == [False, False, True, True, True]
    assert one.reward == 1.0 and one.metrics["accuracy"] == 1.0
    numbers = step_numbers([outcome])
    assert numbers["sessions"] == 2
    assert numbers["sessions/tokens"] - numbers["sessions/discarded_tokens"] == one.action_mask.sum()
    assert numbers["sessions/discarded_tokens"] > 0


def test_a_plain_run_uses_the_workflows_own_session(api, speaker, monkeypatch):
    say(speaker, "hm</think>yes")
    outcome = run(api, monkeypatch, Plain)
    [one] = outcome.experiences
    assert one.reward == 0.5 and one.action_mask.all() and one.info["response"].endswith("yes<|im_end|>")


def test_a_rollout_without_an_answer_counts_in_its_group(api, speaker, monkeypatch):
    say(speaker, "hm</think>yes")
    outcome = run(api, monkeypatch, TooLong, repeat_times=2)
    first, second = outcome.experiences
    assert (first.run, first.reward, first.action_mask.any(), first.truncated) == (0, 0.0, False, True)
    assert (second.run, second.reward, second.action_mask.all()) == (1, 1.0, True)
    assert not first.is_unscored and step_numbers([outcome])["reward/mean"] == 0.5


def test_clients_of_a_session_ask_no_proxy(api, speaker, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    say(speaker, "hm</think>yes")
    [one] = run(api, monkeypatch, Plain).experiences
    assert one.action_mask.all()


def test_rollouts_without_a_verdict_carry_no_loss(api, speaker, monkeypatch):
    say(speaker, "hm</think>yes", "hm</think>no")
    outcome = run(api, monkeypatch, Quiet, repeat_times=2)
    assert outcome.error is None
    assert [one.run for one in outcome.experiences] == [0, 1]
    assert all(one.is_unscored for one in outcome.experiences)


def test_lost_engines_are_a_fault_of_the_run(speaker, folder, monkeypatch):
    """And not of the agent, which gets status 500."""

    class Lost(FakeEngine):
        async def generate(self, requests):
            raise EngineLost("it is gone")

        async def successor(self, model_path):
            return Lost()

    with serving(folder, Lost()) as api, pytest.raises(TransientFault, match="engines were lost 4 times"):
        run(api, monkeypatch, Quiet)


def test_sessions_end_with_their_workflow(api, speaker, monkeypatch):
    kept = []

    class Keeping(AgentWorkflow):
        async def rollout(self, session, run):
            kept.append(session)
            raise RuntimeError("at once")

    outcome = run(api, monkeypatch, Keeping)
    assert outcome.failed and len(kept) == 2
    for session in kept:
        with pytest.raises(openai.APIStatusError) as caught:
            session.openai_client.chat.completions.create(model="policy", messages=ASK)
        assert caught.value.status_code == 410


# ---- mode serve ----


@pytest.fixture
def serve(folder, speaker, tmp_path):
    """Starts a server whose clients open their own sessions, again and again on the same journal."""

    def start():
        book = SessionBook(Journal(tmp_path / "journal"), SessionTerms(), 60.0)
        return serving(folder, speaker, max_model_len=1024, server={"book": book, "key": "sk-kept"})

    return start


def post(api, path, value):
    address = api.server.base_url().removesuffix("/v1") + path
    return httpx.post(address, json=value, headers={"Authorization": f"Bearer {api.server.key}"}, timeout=30)


def chat(base_url, messages):
    client = openai.OpenAI(base_url=base_url, api_key="sk-kept", max_retries=0)
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message


def test_a_conversation_goes_on_after_a_restart(serve, speaker):
    say(speaker, "one", "two")
    with serve() as api:
        opened = post(api, "/sessions", {}).json()
        first = chat(opened["base_url"], ASK)
    with serve() as api:
        base_url = f"{api.server.base_url().removesuffix('/v1')}/sessions/{opened['session_id']}/v1"
        chat(base_url, [*ASK, first, {"role": "user", "content": "and?"}])
        assert post(api, "/feedback", {"session_id": opened["session_id"], "reward": 1.0}).status_code == 200
        [group] = api.server.book.take(8, 99)
    [sequence] = group.sessions[0].session.sequences()
    text = speaker.tokenizer.decode(sequence.tokens)
    assert "one<|im_end|>\n<|im_start|>user\nand?" in text and text.endswith("two<|im_end|>")
    assert len(sequence.answers) == 2


def test_weights_change_in_mid_stream(serve, speaker):
    say(speaker, "one two three four five six seven", seconds=0.05)
    with serve() as api:
        opened = post(api, "/sessions", {"task": "count"}).json()
        client = openai.OpenAI(base_url=opened["base_url"], api_key="sk-kept", max_retries=0)
        said, loading = "", None
        for chunk in client.chat.completions.create(model="policy", messages=ASK, stream=True):
            said += chunk.choices[0].delta.content or ""
            if said and loading is None:
                work = api.pool.load(WeightSource("folder", "somewhere"), 7)
                loading = asyncio.run_coroutine_threadsafe(work, api.loop)
        assert loading.result(30).version == 7 and said == "one two three four five six seven"
        assert post(api, "/feedback", {"session_id": opened["session_id"], "reward": 1}).json()["sampled_tokens"] > 6


def test_plain_clients_find_their_session_in_a_header(serve, speaker):
    say(speaker, "one")
    with serve() as api:
        raw = api.client().chat.completions.with_raw_response.create(model="policy", messages=ASK)
        name = raw.headers["x-trinity-session"]
        with pytest.raises(openai.NotFoundError):
            api.client().chat.completions.create(model="nobody", messages=ASK)
        assert raw.parse().choices[0].message.content == "one"
        deadline = time.monotonic() + 20
        while api.server.book.counts != (1, 0, 0):  # a session in which nothing was said goes after its answer
            assert time.monotonic() < deadline, api.server.book.counts
            time.sleep(0.01)
        assert post(api, "/feedback", {"session_id": name, "reward": -1}).status_code == 200
