"""Run the trial of a stage.

python -m trinity_core.runtime.calibration --config FILE --stage NAME --folder DIR [key=value …]
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from trinity_core.cli import run_app
from trinity_core.runtime.calibration.trial import trial_of
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.run import run
from trinity_core.runtime.signals import ending_on_sigterm
from trinity_core.runtime.stage import pick_stage, resolve_stage


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--stage", default="")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    config, _ = pick_stage(load_checked(given.config, given.overrides), given.stage)
    run(resolve_stage(trial_of(config, given.folder)))


if __name__ == "__main__":
    with ending_on_sigterm():
        run_app(main)
