"""Kills the children of a process that has died. `base/children.py` runs this file as a script, with a descriptor of
the process (`os.pidfd_open`) and the variable that marks its children's environment:

python -I -S guardian.py DESCRIPTOR VARIABLE

The guardian is not a child of that process, so killing the process with its children does not reach it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 3.0
"""Time for children to shut down by themselves after their parent's death."""
ROUNDS = 50
"""Maximum number of scans. Processes may start others between two scans."""


def kill_marked(variable: str) -> None:
    """Kill all processes with a variable in their environment, including daemons, which leave their process group."""
    entry = f"\0{variable}=".encode()
    for _ in range(ROUNDS):
        killed = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's process, or gone
                if entry in b"\0" + path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    killed = True
        if not killed:
            return
        time.sleep(0.01)


def main() -> None:
    descriptor, variable = int(sys.argv[1]), sys.argv[2]
    if os.fork():
        os._exit(0)
    os.setsid()
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    waiting.poll()
    time.sleep(GRACE_SECONDS)
    kill_marked(variable)


if __name__ == "__main__":
    main()
