"""The task pipeline on values worked out by hand: operators, order, rejected rows, fingerprints, kill and retry."""

from __future__ import annotations

import datetime
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from raising import raising

from trinity_core.base.errors import DataError, InputError, TransientFault
from trinity_core.base.runlock import hold, release
from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks import TASK_OPERATORS, TaskOperator, TaskPipeline, curate
from trinity_core.pipelines.tasks.filters import DuplicateFilter, TextLengthFilter


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(*questions: str) -> list[dict[str, str]]:
    return [{"question": question, "answer": "#### 1"} for question in questions]


def operator(name: str, **args: Any) -> OperatorConfig:
    return OperatorConfig(name=name, args=args)


def output(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


@pytest.fixture
def plugin():
    """Registers operators for one test."""
    added: list[str] = []

    def add(name: str, kind: type[TaskOperator]) -> str:
        TASK_OPERATORS.register(name)(kind)
        added.append(name)
        return name

    yield add
    for name in added:
        del TASK_OPERATORS[name]


def questions_left(tmp_path: Path, rows: list[Any], *operators: OperatorConfig, **settings: Any) -> list[str]:
    pipeline = TaskPipeline([write(tmp_path / "in.jsonl", rows)], operators, **settings)
    return [row["question"] for row in output(curate(pipeline, tmp_path / "out").folder)]


def test_length_bounds_are_inclusive(tmp_path: Path) -> None:
    chosen = operator("text_length_filter", input_keys=["question"], min_len=2, max_len=3)
    assert questions_left(tmp_path, asked("a", "ab", "abc", "abcd"), chosen) == ["ab", "abc"]


def test_first_of_duplicates_stays(tmp_path: Path) -> None:
    rows = asked("What is 1 + 2?", "what is  1 2", "What is 1.2?", "What is -1 + 2?", "∑", "∏")
    kept = ["What is 1 + 2?", "What is 1.2?", "What is -1 + 2?", "∑", "∏"]
    assert questions_left(tmp_path, rows, operator("duplicate_filter", input_keys=["question"])) == kept
    exact = operator("duplicate_filter", input_keys=["question"], ignore_format=False)
    assert questions_left(tmp_path, rows + rows[:1], exact) == [row["question"] for row in rows]


def test_format_check_keeps_answers_that_match(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "so\n#### -1,000"}, {"question": "b", "answer": "so 7"}]
    chosen = operator("format_check_filter", input_key="answer", pattern=r"#### -?[\d.,]+$")
    assert questions_left(tmp_path, rows, chosen) == ["a"]


def test_a_row_that_a_pattern_cannot_search_in_time_is_set_aside(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "aaa"}, {"question": "b", "answer": "a" * 60 + "b"}]
    source = write(tmp_path / "in.jsonl", rows)
    dataset = curate(
        TaskPipeline([source], [operator("format_check_filter", input_key="answer", pattern="(a|aa)+$")]),
        tmp_path / "out",
    )
    assert [row["question"] for row in output(dataset.folder)] == ["a"]
    (rejected,) = map(json.loads, (dataset.folder / "rejected.jsonl").read_text().splitlines())
    assert rejected["line"] == 2 and "format_check_filter" in rejected["reason"]


def test_contamination_is_removed_or_marked(tmp_path: Path) -> None:
    evals = write(tmp_path / "evals/test.jsonl", asked("Tom has three red apples", "two words"))
    rows = asked("Why has Tom three red apples?", "If TOM has three, red then?", "two words", "two words more")
    args = {"eval_paths": [evals], "input_keys": ["question"], "ngram": 4}
    kept = ["Why has Tom three red apples?", "two words more"]
    assert questions_left(tmp_path, rows, operator("contamination_filter", **args)) == kept
    marking = operator("contamination_filter", **args, remove=False)
    dataset = curate(TaskPipeline([str(tmp_path / "in.jsonl")], [marking]), tmp_path / "out")
    assert [row["contaminated"] for row in output(dataset.folder)] == [False, True, True, False]


