"""Which stages of a pipeline are done, and whose quick start a folder holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from raising import raising
from run.lock_holders import other_process

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import held, is_held
from trinity_core.config import Config, load_config, stages
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.tracking.run_record import RunState, read_record, record_end, record_start
from trinity_core.exchange.tracking.writers import RunOutcome
from trinity_core.results.audit import runs_in
from trinity_core.run import driver
from trinity_core.run.attempt import Frontend
from trinity_core.run.configuration import start_from
from trinity_core.run.driver import early_cluster, finished, plan_stages
from trinity_core.run.made_from import differences, made_from
from trinity_core.run.nodes import software
from trinity_core.run.preflight.stage_plan import plans_of
from trinity_core.run.stage import (
    StageRequest,
    choose_stage,
    in_fresh_folder,
    in_newest_folder,
    job_dir_of,
    stage_names,
)
from trinity_core.run.summary import summary_path, write_summary

SEPARATE = "synchronizer.sync_method=checkpoint"
QUICKSTART = Path(__file__).parent.parent.parent / "configs/quickstart/quickstart.yaml"


def pipeline_of(root: Path, *overrides: str) -> Config:
    return load_config(QUICKSTART, [f"checkpoint_root_dir={root}", "model.model_path=tiny", *overrides])


def loaded(root: Path, *overrides: str) -> list[Config]:
    return stages(pipeline_of(root, *overrides))


def run_all(root: Path, *overrides: str, begun_by: str = "") -> list[dict[str, Any]]:
    """What the stages leave when they have been run."""
    summaries: list[dict[str, Any]] = []
    model_path = ""
    for part in stages(in_fresh_folder(pipeline_of(root, *overrides), begun_by)):
        if model_path:
            part = start_from(part, model_path)
        numbers = {"score": 0.5, "scores": {}, "step": 3, "seconds": 1.0}
        model = JobLayout(part.job_dir).huggingface(3)
        model.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (model / name).write_text("{}")
        folders = {"hf_dir": str(model), "checkpoint_dir": str(JobLayout(part.job_dir).step(3))}
        summaries.append({"made_from": made_from(part), **numbers, **folders})
        write_summary(part, summaries[-1])
        model_path = summaries[-1]["hf_dir"]
    return summaries


def test_a_stage_with_unchanged_settings_is_done(tmp_path: Path) -> None:
    summaries = run_all(tmp_path)
    assert len(summaries) == 2
    assert finished(loaded(tmp_path)) == summaries
    assert finished(loaded(tmp_path, "cluster.gpu_per_node=0", "monitor.monitor_type=tensorboard")) == summaries
    assert finished(loaded(tmp_path, "continue_from_checkpoint=false")) == [None, None]


@pytest.mark.parametrize(("scores_base", "before"), [("true", 0.1), ("false", None)])
def test_a_finished_pipeline_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores_base: str, before: float | None
) -> None:
    """Nor is its last stage scored again; its model as it was is asked for, which may have a score. No Ray starts."""
    at_start = f"explorer.eval_on_startup={scores_base}"
    sft, rft = run_all(tmp_path, at_start)
    asked: list[tuple[str, str]] = []

    def run_request(request: StageRequest, frontend: Frontend) -> dict[str, Any]:
        asked.append((request.kind, request.which))
        return {"score": 0.1}

    opened: list[object] = []
    monkeypatch.setattr(driver, "run_request", run_request)
    monkeypatch.setattr(driver, "open_cluster", lambda *of: opened.append(of))
    config = pipeline_of(tmp_path, at_start)
    record_end(config.job_dir, record_start(config.job_dir, {}, "pipeline"), RunOutcome.FAILED)
    driver.run_pipeline(config)  # all that is missing is its end
    recorded = read_record(config.job_dir)
    assert recorded is not None and recorded.present_state is RunState.FINISHED
    asked.clear()
    with early_cluster(config):
        summary = driver.run_pipeline(config)
    assert opened == []
    assert asked == ([("evaluate", "base")] if before else [])
    assert summary["scores"] == {"before": before, "sft": 0.5, "rft": 0.5}
    first, second = plans_of(config)
    assert (first.scores_base, second.scores_base) == (False, before is not None)
    assert (first.model, second.model) == (config.model.model_path, f"weights of {first.name}")
    assert summary["hf_dir"] == rft["hf_dir"] != sft["hf_dir"]


def test_a_pipeline_shows_what_runs_and_its_results_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rft = run_all(tmp_path)
    config, shown = pipeline_of(tmp_path), list[tuple[str, dict[str, float | None]]]()
    summary_path(stages(config)[-1]).unlink()

    class Page(Frontend):
        def show_so_far(self, config: Config, summary: dict[str, Any], running: str) -> None:
            shown.append((running, summary["scores"]))

    results = iter([{"score": 0.1}, rft | {"score": 0.7}])
    monkeypatch.setattr(driver, "run_request", lambda *_: next(results))
    monkeypatch.setattr(driver, "open_cluster", lambda *_: None)
    summary = driver.run_pipeline(config, Page())
    whole, last = (f"{run.project}/{run.name}" for run in (config, stages(config)[-1]))
    assert shown == [(f"{whole}, base score", {"before": None}), (last, {"before": 0.1, "sft": 0.5})]
    assert summary["scores"] == {"before": 0.1, "sft": 0.5, "rft": 0.7}


def test_the_seconds_of_a_pipeline_include_its_last_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_start = "explorer.eval_on_startup=false"
    config = pipeline_of(tmp_path, at_start)
    sft, rft = run_all(tmp_path, at_start)
    write_summary(stages(config)[-1], rft | {"name": "rft", "score": None})
    monkeypatch.setattr(driver, "run_request", lambda *_: {"score": 0.9, "scores": {"step 3": 0.9}, "seconds": 5.0})
    summary = driver.run_pipeline(config)
    assert summary["score"] == 0.9 and summary["seconds"] == sft["seconds"] + rft["seconds"] + 5.0


def test_no_stage_trains_once_the_pipelines_budget_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage before is the result, and the last one is not scored in its place."""
    at_start = "explorer.eval_on_startup=false"
    config = pipeline_of(tmp_path, at_start, "monitor.stop.pipeline.tokens=1000")
    sft, _ = run_all(tmp_path, at_start)
    first, last = stages(config)
    write_summary(first, sft | {"name": "sft", "spent": {"tokens": 1000.0}})
    summary_path(last).unlink()
    monkeypatch.setattr(driver, "run_request", lambda *_: pytest.fail("nothing is run"))
    monkeypatch.setattr(driver, "open_cluster", lambda *_: None)
    summary = driver.run_pipeline(config)
    assert (summary["hf_dir"], summary["steps"]) == (sft["hf_dir"], {"sft": 3, "rft": 0})
    assert "monitor.stop.pipeline.tokens" in summary["stopped_early"]


