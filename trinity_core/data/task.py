"""Task: one row of a task set with everything its workflow needs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_core.config.schema.buffer import FormatConfig, RolloutArgs
from trinity_core.data import formats

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "repetition_penalty", "structured_output", "max_tokens")


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, its number of rollouts, and their sampling and scoring."""

    index: int
    """Index among the rows of its task set."""
    raw: dict[str, Any]
    """The row as read."""
    taskset: str
    workflow: str
    """Registered name or dotted path of its workflow."""
    repeat_times: int = 1
    reward_fn: str | None = None
    """Registered name or dotted path of its reward function; None leaves it to the workflow."""
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    """Sampling arguments that differ from the model's settings."""
    format: FormatConfig = field(default_factory=FormatConfig)
    """Meaning of the columns."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    """The user's arguments for the workflow."""
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    """The user's arguments for the reward function."""
    is_eval: bool = False
    """True for evaluation, whose rollouts are not trained on."""
    seed: int = 0
    location: str = ""
    """File and line of the row, for messages."""
    group: str = ""
    """Unique in a run: the explorer, its step and the task's slot in the step. Its experiences carry it, or a group
    below it that the workflow set (`<group>/<name>`)."""
    repeat_of: str = ""
    """Group of the original task if its repeats were made separate tasks and this is one of them."""
    attempt: int = 0
    """Number of failed attempts before this one; each draws its own noise."""
    retried: tuple[int, ...] = ()
    """The rollouts of this attempt if others have succeeded; empty: all."""

    @property
    def runs(self) -> Sequence[int]:
        """The rollouts of this attempt."""
        return self.retried or range(self.repeat_times)

    @property
    def messages(self) -> list[formats.Message]:
        """The conversation that the policy continues."""
        return formats.prompt_messages(self.raw, self.format)

    @property
    def tools(self) -> list[formats.Tool] | None:
        """The tools of the row; None if it has none."""
        return formats.tools(self.raw, self.format)

    @property
    def truth(self) -> Any:
        """The reference answer; None if the row has none."""
        return formats.truth(self.raw, self.format)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling arguments set by the task set, of those in `SAMPLING_FIELDS`."""
        settings = {name: getattr(self.rollout_args, name) for name in SAMPLING_FIELDS}
        return {name: value for name, value in settings.items() if value is not None and value != {}}

    @property
    def temperature(self) -> float | None:
        """Temperature of its rollouts' log-probs, 1 for greedy ones. None if the model's settings apply."""
        temperature = self.rollout_args.temperature
        return temperature if temperature is None else temperature or 1.0

    def rollout_seed(self, run: int, turn: int = 0, conversation: str = "") -> int:
        """Return a seed in [0, 2^31) for one request, from the run's seed, the task, its group, the attempt, the repeat
        and the turn.

        `conversation` distinguishes conversations of one rollout: with equal seeds they draw equal noise, and a policy
        that debates with itself would give equal answers.
        """
        key = f"{self.seed}|{self.taskset}|{self.index}|{self.group}|{run}|{turn}|{conversation}".removesuffix("|")
        key += f"|attempt {self.attempt}" if self.attempt else ""
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1

    @property
    def environment_seed(self) -> int:
        """A seed in [0, 2^31) that all repeats of the task share."""
        return replace(self, group=self.repeat_of or self.group, attempt=0).rollout_seed(0)

    def rollout_seeds(self, turn: int = 0) -> list[int]:
        return [self.rollout_seed(run, turn) for run in range(self.repeat_times)]
