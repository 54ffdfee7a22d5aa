"""The number of steps of a stage whose length is given in epochs."""

from __future__ import annotations

import pytest
from preflight_configs import TASKSET

from trinity_core.config import config_from_dict
from trinity_core.data.tiny import write_jsonl
from trinity_core.run.preflight import steps
from trinity_core.run.preflight.steps import Steps, steps_of

TEN_ROWS = [{"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(10)]


@pytest.fixture
def data(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [*TEN_ROWS, {"question": "no answer"}])
    return tmp_path


def stage(algorithm, buffer, **sections):
    buffer = {"total_epochs": 3, **buffer}
    return config_from_dict(
        {"algorithm": algorithm, "model": {"model_path": "m", "max_model_len": 64}, "buffer": buffer, **sections}
    )


def rft(path, buffer=(), **sections):
    taskset = {**TASKSET, "path": str(path), "format": {"prompt_key": "question", "response_key": "answer"}}
    buffer = {"batch_size": 4, "explorer_input": {"taskset": taskset}, **dict(buffer)}
    return stage({"algorithm_type": "grpo", "repeat_times": 8}, buffer, **sections)


def sft(path):
    form = {"prompt_type": "plaintext", "prompt_key": "question", "response_key": "answer"}
    source = {"path": str(path), "format": form}
    return stage(
        {"algorithm_type": "sft"}, {"train_batch_size": 4, "trainer_input": {"experience_buffer": source}}, mode="train"
    )


def test_steps_as_configured_need_no_data():
    assert steps_of(rft("nowhere", {"total_steps": 5})) == Steps(5)


def test_epochs_are_divided_into_whole_explore_steps(data):
    text = "3 epochs of 10 tasks"
    assert steps_of(rft(data)) == Steps(30 // 4, text)
    assert steps_of(rft(data, mode="explore")) == Steps(30 // 4, text)


def test_asynchronous_trainer_takes_all_rollouts(data):
    taken = rft(data, {"train_batch_size": 16}, synchronizer={"sync_style": "dynamic_by_explorer"})
    assert steps_of(taken) == Steps(7 * 4 * 8 // 16, "3 epochs of 10 tasks")


@pytest.mark.parametrize(("length", "count"), [(60, 3), (70, None)])
def test_texts_that_may_be_cut_into_pieces_have_no_known_number(tmp_path, length, count):
    write_jsonl(tmp_path / "train.jsonl", [{"text": "short"}] * 3 + [{"text": "x" * length}])
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"path": str(tmp_path)}}}
    assert steps_of(stage({"algorithm_type": "cpt"}, buffer, mode="train")).count == count


def test_supervised_epochs_fill_the_last_batch(data):
    assert steps_of(sft(data)) == Steps(8, "3 epochs of 10 rows")


def test_held_out_rows_take_no_steps(data):
    stage = sft(data)
    held_out = stage.buffer.trainer_input.experience_buffer.with_values({"held_out": True})
    both = stage.with_values({"buffer.trainer_input.auxiliary_buffers": {"test": held_out}})
    assert steps_of(both) == steps_of(stage)


def test_reason_is_given_for_unknown_steps(data, monkeypatch):
    monkeypatch.setattr(steps, "MOST_BYTES", 100)
    for config in (rft("openai/gsm8k"), sft(data / "later"), rft(data)):
        unknown = steps_of(config)
        assert unknown.count is None and unknown.why