def test_the_model_of_a_pipeline_is_the_one_that_was_trained_last(tmp_path: Path) -> None:
    """Also where a stage that only evaluates follows."""
    _, rft = run_all(tmp_path)
    rft["stopped_early"] = "enough"
    bench = rft | {"hf_dir": None, "checkpoint_dir": "bench", "step": 0, "score": 0.7, "stopped_early": None}
    plan = plan_stages(pipeline_of(tmp_path))
    summary = driver.pipeline_summary(plan, {"seconds": 2.0}, {"rft": rft, "bench": bench})
    assert summary["seconds"] == 2.0 + rft["seconds"] + bench["seconds"]
    assert (summary["hf_dir"], summary["checkpoint_dir"]) == (rft["hf_dir"], rft["checkpoint_dir"])
    assert (summary["score"], summary["step"], summary["steps"]) == (0.7, 3, {"rft": 3, "bench": 0})
    assert summary["stopped_early"] == "rft: enough"


def test_a_pipeline_has_the_verdict_of_its_gate_and_the_last_score(tmp_path: Path) -> None:
    _, rft = run_all(tmp_path)
    gate = rft | {"hf_dir": None, "score": None, "gate": {"verdict": "no better", "candidate": "c"}}
    summary = driver.pipeline_summary(plan_stages(pipeline_of(tmp_path)), {}, {"rft": rft, "gate": gate})
    assert (summary["score"], summary["gate"]["verdict"]) == (rft["score"], "no better")


def test_a_pipeline_of_a_gate_alone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pipeline_of(tmp_path, "stages=[{stage_name: gate, mode: bench, gate: {enable: true, champion: tiny}}]")
    gate = {"score": None, "scores": {}, "step": 0, "seconds": 1.0, "hf_dir": None, "gate": {"verdict": "no better"}}
    monkeypatch.setattr(driver, "run_request", lambda *_: gate)
    monkeypatch.setattr(driver, "open_cluster", lambda *_: None)
    assert driver.run_pipeline(config)["gate"] == gate["gate"]