def test_priorities_order_rows_and_target_size_cuts(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "hard": 0.5, "old": 1},
        {"question": "b", "hard": 1.0, "old": 4},
        {"question": "c", "hard": 0.5, "old": 1},
        {"question": "d", "hard": 0.1, "old": 0},
        {"question": "e", "old": 0},
    ]
    weights = {"hard": 2.0, "old": -0.5}  # a 0.5, b 0.0, c 0.5, d 0.2, e has no number
    assert questions_left(tmp_path, rows, priority_weights=weights, target_size=3) == ["a", "c", "d"]
    dataset = curate(TaskPipeline([str(tmp_path / "in.jsonl")], priority_weights=weights), tmp_path / "out")
    (rejected,) = map(json.loads, (dataset.folder / "rejected.jsonl").read_text().splitlines())
    assert (rejected["line"], dataset.rejected, dataset.rows) == (5, 1, 4)
    assert "'hard'" in rejected["reason"]


def test_values_of_tables_become_json(tmp_path: Path) -> None:
    """Dates and exact numbers; bytes are rejected with the reason. Text that reads as a number gives a priority."""
    columns = {
        "question": ["old", "new", "odd"],
        "year": ["1999", "2.5e3", "x"],
        "seen": [datetime.date(2020, 1, 2)] * 3,
        "price": [Decimal("1.50")] * 3,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    dataset = curate(TaskPipeline([str(tmp_path / "in.parquet")], priority_weights={"year": 1.0}), tmp_path / "out")
    seen = {"seen": "2020-01-02", "price": 1.5}
    assert output(dataset.folder) == [
        {"question": "new", "year": "2.5e3", **seen}, {"question": "old", "year": "1999", **seen},
    ]  # fmt: skip
    assert "'year'" in (dataset.folder / "rejected.jsonl").read_text()
    parquet.write_table(pyarrow.table({"question": ["a"], "image": [b"1"]}), tmp_path / "in.parquet")
    with pytest.raises(DataError):
        curate(TaskPipeline([str(tmp_path / "in.parquet")]), tmp_path / "out")
    assert curate(TaskPipeline([str(tmp_path / "in.parquet")], columns=["question"]), tmp_path / "out").rows == 1


def test_bad_rows_are_set_aside_with_line_and_reason(tmp_path: Path) -> None:
    rows = ["{broken\n", *asked("a"), {"answer": "1"}, {"question": 3}]
    chosen = operator("text_length_filter", input_keys=["question"])
    assert questions_left(tmp_path, rows, chosen) == ["a"]
    dataset = curate(TaskPipeline([str(tmp_path / "in.jsonl")], [chosen]), tmp_path / "out")
    lines = [json.loads(line) for line in (dataset.folder / "rejected.jsonl").read_text().splitlines()]
    reasons = {rejected["line"]: rejected["reason"] for rejected in lines}
    assert set(reasons) == {1, 3, 4}
    assert "text_length_filter" in reasons[3] and "'question'" in reasons[3]
    strict = TaskPipeline([str(tmp_path / "in.jsonl")], [chosen], max_rejected_share=0.5)
    with raising(DataError, key="max_rejected_share"):
        curate(strict, tmp_path / "out")


def test_transient_faults_travel_and_nothing_is_rejected(tmp_path: Path, plugin: Any) -> None:
    down = tmp_path / "down"
    down.touch()

    class NeedsService(TaskOperator):
        def row(self, row, memory):  # type: ignore[no-untyped-def]
            if down.exists():
                raise TransientFault("the service is away")
            return [row]

    pipeline = TaskPipeline(
        [write(tmp_path / "in.jsonl", asked("a"))], [operator(plugin("needs_service", NeedsService))]
    )
    with pytest.raises(TransientFault):
        curate(pipeline, tmp_path / "out")
    down.unlink()
    dataset = curate(pipeline, tmp_path / "out")
    assert (dataset.rows, dataset.rejected) == (1, 0)


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("text_length_filter", {"input_keys": ["a"], "min_len": 3, "max_len": 2}, "max_len"),
        ("duplicate_filter", {"input_keys": []}, "input_keys"),
        ("format_check_filter", {"input_key": "a", "pattern": "("}, "pattern"),
        ("text_lenght_filter", {}, "text_lenght_filter"),
    ],
)
def test_wrong_operators_are_refused_at_once(tmp_path: Path, name: str, args: dict[str, Any], key: str) -> None:
    with raising(InputError, key=key):
        questions_left(tmp_path, asked("a"), operator(name, **args))
    assert not (tmp_path / "out").exists()


