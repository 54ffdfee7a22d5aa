"""A trainer worker as the main object of a process of its own."""

from __future__ import annotations

import signal
import threading
from typing import Any

from trinity_core.training.worker import TrainerWorker


class TrainerActor(TrainerWorker):
    """SIGTERM, as a machine that is taken away sends it to every process, lets it save at the next step boundary."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: self.stop())
