"""Messages of a trainer that waits for rollouts, and what explorers learn about it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.store_helpers import make_rows

from trinity_core.base.errors import DataError
from trinity_core.config import config_from_dict
from trinity_core.data.lengths import takes_whole_step
from trinity_core.data.tiny import write_jsonl
from trinity_core.exchange.store import run_store
from trinity_core.exchange.store.archive import lines_of
from trinity_core.training import sources
from trinity_core.training.sources import BatchSource, RolloutSource, open_source


@pytest.fixture
def source(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> RolloutSource:
    """The rollouts of a run of 4 train steps of 16 rows."""
    monkeypatch.setattr(sources, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trinity_core.base.waits.FIRST_SECONDS", 0.0)
    return RolloutSource(make_config(), None)


def test_wait_message_names_missing_explorers(source: RolloutSource, caplog: pytest.LogCaptureFixture) -> None:
    source.store.join("explorer", 9)
    source.store.put("explorer", 1, {}, [], 0)
    lines: list[str] = []
    with caplog.at_level(logging.INFO):
        assert source.draw(1, lambda: bool(lines), lines.append) is None
    [line] = lines
    assert "explorer" in line and "0 of 16 rows" in line and line in caplog.text


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ({}, [40, 12, 28]),
        ({"buffer__train_batch_size": 32}, [40, 12, 28]),  # else the third step would find nothing
        ({"buffer__train_batch_size": 8}, [10, 10]),
        ({"mode": "train"}, [20, 20]),
        ({"synchronizer__sync_style": "trainer_driven"}, [20, 20]),
    ],
    ids=["one_step", "no_more_than_one", "part_of_a_step", "trainer_of_its_own", "asynchronous"],
)
def test_a_synchronous_train_step_takes_explore_steps_whole(make_config: Any, overrides: Any, rows: Any) -> None:
    """Explore steps of 4 tasks with 4 rollouts each, which become 40, 12 and 28 sequences."""
    tasks = {"buffer__explorer_input__taskset": "{path: /nowhere, format: {prompt_key: q, response_key: a}}"}
    source = RolloutSource(make_config(**{"mode": "both", **tasks, **overrides}), None)
    for step, size in enumerate((10, 3, 7), 1):
        source.store.put("explorer", step, {}, make_rows(4, size, tag=f"{step}/"), 0)
    source.store.mark_finished("explorer")
    batches = [source.draw(step, lambda: False, lambda _: None) for step in range(1, len(rows) + 1)]
    assert [len(batch or ()) for batch in batches] == rows


@pytest.mark.parametrize(
    ("changes", "train_batch_size"),
    [
        ({"taskset": {"repeat_times": 8}}, 32),  # more than the algorithm's 4
        ({"tasksets": [{"repeat_times": 2}, {"repeat_times": 8}]}, 32),
        ({"algorithm": {"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.1}}}, 18),
    ],
    ids=["own_repeats", "two_task_sets", "mix"],
)
def test_default_train_batch_holds_one_explore_step(changes: Any, train_batch_size: int) -> None:
    """Otherwise part of each step would be left over and grow stale."""
    one = {"path": "/nowhere", "format": {"prompt_key": "q", "response_key": "a"}}
    task_sets = [{**one, **taskset} for taskset in changes.get("tasksets", [changes.get("taskset", {})])]
    expert = {"auxiliary_buffers": {"sft": one}}
    config = config_from_dict({
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, **changes.get("algorithm", {})},
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {
            "batch_size": 4, "total_steps": 4, "explorer_input": {"tasksets": task_sets},
            "trainer_input": expert if "algorithm" in changes else {},
        },
    })  # fmt: skip
    assert config.buffer.train_batch_size == train_batch_size
    assert takes_whole_step(config)


def test_explorers_know_that_a_trainer_is_at_work(source: RolloutSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "SEEN_SECONDS", 0.01)
    with source.present(4):
        first = source.store.trainer()
        assert first.total == 4 and first.seen is not None
        while source.store.trainer().seen == first.seen:
            pass
    source.store.commit(4)
    assert source.store.trainer().finished


def test_advantages_are_archived_with_the_rows_that_were_trained_on(source: RolloutSource) -> None:
    source.store.put("explorer", 1, {}, make_rows(4, 8), 0)
    source.store.mark_finished("explorer")
    for step in (1, 2):
        batch = source.draw(step, lambda: False, lambda _: None)
        advantages = [(100 * step + row) / 100 for row in range(len(batch or ()))]
        source.record_advantages(step, [*advantages[:-1], np.array([1 / 3, step], np.float16)])
    source.before_save(1)
    source.before_save(2)
    archived = [[line["advantage"] for line in lines_of(source.archive.path, step)] for step in (1, 2)]
    assert archived == [[*((100 * step + row) / 100 for row in range(15)), [0.3333, step]] for step in (1, 2)]


def test_changed_expert_data_is_refused_by_a_resume(make_config: Any, tmp_path: Path) -> None:
    def opened(rows: int) -> BatchSource:
        write_jsonl(tmp_path / "expert.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(rows)])
        config = make_config(
            "mix", algorithm__sample_strategy_args="{expert_data_ratio: 0.5}",
            buffer__trainer_input__auxiliary_buffers__expert__path=tmp_path / "expert.jsonl",
            buffer__trainer_input__auxiliary_buffers__expert__format="{prompt_key: question, response_key: answer}",
        )  # fmt: skip
        return open_source(config)

    opened(8).before_save(1)
    opened(8).rewind(1)
    with pytest.raises(DataError):
        opened(10).rewind(1)
    opened(10).rewind(0)


def test_rows_that_a_rewind_cannot_bring_back_are_logged(
    source: RolloutSource, caplog: pytest.LogCaptureFixture
) -> None:
    source.store.put("explorer", 1, {}, make_rows(4, 4), 0)
    assert len(source.store.lease(1, 16, 0) or ()) == 16
    source.store.commit(1)
    source.store.prune(1)
    source.rewind(0)
    [lost] = [record.args for record in caplog.records if record.levelno == logging.WARNING]
    assert lost == (0, 16)
