"""A run's folder with a store made through the store's own API, and the page of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from viewing import NASTY, rollout

from trinity_core.base.layout import JobLayout
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.store.archive import Archive
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts

REWARD = {"truncated": 0.0, "style": 0.5, "brief": 0.0}


@pytest.fixture(scope="session")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture
def run_folder(tmp_path, tokenizer, tiny_folder) -> Path:
    """Three explore steps of two tasks each; the last has what a model should not be able to do to the page."""
    folder = tmp_path / "project" / "run"
    with ExperienceStore.open(folder / "buffer" / "explorer_output.db", str(folder)) as store:
        for step in (1, 2, 3):
            rows, drawn = [], []
            for task in (0, 1):
                group = f"explorer/{step}/{task}"
                drawn.append(DrawnTask(group, f"{'sums' if task else 'words'}/{step}", 2))
                for run in (0, 1):
                    answer = NASTY if (step, task, run) == (3, 1, 1) else f"It is {run}.\n#### {run}"
                    rows.append(rollout(tokenizer, "What is 2 + 2?", answer, float(run * task), group, run, step - 1))
            if step == 3:
                rows[-2].info["truth"] += " \ud83d"  # half of a surrogate pair, as JSON files may have
            if step == 2:
                drawn.append(DrawnTask("explorer/2/2", "sums/9", 0, tries=2, failure=f"broke on {NASTY}"))
            store.put("explorer", step, {}, rows, newest_version=step - 1, drawn=drawn)
        batch = store.lease(1, 4, newest_version=0)
        assert batch is not None
        tokens = batch[2].response_length // 2
        by_token = np.repeat(np.array([-0.5, 0.0], np.float16), tokens)
        Archive(JobLayout(folder).archive).extend(1, store.batch, {1: [None, 0.0, by_token, 0.5]})
    update_meta(folder / "trainer_meta.json", tokenizer=str(tiny_folder))
    for step, answer in ((0, "It is 5."), (6, NASTY)):
        save_rollouts(
            folder,
            "eval/test",
            step,
            [SampledRollout("What is 2 + 2?", answer, step / 6, REWARD, task_index=7)],
        )
    return folder


@pytest.fixture
def serving() -> Callable[[Path], AbstractContextManager[str]]:
    """Serves the page of a run's folder without a gate: its address."""
    from uvicorn import Config, Server

    from trinity_core.view.app import make_app
    from trinity_core.view.viewed_run import viewed_runs

    @contextmanager
    def serve(folder: Path) -> Iterator[str]:
        listening = socket.create_server(("127.0.0.1", 0))
        server = Server(Config(make_app(viewed_runs(folder)), log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the page is not served"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)

    return serve
