"""What the processes do that tests of the store start: little is imported, so that they begin at once."""

import os
import random
import resource
import signal
import time

from store_helpers import make_rows

from trinity_core.base.errors import TrinityError
from trinity_core.exchange.store import backend
from trinity_core.exchange.store.store import ExperienceStore

STEPS = 25


def explore(url, run, name):
    store = ExperienceStore.open(url, run)
    for step in range(store.position(name).step + 1, STEPS + 1):
        store.put(name, step, {"n": step}, make_rows(2, 2, tag=f"{name}{step}"), 0)
        time.sleep(random.random() * 0.03)
    store.mark_finished(name)


def fill_up(url, queue):
    store = ExperienceStore.open(url)
    store.put("e", 1, {"o": 1}, make_rows(4), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    try:
        store.put("e", 2, {"o": 2}, make_rows(400, length=100), 0)
        queue.put("no error")
    except TrinityError as error:
        queue.put(str(error))


def stop_in_mid_transaction(url, busy_timeout):
    backend.BUSY_TIMEOUT = busy_timeout
    with ExperienceStore.open(url, "/jobs/held")._database.write():
        os.kill(os.getpid(), signal.SIGSTOP)
