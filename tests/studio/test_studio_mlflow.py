"""What Studio reads of a real MLflow store: a pipeline's stages, their settings, the best checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from studio.lineage import made_with
from studio.run_list import RunState, run_rows
from studio.tracked_runs import champion_step, served_at, tracked_runs
from trinity_core.checkpoints.commit import begin, commit
from trinity_core.checkpoints.resume import update_meta
from trinity_core.files import write_json
from trinity_core.layout import JobLayout
from trinity_core.page_notes import page_note
from trinity_core.tracking import MetricsFile, SampledRollout, save_rollouts
from trinity_core.tracking.forwarder import open_writer
from trinity_core.tracking.mlflow_writer import default_uri, open_client
from trinity_core.tracking.writers import RunInfo, RunOutcome


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs: making one takes seconds."""
    root = tmp_path_factory.mktemp("mlflow")
    open_client(default_uri(root), None, None, root)
    return root / "mlflow.db"


def test_no_store_is_made_by_looking_for_one(tmp_path: Path) -> None:
    assert tracked_runs(tmp_path) == [] and not [*tmp_path.iterdir()]


def test_runs_of_the_store_beside_the_checkpoints(tmp_path: Path, empty_store: Path) -> None:
    shutil.copy(empty_store, tmp_path)
    config = {"mode": "both", "buffer": {"explorer_input": {"taskset": {"path": "gsm8k"}}}}
    job = tmp_path / "p/all_rft"
    writer = open_writer("mlflow", RunInfo("p", "all_rft", job, config, parent_dir=tmp_path / "p/all"), tmp_path)
    for step, score in ((2, 0.5), (4, 0.75), (6, 0.25)):
        writer.checkpoint(step, job / f"global_step_{step}")
        assert writer.score(step, score)
    rows = run_rows([], tracked_runs(tmp_path), [])
    assert [(row.title, row.depth, row.state) for row in rows] == [
        ("p/all", 0, RunState.RUNNING), ("p/all_rft", 1, RunState.RUNNING),
    ]  # fmt: skip
    pipeline, stage = (row.tracked for row in rows)
    assert pipeline is not None and stage is not None
    assert stage.job_dir == job and made_with(stage.params)["buffer.explorer_input.taskset.path"] == "gsm8k"
    assert champion_step(tmp_path, stage) == 4 and champion_step(tmp_path, pipeline) is None
    writer.close(RunOutcome.FINISHED)
    assert [run.status for run in tracked_runs(tmp_path)] == ["FINISHED", "FINISHED"]


def test_chosen_runs_are_compared_on_the_page(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one task set, of which one has a checkpoint."""
    monkeypatch.chdir(tmp_path)
    for variable in ("PREFECT_API_URL", "TRINITY_CHECKPOINT_ROOT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    root = tmp_path / "checkpoints"
    root.mkdir()
    shutil.copy(empty_store, root)
    for name, answer in (("one", "It is 4."), ("other", "It is <b>5</b>.")):
        job = root / "p" / name
        writer = open_writer("mlflow", RunInfo("p", name, job, {"seed": 1}), root)
        MetricsFile(job, "eval").write(2, {"eval/test/accuracy": 0.5})
        save_rollouts(job, "eval/test", 2, [SampledRollout("2 + 2?", answer, float("4" in answer), truth="4")])
        update_meta(JobLayout(job).trainer_meta, model="org/base")
        writer.close(RunOutcome.FINISHED)
    layout = JobLayout(root / "p/one")
    made = begin(layout, 2)
    (made / "weights").write_bytes(b"weights")
    commit(layout, 2, made)

    page = AppTest.from_function(runs, default_timeout=60).run()
    assert [box.label for box in page.checkbox] == ["p/other", "p/one"]
    assert "Choose a run" in page.info[0].value
    for box in page.checkbox:
        box.check()
    page.run()
    assert not page.exception
    assert [each.value for each in page.multiselect if each.label == "Metrics"] == [["eval/test/accuracy"]]
    [frame] = page.get("iframe")
    assert frame.proto.src == "/rollouts/#run=p%2Fother&tab=samples&other=p%2Fone"  # type: ignore[attr-defined]
    assert [list(table.value["step"]) for table in page.dataframe] == [[2]], "one run has a checkpoint"
    assert [note.value for note in page.info] == ["It has no whole checkpoint yet."]


def runs() -> None:
    """The page as a script."""
    from studio.runs_page import runs_page
    from studio.settings import studio_settings

    runs_page(studio_settings([]))


def test_mlflows_page_is_where_its_note_says(tmp_path: Path) -> None:
    assert served_at(tmp_path) == ""
    write_json(page_note(tmp_path, "mlflow"), {"url": "http://127.0.0.1:5000", "uri": "sqlite:///x"})
    assert served_at(tmp_path) == "http://127.0.0.1:5000"
