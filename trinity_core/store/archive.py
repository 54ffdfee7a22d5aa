"""`buffer/experience_buffer.jsonl`: what was trained on, for people and scripts, after it has left the store.

A line is one experience of a batch that a checkpoint has made final. Lines are appended when a checkpoint is whole and
dropped again where a run goes back before it, so that the file is always the history of the weights beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trinity_core.data.experience import Experience
from trinity_core.files import clear_errors, sync_file, write_atomically


class Archive:
    """The file's one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = max((step for _, step in self._lines()), default=0)

    def extend(self, upto: int, batch: Callable[[int], Sequence[Experience]]) -> None:
        """Append the batches of the trainer steps that are not in the file yet, up to step `upto`."""
        if upto <= self._last:
            return
        with clear_errors("writing", self.path):
            with self.path.open("a", encoding="utf-8") as file:
                for step in range(self._last + 1, upto + 1):
                    file.writelines(json.dumps(as_line(step, each), ensure_ascii=False) + "\n" for each in batch(step))
            sync_file(self.path)
        self._last = upto

    def rewind(self, step: int) -> None:
        """Drop what lies after trainer step `step`, and a line that a crash cut short."""
        if not self.path.exists():
            return
        kept = b"".join(raw for raw, of in self._lines() if of <= step)
        if len(kept) != self.path.stat().st_size:
            write_atomically(self.path, kept)
        self._last = min(self._last, step)

    def _lines(self) -> list[tuple[bytes, int]]:
        """Whole lines, each with its trainer step."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines(keepends=True)
        return [(raw, int(json.loads(raw)["step"])) for raw in lines if raw.endswith(b"\n")]


def as_line(step: int, experience: Experience) -> dict[str, Any]:
    """An experience as JSON: the texts, what they earned, and where they came from. No tokens."""
    versions = experience.versions
    return {
        "step": step,
        "group": experience.group,
        "run": experience.run,
        "turn": experience.turn,
        "task_index": experience.task_index,
        "reward": experience.reward,
        "policy_version": None if versions is None else int(versions.max()),
        "prompt_tokens": experience.prompt_length,
        "response_tokens": len(experience.tokens) - experience.prompt_length,
        "truncated": experience.truncated,
        "is_expert": experience.is_expert,
        "metrics": experience.metrics,
        **experience.info,
    }
