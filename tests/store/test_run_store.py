"""A run finds its own store: wherever its folder lies, whatever else the database holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from raising import raising
from store_helpers import make_rows

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.exchange.store.database import namespaces
from trinity_core.exchange.store.run_store import identify, open_run_store
from trinity_core.results.audit import audit_runs
from trinity_core.run.stage import resume_step

PARTS = {"explore", "train"}


def run_at(root: Path, url: str = "") -> Config:
    tree = {
        "project": "p",
        "name": "r",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": "/m", "max_model_len": 16},
        "synchronizer": {"sync_method": "checkpoint"},
        "buffer": {
            "total_steps": 9,
            "explorer_input": {"taskset": {"path": "/tasks"}},
            "trainer_input": {"experience_buffer": {"path": url or None}},
        },
    }
    return config_from_dict(tree)


@pytest.fixture
def shared(server_url: str, tmp_path: Path) -> str:
    """A database outside of every run's folder."""
    return server_url or f"sqlite:///{tmp_path}/shared.db"


def begun(config: Config, steps: int = 3, tag: str = "") -> Config:
    """As after `steps` explore and train steps, the last one in a checkpoint."""
    with open_run_store(config) as store:
        store.position("explorer")
        for step in range(1, steps + 1):
            store.put("explorer", step, {"at": step}, make_rows(2, tag=f"{tag}{step}"), 0)
            assert store.lease(step, 4, step)
        layout = JobLayout(config.job_dir)
        folder = begin(layout, steps)
        (folder / "weights").write_text("1")
        commit(layout, steps, folder)
        store.commit(steps)
    return config


def explored(config: Config) -> int:
    with open_run_store(config) as store:
        return store.position("explorer").step


@pytest.mark.parametrize("elsewhere", [False, True])
def test_moved_run_resumes_with_its_rows(tmp_path: Path, shared: str, elsewhere: bool) -> None:
    url = shared if elsewhere else ""
    begun(run_at(tmp_path / "disk1", url))
    shutil.move(tmp_path / "disk1", tmp_path / "disk2")
    moved = run_at(tmp_path / "disk2", url)
    assert resume_step(moved, PARTS) == 3 and explored(moved) == 3
    (tmp_path / "link").symlink_to(tmp_path / "disk2")
    assert explored(run_at(tmp_path / "link", url)) == 3
    # Across file systems a move is a copy whose original is removed.
    shutil.copytree(tmp_path / "disk2", tmp_path / "disk3")
    shutil.rmtree(tmp_path / "disk2")
    assert explored(run_at(tmp_path / "disk3", url)) == 3


def test_runs_at_the_same_path_have_stores_of_their_own(tmp_path: Path, shared: str) -> None:
    """As two machines that have the same paths and one server."""
    namespace = identify(begun(run_at(tmp_path, shared), tag="ann")).namespace
    shutil.move(tmp_path / "p", tmp_path / "ann's")
    bob = run_at(tmp_path, shared)
    assert explored(bob) == 0
    with open_run_store(bob) as store:
        store.rewind(0)
        assert store.lease(1, 4, 0) is None
    assert identify(bob).namespace != namespace and {identify(bob).namespace, namespace} <= {*namespaces(shared)}


@pytest.mark.parametrize("parts", [PARTS, {"train"}, {"explore"}])
def test_checkpoint_without_its_store_is_not_resumed(tmp_path: Path, parts: set[str]) -> None:
    config = begun(run_at(tmp_path))
    shutil.rmtree(config.job_dir / "buffer")
    with pytest.raises(DataError):
        resume_step(config, parts)


def test_checkpoint_named_before_a_crash_is_resumed(tmp_path: Path) -> None:
    config = run_at(tmp_path)
    with open_run_store(config) as store:
        store.put("explorer", 1, {}, make_rows(2), 0)
        store.lease(1, 4, 0)
    folder = begin(JobLayout(config.job_dir), 1)
    (folder / "weights").write_text("1")
    commit(JobLayout(config.job_dir), 1, folder)
    assert resume_step(config, PARTS) == 1


def test_copied_run_goes_on_by_itself(tmp_path: Path) -> None:
    original = begun(run_at(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = run_at(tmp_path / "b")
    with open_run_store(copy) as store:
        assert store.put("explorer", 4, {}, make_rows(2), 3)
    assert identify(copy).id != identify(original).id
    assert explored(copy) == 4 and explored(original) == 3


def test_copied_run_does_not_write_the_originals_store(tmp_path: Path, shared: str) -> None:
    original = begun(run_at(tmp_path / "a", shared))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = run_at(tmp_path / "b", shared)
    for _ in range(2):
        with raising(TrinityError, key="name"):
            resume_step(copy, PARTS)
    assert explored(original) == 3
    shutil.rmtree(tmp_path / "a")
    assert explored(copy) == 3


def test_damaged_identity_begins_no_other_store(tmp_path: Path) -> None:
    config = begun(run_at(tmp_path))
    JobLayout(config.job_dir).identity.write_text("{")
    with raising(DataError, key=str(JobLayout(config.job_dir).identity)):
        open_run_store(config)


def test_audit_and_view_read_the_store_of_the_folder(tmp_path: Path, shared: str) -> None:
    one, two = begun(run_at(tmp_path / "one", shared)), begun(run_at(tmp_path / "two", shared), 2)
    for config, steps in ((one, 3), (two, 2)):
        [audit] = audit_runs(config.job_dir, url=shared).values()
        assert audit.checkpoint == steps
