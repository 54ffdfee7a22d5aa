"""A person's verdicts on answers of an earlier run, as data for SFT or DPO.

The resulting rows are rollouts with the person's verdict as their reward, in a file that `storage_type: rollouts`
reads. Answers keep their sampled tokens; only answers written by the person are tokenised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.config import Config
from trinity_core.config.schema.buffer import ExperienceBufferConfig
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.experience import Experience
from trinity_core.data.tokenizer import policy_encoder
from trinity_core.exchange.store.archive import whole_line
from trinity_core.exchange.store.earlier_rollouts import EarlierRollout, find_rollouts
from trinity_core.exchange.tracking.rollouts import write_rows

Verdict = Literal["no verdict", "keep", "drop"]
BETTER, KEPT, DROPPED = 2.0, 1.0, 0.0
"""Rewards: what a person wrote is preferred to what was kept, and that to what was dropped."""
BUFFER = "buffer.trainer_input.experience_buffer"


@dataclass(frozen=True)
class ShownTask:
    """A task with the answers that a person is asked about."""

    prompt: str
    answers: Sequence[Experience]


@dataclass(frozen=True)
class TaskVerdict:
    """A person's verdict on one task."""

    answers: Sequence[Verdict]
    better: str = ""
    """An answer that the person wrote; "" for none."""


def verdicts_file(config: Config) -> Path:
    return config.job_dir / "human" / "verdicts.jsonl"


def asks_person(config: Config) -> bool:
    """True if the run needs verdicts that it does not have yet."""
    return config.buffer.trainer_input.experience_buffer.human_verdicts.enable and not verdicts_file(config).exists()


def with_verdicts(config: Config) -> Config:
    """Return the configuration that learns from a person's verdicts, if it uses any. Raises TrinityError if none were
    collected."""
    if not config.buffer.trainer_input.experience_buffer.human_verdicts.enable:
        return config
    if asks_person(config):
        raise TrinityError(
            f"{BUFFER}.human_verdicts asks a person, which only a flow can: use `trinity run` or a deployment",
            key=f"{BUFFER}.human_verdicts",
        )
    path = str(verdicts_file(config))
    values = {"path": path, "subset_name": None, "rollouts.min_reward": KEPT, "rollouts.min_gap": 0.0}
    return config.with_values({f"{BUFFER}.{name}": value for name, value in values.items()})


def shown_tasks(buffer: ExperienceBufferConfig) -> list[ShownTask]:
    """Return tasks whose answers differ, spread evenly over the earlier run. Raises DataError if there are none."""
    groups: dict[str, list[EarlierRollout]] = defaultdict(list)
    for rollout in find_rollouts(buffer.path or "", buffer.subset_name):
        if isinstance(rollout, EarlierRollout) and rollout.text:
            groups[rollout.experience.group].append(rollout)
    settings = buffer.human_verdicts
    able = [task for group in groups.values() if (task := _shown(group, settings.answers)) is not None]
    if not able:
        raise DataError(f"{buffer.path} has no task with two answers that differ, which a person could compare")
    places = np.unique(np.linspace(0, len(able) - 1, min(settings.tasks, len(able))).round().astype(int))
    return [able[index] for index in places]


def _shown(group: Sequence[EarlierRollout], count: int) -> ShownTask | None:
    """Return the best and the worst answer to one prompt, then others; None if there are fewer than two."""
    distinct: dict[str | None, Experience] = {}
    for row in group:
        if row.prompt == group[0].prompt:
            distinct.setdefault(row.text, row.experience)
    if len(distinct) < 2:
        return None
    ranked = sorted(distinct.values(), key=lambda experience: -(experience.total_reward or 0.0))
    shown = [ranked[0], ranked[-1], *ranked[1:-1]][:count]
    return ShownTask(str(shown[0].info.get("prompt", "")), shown)


def judged_rows(shown: Sequence[ShownTask], verdicts: Sequence[TaskVerdict], encoder: ChatEncoder) -> list[Experience]:
    """Return the answers with the person's verdict as their reward, without those that have none.

    If the person wrote an answer, an answer without a verdict counts as dropped.
    """
    rows: list[Experience] = []
    for task, verdict in zip(shown, verdicts, strict=True):
        without: Mapping[str, float] = {"no verdict": DROPPED} if verdict.better.strip() else {}
        rewards = {"keep": KEPT, "drop": DROPPED} | dict(without)
        for answer, choice in zip(task.answers, verdict.answers, strict=True):
            if choice in rewards:
                rows.append(replace(answer, reward=rewards[choice], token_rewards=None))
        if verdict.better.strip():
            rows.append(_written(verdict.better.strip(), task.answers, encoder))
    return rows


def _written(text: str, answers: Sequence[Experience], encoder: ChatEncoder) -> Experience:
    """Return a person's answer with the end token of the sampled answers; if all were truncated, with the
    template's."""
    first, tokenizer = answers[0], encoder.tokenizer
    sampled = [int(answer.tokens[-1]) for answer in answers if not answer.truncated and answer.sampled[-1]]
    [end, *_] = [*sampled, *encoder.turn_ends, tokenizer.eos_token_id]
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    record = {"response": tokenizer.decode(ids, skip_special_tokens=True), "written_by": "a person"}
    return Experience(
        tokens=np.concatenate([first.tokens[: first.prompt_length], ids]),
        prompt_length=first.prompt_length,
        action_mask=np.ones(len(ids), bool),
        reward=BETTER,
        group=first.group,
        run=max(answer.run for answer in answers) + 1,
        task_index=first.task_index,
        is_expert=True,
        info={name: first.info[name] for name in ("prompt", "truth") if name in first.info} | record,
    )


def keep_verdicts(config: Config, shown: Sequence[ShownTask], verdicts: Sequence[TaskVerdict]) -> int:
    """Write the rows that result from the verdicts, for `with_verdicts`; return their number.

    Nothing is written without a verdict.
    """
    rows = judged_rows(shown, verdicts, policy_encoder(config.model))
    if rows:
        lines = (whole_line(number, row) for number, row in enumerate(rows, 1))
        write_rows(verdicts_file(config), lines, durable=True)
    return len(rows)
