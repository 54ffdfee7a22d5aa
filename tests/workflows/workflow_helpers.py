"""A scripted policy and a task for it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from trinity_core.config.schema.buffer import FormatConfig, RolloutArgs
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.workflows import Completion, RewardPool, run_workflow


def completion(text: str, reason: Any = "stop") -> Completion:
    tokens = np.arange(len(text) + 1)
    return Completion(np.arange(3), tokens, -np.ones(len(tokens)), version=4, text=text, finish_reason=reason)


class Tokenizer:
    """One token a character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


class ScriptedModel:
    """A policy with prepared answers that records its calls."""

    tokenizer = Tokenizer()

    def __init__(self, *texts: str, reason: Any = "stop") -> None:
        self.texts, self.reason = texts, reason
        self.asked: list[tuple[Any, ...]] = []

    async def chat(self, messages, n=1, tools=None, **args):
        return self.chat_sync(messages, n, tools, **args)

    def chat_sync(self, messages, n=1, tools=None, **args):
        self.asked.append((messages, n, tools, args))
        return [completion(text, self.reason) for text in self.texts[:n]]

    async def generate(self, prompt_tokens, n=1, **args):
        return self.generate_sync(prompt_tokens, n, **args)

    def generate_sync(self, prompt_tokens, n=1, **args):
        self.asked.append((list(prompt_tokens), n, None, args))
        return [completion(text) for text in self.texts[:n]]


def make_task(workflow: str = "math_workflow", **fields: Any) -> Task:
    given: dict[str, Any] = {
        "index": 5,
        "raw": {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        "taskset": "t",
        "workflow": workflow,
        "repeat_times": 3,
        "rollout_args": RolloutArgs(temperature=0.7),
        "format": FormatConfig(prompt_key="question", response_key="answer"),
        "group": "explorer/1/0",
    }
    return Task(**(given | fields))


def run(task: Task, model: Any, rewards: Any = None, **args: Any) -> list[Experience]:
    return asyncio.run(run_workflow(task, model, rewards=rewards or RewardPool(), **args))
