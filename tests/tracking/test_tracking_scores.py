"""A score belongs to what it was made with: model, data, sampling, workflow and reward."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import create_model
from raising import raising
from safetensors.numpy import save_file

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.tracking.forwarder import Forwarder
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.scores import (
    best_steps,
    latest_scores,
    score_fingerprint,
    uncounted_steps,
    unscored_sets,
    valid_scores,
)
from trinity_core.exchange.tracking.writers import Writer
from trinity_core.run import summary
from trinity_core.run.summary import unscored_steps
from trinity_core.training.checkpoint import Savepoints


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
        "explorer": {"auxiliary_models": [{"model_path": str(root / "judge"), "max_model_len": 64}]},
        "plugin_dir": str(root / "plugins"),
    }  # fmt: skip
    return config_from_dict(tree, list(overrides))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("data", "model", "plugins", "judge"):
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
        "explorer.rollout_model.dtype=float16",
        "explorer.rollout_model.tool_call_parser=hermes",
        "explorer.rollout_model.reasoning_parser=qwen3",
        "explorer.rollout_model.seed=7",
        "explorer.rollout_model.extra_engine_args={quantization: fp8}",
        "explorer.max_timeout=5",
        "explorer.env_vars={JUDGE: x}",
        "judge/model.safetensors",
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
    assert unscored_steps(before, "base") == [] and valid_scores(before) == {0: 0.4}
    if "=" in change:
        after = config_of(folder, change)
    else:
        (folder / change).write_text('{"question": "2+2?", "answer": "4"}\n')
        after = config_of(folder)
    assert unscored_steps(after, "base") == [0] == uncounted_steps(after)
    assert valid_scores(after) == {}
    write_score(after, 0, 0.6)
    assert uncounted_steps(after) == []
    assert unscored_steps(after, "base") == [] and valid_scores(after) == {0: 0.6}


@pytest.mark.parametrize(
    "change",
    [
        "explorer.rollout_model.max_num_seqs=4", "name=n", "data/train.jsonl",
        "explorer.rollout_model.extra_engine_args={block_size: 16, kv_cache_dtype: auto}",
    ],
)  # fmt: skip
def test_a_score_stays_when_what_made_it_stays(folder: Path, change: str) -> None:
    write_score(config_of(folder), 0, 0.4)
    if "=" not in change:
        (folder / change).write_text('{"question": "2+2?", "answer": "4"}\n')
    after = config_of(folder, *([change] if "=" in change else []))
    assert valid_scores(after) == {0: 0.4}


def test_a_score_stays_however_the_paths_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_score(config_of(folder), 0, 0.4)
    monkeypatch.chdir(folder)
    data, judge = "buffer.explorer_input.eval_tasksets[0].path", "explorer.auxiliary_models[0].model_path"
    relative = config_of(folder, f"{data}=data", f"{judge}=./judge", "model.model_path=model", "plugin_dir=plugins")
    assert relative.buffer.explorer_input.eval_tasksets[0].path == "data"
    assert unscored_steps(relative, "base") == []


def test_a_score_stays_when_an_update_adds_a_setting(folder: Path) -> None:
    config = config_of(folder)
    before = [score_fingerprint(config, step) for step in (0, 1)]
    updated = create_model("Updated", __base__=type(config.model), added=(int, 5))
    for added, same in ((5, True), (6, False)):
        model = updated.model_construct(**dict(config.model), added=added)
        after = config.model_copy(update={"model": model})
        assert ([score_fingerprint(after, step) for step in (0, 1)] == before) is same


def test_trained_step_keeps_its_score_under_another_base_model(folder: Path) -> None:
    """Its weights are the run's own; only step 0 is the model of `model_path`."""
    write_score(config_of(folder), 8, 0.9)
    (folder / "model/model.safetensors").write_bytes(b"others!")
    assert valid_scores(config_of(folder)) == {8: 0.9}


def test_the_score_of_step_0_is_that_of_the_adapter_to_start_from(folder: Path) -> None:
    (folder / "adapter").mkdir()
    write = partial(save_file, filename=folder / "adapter/adapter_model.safetensors")
    config = config_of(folder, f"model.lora_configs=[{{path: {folder / 'adapter'}}}]")
    write({"x": np.zeros(3, np.float32)})
    before = [score_fingerprint(config, step) for step in (0, 1)]
    write({"x": np.ones(3, np.float32)})
    after = [score_fingerprint(config, step) for step in (0, 1)]
    assert before[0] != after[0] and before[1] == after[1]


def test_a_trainer_alone_takes_the_scores_of_its_explorer(folder: Path) -> None:
    """Its configuration need not name the eval sets."""
    write_score(config_of(folder, "mode=explore", "synchronizer.sync_method=checkpoint"), 8, 0.9)
    trainer = config_of(folder, "mode=train", "buffer.explorer_input.eval_tasksets=[]")
    assert valid_scores(trainer) == {8: 0.9}


def test_a_part_of_the_reward_is_no_eval_set(folder: Path) -> None:
    """A reward function may call its parts `algebra/accuracy` and `algebra/reward`."""
    numbers = {"eval/test/accuracy": 0.5, "eval/test/judged": 4, "eval/test/answers": 4, "eval/test/reward": 0.7}
    parts = {"eval/test/algebra/accuracy": 0.1, "eval/test/algebra/reward": 0.2}
    MetricsFile(folder, "eval").write(3, numbers | parts)
    assert latest_scores(folder) == {3: 0.5} and unscored_sets(numbers | parts) == []


