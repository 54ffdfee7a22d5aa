"""The command line of a run without Prefect.

python -m trinity_core.run --config FILE [key=value …] [--decide DECISION]
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from trinity_core.base.errors import InputError
from trinity_core.base.processes import require_limits
from trinity_core.base.program import ending_on_sigterm, run_app
from trinity_core.config import Config
from trinity_core.exchange.tracking.pauses import Decision
from trinity_core.run.attempt import Frontend
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import run_configuration
from trinity_core.run.pauses import require_waiting
from trinity_core.run.summary import summary_text


class Terminal(Frontend):
    """Prints the summary of each stage, and of the pipeline."""

    def show(self, config: Config, summary: dict[str, Any], is_pipeline: bool = False) -> None:
        print(summary_text(summary))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m trinity_core.run", description="Run a configuration with all its stages."
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings laid over the file")
    parser.add_argument("--decide", default="", help="decision on a paused run: continue, continue key=value, stop")
    options = parser.parse_intermixed_args()
    try:
        decision = Decision.parse(options.decide) if options.decide else None
    except InputError as error:
        parser.error(f"--decide: {error}")
    require_limits()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("trinity_core").setLevel(logging.INFO)
    config = load_checked(options.config, options.overrides)
    if decision:
        require_waiting(config)
    run_configuration(config, Terminal(decision))


if __name__ == "__main__":
    with ending_on_sigterm():
        run_app(main)
