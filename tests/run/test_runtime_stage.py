"""Where a run resumes, and that nobody else starts it meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raising
from run.lock_holders import other_process
from safetensors.torch import load_file, save_file

from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.files import read_json, write_json
from trinity_core.base.layout import MANIFEST, JobLayout
from trinity_core.base.runlock import PIPELINE, TRAINER_PROCESS, held, hold, is_held, release
from trinity_core.config import Config, SynchronizerConfig, config_from_dict, notices, stages
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.data.experience import Experience
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.checkpoints.beginning import STATE
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.exchange.store.run_store import identify, open_run_store
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync.versions import open_versions, run_versions
from trinity_core.exchange.tracking.metrics_file import MetricsFile, read_metrics
from trinity_core.exchange.tracking.run_record import read_record, record_path
from trinity_core.hosting.cluster import placement_of
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.attempt import Frontend
from trinity_core.run.driver import resolve, run_request
from trinity_core.run.stage import Stage, StageRequest, choose_stage, lock_names, resume, resume_step, unlock_run
from trinity_core.run.tracking_thread import _run_info

PARTS = {"explore", "train"}


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    synchronizer = SynchronizerConfig(sync_method="memory")
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path), synchronizer=synchronizer)
    yield config
    for name in lock_names(config, PARTS):
        release(config.job_dir, name)


@pytest.mark.parametrize("part", ["training", "explorer_explorer"])
def test_a_run_that_is_going_on_is_not_begun_again(config: Config, part: str) -> None:
    """Its weights, its numbers and its store stay as they are."""
    folder = open_versions("memory", config.job_dir)
    other = other_process(config, part)
    try:
        folder.publish(3, [("weight", torch.ones(2))])
        with pytest.raises(TrinityError, match=f"already in progress.*process {other.pid} on .*another name"):
            resume_step(config, PARTS)
        assert folder.has(3) and not (config.job_dir / "buffer").exists()
        other.kill()
        other.wait()
        assert resume_step(config, PARTS) == 0
        assert not folder.versions(), "of a lineage that no checkpoint has"
    finally:
        other.kill()
        folder.remove()


def test_a_trainer_that_outlives_its_flow_is_waited_for(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    other = other_process(config, TRAINER_PROCESS)
    with caplog.at_level("INFO"), pytest.raises(TransientFault, match=f"process {other.pid} .*trainer"):
        hold(config.job_dir, TRAINER_PROCESS, wait=0.6)
    assert f"waiting up to 0.6 s for process {other.pid} on" in caplog.text
    assert other.stdin is not None
    other.stdin.write("\n")
    other.stdin.close()
    assert resume_step(config, PARTS) == 0
    assert other.wait() == 0


def test_explorer_and_trainer_of_a_run_can_be_separate_flows(config: Config) -> None:
    other = other_process(config, "training")
    try:
        assert resume_step(config, {"explore"}) == 0
        with pytest.raises(TrinityError):
            resume_step(config, {"train"})
    finally:
        other.kill()


def test_parts_with_stores_of_one_name_on_different_machines_are_refused(config: Config) -> None:
    """Each machine has the file on its own disk; here the explorer's is moved away."""
    root, key = Path(config.checkpoint_root_dir), "buffer.trainer_input.experience_buffer.path"
    store = {key: f"sqlite:///{root / 'store.db'}", key.replace("path", "storage_type"): "queue"}
    explorer, trainer = (config.with_values({"mode": mode} | store) for mode in ("explore", "train"))
    resume_step(explorer, {"explore"})
    (root / "store.db").rename(root / "elsewhere.db")
    with raising(TrinityError, key=key):
        resume_step(trainer, {"train"})
    (root / "elsewhere.db").replace(root / "store.db")
    assert resume_step(trainer, {"train"}) == 0


