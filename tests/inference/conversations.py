"""Random conversations of agents through the OpenAI API, and the trainer's log-probs of their recordings."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
from inference.openai_server import Api

from trinity_core.rollout.openai_api.recorded_session import RecordedSession

ASK = [{"role": "user", "content": "Mia has 2 apples and buys 3. How many has she?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"said": {"type": "string"}}}},
}
FULL = ("maximum context length", "max_tokens must be at least 1, got 0")
"""The second is vLLM's message if a prompt that it rendered itself fills the context exactly."""


def every_answer_is_a_call() -> str:
    """The name of a tool parser with which every answer of an untrained model is a tool call."""
    from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
    from vllm.tool_parsers import ToolParser, ToolParserManager

    class EveryAnswerIsACall(ToolParser):
        def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
            function = FunctionCall(name="add", arguments=json.dumps({"said": model_output}))
            return ExtractedToolCallInformation(tools_called=True, tool_calls=[ToolCall(function=function)])

    ToolParserManager.register_module(name := EveryAnswerIsACall.__name__, module=EveryAnswerIsACall)
    return name


def streamed(client: openai.OpenAI, messages: Sequence[Any], **args: Any) -> dict[str, Any]:
    chunks = client.chat.completions.create(model="policy", messages=list(messages), stream=True, **args)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return {"role": "assistant", "content": text}


def whole(client: openai.OpenAI, messages: Sequence[Any], **args: Any) -> dict[str, Any]:
    completion = client.chat.completions.create(model="policy", messages=list(messages), **args)
    return completion.choices[0].message.model_dump(exclude_none=True)


def converse(api: Api, number: int) -> RecordedSession:
    """One conversation: some turns; tools, streams, cut and rewritten answers, branches, forgotten beginnings."""
    chance, session = random.Random(number), api.session(seed=number)
    client, with_tools = api.client(session), chance.random() < 0.5
    histories: list[list[Any]] = [list(ASK)]
    for _ in range(chance.randint(2, 5)):
        messages = list(chance.choice(histories))
        args: dict[str, Any] = {"max_tokens": chance.randint(1, 9)}
        calls = with_tools and chance.random() < 0.7
        if with_tools:
            args |= {"tools": [ADD], "tool_choice": "auto" if calls else "none"}
        try:
            message = (streamed if not calls and chance.random() < 0.4 else whole)(client, messages, **args)
        except openai.BadRequestError as error:
            assert any(words in str(error) for words in FULL), error
            break
        if message.get("content") and chance.random() < 0.2:
            message["content"] = message["content"][: len(message["content"]) // 2]  # the client cuts the answer
        history = [*messages, message, *(results_of(message, chance) or [{"role": "user", "content": "go on"}])]
        histories.append(history[2:] if len(history) > 4 and chance.random() < 0.1 else history)
    return session


def results_of(message: dict[str, Any], chance: random.Random) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": str(chance.random())}
        for call in message.get("tool_calls", ())
    ]


def converse_all(api: Api, count: int, at_once: int = 8) -> list[RecordedSession]:
    """The sessions of `count` conversations."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda number: converse(api, number), range(count)))


def gaps(sessions: Sequence[RecordedSession], model: str) -> np.ndarray:
    """float32 [tokens]: recorded minus the trainer's log-prob of each sampled token, both in float32. Uses the
    trainer's batching, packing and forward, without DeepSpeed around the module."""
    import torch

    from trinity_core.training.batch import make_batch
    from trinity_core.training.distributed import Ranks
    from trinity_core.training.policy import Policy, find_fast_paths, load_causal_lm
    from trinity_core.training.update import MicroBatchLimits, forward_batch, micro_batches

    rows = [sequence.experience(reward=0.0) for session in sessions for sequence in session.sequences()]
    lm = load_causal_lm(model, torch.float32)
    paths = find_fast_paths(lm)
    policy, ranks = Policy(lm, paths), Ranks(0, 1, torch.device("cpu"))
    batch = make_batch(rows, ranks.device)
    micros = micro_batches(batch, MicroBatchLimits(8192, packing=paths.packing), ranks)
    with torch.no_grad():
        logprobs = forward_batch(batch, micros, lambda micro: policy(micro, 1.0, False)[0], ranks)
    assert batch.rollout_logprobs is not None
    return (batch.rollout_logprobs - logprobs)[batch.mask].numpy()