def test_fingerprint_is_not_of_the_source_of_our_own_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update would have rows made anew, by models that say something else: no run could be resumed with them."""
    source = write(tmp_path / "rows.jsonl", asked("1 + 1", "2 + 2"))
    pipeline = TaskPipeline([source], [operator("text_length_filter", input_keys=["question"])])
    before = curate(pipeline, tmp_path / "out").fingerprint
    (edited := tmp_path / "filters.py").write_text("# another word\n")
    monkeypatch.setattr(inspect, "getsourcefile", lambda kind: str(edited))
    monkeypatch.setattr(DuplicateFilter, "revision", 1)
    assert curate(pipeline, tmp_path / "out").fingerprint == before == "5c93db5d16af51bc", "as in earlier releases"
    monkeypatch.setattr(TextLengthFilter, "revision", 1)
    assert curate(pipeline, tmp_path / "out").fingerprint != before


def test_fingerprint_is_of_contents(tmp_path: Path) -> None:
    evals = tmp_path / "evals/test.jsonl"
    write(evals, asked("x y"))
    path = write(tmp_path / "in.jsonl", asked("a b c", "d"))
    args = {"eval_paths": [str(evals)], "input_keys": ["question"], "ngram": 2}

    def made(source: str = path, size: int | None = None, **changed: Any) -> str:
        chosen = operator("contamination_filter", **{**args, **changed})
        return curate(TaskPipeline([source], [chosen], target_size=size), tmp_path / "out").fingerprint

    first = made()
    assert made(write(tmp_path / "moved.jsonl", asked("a b c", "d"))) == first
    others = [made(ngram=3), made(size=1), made(write(tmp_path / "other.jsonl", asked("a b c")))]
    write(evals, asked("z z"))
    assert len({first, *others, made()}) == 5


def test_same_pipeline_is_not_run_twice(tmp_path: Path, plugin: Any) -> None:
    calls: list[str] = []

    class Counts(TaskOperator):
        def row(self, row, memory):  # type: ignore[no-untyped-def]
            calls.append(row["question"])
            return [row]

    pipeline = TaskPipeline([write(tmp_path / "in.jsonl", asked("a", "b"))], [operator(plugin("counts", Counts))])
    assert curate(pipeline, tmp_path / "out") == curate(pipeline, tmp_path / "out")
    assert calls == ["a", "b"]


def test_two_processes_do_not_make_one_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = TaskPipeline([write(tmp_path / "in.jsonl", asked("a"))])
    name = curate(pipeline, tmp_path / "elsewhere").fingerprint
    folder = tmp_path / "out" / name
    folder.mkdir(parents=True)
    hold(folder, "curate")
    release(folder, "curate")
    program = (
        f"from trinity_core.base.runlock import hold; from pathlib import Path; hold(Path({str(folder)!r}), 'curate')"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{program}; print('held', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with monkeypatch.context() as impatient, pytest.raises(TransientFault):
            impatient.setattr("trinity_core.pipelines.tasks.curation.WAIT_SECONDS", 0.2)
            curate(pipeline, tmp_path / "out")
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(curate, pipeline, tmp_path / "out")
            holder.communicate("\n", timeout=30)
            assert waiting.result(30).rows == 1
    finally:
        holder.kill()


def test_explorers_in_one_process_share_a_data_set(plugin, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The parts of `rft_async` are its threads."""
    begun, calls = threading.Event(), []

    class Slow(TaskOperator):
        def row(self, row, memory):  # type: ignore[no-untyped-def]
            calls.append(row["question"])
            begun.set()
            time.sleep(0.002)
            return [row]

    questions = [f"q{number}" for number in range(200)]
    pipeline = TaskPipeline([write(tmp_path / "in.jsonl", asked(*questions))], [operator(plugin("slow", Slow))])
    with ThreadPoolExecutor() as threads:
        first = threads.submit(curate, pipeline, tmp_path / "out")
        assert begun.wait(30)
        second = threads.submit(curate, pipeline, tmp_path / "out")
        assert first.result(60) == second.result(60)
    assert calls == questions


