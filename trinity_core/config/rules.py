"""What must hold between settings. Each rule reports; none raises."""

from __future__ import annotations

from trinity_core.config.problems import Report
from trinity_core.config.schema import Config


def check(config: Config, report: Report) -> None:
    """Report every contradiction in a resolved configuration."""


def check_stage_list(config: Config, report: Report) -> None:
    """Report stages without a name or with another's."""
