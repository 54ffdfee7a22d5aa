"""What `trinity plan` shows: the outlook of each stage, with its measured pace. A run that starts needs no pace."""

from __future__ import annotations

from dataclasses import replace

from trinity_core.config import Config, stages
from trinity_core.runtime.calibration.kept import kept_pace
from trinity_core.runtime.calibration.trial import hindrance
from trinity_core.runtime.readiness.planned import StageOutlook, planned


def paced(config: Config) -> list[StageOutlook]:
    """`planned` on this machine, with the pace of each stage, or why it has none."""
    return [
        replace(outlook, pace=kept_pace(stage), immeasurable=hindrance(stage))
        for outlook, stage in zip(planned(config), stages(config), strict=True)
    ]
