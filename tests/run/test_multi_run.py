"""Which runs may work beside each other in one process, and how they are asked to end together."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from raising import raising
from store.store_helpers import make_rows

from trinity_core.base.errors import TrinityError
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.hosting.faults import CancelToken
from trinity_core.hosting.placement import Machine
from trinity_core.run import parts
from trinity_core.run.attempt import Frontend
from trinity_core.run.parts import gpus_together, plan_parts
from trinity_core.run.stage import StageRequest
from trinity_core.training.sources import wait_lease

GSM8K = Path(__file__).parent.parent.parent / "configs/gsm8k"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's files of those names, on a machine without GPUs."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    return lambda *names: [str(GSM8K / f"{name}.yaml") for name in names]


def test_a_trainer_and_its_explorers_are_parts_of_a_run(files: Any) -> None:
    parts = plan_parts(files("trainer", "explorer", "explorer_new"), ["cluster.gpu_per_node=0"])
    assert [part.name for part in parts] == ["trainer", "explorer", "explorer_new"]
    assert len({part.config.job_dir for part in parts}) == 1 and gpus_together(parts) == 0


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("trainer", "gsm8k"), "mode"),
        (("trainer", "explorer", "explorer"), "explorer.name"),
        (("trainer", "trainer"), "explorer.name"),
    ],
)
def test_what_does_not_fit_together_is_refused(files: Any, names: tuple[str, ...], key: str) -> None:
    with raising(TrinityError, key=key):
        plan_parts(files(*names), [])


def test_parts_of_two_runs_are_refused(files: Any, tmp_path: Path) -> None:
    (trainer,) = files("trainer")
    other = tmp_path / "other.yaml"
    other.write_text(
        Path(trainer).read_text().replace("name: gsm8k-async", "name: another").replace("train", "explore", 1)
    )
    with raising(TrinityError, key="name"):
        plan_parts([trainer, str(other)], [])


def test_parts_need_their_gpus_together(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_core.hosting.cluster.machine", lambda gpus: Machine(16, 8))
    assert gpus_together(plan_parts(files("trainer", "explorer"), [])) == 8


@pytest.mark.parametrize("fresh", ["", "_20260101000000"])
def test_an_explorer_works_again_if_its_trainer_goes_back(
    files: Any, monkeypatch: pytest.MonkeyPatch, fresh: str
) -> None:
    """It has finished and ended by then; nobody else would explore what the rewind took back. With
    `continue_from_checkpoint: false` the run may be in a folder of its own, beside that of a run that was killed."""
    names = files("trainer", "explorer")
    (trainer, _) = plan_parts(names, ["cluster.gpu_per_node=0"])
    run_config = trainer.config.with_values({"name": trainer.config.name + fresh})
    if fresh:
        open_run_store(trainer.config).put("explorer", 1, {}, make_rows(1), 0)
    store, ran, again = open_run_store(run_config), [], Event()
    monkeypatch.setattr(parts, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(parts, "open_cluster", lambda *_: None)
    monkeypatch.setattr(parts, "shared_ray", lambda *_: nullcontext(CancelToken()))

    class Played(Frontend):
        def subflow(self, request: StageRequest, run: Any) -> Any:
            ran.append(request.config.mode)
            if request.config.mode == "explore":
                for step in range(store.position("explorer").step + 1, 4):
                    store.put("explorer", step, {}, make_rows(1, tag=f"{len(ran)}/{step}/"), step - 1)
                store.mark_finished("explorer")
                if ran.count("explore") == 2:
                    again.set()
            else:
                store.rewind(0)
                store.begin("trainer", 3)
                for step in (1, 2, 3):
                    assert wait_lease(store, step, 2, step - 1, timeout=30)
                    if step == 1:
                        store.commit(1)
                while not store.stats().explorers["explorer"].finished:
                    time.sleep(0.01)
                store.rewind(1)
                assert again.wait(30)
                for step in (2, 3):
                    assert wait_lease(store, step, 2, step - 1, timeout=30)
                store.commit(3)
            return {"name": run_config.name}

    assert parts.run_parts(names, ["cluster.gpu_per_node=0"], Played()).keys() == {"trainer", "explorer"}
    assert ran.count("explore") == 2 and ran.count("train") == 1
