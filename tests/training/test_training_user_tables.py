"""SFT and DPO learn from tables of the user's database, which they do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from raising import raising
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert, inspect, select, text

from trinity_core.base.errors import DataError
from trinity_core.config import store_url
from trinity_core.data.files import read_rows
from trinity_core.data.tiny import make_tokenizer
from trinity_core.training.sources import SupervisedSource, open_source, total_steps

ROWS = [{"id": 7 - n, "question": f"{n}+1?", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(6)]
NAME = "answers_of_a_user"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: Any, tmp_path: Path) -> Any:
    """The URL of a user's database with the table `NAME`."""
    server = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""
    url = server or f"sqlite:///{tmp_path / 'user.db'}"
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    columns = (Column(name, Text) for name in ("question", "chosen", "rejected"))
    table = Table(NAME, MetaData(), Column("id", Integer, primary_key=True), *columns)
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(insert(table), ROWS)
    before = inspect(engine).get_table_names()
    yield url
    assert inspect(engine).get_table_names() == before, "no table of ours is made in their database"
    with engine.begin() as connection:
        assert {row.id for row in connection.execute(select(table))} == {row["id"] for row in ROWS}
        connection.execute(text(f"DROP TABLE {NAME}"))
    engine.dispose()


@pytest.mark.parametrize(("algorithm", "column"), [("sft", "chosen"), ("dpo", "rejected")])
def test_trainer_reads_a_table(make_config: Any, tmp_path: Path, url: str, algorithm: str, column: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    buffer = (
        f"{{name: {NAME}, storage_type: sql, path: '{url}', format: {{prompt_key: question, response_key: chosen}}}}"
    )
    config = make_config(
        algorithm, model__model_path=tmp_path / "model", buffer__train_batch_size=6, buffer__total_steps="null",
        buffer__total_epochs=2, buffer__trainer_input__experience_buffer=buffer,
    )  # fmt: skip
    source = open_source(config)
    assert isinstance(source, SupervisedSource) and total_steps(config, source) == (4 if algorithm == "dpo" else 2)
    assert [location.line for location in source.data.locations] == list(range(1, 7)), "in the order of the key"
    batch = source.draw(1, lambda: False, print)
    assert batch is not None and len(batch) == 6
    texts = {tokenizer.decode(one.tokens[one.prompt_length :][one.action_mask]) for one in batch}
    assert texts <= {f"{row[name]}<|im_end|>" for row in ROWS for name in ("chosen", column)} and len(texts) >= 4
    assert store_url(config) == f"sqlite:///{config.job_dir}/buffer/explorer_output.db", "not theirs"


def test_a_missing_table_or_database_is_named(url: str, tmp_path: Path) -> None:
    with raising(DataError, key="answer_of_user"):
        read_rows(url, storage="sql", table="answer_of_user")
    with raising(DataError, key=str(tmp_path / "gone.db")):
        read_rows(f"sqlite:///{tmp_path / 'gone.db'}", storage="sql", table=NAME)
    assert not (tmp_path / "gone.db").exists()


def test_locations_of_rows_do_not_show_a_password() -> None:
    with pytest.raises(DataError) as caught:
        read_rows("postgresql://me:secret@localhost:1/none", storage="sql", table=NAME)
    assert "secret" not in str(caught.value) and "me:***@localhost" in str(caught.value)