def test_a_run_goes_back_behind_a_checkpoint_for_good(config: Config) -> None:
    """A file of checkpoint 4 is missing for a while: its weights must not meet batches of the lineage after."""
    layout = JobLayout(config.job_dir).create()

    def lease(store: ExperienceStore, *steps: int) -> None:
        for step in steps:
            assert store.lease(step, 2, step - 1, final=True) == []

    with open_run_store(config) as store:
        for step in (2, 4):
            temporary = begin(layout, step)
            (temporary / "state").write_text(str(step))
            commit(layout, step, temporary)
            lease(store, step - 1, step)
            store.commit(step)
        state = layout.step(4) / "state"
        state.rename(layout.root / "away")
        assert resume_step(config, PARTS) == 2
        lease(store, 3, 4, 5)
        (layout.root / "away").rename(state)
        lineage = store.lineage()
        assert resume_step(config, PARTS) == 2 and store.lineage() == lineage + 1


def test_checkpoint_of_another_release_is_not_rewound_behind(config: Config) -> None:
    layout = JobLayout(config.job_dir).create()
    with open_run_store(config) as store:
        for step in (1, 2):
            commit(layout, step, begin(layout, step))
            assert store.lease(step, 2, step - 1, final=True) == []
            store.commit(step)
        manifest, lineage = layout.step(2) / MANIFEST, store.lineage()
        written = read_json(manifest)
        write_json(manifest, {"format": "next", "step": 2})
        with raising(DataError, key=str(manifest)):
            resume_step(config, PARTS)
        assert store.lineage() == lineage
        write_json(manifest, written)
        assert resume_step(config, PARTS) == 2, "with the release that wrote it"


@pytest.mark.parametrize(("parts", "is_recorded"), [(PARTS, True), ({"explore"}, False)])
def test_a_killed_attempt_ended_with_metrics_that_are_rewound(
    config: Config, parts: set[str], is_recorded: bool
) -> None:
    """An explorer that starts alone does not know whether the trainer is at work."""
    MetricsFile(config.job_dir, "trainer").write(1, {"loss": 1.0})
    write_json(record_path(config.job_dir), {"state": "running", "began": 100.0})
    [line] = read_metrics(config.job_dir)
    resume_step(config, parts)
    record = read_record(config.job_dir)
    assert record is not None and record.ended == (line.time if is_recorded else None)
    assert len(read_metrics(config.job_dir)) == (0 if is_recorded else 1)


@pytest.mark.parametrize("parts", [PARTS, {"explore"}])
def test_a_restarted_explorer_is_expected_before_it_loads(config: Config, parts: set[str]) -> None:
    """The further explorer has finished, the run's own was cancelled: a trainer that is ready first must not end."""
    resume_step(config, PARTS)
    with open_run_store(config) as store:
        for name in (config.explorer.name, "explorer_new"):
            store.join(name, 9)
            store.position(name)
        store.mark_finished("explorer_new")
        store.leave(config.explorer.name)
        assert store.exhausted()
        resume_step(config, parts)
        assert not store.exhausted() and store.lease(1, 2, 0) is None


def save_of_another_model(config: Config) -> None:
    """A checkpoint of step 1 whose run began with a model that is not `model.model_path`."""
    layout = JobLayout(config.job_dir).create()
    temporary = begin(layout, 1)
    (temporary / STATE).write_text(json.dumps({"began": {"model": "elsewhere", "digest": "of other weights"}}))
    commit(layout, 1, temporary)


