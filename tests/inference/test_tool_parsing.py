"""Tool calls in answers, read by vLLM's parsers."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from raising import raising
from rollout.fakes import FakeEngine
from workflows.workflow_helpers import make_task

from trinity_core.base.errors import TrinityError
from trinity_core.config import RolloutModelConfig
from trinity_core.config.rules.explorer import TOOL_CALL_PARSERS
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.rollout.inference.engine_model import EngineModel, Limits
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import SampleBatch, Sampling
from trinity_core.rollout.inference.tool_parsing import ToolCallReader, parser_of
from trinity_core.rollout.openai_api.vllm_handlers import add_delta, session_parser
from trinity_core.workflows import TOOLS as NAMED
from trinity_core.workflows import Completion, RewardPool, run_workflow
from trinity_core.workflows.tools import Toolbox


def add(a: int, b: int) -> int:
    """The sum of two integers."""
    return a + b


TOOLS = Toolbox(add).schemas
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def read(tokenizer, text: str, parser: str = "hermes", reasoning: str | None = None, **template_args: bool):
    model = RolloutModelConfig(tool_call_parser=parser, reasoning_parser=reasoning)
    reader = ToolCallReader.of(model, tokenizer, "m", template_args)
    tokens = np.array([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], np.int32)
    answer = Completion(np.array([1]), tokens, np.zeros(len(tokens), np.float32), 0, text)
    return reader.message(answer, TOOLS)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'),
        ("pythonic", "[add(a=2, b=3)]"),
        ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
         "</function>\n</tool_call>"),
    ],
)  # fmt: skip
def test_calls_are_read_and_answered(tokenizer, parser, text):
    message = read(tokenizer, text, parser)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}} and call["id"]
    [answer] = asyncio.run(Toolbox(add).answers(message))
    assert answer["content"] == "5" and answer["tool_call_id"] == call["id"]


def test_two_calls_after_a_thought(tokenizer):
    one = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": 3}}</tool_call>'
    message = read(tokenizer, f"<think>hm</think>So {one % 1}{one % 2}", reasoning="deepseek_r1")
    assert message["content"] == "So " and message["reasoning_content"] == "hm"
    assert [call["function"]["arguments"]["a"] for call in message["tool_calls"]] == [1, 2]


def test_answers_of_a_policy_that_does_not_think_are_no_thoughts(tokenizer):
    message = read(tokenizer, "It is 5.", reasoning="qwen3", enable_thinking=False)
    assert message == {"role": "assistant", "content": "It is 5."}
    message = read(tokenizer, f"So {CALL}", reasoning="qwen3", enable_thinking=False)
    assert message["tool_calls"] and "reasoning_content" not in message
    assert read(tokenizer, "hm</think>5", reasoning="qwen3", enable_thinking=True)["reasoning_content"] == "hm"


@pytest.mark.parametrize("text", ["It is 5.", '<tool_call>{"name": "add"</tool_call>', "<tool_call>", "<tool_call>7"])
def test_what_cannot_be_read_is_text(tokenizer, text):
    message = read(tokenizer, text)
    assert "tool_calls" not in message and message["content"] == text


XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
BROKEN = XML.replace("3\n</parameter>", "3")


@pytest.mark.parametrize("parser", ["qwen3_coder", "qwen3_xml"])
@pytest.mark.parametrize(
    "text",
    [
        XML.replace("3\n</parameter>", "3"),
        XML.replace("</function>\n", ""),
        XML.replace("<function=add>", "<function=add"),
        XML[: XML.index("3\n</")],
        XML[: XML.index("<parameter=a>")],
        XML + XML[: XML.index("3\n</")],
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    ],
)
def test_a_malformed_xml_call_is_text(tokenizer, parser, text):
    """Neither executed with the parameters that could be read, nor lost."""
    message = read(tokenizer, text, parser)
    assert "tool_calls" not in message and message["content"] == text


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("So:\n" + XML, 1, "So:"),
        (XML + "\n" + XML, 2, ""),
        (BROKEN, 0, BROKEN),
        (XML[: XML.index("3\n</")], 0, XML[: XML.index("3\n</")]),
        (XML + "\n" + BROKEN, 1, BROKEN),
    ],
)
def test_a_stream_holds_no_part_of_a_malformed_call(tokenizer, size, text, calls, content):
    """Whatever the sizes of its deltas; calls before it have been sent."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    kind = session_parser(ParserManager.get_parser("qwen3_coder", None, True, "m", tokenizer=tokenizer))
    request = ChatCompletionRequest.model_validate({"messages": [], "tools": TOOLS, "tool_choice": "auto"})
    parser, message = kind(get_cached_tokenizer(tokenizer), request.tools), {"role": "assistant"}
    tokens = tokenizer.encode(text, add_special_tokens=False)
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    for number, part in enumerate(parts, 1):
        delta = parser.parse_delta(tokenizer.decode(part), part, request, [5], finished=number == len(parts))
        if delta is not None:
            add_delta(message, delta.model_dump())
    made = message.get("tool_calls", [])
    if calls and text.endswith(BROKEN) and size == 1000:  # nothing has been sent before
        calls, content = 0, text
    assert [json.loads(call["function"]["arguments"]) for call in made] == [{"a": 2, "b": 3}] * calls
    assert (message.get("content") or "").strip().endswith(content.strip())


