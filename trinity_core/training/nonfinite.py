"""A loss or gradient that is not finite ends the run, before the weights that came of it are published or saved."""

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
    """What the advantages cannot be made of (a reward or value that is not finite) is told with its train step."""
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
    """Raise TrinityError where the loss of `what`, or its gradient's norm, is not finite.

    The error names those of `inputs` (the whole batch's, alike on every rank) that were not finite before the update;
    where all were, the settings that most often make numbers grow. Under float16 a gradient may overflow: there the
    loss scale goes down and the update is left out, which is no error.
    """
    overflow = engine.settings.dtype == torch.float16
    if math.isfinite(loss) and (math.isfinite(norm) or overflow):
        return
    raise TrinityError(
        f"train step {step}: the loss of the {what} is {loss:g} and the norm of its gradient {norm:g}, so it cannot be "
        f"updated. {_causes(engine, lr, inputs)} The latest checkpoint is as it was before this step; a run with the "
        "cause removed goes on from there."
    )


def _causes(engine: TrainingEngine, lr: float, inputs: Mapping[str, Tensor | None]) -> str:
    """One sentence on where it came from."""
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
