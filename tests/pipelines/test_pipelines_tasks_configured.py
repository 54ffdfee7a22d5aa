"""`data_processor.task_pipeline`: which task sets read its output, and what is refused before anything starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from raising import raising

from trinity_core.config import AuxiliaryModelConfig, Config, ConfigError, OperatorConfig, config_from_dict
from trinity_core.config.findings import Report
from trinity_core.config.notices import notices
from trinity_core.config.paths import curated_folder, output_root, reads_output, uses_pipeline
from trinity_core.pipelines.named_parts import check_names
from trinity_core.pipelines.tasks import asked_models, curate, curated_tasks, with_curated_tasks
from trinity_core.pipelines.tasks.curation import configured_pipeline
from trinity_core.run.driver import finished
from trinity_core.run.stage import StageRequest, choose_stage
from trinity_core.run.summary import write_summary

FORMAT = {"prompt_key": "question", "response_key": "answer"}
DUPLICATES = {"name": "duplicate_filter", "args": {"input_keys": ["question"]}}
FLOW = {"default_workflow_type": "math_workflow", "default_reward_fn_type": "math_reward"}


def config_of(
    root: Path, taskset: dict[str, Any], evals: Sequence[dict[str, Any]] = (), mode: str = "both", **pipeline: Any
) -> Config:
    rows = [
        {"question": f"How many is {number % 40}?", "answer": f"#### {number}", "rank": number} for number in range(50)
    ]
    (root / "data").mkdir(exist_ok=True)
    (root / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = {
        "taskset": {**taskset, "format": FORMAT, **FLOW},
        "eval_tasksets": [{**eval_set, "format": FORMAT, **FLOW} for eval_set in evals],
    }
    return config_from_dict({
        "project": "p", "name": "n", "mode": mode, "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": "m", "max_model_len": 64, "max_response_tokens": 16},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": inputs},
        "data_processor": {
            "task_pipeline": {"inputs": [str(root / "data")], "operators": [DUPLICATES], **pipeline}
        },
    })  # fmt: skip


def rows(folder: str | Path, split: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / f"{split}.jsonl").read_text().splitlines()]


def test_a_finished_stage_that_reads_the_output_is_done(
    tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the output nor the sync method used without GPUs is a change of the configuration."""
    config = config_of(tmp_path, {"name": "t"}).with_values({"model.model_path": str(tiny_folder)})
    stage = choose_stage(StageRequest(config))
    assert stage.config.synchronizer.sync_method != config.synchronizer.sync_method
    summary = {"made_from": stage.made_from, "step": 0, "hf_dir": ""}
    write_summary(stage.config, summary)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    assert finished([config]) == [summary] and not caplog.messages
    (tmp_path / "data/train.jsonl").write_text('{"question": "1?", "answer": "#### 1"}\n')
    assert finished([config]) == [summary] and "train.jsonl" in caplog.text


@pytest.mark.parametrize(("paths", "curated"), [("ab", True), ("ba", True), ("b", True), ("cd", False)])
def test_a_list_of_inputs_is_curated(tmp_path: Path, paths: str, curated: bool) -> None:
    config = config_of(
        tmp_path, {"name": "t", "path": [f"{name}.jsonl" for name in paths]}, inputs=["a.jsonl", "b.jsonl"]
    )
    assert reads_output(config, config.buffer.explorer_input.tasksets[0]) == curated == uses_pipeline(config)


def test_inputs_beside_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(tmp_path, {"name": "t", "path": ["./a.jsonl", "c.jsonl"]}, inputs=["a.jsonl", "b.jsonl"])
    [problem] = error.value.problems
    assert problem.key == "buffer.explorer_input.taskset.path" and "c.jsonl" in problem.message
    assert "a.jsonl" not in problem.message


def test_a_task_set_without_a_path_reads_the_output(tmp_path: Path, tiny_folder: Path) -> None:
    before = config_of(tmp_path, {"name": "t"}, [{"name": "e", "path": str(tmp_path / "data"), "split": "train"}])
    config = before.with_values({"model.model_path": str(tiny_folder)})
    stage = choose_stage(StageRequest(config))
    [tasks], [evaluation] = (
        stage.config.buffer.explorer_input.tasksets, stage.config.buffer.explorer_input.eval_tasksets,
    )  # fmt: skip
    dataset = curated_tasks(config)
    assert tasks.path == str(dataset.folder) == curated_folder(stage.config)
    assert dataset.folder == output_root(config) / dataset.fingerprint
    assert evaluation.path == str(tmp_path / "data"), "it has a path of its own"
    assert (dataset.rows, dataset.read, dataset.dropped) == (40, 50, {"1 duplicate_filter": 10})
    assert notices(config) == []
    written = (dataset.folder / "train.jsonl").stat().st_mtime_ns
    assert with_curated_tasks(config).buffer.explorer_input.tasksets[0].path == tasks.path
    assert (dataset.folder / "train.jsonl").stat().st_mtime_ns == written, "it is not made again"


