"""The `stages` section: one run after another, each from the model of the one before."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_core.config.types import Args


@dataclass(slots=True)
class StageConfig:
    """What one stage does differently. A setting that is not given here has its value from the sections above.

    Sections are merged key by key; an `experience_buffer`, a `taskset` and any list replaces the one above as a whole.
    """

    stage_name: str = ""
    """Unique name; the stage's run is called `<name>_<stage_name>`."""
    mode: str | None = None
    """Mode of this stage."""
    algorithm: Args = field(default_factory=dict)
    """Settings of `algorithm`."""
    model: Args = field(default_factory=dict)
    """Settings of `model`. A stage after the first starts from the model of the stage before."""
    cluster: Args = field(default_factory=dict)
    """Settings of `cluster`."""
    buffer: Args = field(default_factory=dict)
    """Settings of `buffer`."""
    explorer: Args = field(default_factory=dict)
    """Settings of `explorer`."""
    trainer: Args = field(default_factory=dict)
    """Settings of `trainer`."""
    synchronizer: Args = field(default_factory=dict)
    """Settings of `synchronizer`."""
    data_processor: Args = field(default_factory=dict)
    """Settings of `data_processor`."""
