"""Ends the run on a loss or gradient that is not finite, before the resulting weights are published or saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trinity_core.errors import InputError, TrinityError
from trinity_core.training.engine import TrainingEngine

ENLARGERS = (
    "the learning rate is too high for this model (algorithm.optimizer.lr, now {lr:g}); gradients are not clipped "
    "(trainer.grad_clip, now {clip:g}); the numbers outgrow {dtype} (trainer.dtype)"
)


@contextmanager
def step_in_error(step: int) -> Iterator[None]:
    """Add the train step to an InputError (a reward or value that is not finite)."""
    try:
        yield
    except InputError as error:
        raise InputError(f"train step {step}: {error}") from error


def check_finite(
    what: str,
    step: int,
    loss: float,
    norm: float,
    engine: TrainingEngine,
    lr: float,
    inputs: Mapping[str, Tensor | None],
) -> None:
    """Raise TrinityError if the loss of `what` ("policy", "critic"), or its gradient's norm, is not finite.

    The error names those of `inputs` (of the whole batch, the same on every rank) that were not finite before the
    update; if all were finite, the settings that most often cause overflow. A gradient that overflows under float16 is
    no error: the loss scale is lowered and the update skipped.
    """
    overflow = engine.settings.dtype == torch.float16
    if math.isfinite(loss) and (math.isfinite(norm) or overflow):
        return
    raise TrinityError(
        f"train step {step}: the loss of the {what} is {loss:g} and the norm of its gradient {norm:g}, so it cannot be "
        f"updated. {_causes(engine, lr, inputs)} The latest checkpoint is as it was before this step; a run with the "
        "cause removed resumes from there."
    )


def _causes(engine: TrainingEngine, lr: float, inputs: Mapping[str, Tensor | None]) -> str:
    """One sentence on the likely cause."""
    broken = [
        f"{name} ({int((~values.isfinite()).sum())} of {values.numel()} numbers)"
        for name, values in inputs.items()
        if values is not None and not bool(values.isfinite().all())
    ]
    if broken:
        return f"Not finite before the update: {', '.join(broken)}; look for the cause there."
    settings = engine.settings
    listed = ENLARGERS.format(lr=lr, clip=settings.grad_clip, dtype=str(settings.dtype).removeprefix("torch."))
    return f"All that went in was finite. Likely causes: {listed}."
