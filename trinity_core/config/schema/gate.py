"""The `gate` section: what a candidate must show before it becomes the champion."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from trinity_core.config.types import EMPTY, Count, Flag, Many, Named, Number, PositiveShare, Seconds, Section, Share


class GateConfig(Section):
    """Compares a candidate with the champion on the eval sets, as a stage in mode `bench` or by `trinity promote`."""

    enable: Flag = False
    """The stage is a gate for the previous stage's model."""
    champion: str | None = None
    """Model to beat: a checkpoint or a Hugging Face folder. By default the project's champion; before the first one,
    the model that training began with."""
    no_loss: Many[str] = ()
    """Eval sets that must not fall: each must show a difference above -`max_loss`. The gain is tested on all other
    sets together."""
    floors: Named[Annotated[Number, Ge(0), Lt(1)]] = EMPTY
    """Eval set → accuracy that the candidate must exceed there."""
    min_gain: PositiveShare = 0.05
    """Gain in accuracy that is found with probability 1 - `error_rate`, given enough tasks. Any gain above 0 suffices
    for a promotion, but smaller ones may be missed."""
    max_loss: PositiveShare = 0.05
    """Loss of accuracy that is tolerated on the sets of `no_loss`."""
    error_rate: Annotated[Number, Gt(0), Le(0.5)] = 0.05
    """Probability at which a candidate that is no better is promoted."""
    tasks_per_look: Count = 32
    """Tasks of each eval set that both models answer before the evidence is looked at again; those of the sets on which
    the gain is tested come in one random order."""
    max_leaked_share: Share = 0.0
    """Largest share of an eval set's tasks that the candidate may have been trained on. They are left out."""
    needs_approval: Flag = False
    """Pause until a person approves the promotion on Prefect's page."""
    approval_timeout: Seconds = 7 * 24 * 3600.0
    """Time for the approval; without it the candidate is not promoted."""
