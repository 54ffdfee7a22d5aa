"""Data-Juicer's own operators in a task pipeline."""

from __future__ import annotations

import json

import pytest
from ports import free_port
from raising import raising

from trinity_core.base.errors import DataError, InputError
from trinity_core.config import ConfigError, OperatorConfig, config_from_dict
from trinity_core.config.findings import Report
from trinity_core.config.notices import notices
from trinity_core.pipelines.data_juicer.local import ENVIRONMENT, MISSING, LocalDataJuicer
from trinity_core.pipelines.named_parts import check_names
from trinity_core.pipelines.tasks import TaskPipeline, curate, curated_tasks

ROWS = [
    {"question": "Natalia sold\u2009clips to 48 of her friends. How many?", "answer": "48"},
    {"question": "2 + 2?", "answer": "4", "hint": "add"},
    {"question": "Weng earns $12 an hour. How much in 2 hours?", "answer": "24", "hint": None},
]
STEPS = [
    {"whitespace_normalization_mapper": {"text_key": "question"}},
    {"text_length_filter": {"text_key": "question", "min_len": 10}},
]


class Doubling:
    """Stands for the server: drops rows without "?", gives each other one twice, the second time in capitals."""

    def process(self, rows, steps):
        assert steps
        left = [row for row in rows if "?" in row["question"]]
        return [{**row, "__dj__stats__": {"n": 1, "m": None}} for row in left] + [
            {**row, "question": row["question"].upper()} for row in left
        ]


def written(tmp_path, rows=ROWS):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(dataset):
    return [json.loads(line) for line in (dataset.folder / "train.jsonl").read_text().splitlines()]


def test_each_row_becomes_what_the_server_makes_of_it(tmp_path):
    operator = OperatorConfig(name="data_juicer", args={"operators": STEPS})
    rows = [{"question": "a?", "b": 1}, {"question": "no"}, {"question": "c?", "d": None}]
    dataset = curate(TaskPipeline([written(tmp_path, rows)], [operator]), tmp_path / "out", data_juicer=Doubling())
    assert lines(dataset) == [
        {"question": "a?", "b": 1, "n": 1}, {"question": "A?", "b": 1},
        {"question": "c?", "d": None, "n": 1}, {"question": "C?", "d": None},
    ]  # fmt: skip
    assert dataset.dropped == {"1 data_juicer": 1}


def test_operators_on_whole_data_sets_are_refused(tmp_path):
    operator = OperatorConfig(name="data_juicer", args={"operators": [{"document_deduplicator": {}}]})
    with raising(InputError, key="operators"):
        curate(TaskPipeline([written(tmp_path)], [operator]), tmp_path / "out", data_juicer=Doubling())


def config_of(tmp_path, service, operators=STEPS):
    return config_from_dict({
        "checkpoint_root_dir": str(tmp_path), "service": service,
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"name": "t", "default_workflow_type": "math_workflow"}}},
        "data_processor": {"task_pipeline": {
            "inputs": [written(tmp_path)], "operators": [{"name": "data_juicer", "args": {"operators": operators}}],
        }},
    })  # fmt: skip


def test_a_run_without_a_server_is_refused(tmp_path):
    report = Report()
    check_names(config_of(tmp_path, {}), report)
    with raising(ConfigError, key="data_processor.task_pipeline.operators[0].name"):
        report.check()


@pytest.mark.parametrize("address", ["127.0.0.1:5005", "ftp://server", "http://"])
def test_an_address_that_is_none_is_refused(tmp_path, address):
    report = Report()
    check_names(config_of(tmp_path, {"data_juicer": {"server_url": address}}), report)
    with raising(ConfigError, key="service.data_juicer.server_url"):
        report.check()


@pytest.mark.skipif(not ENVIRONMENT.exists(), reason=MISSING)
def test_an_operator_that_data_juicer_lacks_is_refused(tmp_path):
    """Before anything starts, in either pipeline; a server that runs already may have others."""
    steps = [{"text_length_filter": {}}, {"words_num_filtr": {}}, {"fix_unicode_mapper": {}}]
    report = Report()
    config = config_of(tmp_path, {"data_juicer": {"auto_start": True}}, steps)
    operators = {"operators": [{"name": "data_juicer", "args": {"operators": steps}}]}
    check_names(config.with_values({"data_processor.experience_pipeline": operators}), report)
    key = "data_processor.{}_pipeline.operators[0].args.operators[1]"
    assert [(problem.key, problem.suggestion) for problem in report.problems] == [
        (key.format(pipeline), "words_num_filter") for pipeline in ("experience", "task")
    ]
    report = Report()
    check_names(config_of(tmp_path, {"data_juicer": {"server_url": "http://127.0.0.1:5005"}}, steps), report)
    assert report.problems == []


@pytest.mark.skipif(not ENVIRONMENT.exists(), reason=MISSING)
def test_rows_come_back_as_they_were_but_for_what_operators_change(tmp_path):
    """Arrow has one type for a column. Operators may be listed again, of which filters measure again."""
    rows = [
        {"question": "Is\u2009it one?", "answer": "1\u20091", "calls": [{"name": "f", "arguments": {"x": 1}}], "n": 1},
        {"question": "What is two?", "answer": "2", "calls": [{"name": "g", "arguments": {"city": "Ulm"}}], "n": 2.5},
    ]
    unusable = [{"question": "What is much?", "answer": "33", "n": 10**30}]
    steps = [
        {"whitespace_normalization_mapper": {"text_key": "question"}},
        {"whitespace_normalization_mapper": {"text_key": "answer"}},
        {"text_length_filter": {"text_key": "question", "min_len": 10}},
        {"text_length_filter": {"text_key": "answer", "min_len": 2}},
        {"words_num_filter": {"text_key": "question", "min_num": 2}},
    ]
    operator, server = OperatorConfig(name="data_juicer", args={"operators": steps}), LocalDataJuicer()
    try:
        dataset = curate(TaskPipeline([written(tmp_path, rows)], [operator]), tmp_path / "out", data_juicer=server)
        with pytest.raises(DataError, match="too large"):
            curate(TaskPipeline([written(tmp_path, unusable)], [operator]), tmp_path / "out", data_juicer=server)
    finally:
        server.close()
    [left] = lines(dataset)
    assert left == rows[0] | {"question": "Is it one?", "answer": "1 1", "text_len": 3, "num_words": 3}
    assert type(left["n"]) is int
    assert dataset.dropped == {"1 data_juicer": 1}


@pytest.mark.skipif(not ENVIRONMENT.exists(), reason=MISSING)
def test_the_runs_own_server_curates_rows(tmp_path):
    service = {"data_juicer": {"auto_start": True, "port": free_port()}}
    config = config_of(tmp_path, service)
    assert not any("data_juicer" in notice for notice in notices(config))
    dataset = curated_tasks(config)
    assert [(row["question"], row["text_len"], row.get("hint", "none")) for row in lines(dataset)] == [
        ("Natalia sold clips to 48 of her friends. How many?", 50, "none"), (ROWS[2]["question"], 44, None),
    ]  # fmt: skip
    assert dataset.dropped == {"1 data_juicer": 1}