def test_rows_of_another_model_are_not_trained_on(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Before the first checkpoint: what an explorer has stored was sampled by the model that the run began with."""
    other = tmp_path / "other"
    shutil.copytree(tiny_folders.model, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, other / "model.safetensors")
    tree = grpo_tree(tmp_path, tiny_folders, 0, "memory", "fixed")

    def start(model_path: Path) -> Config:
        stage = resolve(StageRequest(config_from_dict(tree, [f"model.model_path={model_path}"])))
        for name in lock_names(stage.config, PARTS):
            release(stage.config.job_dir, name)
        assert stage.resumed_step == 0
        return stage.config

    versions = run_versions(start(other))
    for model, published in ((other, [0]), (tiny_folders.model, [])):  # nothing was stored: the model may change
        versions.publish(0, [("w", torch.zeros(1))])
        config = start(model)
        assert versions.versions() == published, "weights of another model must not meet this one"
    versions.remove()
    row = Experience(tokens=np.arange(6), prompt_length=3, action_mask=np.ones(3, bool), reward=1.0, group="g")
    with open_run_store(config) as store:
        store.position("explorer")
        store.put("explorer", 1, {}, [row], 0)
    with raising(TrinityError, key="model.model_path"):
        start(other)
    start(shutil.copytree(tiny_folders.model, tmp_path / "copy"))  # the same weights elsewhere


def test_a_run_that_refuses_to_resume_is_not_waited_for(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """The further explorer of a finished run would wait for a trainer that never comes."""
    tree = grpo_tree(tmp_path, tiny_folders, 0, "memory", "fixed")
    config = config_from_dict(tree, ["algorithm.kl_loss_fn_args.kl_coef=0.1", "buffer.total_steps=1"])
    save_of_another_model(config)
    with open_run_store(config) as store:
        store.position(config.explorer.name)
        store.begin("trainer", 1)
        store.commit(1)
        with raising(TrinityError, key="model.model_path"):
            resume(Stage(config, place(config, Machine(1, 0)), "rft"))
        assert store.trainer().finished and store.stats().explorers[config.explorer.name].left
    assert not any(is_held(config.job_dir, name) for name in lock_names(config, PARTS))


@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_engines_that_are_pushed_to_never_sample_with_another_model(
    method: str, tmp_path: Path, tiny_folders: TinyFolders
) -> None:
    """They start with `model.model_path`; others load the checkpoint's weights first, and the run only warns."""
    tree = grpo_tree(tmp_path, tiny_folders, 0, method, "fixed")
    config = config_from_dict(tree, ["algorithm.kl_loss_fn=none"])
    save_of_another_model(config)
    with open_run_store(config) as store:
        store.begin("trainer", 1)
        store.commit(1)
    stage = Stage(config, place(config, Machine(1, 0)), "rft")
    with raising(TrinityError, key="model.model_path") if method == "nccl" else nullcontext():
        assert len(resume(stage).warnings) == 1
    unlock_run(stage)


def test_a_run_that_fails_before_it_begins_is_unlocked(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    config = config_from_dict(grpo_tree(tmp_path, tiny_folders, 0, "checkpoint", "fixed"))
    locked: list[bool] = []

    class Judging(Frontend):
        def with_human_verdicts(self, stage: Stage) -> Stage:
            locked.extend(is_held(config.job_dir, name) for name in lock_names(config, PARTS))
            raise TrinityError("nobody was there")

    with raising(TrinityError, key=""):
        run_request(StageRequest(config, "rft", is_ready=True), Judging())
    assert all(locked) and len(locked) == 2
    assert not any(is_held(config.job_dir, name) for name in lock_names(config, PARTS))


@pytest.mark.parametrize("trains", [True, False])
def test_a_new_run_has_no_weights_before_its_trainer(tmp_path: Path, tiny_folders: TinyFolders, trains: bool) -> None:
    """What an explorer finds is of a trainer at work, or of a run whose folder was deleted."""
    tree = grpo_tree(tmp_path, tiny_folders, 0, "checkpoint", "fixed") | {"mode": "explore"}
    config = config_from_dict(tree)
    versions = open_versions("checkpoint", config.job_dir)
    versions.publish(0, [("w", torch.zeros(1))])
    if trains:
        hold(config.job_dir, "training")
    resume(Stage(config, place(config, Machine(1, 0)), "rft"))
    for name in lock_names(config, PARTS):
        release(config.job_dir, name)
    assert versions.versions() == ([0] if trains else [])


def grpo_tree(root: Path, folders: TinyFolders, gpus: int | None, method: str, style: str) -> dict[str, Any]:
    taskset = {"path": str(folders.data), "format": {"prompt_key": "question", "response_key": "answer"}}
    return {
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": str(folders.model), "max_prompt_tokens": 64, "max_response_tokens": 8},
        "cluster": {"gpu_per_node": gpus},
        "synchronizer": {"sync_method": method, "sync_style": style, "sync_interval": 2},
        "buffer": {"batch_size": 2, "total_steps": 4, "explorer_input": {"taskset": taskset}},
    }


@pytest.mark.parametrize("gpus", [0, None])
@pytest.mark.parametrize(
    ("method", "style", "in_force"),
    [
        ("nccl", "explorer_driven", "trainer_driven"),
        ("nccl", "dynamic_by_explorer", "trainer_driven"),
        ("memory", "explorer_driven", "explorer_driven"),
        ("nccl", "fixed", "fixed"),
    ],
)
def test_a_run_keeps_the_sync_style_that_validation_tells(
    gpus: int | None, method: str, style: str, in_force: str, tmp_path: Path, tiny_folders: TinyFolders
) -> None:
    """Also where `memory` takes over from `nccl`, as on this machine."""
    config = config_from_dict(grpo_tree(tmp_path, tiny_folders, gpus, method, style))
    stage = choose_stage(StageRequest(config))
    assert stage.config.synchronizer.sync_method == "memory"
    assert config.synchronizer.style == stage.config.synchronizer.style == in_force
    assert SyncSchedule.of(stage.config).publish_every == SyncSchedule.of(config).publish_every
    lines = set(map(str, notices(config)))
    assert lines <= set(map(str, stage.warnings))
    evaluation = choose_stage(StageRequest(config, "evaluate", which="base"))
    assert not [text for text in evaluation.warnings if "without effect" in text], "they are the training's"


@pytest.mark.parametrize("running", [False, True])
def test_a_stage_run_alone_leaves_the_record_of_a_running_pipeline(
    running: bool, tmp_path: Path, tiny_folders: TinyFolders
) -> None:
    """Begun anew it has a folder of its own, which the pipeline does not know."""
    more = {"stages": [{"stage_name": "first"}], "continue_from_checkpoint": False}
    config = config_from_dict(grpo_tree(tmp_path, tiny_folders, 0, "memory", "explorer_driven") | more)
    own = stages(config)[0]
    for run in (own, config):
        JobLayout(run.job_dir).create()
    write_json(JobLayout(config.job_dir).stages, {"first": own.name})
    with held(config.job_dir, PIPELINE) if running else nullcontext():
        alone = choose_stage(StageRequest(config, "rft", "first")).config
    assert alone.name != own.name
    assert read_json(JobLayout(config.job_dir).stages) == {"first": own.name if running else alone.name}


def test_an_evaluation_of_a_copied_folder_is_tracked_as_the_copys(config: Config) -> None:
    """Before the copy has trained, and though it may not train: the store of both is the same."""
    url = f"sqlite:///{config.checkpoint_root_dir}/shared.db"
    original = config.with_values({"mode": "bench", "buffer.trainer_input.experience_buffer.path": url})
    identity = identify(original).id
    copy = original.with_values({"name": "copy"})
    shutil.copytree(original.job_dir, copy.job_dir)

    def tracked_as(evaluated: Config) -> str:
        return _run_info(resume(Stage(evaluated, placement_of(evaluated), "evaluate"))).identity

    assert tracked_as(original) == identity and tracked_as(copy) not in ("", identity)
    own_store = copy.with_values({"buffer.trainer_input.experience_buffer.path": None})
    evaluated = tracked_as(own_store)
    assert identify(own_store).id == evaluated == tracked_as(own_store), "once it trains"
