"""The learning rate as a pure function of the step: linear warm-up, then constant, cosine or linear."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trinity_core.errors import TrinityError

STYLES = ("constant", "cosine", "linear")


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """`lr` is the peak. Cosine and linear decay to `min_lr_ratio * lr` at `total_steps` and stay there."""

    lr: float
    total_steps: int
    warmup_steps: int = 0
    style: str = "constant"
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise TrinityError(f"optimizer.warmup_style is '{self.style}'; choose one of {', '.join(STYLES)}")

    def at(self, step: int) -> float:
        """The rate of `step` (from 1). Warm-up is linear and reaches the peak at step `warmup_steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.style == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)


def warmup_steps(steps: int, ratio: float, total_steps: int) -> int:
    """`lr_warmup_steps` if positive, else `lr_warmup_steps_ratio` of all steps."""
    return steps if steps > 0 else int(ratio * total_steps)
