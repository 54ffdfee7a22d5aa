"""Ends the children of a process that has died. Run as a script by `children.py`, which names the process by
a descriptor (`os.pidfd_open`) and its children by a variable that they have in their environment:

    python -I -S guardian.py DESCRIPTOR VARIABLE

It is no child of that process, so whoever kills a process with its children leaves it alone.
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
"""Time for children to close what they hold and end by themselves, once their parent asks no more."""
ROUNDS = 50
"""Looks for processes; each may have started others since the look before."""


def kill_marked(variable: str) -> None:
    """Kill all processes with a variable in their environment, such as daemons, which leave their group."""
    entry = f"\0{variable}=".encode()
    for _ in range(ROUNDS):
        killed = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or gone
                if entry in b"\0" + path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    killed = True
        if not killed:
            return
        time.sleep(0.01)


def main() -> None:
    """Wait for the end of the process, then end its children."""
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
