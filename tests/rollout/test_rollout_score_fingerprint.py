"""A score belongs to what it was made with: model, data, sampling, workflow and reward."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity_core.config import Config, config_from_dict
from trinity_core.rollout.score_fingerprint import score_fingerprint, valid_scores
from trinity_core.runtime import evaluation
from trinity_core.runtime.evaluation import unscored_targets
from trinity_core.tracking import MetricsFile


def config_of(root: Path, *overrides: str) -> Config:
    columns = {"prompt_key": "question", "response_key": "answer"}
    sets = {
        "taskset": {"path": str(root / "data"), "format": columns},
        "eval_tasksets": [{"name": "test", "path": str(root / "data"), "split": "test", "format": columns}],
    }
    tree = {
        "project": "p", "name": "n", "mode": "bench", "checkpoint_root_dir": str(root / "runs"),
        "model": {"model_path": str(root / "model"), "max_model_len": 128, "max_response_tokens": 24},
        "buffer": {"explorer_input": sets},
        "explorer": {"auxiliary_models": [{"model_path": "judge", "max_model_len": 64}]},
        "plugin_dir": str(root / "plugins"),
    }  # fmt: skip
    return config_from_dict(tree, list(overrides))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("data", "model", "plugins"):
        (tmp_path / name).mkdir()
    for split in ("train", "test"):
        (tmp_path / f"data/{split}.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    (tmp_path / "plugins/reward.py").write_text("LIMIT = 1\n")
    return tmp_path


def write_score(config: Config, step: int, accuracy: float) -> None:
    made_with = score_fingerprint(config, step)
    MetricsFile(config.job_dir, "eval").write(step, {"eval/test/accuracy": accuracy}, made_with=made_with)


@pytest.mark.parametrize(
    "change",
    [
        "model.temperature=0.5",
        "model.max_response_tokens=12",
        "model.custom_chat_template=x",
        "seed=7",
        "buffer.explorer_input.default_workflow_type=simple_workflow",
        "buffer.explorer_input.default_reward_fn_type=format_reward",
        "data/test.jsonl",
        "plugins/reward.py",
        "model/model.safetensors",
    ],
)
def test_a_score_is_made_again_when_what_made_it_changes(folder: Path, change: str) -> None:
    before = config_of(folder)
    write_score(before, 0, 0.4)
    assert unscored_targets(before, "base") == [] and valid_scores(before) == {0: 0.4}
    if "=" in change:
        after = config_of(folder, change)
    else:
        (folder / change).write_text('{"question": "2+2?", "answer": "4"}\n')
        after = config_of(folder)
    assert [target.step for target in unscored_targets(after, "base")] == [0]
    assert valid_scores(after) == {}
    write_score(after, 0, 0.6)
    assert unscored_targets(after, "base") == [] and valid_scores(after) == {0: 0.6}


@pytest.mark.parametrize("change", ["explorer.rollout_model.max_num_seqs=4", "name=n", "data/train.jsonl"])
def test_a_score_stays_when_what_made_it_stays(folder: Path, change: str) -> None:
    write_score(config_of(folder), 0, 0.4)
    if "=" not in change:
        (folder / change).write_text('{"question": "2+2?", "answer": "4"}\n')
    after = config_of(folder, *([change] if "=" in change else []))
    assert valid_scores(after) == {0: 0.4}


def test_trained_step_keeps_its_score_under_another_base_model(folder: Path) -> None:
    """Its weights are the run's own; only step 0 is the model of `model_path`."""
    write_score(config_of(folder), 8, 0.9)
    (folder / "model/model.safetensors").write_bytes(b"others!")
    assert valid_scores(config_of(folder)) == {8: 0.9}


def test_a_trainer_alone_takes_the_scores_of_its_explorer(folder: Path) -> None:
    """Its configuration need not name the eval sets."""
    write_score(config_of(folder, "mode=explore", "synchronizer.sync_method=checkpoint"), 8, 0.9)
    trainer = config_of(folder, "mode=train", "buffer.explorer_input.eval_tasksets=[]")
    assert valid_scores(trainer) == {8: 0.9}


def test_only_the_ends_of_a_large_weight_file_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_core.rollout.score_fingerprint.EDGE_BYTES", 4)
    found = []
    for weights in (b"aaaa....bbbb", b"aaaa,,,,bbbb", b"aaaa....bbbB"):
        (folder / "model/model.safetensors").write_bytes(weights)
        found.append(score_fingerprint(config_of(folder), 0))
    assert found[0] == found[1] != found[2]


def test_outside_programs_read_an_eval_line_as_before(folder: Path) -> None:
    config = config_of(folder)
    write_score(config, 0, 0.4)
    line = json.loads((config.job_dir / "monitor/metrics.jsonl").read_text())
    assert line.keys() - {"made_with"} == {"step", "source", "time", "metrics"}
    assert line["metrics"] == {"eval/test/accuracy": 0.4}


def test_plugins_in_the_home_folder_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    config = config_of(folder, "plugin_dir=~/plugins")
    before = score_fingerprint(config, 1)
    (folder / "plugins/reward.py").write_text("LIMIT = 2\n")
    assert score_fingerprint(config, 1) != before


@pytest.mark.parametrize(("latest", "steps"), [(True, [3]), (False, [1, 2, 3])])
def test_bench_scores_the_latest_or_every_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, latest: bool, steps: list[int]
) -> None:
    monkeypatch.setattr(evaluation, "whole_steps", lambda _: [1, 2, 3])
    monkeypatch.setattr(evaluation, "huggingface_folder", lambda _, step: folder / str(step))
    config = config_of(folder, "mode=bench", f"explorer.bench_on_latest_checkpoint={latest}")
    session = SimpleNamespace(config=config)
    assert [target.step for target in evaluation.unscored_result(session)] == steps  # type: ignore[arg-type]
    monkeypatch.setattr(evaluation, "whole_steps", lambda _: [])
    assert [target.step for target in evaluation.unscored_result(session)] == [0]  # type: ignore[arg-type]
