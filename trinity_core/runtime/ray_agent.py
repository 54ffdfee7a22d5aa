"""In place of the dashboard's agent of a Ray of our own: a node must have one, and there is no page for it to serve.

Ray's own imports all that the dashboard has, for two seconds of a core of each run's start and 100 MB, and then looks
at every process each few seconds.

    python ray_agent.py … --node-id=ID … --session-dir=FOLDER …
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""The raylet waits for files of these names, each with a port; -1: none."""
LOOK_SECONDS = 0.5


def main(arguments: Sequence[str]) -> None:
    """Tell the raylet that there are no ports, and stay until it has ended."""
    raylet = os.getppid()
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    for name in PORTS:
        whole = Path(options["--session-dir"], f"{name}_{options['--node-id']}")
        part = whole.with_name(f".{whole.name}")
        part.write_text("-1")
        part.rename(whole)
    while os.getppid() == raylet:
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
