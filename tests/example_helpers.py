"""What the pages of examples/ may use in their last part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trinity_core.base.plugins import load_plugins
from trinity_core.config import ConfigError
from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.run.configuration import load_checked
from trinity_core.workflows import Completion, RewardPool

RUN = """\
model: {model_path: model, max_prompt_tokens: 20, max_response_tokens: 20}
algorithm: {algorithm_type: grpo, repeat_times: 2}
buffer:
  train_batch_size: 4
  explorer_input: {taskset: {path: tasks}}
"""
PLUGINS = Path("plugins")
if PLUGINS.is_dir():
    load_plugins(PLUGINS)


def accepts(*overrides: str) -> bool:
    """True if a run with these settings passes every check, `trinity validate`'s included."""
    Path("run.yaml").write_text(RUN + (f"plugin_dir: {PLUGINS}\n" if PLUGINS.is_dir() else ""))
    load_checked("run.yaml", overrides)
    return True


def refuses(*overrides_and_text: str) -> bool:
    """True if a run with these settings is refused by a message that contains the last argument."""
    *overrides, text = overrides_and_text
    try:
        accepts(*overrides)
    except ConfigError as error:
        return text in str(error)
    return False


class Letters:
    """A tokenizer with one token a character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token) for token in tokens)


class Scripted:
    """A policy that gives prepared answers, by the seed of the request."""

    tokenizer = Letters()

    def __init__(self, answers: Mapping[int, str]) -> None:
        self._answers = answers

    def render(self, messages: Any, *_: Any, prompt: bool = True, **__: Any) -> str:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return text + ("assistant: " if prompt else "")

    def message(self, answer: Completion, *_: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": answer.text}

    async def chat(self, messages: Any, n: int = 1, tools: Any = None, **how: Any) -> list[Completion]:
        return await self.generate(self.tokenizer.encode(self.render(messages)), n, **how)

    async def generate(self, prompt_tokens: Any, n: int = 1, *, seeds: Any = None, **_: Any) -> list[Completion]:
        return [self._answer(prompt_tokens, self._answers[seed]) for seed in seeds]

    def _answer(self, prompt: Any, text: str) -> Completion:
        tokens = np.array(self.tokenizer.encode(text))
        return Completion(np.array(prompt), tokens, -np.ones(len(tokens)), version=0, text=text, finish_reason="stop")


def scripted(*rollouts: list[str], workflow: str, truth: str) -> tuple[Scripted, RewardPool, Task]:
    """A policy with prepared answers for each turn of each rollout, rewards, and the task."""
    task = Task(
        index=0,
        raw={"question": "?", "answer": truth},
        taskset="tasks",
        workflow=workflow,
        repeat_times=len(rollouts),
        format=FormatConfig(prompt_key="question", response_key="answer"),
        group="explorer/1/0",
    )
    answers = {
        task.rollout_seed(run, turn): text for run, texts in enumerate(rollouts) for turn, text in enumerate(texts)
    }
    return Scripted(answers), RewardPool(), task


def experiences(count: int) -> list[Experience]:
    """Rows as an explorer stores them."""
    mask = np.ones(2, dtype=np.bool_)
    return [
        Experience(
            tokens=np.arange(4), prompt_length=2, action_mask=mask, logprobs=-np.ones(2, np.float32), reward=1.0,
            group="g", run=run,
        )
        for run in range(count)
    ]  # fmt: skip