@pytest.mark.parametrize(
    "text", [XML + XML, "So:\n" + XML, XML.replace("<tool_call>\n", ""), XML[: XML.index("\n</tool")]]
)
def test_a_whole_xml_call_is_read_wherever_it_stands(tokenizer, text):
    calls = read(tokenizer, text, "qwen3_xml")["tool_calls"]
    expected = {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert [call["function"] for call in calls] == [expected] * text.count("<function=")


@pytest.mark.parametrize(
    ("written", "parser"),
    [
        ('<tool_call>{"name": ', "hermes"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<seed:tool_call>\n<function=", "seed_oss"),
    ],
)
def test_a_template_tells_its_parser(tokenizer, written, parser):
    assert parser_of(ChatEncoder(tokenizer, "{% if tools %}" + written + "{% endif %}")) == parser
    assert parser in TOOL_CALL_PARSERS


@pytest.mark.parametrize("template", ["{{ messages }}", "<tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key>"])
def test_a_template_without_calls_or_of_several_parsers_tells_none(tokenizer, template):
    with raising(TrinityError, key="explorer.rollout_model.tool_call_parser"):
        parser_of(ChatEncoder(tokenizer, template))


def test_a_parser_that_the_tokenizer_does_not_fit_is_named(tokenizer):
    with raising(TrinityError, key="explorer.rollout_model.tool_call_parser"):
        read(tokenizer, "It is 5.", "jamba")


class Says(FakeEngine):
    """An engine with prepared texts."""

    def __init__(self, tokenizer, *texts: str) -> None:
        super().__init__()
        self.texts = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]

    async def generate(self, requests) -> SampleBatch:
        self.answer = self.texts[len(self.calls)]
        return await super().generate(requests)


def explored(engine, task, tokenizer, model_path, max_model_len: int, reader=None):
    """The experiences of a task with the model of a run's workflows, and its prompts."""

    async def main():
        pool = EnginePool([engine], str(model_path))
        await pool.start()
        limits = Limits(max_model_len, max_model_len - 16, 64, Sampling(64, stop_token_ids=(tokenizer.eos_token_id,)))
        model = EngineModel(pool, ChatEncoder(tokenizer), limits, reader=reader)
        rewards = RewardPool()
        try:
            return await run_workflow(task, model, rewards=rewards)
        finally:
            rewards.close()

    return asyncio.run(main())


def test_toolcall_workflow_calls_a_tool(tokenizer, tiny_folder, monkeypatch):
    monkeypatch.setitem(NAMED, "add", add)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    engine = Says(tokenizer, call, "#### 2")
    reader = ToolCallReader.of(RolloutModelConfig(tool_call_parser="hermes"), tokenizer, "m")
    task = make_task("toolcall_workflow", repeat_times=1, workflow_args={"tools": ["add"]})
    [one] = explored(engine, task, tokenizer, tiny_folder, 1024, reader)
    assert one.reward == 1.0 and one.metrics["tool_calls"] == 1 and one.metrics["tool_errors"] == 0
    sampled = one.tokens[one.prompt_length :][one.action_mask].tolist()
    assert sampled == [token for text in engine.texts for token in text]
    prompt = tokenizer.decode(one.tokens[: one.prompt_length])
    assert '"name": "add"' in prompt and "The sum of two integers." in prompt
    context = tokenizer.decode(one.tokens[one.prompt_length :][~one.action_mask])
    assert context == "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    assert engine.calls[1][0].prompt.tolist() == one.tokens[: -len(engine.texts[1])].tolist()


@pytest.mark.parametrize("workflow", ["multi_turn_workflow", "toolcall_workflow", "async_math_workflow"])
def test_workflows_run_on_an_engine(tiny_engine, tokenizer, tiny_folder, workflow, monkeypatch):
    monkeypatch.setitem(NAMED, "now", lambda: "noon")  # a short schema: the model has a context of 256 tokens
    args = {"multi_turn_workflow": {"step_wise": True, "discount": 0.5}, "toolcall_workflow": {"tools": ["now"]}}
    row = {"question": "Tom has 3 apples.", "answer": "#### 3"}
    task = make_task(workflow, raw=row, repeat_times=2, workflow_args=args.get(workflow, {}))
    reader = ToolCallReader.of(RolloutModelConfig(tool_call_parser="hermes"), tokenizer, "m")
    rows = explored(tiny_engine, task, tokenizer, tiny_folder, 256, reader)
    assert {row.run for row in rows} == {0, 1}
    assert all(np.isfinite(row.logprobs).all() and row.action_mask.any() for row in rows)


def test_a_parser_that_raises_leaves_text():
    from vllm.parser.abstract_parser import Parser

    class Broken(Parser):
        def __init__(self):
            pass

        def parse(self, *args, **named):
            raise KeyError("name")

        parse_delta = parse

    parser, call = session_parser(Broken)(), '<tool_call>{"name": "add"}</tool_call>'
    assert parser.parse(call, None) == (None, call, [])
    assert parser.parse_delta(call, [1], None, [2], finished=True).content == call