def test_scores_with_a_missing_eval_set_do_not_count(folder: Path) -> None:
    sets = [{"name": name, "path": str(folder / "data"), "split": "test"} for name in ("easy", "hard")]
    config = config_of(folder, f"buffer.explorer_input.eval_tasksets={json.dumps(sets)}")
    for step, values in ((2, {"easy": 0.9, "hard": 0.1}), (4, {"easy": 0.7})):
        metrics = {f"eval/{name}/accuracy": value for name, value in values.items()}
        MetricsFile(config.job_dir, "eval").write(step, metrics, made_with=score_fingerprint(config, step))
    assert valid_scores(config) == {2: 0.5}


def test_best_checkpoint_takes_scores_that_count(folder: Path) -> None:
    """The prompt of the eval set changed between steps 4 and 6; step 7 is a folder of published weights alone."""
    prompt = "buffer.explorer_input.eval_tasksets.test.format.system_prompt={}"
    both = ("mode=both", "algorithm.repeat_times=2", "buffer.total_steps=9", "trainer.max_checkpoints_to_keep=1")
    old, new = (config_of(folder, *both, prompt.format(text)) for text in ("easy", "hard"))
    layout = JobLayout(new.job_dir)
    for step, accuracy, config in ((4, 0.95, old), (6, 0.4, new), (7, 0.9, new), (8, 0.5, new)):
        write_score(config, step, accuracy)
        layout.actor(step).mkdir(parents=True)
        (layout.actor(step) / "weights").write_text(str(step))
        if step != 7:
            write_manifest(layout.step(step), step)
    savepoints = object.__new__(Savepoints)  # its trainer is not needed
    savepoints.layout, savepoints.config, savepoints.keep = layout, new, 1
    assert savepoints._best() == [4, 8], "the best by what counts now, and the best by what counted before"
    savepoints.config = new.with_values({"model.chat_template_path": str(folder / "gone.jinja")})
    assert savepoints._best() == [4, 6, 8], "what cannot be compared is kept, and the new checkpoint gets its name"
    sent: dict[int, float] = {}
    best: list[int] = []

    class Counting(Writer):
        def score(self, step: int, value: float) -> bool:
            sent[step] = value
            return True

        def best(self, step: int) -> None:
            best.append(step)

    Forwarder(new.job_dir, Counting(), scores=partial(valid_scores, new))._forward_checkpoints()
    assert sent == {6: 0.4, 8: 0.5} and best == [8]


def test_the_best_step_of_the_settings_before_outlives_a_score_of_step_0(folder: Path) -> None:
    old, new = config_of(folder), config_of(folder, "model.temperature=0.5")
    for config, step, accuracy in (old, 0, 0.1), (old, 4, 0.9), (old, 5, 0.8), (new, 0, 0.1), (new, 6, 0.3):
        write_score(config, step, accuracy)
    assert best_steps(new, [4, 5, 6]) == [4, 6]


def test_plugins_in_the_home_folder_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    config = config_of(folder, "plugin_dir=~/plugins")
    before = score_fingerprint(config, 1)
    (folder / "plugins/reward.py").write_text("LIMIT = 2\n")
    assert score_fingerprint(config, 1) != before


@pytest.fixture
def checkpoints(folder: Path) -> Path:
    """Steps 1 to 3 of a run."""
    job_dir = config_of(folder).job_dir
    for step in (1, 2, 3):
        actor = JobLayout(job_dir).actor(step)
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_bytes(b"weights")
        write_manifest(actor.parent, step)
    return job_dir


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(("latest", "steps"), [(True, [3]), (False, [1, 2, 3])])
def test_bench_scores_the_latest_or_every_checkpoint(folder: Path, latest: bool, steps: list[int]) -> None:
    config = config_of(folder, "mode=bench", f"explorer.bench_on_latest_checkpoint={latest}")
    session = SimpleNamespace(config=config)
    assert summary.unscored_result(session) == steps  # type: ignore[arg-type]
    shutil.rmtree(config.job_dir)
    assert summary.unscored_result(session) == [0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("which", "steps"), [("latest", [2]), ("missing", [1, 2]), ("all", [1, 2])])
def test_damaged_checkpoint_is_not_scored(folder: Path, checkpoints: Path, which: str, steps: list[int]) -> None:
    """Sizes fit, contents do not: resume and summary pass it over too."""
    (JobLayout(checkpoints).actor(3) / "model_world_size_1_rank_0.pt").write_bytes(b"WEIGHTS")
    assert unscored_steps(config_of(folder), which) == steps


def test_checkpoints_that_training_removes_meanwhile_are_passed_over(folder: Path, checkpoints: Path) -> None:
    def converted(step: int, merge: bool) -> Path:
        assert JobLayout(checkpoints).step(step).exists()
        if step == 2:
            shutil.rmtree(JobLayout(checkpoints).step(2))
            raise DataError("removed while it was read")
        return folder / str(step)

    scored = dict[int, Path | None]()

    def score(step: int, weights: Path | None) -> dict[str, float]:
        scored[step] = weights
        return {"eval/test/accuracy": 0.5}

    attempt: Any = SimpleNamespace(config=config_of(folder), huggingface_folder=converted, score=score)
    steps = unscored_steps(attempt.config, "missing")
    shutil.rmtree(JobLayout(checkpoints).step(1))
    summary.score_steps(attempt, steps)
    assert scored == {3: folder / "3"}
    with raising(TrinityError, key="trainer.max_checkpoints_to_keep"):
        summary.score_steps(attempt, [1])
