"""The metrics file: whole lines, one tail that forgets nothing and repeats nothing, and rewinding."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
from forkserver import PROCESSES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trinity_core.exchange.tracking.metrics_file import (
    STREAMS,
    MetricsFile,
    MetricsReader,
    Tail,
    explorer_source,
    metrics_path,
    read_metrics,
    rewind,
)


def write_many(job_dir: Path, source: str) -> None:
    file = MetricsFile(job_dir, source)
    for step in range(60):
        file.write(step, {"value": step, "text" * 50: 1.0})


def test_concurrent_writers_never_tear_a_line(tmp_path: Path) -> None:
    writers = [
        PROCESSES.Process(target=write_many, args=(tmp_path, name), daemon=True) for name in ("trainer", "explorer")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = read_metrics(tmp_path)
    assert len(lines) == len(metrics_path(tmp_path).read_text().splitlines()) == 120
    for source in ("trainer", "explorer"):
        assert [line.step for line in lines if line.source == source] == list(range(60))


def test_non_finite_metrics_are_written_as_null(tmp_path: Path) -> None:
    MetricsFile(tmp_path, "trainer").write(1, {"a": math.nan, "b": math.inf, "c": 2})
    assert json.loads(metrics_path(tmp_path).read_text())["metrics"] == {"a": None, "b": None, "c": 2.0}
    [line] = read_metrics(tmp_path)
    assert math.isnan(line.metrics["a"]) and line.metrics["c"] == 2


def test_reader_skips_a_line_cut_short_by_a_crash(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, "trainer")
    file.write(1, {"a": 1})
    with metrics_path(tmp_path).open("ab") as raw:
        raw.write(b'{"step": 2, "sou\xfe')
    tail = Tail(tmp_path, "trainer")
    lines, position = tail.read()
    assert [line.step for line in lines] == [1]
    assert position == metrics_path(tmp_path).read_bytes().index(b"\n") + 1
    file.write(2, {"a": 2})
    assert [line.step for line in read_metrics(tmp_path)] == [1, 2], "the line after it is kept"


@given(
    steps=st.lists(st.tuples(st.sampled_from(["trainer", "explorer", "eval"]), st.integers(0, 20)), max_size=30),
    forwarded=st.integers(0, 30),
    checkpoint=st.integers(0, 20),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rewind_drops_only_later_lines(
    tmp_path_factory, steps: list[tuple[str, int]], forwarded: int, checkpoint: int
) -> None:
    job_dir = tmp_path_factory.mktemp("job")
    for source, step in steps[:forwarded]:
        MetricsFile(job_dir, source).write(step, {"a": step})
    for stream in STREAMS:
        tail = Tail(job_dir, stream)
        with tail.exclusive():
            tail.advance(tail.read()[1])
    for source, step in steps[forwarded:]:
        MetricsFile(job_dir, source).write(step, {"a": step})

    dropped = rewind(job_dir, checkpoint, lambda: {"explorer": checkpoint})

    kept = [(source, step) for source, step in steps if step <= checkpoint]
    MetricsFile(job_dir, "trainer").write(21, {"a": 21})
    assert [json.loads(raw)["step"] for raw in metrics_path(job_dir).read_text().splitlines()] == [
        *(step for _, step in kept),
        21,
    ], "each line is JSON"
    assert rewind(job_dir, 20) == 1
    assert [(line.source, line.step) for line in read_metrics(job_dir)] == kept
    assert dropped == len(steps) - len(kept)
    for stream in STREAMS:
        news = [(line.source, line.step) for line in Tail(job_dir, stream).read()[0]]
        assert news == [entry for entry in steps[forwarded:] if entry[0] == stream and entry[1] <= checkpoint]


def test_a_rewind_amid_forwarding_loses_no_line(tmp_path: Path) -> None:
    """A trainer that returns to its checkpoint rewinds while the flow process forwards."""
    file, tail = MetricsFile(tmp_path, "trainer"), Tail(tmp_path, "trainer")
    for step in range(1, 6):
        file.write(step, {"loss": 1.0})
    _, position = tail.read()
    assert rewind(tmp_path, 2) == 3
    tail.advance(position)
    file.write(3, {"loss": 2.0})
    assert [line.step for line in tail.read()[0]] == [3]


def test_a_damaged_position_sends_all_again(tmp_path: Path) -> None:
    file, tail = MetricsFile(tmp_path, "trainer"), Tail(tmp_path, "trainer")
    file.write(1, {"a": 1})
    tail.advance(tail.read()[1])
    [state] = (tmp_path / "monitor").glob("forwarded_*.json")
    state.write_bytes(b"")
    assert rewind(tmp_path, 1) == 0
    assert [line.step for line in tail.read()[0]] == [1]


def test_a_rewind_knows_the_step_of_each_explorer(tmp_path: Path) -> None:
    """Explorers are ahead of the trainer, each by its own steps; one that nothing is known of keeps its lines."""
    sources = {"explorer": 3, "explorer_new": 50, "explorer_b": 5, "trainer": 3, "eval": 2}
    for source, steps in sources.items():
        for step in range(1, steps + 1):
            MetricsFile(tmp_path, source).write(step, {"a": step})
    rewind(tmp_path, 1, lambda: {"explorer": 2, "explorer_new": 50, "late": 1})
    left = Counter(line.source for line in read_metrics(tmp_path))
    assert left == {"explorer": 2, "explorer_new": 50, "explorer_b": 5, "trainer": 1, "eval": 1}


def test_an_explorer_that_works_on_keeps_its_lines(tmp_path: Path) -> None:
    """It stores step 2 and writes the line of it while the trainer goes back, which asks for the steps only then."""
    explorer, stored = MetricsFile(tmp_path, "explorer"), {"explorer": 1}
    explorer.write(1, {"a": 1})
    writing = threading.Thread(target=explorer.write, args=(2, {"a": 2}))

    def steps() -> dict[str, int]:
        values = dict(stored)
        stored["explorer"] = 2
        writing.start()
        writing.join(0.2)
        return values

    assert rewind(tmp_path, 1, steps) == 0
    writing.join()
    assert [line.step for line in read_metrics(tmp_path)] == [1, 2]


def test_another_tracking_system_gets_all_lines(tmp_path: Path) -> None:
    """Also after a rewind."""
    for step in (1, 2, 3):
        MetricsFile(tmp_path, "trainer").write(step, {"a": 1.0})
    first, second = Tail(tmp_path, "trainer", target="mlflow"), Tail(tmp_path, "trainer", target="tensorboard")
    first.advance(first.read()[1])
    assert rewind(tmp_path, 2) == 1
    assert first.read()[0] == [] and [line.step for line in second.read()[0]] == [1, 2]
    second.advance(second.read()[1])
    assert first.read()[0] == second.read()[0] == [], "each has a position of its own"


def test_explorers_have_sources_of_their_own():
    names = ["explorer", "explorer1", "a", "explorer_a", "explorer.a", "explorer.explorer.a"]
    sources = [explorer_source(name) for name in names]
    assert len(set(sources)) == len(names) and all(source.startswith("explorer") for source in sources)
    assert explorer_source("explorer_new") == "explorer_new"


def test_a_reader_reads_on_and_begins_anew_after_a_rewind(tmp_path: Path) -> None:
    """Also where the file has become as long as before, and its inode is in use once more."""
    trainer = MetricsFile(tmp_path, "trainer")
    forgotten: list[bool] = []
    reader = MetricsReader(tmp_path, lambda: forgotten.append(True))
    assert [*reader.read()] == []
    for step in (1, 2, 3):
        trainer.write(step, {"loss": 1.0})
    MetricsFile(tmp_path, "eval").write(3, {"eval/test/accuracy": 0.5})
    assert [line.step for line in reader.read()] == [1, 2, 3, 3] and len(reader.evaluations) == 1
    trainer.write(4, {"loss": 1.0})
    with metrics_path(tmp_path).open("a") as file:
        file.write('{"step": 5, "sou')
    assert [line.step for line in reader.read()] == [4] and not forgotten
    for last in (2, 1):
        rewind(tmp_path, last)
        for step in range(last + 1, 7):
            trainer.write(step, {"loss": 2.0})
    assert [line.step for line in reader.read()] == [*range(1, 7)] and forgotten == [True]
    assert reader.evaluations == [] and [*reader.read()] == []


@pytest.mark.parametrize("looks_between", [True, False])
def test_a_reader_forgets_a_run_whose_folder_was_removed(tmp_path: Path, looks_between: bool) -> None:
    """Its successor has the same name, and may begin before the reader looks again."""
    forgotten: list[bool] = []
    reader = MetricsReader(tmp_path / "run", lambda: forgotten.append(True))
    for source in ("trainer", "eval"):
        MetricsFile(tmp_path / "run", source).write(9, {"a": 1})
    assert len([*reader.read()]) == 2
    shutil.rmtree(tmp_path / "run")
    for _ in range(2 * looks_between):
        assert [*reader.read()] == [] and forgotten == [True] and reader.evaluations == []
    for step in range(5):
        MetricsFile(tmp_path / "run", "trainer").write(step, {"a": 2})
    assert [line.step for line in reader.read()] == [0, 1, 2, 3, 4]
    assert forgotten == [True] and reader.evaluations == []