KILLED = """
import os, signal, sys
from pathlib import Path
from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks import TASK_OPERATORS, TaskOperator, TaskPipeline, curate

folder = Path(sys.argv[1])

@TASK_OPERATORS.register("counts_and_dies")
class CountsAndDies(TaskOperator):
    def row(self, row, memory):
        with (folder / "calls").open("a") as calls:
            calls.write(row["question"] + "\\n")
        if row["question"] == "q2500" and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [row]

chosen = [OperatorConfig(name="counts_and_dies"),
          OperatorConfig(name="duplicate_filter", args={"input_keys": ["question"]})]
made = curate(TaskPipeline([str(folder / "in.jsonl")], chosen), folder / "out")
print(made.folder)
"""


def test_killed_pipeline_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = asked(*(f"q{number}" for number in range(3000)), *(f"q{number}" for number in range(100)))
    write(tmp_path / "in.jsonl", rows)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)

    assert run().returncode == -signal.SIGKILL
    done = run()
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert output(folder) == rows[:3000]
    assert json.loads((folder / "dataset.json").read_text())["dropped"] == {"2 duplicate_filter": 100}
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == 2501 + 3100 - 2048  # two chunks of 1024 rows were done before the kill
    assert not list(folder.glob("progress.db*"))


QUESTIONS = {
    "en": "Natalia sold clips to 48 of her friends in April. How many clips did she sell in May?",
    "de": "Im April hat Natalia ihren Freunden 48 Haarspangen verkauft. Wie viele waren es im Mai?",
    "fr": "Combien de pommes reste-t-il si Marie en mange trois et que son frère en mange deux ?",
    "zh": "小明有三个苹果，他又买了两个。请问他现在一共有多少个苹果？",
    "none": "2 + 2 = ?",
    "formula": r"Solve $\int_0^1 x^2 dx$",
}


def kept(tmp_path, **args):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"question": text, "is": name}) + "\n" for name, text in QUESTIONS.items()))
    operator = OperatorConfig(name="language_id_score_filter", args={"input_keys": ["question"], **args})
    dataset = curate(TaskPipeline([str(path)], [operator]), tmp_path / "out")
    return [json.loads(line)["is"] for line in (dataset.folder / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("args", "left"),
    [
        ({"lang": "en"}, ["en", "none", "formula"]),
        ({"lang": ["de", "fr"]}, ["de", "fr", "none", "formula"]),
        ({"lang": "zh"}, ["zh", "none", "formula"]),
        ({"lang": "en", "min_score": 0.5}, ["en"]),
    ],
)
def test_rows_in_a_language_are_kept(tmp_path, args, left):
    assert kept(tmp_path, **args) == left


@pytest.mark.parametrize("lang", ["english", []])
def test_a_language_that_is_none_is_refused(tmp_path, lang):
    with raising(InputError, key="lang"):
        kept(tmp_path, lang=lang)


def test_two_duplicate_filters_do_not_share_memory(tmp_path: Path) -> None:
    same = operator("duplicate_filter", input_keys=["question"])
    assert questions_left(tmp_path, asked("a", "b", "a"), same, same) == ["a", "b"]


def test_each_slice_of_a_split_is_a_data_set_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "in/train.jsonl", asked(*"abcdef"))
    slices = {"train[:2]": ["a", "b"], "train[2:]": ["c", "d", "e", "f"], "train": list("abcdef")}
    for split, expected in slices.items():
        dataset = curate(TaskPipeline([str(tmp_path / "in")], split=split), tmp_path / "out")
        assert [row["question"] for row in output(dataset.folder)] == expected
