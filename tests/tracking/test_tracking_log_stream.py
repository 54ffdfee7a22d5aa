"""The logs of several actors as one stream, while they are written and afterwards."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from raising import raising
from typer.testing import CliRunner

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.cli import app
from trinity_core.exchange.tracking.logs import LogStream, entry_filter, entry_line, parse

TRACE = """\
2026-11-23 10:00:02,000 ERROR   trinity_core.x: it fails
Traceback (most recent call last):
ValueError: no rows
"""


def write(run: Path, actor: str, *lines: str) -> Path:
    path = run / "log" / f"{actor}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)
    return path


def line(second: int, message: str, level: str = "INFO") -> str:
    return f"2026-11-23 10:00:{second:02},000 {level:7} trinity_core.x: {message}\n"


def test_entries_of_all_actors_come_in_order_of_time(tmp_path: Path) -> None:
    stream = LogStream(lambda: [tmp_path])
    write(tmp_path, "explorer", line(1, "first"), line(3, "third"))
    write(tmp_path, "10.0.0.2/trainer_0", TRACE)
    entries = stream.read()
    assert [entry.actor for entry in entries] == ["explorer", "10.0.0.2/trainer_0", "explorer"]
    assert entries[1].text.endswith("ValueError: no rows") and entries[1].level == "ERROR"
    assert entry_line(entries[0]) == "11-23 10:00:01,000 INFO    explorer trinity_core.x: first"
    assert stream.read() == []


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    stream = LogStream(lambda: [tmp_path])
    whole = line(1, "a long message")
    write(tmp_path, "explorer", whole[:40])
    assert stream.read() == []
    write(tmp_path, "explorer", whole[40:])
    assert [entry.text for entry in stream.read()] == ["trinity_core.x: a long message"]
    write(tmp_path, "engine_0", line(2, "a new file"))
    assert [entry.actor for entry in stream.read()] == ["engine_0"]


def test_filters_by_level_and_actor() -> None:
    [warning] = parse(line(1, "x", "WARNING"), "n_rft/explorer_engine_0")
    assert entry_filter("warning", [])(warning) and not entry_filter("ERROR", [])(warning)
    assert entry_filter("DEBUG", ["trainer_*", "*engine*"])(warning) and entry_filter("INFO", ["n_rft/*"])(warning)
    assert not entry_filter("DEBUG", ["explorer"])(warning)
    with raising(TrinityError, key="--level"):
        entry_filter("LOUD", [])


def test_the_command_prints_a_pipelines_stages_and_names_them(tmp_path: Path) -> None:
    write(tmp_path / "n", "explorer", line(0, "scores the base model"))
    (tmp_path / "n" / "stages.json").write_text('{"sft": "n_sft", "rft": "n_rft"}')
    for second, stage in enumerate(("n_sft", "n_rft"), 1):
        write(tmp_path / stage, "trainer_0", line(second, "begins"), line(second, "too fine", "DEBUG"))
    command = ["log", "--checkpoint-dir", str(tmp_path / "n")]
    done = CliRunner().invoke(app, command)
    actors = [text.split()[3] for text in done.stdout.splitlines()]
    assert actors == ["n/explorer", "n_sft/trainer_0", "n_rft/trainer_0"]
    other = CliRunner().invoke(app, [*command, "--actor", "trainer"])
    assert isinstance(other.exception, TrinityError) and all(actor in str(other.exception) for actor in actors)


def test_a_folder_without_a_run_has_no_log(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["log", "--checkpoint-dir", str(tmp_path)])
    assert isinstance(done.exception, DataError) and done.exception.key == str(tmp_path)


def test_follow_shows_what_is_logged_meanwhile(tmp_path: Path) -> None:
    """A real process reads while Python's own log handler writes."""
    (tmp_path / "log").mkdir()
    command = [sys.executable, "-m", "trinity_core.cli", "log", "--checkpoint-dir", str(tmp_path), "--follow"]
    log = logging.getLogger("test_follow")
    handler = logging.FileHandler(tmp_path / "log" / "explorer.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    log.addHandler(handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            for message in ("one", "two"):
                log.warning(message)
                assert reader.stdout is not None
                assert reader.stdout.readline().endswith(f"WARNING explorer test_follow: {message}\n")
        finally:
            reader.terminate()
            log.removeHandler(handler)
            handler.close()
