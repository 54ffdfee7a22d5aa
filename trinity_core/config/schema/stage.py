"""The `stages` section: one run after another, each from the model of the one before."""

from __future__ import annotations

from trinity_core.config.section import Section
from trinity_core.config.types import EMPTY, Args


class StageConfig(Section):
    """What one stage does differently. A setting that is not given here has its value from the sections above.

    Sections are merged key by key; an `experience_buffer`, a `taskset` and any list replaces the one above as a whole.
    """

    stage_name: str = ""
    """Unique name; the stage's run is called `<name>_<stage_name>`."""
    mode: str | None = None
    """Mode of this stage."""
    algorithm: Args = EMPTY
    """Settings of `algorithm`."""
    model: Args = EMPTY
    """Settings of `model`. A stage after the first starts from the model of the stage before."""
    cluster: Args = EMPTY
    """Settings of `cluster`."""
    buffer: Args = EMPTY
    """Settings of `buffer`."""
    explorer: Args = EMPTY
    """Settings of `explorer`."""
    trainer: Args = EMPTY
    """Settings of `trainer`."""
    synchronizer: Args = EMPTY
    """Settings of `synchronizer`."""
    data_processor: Args = EMPTY
    """Settings of `data_processor`."""