def test_stages_run_again_from_the_first_changed_one(tmp_path: Path) -> None:
    first, _ = run_all(tmp_path)
    assert finished(loaded(tmp_path, "seed=7")) == [None, None]
    assert finished(loaded(tmp_path, "model.model_path=other")) == [None, None]
    changed = loaded(tmp_path)
    changed[1] = changed[1].with_values({"buffer.total_steps": 500})
    assert finished(changed) == [first, None]


def test_a_stage_that_was_run_with_another_model_is_not_done(tmp_path: Path) -> None:
    """Not with the previous stage's: by hand, as by `trinity promote --candidate`."""
    first, second = run_all(tmp_path)
    part = loaded(tmp_path)[1]
    write_summary(part, second | {"made_from": made_from(start_from(part, str(tmp_path / "other/model")))})
    assert finished(loaded(tmp_path)) == [first, None]


@pytest.mark.campaign
def test_stages_of_a_moved_pipeline_stay_done(tmp_path: Path) -> None:
    run_all(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    done = finished(loaded(tmp_path / "new"))
    folders = [str(JobLayout(part.job_dir).huggingface(3)) for part in loaded(tmp_path / "new")]
    assert [summary["hf_dir"] for summary in done if summary] == folders
    assert finished(loaded(tmp_path / "new", "seed=7")) == [None, None]


@pytest.mark.campaign
def test_a_removed_model_of_a_finished_stage_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its checkpoint; without that the stage is done all the same."""
    summaries = run_all(tmp_path)
    layout = JobLayout(loaded(tmp_path)[0].job_dir)
    shutil.rmtree(layout.huggingface(3))
    write_manifest(layout.step(3), 3)
    made: list[str] = []

    def convert(config: Config, step: int) -> Path:
        made.append(config.name)
        return JobLayout(config.job_dir).huggingface(step)

    monkeypatch.setattr(driver, "huggingface_folder", convert)
    assert finished(loaded(tmp_path)) == summaries and layout.root.name in made
    shutil.rmtree(layout.step(3))
    assert finished(loaded(tmp_path)) == summaries


def test_a_second_start_of_a_pipeline_changes_nothing(tmp_path: Path) -> None:
    config = pipeline_of(tmp_path)
    other = other_process(config, "pipeline")
    before = sorted(config.job_dir.iterdir())
    try:
        with pytest.raises(TrinityError, match=f"already in progress.*process {other.pid} "):
            driver.run_pipeline(config)
        assert sorted(config.job_dir.iterdir()) == before
    finally:
        other.kill()
        other.communicate()


def test_a_pipeline_that_is_in_progress_in_another_thread_is_refused(tmp_path: Path) -> None:
    """And ends no lock of that one: other processes are refused too."""
    with held(tmp_path, "pipeline"):
        for _ in range(2):
            with raising(TrinityError, key=""), held(tmp_path, "pipeline"):
                pass
        assert is_held(tmp_path, "pipeline")
    assert not is_held(tmp_path, "pipeline")


@pytest.mark.parametrize("first", ["continue_from_checkpoint=true", "continue_from_checkpoint=false"])
def test_a_pipeline_that_begins_anew_beside_another_has_a_record_of_its_own(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other may have begun a moment ago, or one of its stages may have been run alone."""
    anew = pipeline_of(tmp_path, "continue_from_checkpoint=false")
    begun: list[Config] = []
    seen: list[list[Path]] = []

    def run_stages(config: Config, *_: object) -> dict[str, Any]:
        begun.append(config)
        with driver.pipeline_cluster(plan_stages(config), None):  # type: ignore[arg-type]
            if len(begun) < 3:
                driver.run_pipeline(anew)
            seen.append([config.job_dir, *runs_in(config.job_dir)])
        return {}

    monkeypatch.setattr(driver, "_run_stages", run_stages)
    monkeypatch.setattr(driver, "close_cluster", lambda _: None)
    driver.run_pipeline(pipeline_of(tmp_path, first))
    assert len({folder for folders in seen for folder in folders}) == 3 * len(seen) == 9
    for pipeline_dir, *runs in seen:
        assert [run.name for run in runs] == [f"{pipeline_dir.name}_{stage}" for stage in stage_names(anew)]
    with held(anew.job_dir, "pipeline"), raising(TrinityError, key=""):
        driver.run_pipeline(pipeline_of(tmp_path))


def test_fresh_runs_of_stages_are_found_by_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `continue_from_checkpoint: false`: by audit, view and log from the start, and by evaluate and convert."""
    config = pipeline_of(tmp_path, "continue_from_checkpoint=false")
    monkeypatch.setattr(driver, "close_cluster", lambda _: None)
    last = stage_names(config)[-1]
    names = []
    for attempt in ("flow 1", "flow 2"):
        fresh = in_fresh_folder(config, attempt)
        with driver.pipeline_cluster(plan_stages(fresh), None):  # type: ignore[arg-type]
            assert list(runs_in(fresh.job_dir)) == [stage.job_dir for stage in stages(fresh)]
            JobLayout(stages(fresh)[-1].job_dir).identity.touch()  # the run has been started
            names.append(stages(fresh)[-1].name)
    assert names[0] == stages(config)[-1].name != names[1]
    assert job_dir_of(config).name == job_dir_of(config, last).name == names[1]
    alone = in_fresh_folder(stages(config)[-1], "flow 3")
    JobLayout(alone.job_dir).identity.touch()
    assert job_dir_of(config, last) == alone.job_dir
    assert in_newest_folder(config).job_dir == in_fresh_folder(config, "flow 2").job_dir


@pytest.mark.parametrize("mode", ["explore", "train"])
def test_a_part_begun_anew_alone_is_refused(tmp_path: Path, mode: str) -> None:
    """It would get a folder of its own, and never meet the other parts."""
    config = pipeline_of(tmp_path, "stages=[]", "continue_from_checkpoint=false", f"mode={mode}", SEPARATE)
    with raising(TrinityError, key=""):
        choose_stage(StageRequest(config), is_ready=True)


def test_a_retry_of_a_pipeline_begun_anew_knows_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its record of the stages' folders names those of its first attempt."""
    anew = "continue_from_checkpoint=false"
    config = pipeline_of(tmp_path, anew)
    run_all(tmp_path)
    summaries = run_all(tmp_path, anew, begun_by="flow 1")
    plan = plan_stages(in_fresh_folder(config, "flow 1"))
    assert [stage.done for stage in plan.stages] == summaries
    assert [stage.done for stage in plan_stages(in_fresh_folder(config, "flow 2")).stages] == [None, None]
    monkeypatch.setattr(driver, "close_cluster", lambda _: None)
    with driver.pipeline_cluster(plan, None):  # type: ignore[arg-type]
        folders = [str(folder) for folder in runs_in(plan.config.job_dir)]
    assert [Path(summary["hf_dir"]).parents[2] for summary in summaries] == [Path(folder) for folder in folders]


def test_changed_data_plugins_and_sync_of_a_finished_stage_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugins, data = tmp_path / "plugins", tmp_path / "data"
    plugins.mkdir()
    data.mkdir()
    (plugins / "rewards.py").write_text("HIGHEST = 1\n")
    (data / "train.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    row = '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n'
    (tmp_path / "sft.jsonl").write_text(row)
    paths = [
        f"plugin_dir={plugins}",
        f"stages.sft.buffer.trainer_input.experience_buffer.path={tmp_path / 'sft.jsonl'}",
        f"buffer.explorer_input.taskset.path={data}",
    ]
    summaries = run_all(tmp_path, *paths)
    assert finished(loaded(tmp_path, *paths)) == summaries
    assert [record for record in caplog.records if record.name == driver.log.name] == []
    (plugins / "rewards.py").write_text("HIGHEST = 2\n")
    (tmp_path / "sft.jsonl").write_text(row * 2)
    assert finished(loaded(tmp_path, *paths, "synchronizer.sync_timeout=99")) == summaries, "done all the same"
    for name in ("rewards.py", "sft.jsonl", "synchronizer.sync_timeout"):
        assert name in caplog.text
    assert "train.jsonl" not in caplog.text
    caplog.clear()
    assert finished(loaded(tmp_path, *paths, "seed=7")) == [None, None]
    assert "seed" in caplog.text


def test_settings_with_defaults_are_not_compared() -> None:
    """A setting that an update adds, or whose default it changes, leaves a stage done."""
    config = Config().with_values({"explorer.runner_per_model": 3, "model.temperature": 0.5})
    now, default = made_from(config), made_from(Config())
    assert now["settings"] == default["settings"] | {"explorer.runner_per_model": 3, "model.temperature": 0.5}
    expected = ["explorer.runner_per_model", "model.temperature"]
    assert differences(now, default, "settings") == expected == differences(default, now, "settings")
    assert differences({}, now, "settings") == ["settings"], "nothing was recorded"


def test_a_secret_is_not_recorded() -> None:
    url = "postgresql://me:hunter2@there/store"
    made = made_from(Config().with_values({"buffer.trainer_input.experience_buffer.path": url}))
    assert "there/store" in str(made) and "hunter2" not in str(made)


@pytest.mark.parametrize("absolute", [True, False])
def test_inputs_of_a_moved_project_are_the_same(
    absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    (tmp_path / "old/rows").mkdir(parents=True)
    (tmp_path / "old/rows/train.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    for name in ("old", "new"):
        if name == "new":
            (tmp_path / "old").rename(tmp_path / "new")
        monkeypatch.chdir(tmp_path / name)
        path = str(tmp_path / name / "rows") if absolute else "rows"
        made.append(made_from(loaded(tmp_path, f"buffer.explorer_input.taskset.path={path}")[-1]))
    before, now = made
    assert before["inputs"].keys() != now["inputs"].keys()
    assert differences(before, now, "settings") == differences(before, now, "inputs") == []


def test_plugins_in_folders_within_the_plugin_folder_count(tmp_path: Path) -> None:
    """An editor's link to nowhere, which marks an unsaved file, does not, nor do environments in the folder."""
    inner = tmp_path / "rewards" / "brief.py"
    inner.parent.mkdir()
    (tmp_path / ".#main.py").symlink_to("me@here:1")
    for other in (".venv/lib.py", "venv/site-packages/lib.py"):
        (tmp_path / other).parent.mkdir(parents=True)
        (tmp_path / other).touch()
    config = Config().with_values({"plugin_dir": str(tmp_path)})
    assert not [name for name in made_from(config)["inputs"] if name.endswith(".py")]
    digests = []
    for text in ("LIMIT = 10", "LIMIT = 20"):
        inner.write_text(text)
        digests.append((made_from(config)["inputs"].get(str(inner)), software(str(tmp_path))["plugin_dir"]))
    before, after = digests
    assert None not in before and before[0] != after[0] and before[1] != after[1]


def test_a_ray_that_does_not_start_early_is_left_to_the_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The flow has retries; what is done before it has none."""

    def fail(*_: object) -> None:
        raise TransientFault("Ray did not start")

    monkeypatch.setattr(driver, "open_cluster", fail)
    with early_cluster(loaded(tmp_path, "cluster.gpu_per_node=0")[0]):
        pass
    assert "tried again: Ray did not start" in caplog.text


@pytest.mark.parametrize(("key", "path"), [("", None), ("stages.rft.", "adapter")])
def test_an_adapter_to_start_from_is_applied_once(key: str, path: str | None, tmp_path: Path) -> None:
    """Unless a later stage names one itself: what the stage before hands on has the first one merged."""
    both = loaded(tmp_path, f"{key}model.lora_configs=[{{path: adapter, lora_rank: 8}}]")
    assert both[0].model.lora is None or both[0].model.lora.path == "adapter"
    later = start_from(both[1], "sft/model").model.lora
    assert later is not None and (later.path, later.lora_rank) == (path, 8)


def test_a_run_without_stages_keeps_the_adapter_that_it_names(tmp_path: Path) -> None:
    """Where only its model is another, as by a flow's parameter `model_path`."""
    one = loaded(tmp_path, "model.lora_configs=[{path: adapter, lora_rank: 8}]", "stages=[]")[0]
    model = start_from(one, "other/model").model
    assert model.lora is not None and (model.model_path, model.lora.path) == ("other/model", "adapter")


@pytest.mark.parametrize(("critic", "starts_from"), [(None, "sft/model"), ("value-model", "value-model")])
def test_a_later_stage_keeps_a_critic_of_its_own(critic: str | None, starts_from: str, tmp_path: Path) -> None:
    own = [] if critic is None else [f"model.critic_model_path={critic}"]
    model = start_from(loaded(tmp_path, *own)[1], "sft/model").model
    assert (model.model_path, model.critic_model_path) == ("sft/model", starts_from)