def test_the_guides_pipeline_replaces_the_path_it_reads(tmp_path: Path) -> None:
    """Task set, evaluation and pipeline name the same data; the pipeline's output is for training alone."""
    path = str(tmp_path / "data")
    curated = with_curated_tasks(config_of(tmp_path, {"path": path}, [{"path": path, "split": "train"}]))
    [tasks], [evaluation] = curated.buffer.explorer_input.tasksets, curated.buffer.explorer_input.eval_tasksets
    assert Path(str(tasks.path)).parent == output_root(curated) and evaluation.path == path


def test_part_of_the_output_is_for_evaluation(tmp_path: Path, tiny_folder: Path) -> None:
    before = config_of(
        tmp_path, {"name": "t"}, [{"name": "e", "split": "test"}], test_share=0.25, target_fields=list(FORMAT.values())
    )
    config = before.with_values({"model.model_path": str(tiny_folder)})
    folder = str(with_curated_tasks(config).buffer.explorer_input.eval_tasksets[0].path)
    train, test = rows(folder), rows(folder, "test")
    assert len(train) + len(test) == 40 and 3 <= len(test) <= 20
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert all(list(row) == ["question", "answer"] for row in (*train, *test))
    alone = choose_stage(StageRequest(config, "evaluate")).config.buffer.explorer_input
    assert alone.eval_tasksets[0].path == folder, "an evaluation of the run reads what the run read"


def test_the_output_goes_where_it_is_wanted(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"name": "t"}, output={"path": str(tmp_path / "chosen")})
    assert curated_tasks(config).folder.parent == tmp_path / "chosen"


PIPELINE = "data_processor.task_pipeline"
OPERATOR = f"{PIPELINE}.operators[0]"


@pytest.mark.parametrize(
    ("taskset", "pipeline", "key"),
    [
        ({"split": "test"}, {}, "buffer.explorer_input.taskset.split"),
        ({"split": "dev"}, {"test_share": 0.1}, "buffer.explorer_input.taskset.split"),
        ({}, {"inputs": []}, f"{PIPELINE}.inputs"),
        ({}, {"test_share": 1}, f"{PIPELINE}.test_share"),
        ({}, {"top_k": -2}, f"{PIPELINE}.top_k"),
        ({}, {"top_k": 0}, f"{PIPELINE}.top_k"),
        ({}, {"operators": [{"name": "duplicate_fliter"}]}, f"{OPERATOR}.name"),
        ({}, {"operators": [{"name": "duplicate_filter", "args": {"keys": ["a"]}}]}, f"{OPERATOR}.args.keys"),
        ({}, {"operators": [{"name": "duplicate_filter", "args": {"input_keys": []}}]}, f"{OPERATOR}.args.input_keys"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path, taskset: dict[str, Any], pipeline: dict[str, Any], key: str
) -> None:
    report = Report()
    with raising(ConfigError, key=key):
        check_names(config_of(tmp_path, {"name": "t", **taskset}, **pipeline), report)
        report.check()
    assert not (tmp_path / "p").exists()


def rated_by(root: Path, model: str, **explorer: Any) -> Config:
    rating = {"name": "llm_difficulty_score_filter", "args": {"api_or_hf_model": model, "input_keys": ["question"]}}
    return config_of(root, {"name": "t"}, operators=[rating]).with_values(
        {f"explorer.{key}": value for key, value in explorer.items()}
    )


def test_operators_find_models_of_the_configuration(tmp_path: Path) -> None:
    judges = [
        AuxiliaryModelConfig(name="judge", model_path="models/A-1B"), AuxiliaryModelConfig(model_path="Org/B-7B-Chat"),
    ]  # fmt: skip
    for name, path in (("judge", "models/A-1B"), ("a-1b", "models/A-1B"), ("b-7b-chat", "Org/B-7B-Chat"), ("m", "m")):
        config = rated_by(tmp_path, name, auxiliary_models=judges)
        assert {asked: model.model_path for asked, model in asked_models(config).items()} == {name: path}
        assert configured_pipeline(config).models == {name: path}
        report = Report()
        check_names(config, report)
        assert not [problem for problem in report.problems if "api_or_hf_model" in problem.key]


def test_a_model_that_nobody_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    report = Report()
    check_names(rated_by(tmp_path, "gpt-9"), report)
    [problem] = [problem for problem in report.problems if "api_or_hf_model" in problem.key]
    assert problem.key == "data_processor.task_pipeline.operators[0].args.api_or_hf_model"
    assert "names no model of this configuration (policy)" in problem.message
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    report = Report()
    check_names(rated_by(tmp_path, "gpt-9"), report)
    assert not [problem for problem in report.problems if "api_or_hf_model" in problem.key]


def test_the_models_behind_names_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    datasets = {}
    for path in ("A", "B"):
        judge = AuxiliaryModelConfig(name="judge", model_path=path)
        config = rated_by(tmp_path, "judge", auxiliary_models=[judge])
        pipeline = configured_pipeline(config)
        operators = [OperatorConfig(name="text_length_filter", args={"input_keys": ["question"]})]
        datasets[path] = curate(replace(pipeline, operators=operators), tmp_path / "out").fingerprint
    assert datasets["A"] != datasets["B"]
