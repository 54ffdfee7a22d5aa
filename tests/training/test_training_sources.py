"""A supervised run resumes in its original order or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_core.base.errors import DataError
from trinity_core.base.layout import JobLayout
from trinity_core.data.tiny import make_problems, make_tokenizer, write_jsonl
from trinity_core.training.sources import SupervisedSource, open_source

ROWS = make_problems(1, 20, 1, 1)["train"]


@pytest.fixture
def opened(make_config: Any, tmp_path: Any) -> Any:
    make_tokenizer().save_pretrained(tmp_path / "model")

    def opened(rows: list[dict[str, str]] = ROWS, file: str = "sft.jsonl", **overrides: Any) -> SupervisedSource:
        write_jsonl(tmp_path / file, rows)
        settings = {
            "buffer__train_batch_size": 8,
            "model__model_path": tmp_path / "model",
            "model__max_model_len": 200,
            "buffer__trainer_input__experience_buffer__path": tmp_path / file,
            "buffer__trainer_input__experience_buffer__format": "{prompt_key: question, response_key: answer}",
        }
        config = make_config("sft", **(settings | overrides))
        JobLayout(config.job_dir).create()
        source = open_source(config)
        assert isinstance(source, SupervisedSource)
        return source

    return opened


@pytest.mark.parametrize(
    "changed", [{"buffer__train_batch_size": 4}, {"seed": 7}, {"rows": ROWS[1:]}, {"rows": ROWS[::-1]}]
)
def test_resume_refuses_data_that_would_repeat_or_skip_rows(opened: Any, changed: Any) -> None:
    opened().before_save(2)
    opened(**changed).rewind(0)  # of a run without a checkpoint nothing has been taken
    with pytest.raises(DataError):
        opened(**changed).rewind(2)
    opened().rewind(2)


def test_resumed_run_may_be_longer_and_data_may_move(opened: Any) -> None:
    opened().before_save(2)
    opened(file="moved.jsonl", buffer__total_steps=9, buffer__total_epochs=5).rewind(2)


def test_run_without_recorded_order_resumes(opened: Any) -> None:
    opened().rewind(2)


def test_auxiliary_buffers_join_sft_by_their_shares(opened: Any, tmp_path: Any) -> None:
    others = make_problems(7, 8, 1, 1)["train"]
    write_jsonl(tmp_path / "other.jsonl", others)
    form = "{prompt_key: question, response_key: answer}"

    def mixed(share: float | str) -> SupervisedSource:
        other = f"{{other: {{path: {tmp_path / 'other.jsonl'}, share: {share}, format: {form}}}}}"
        return opened(buffer__trainer_input__auxiliary_buffers=other)

    source = mixed(1 / 3)
    batch = source.draw(1, lambda: False, print)
    assert batch is not None and [row.group.split("/")[0] for row in batch].count("other") == 2 and len(batch) == 8
    assert source.data.steps(1, 8) == 4, "all 20 rows of the experience buffer: 6 a step"
    source.before_save(2)
    source.rewind(2)
    with pytest.raises(DataError):
        mixed(1.0).rewind(2)
    without = mixed("null").draw(1, lambda: False, print)
    assert without is not None and not any(row.group.startswith("other") for row in without)
