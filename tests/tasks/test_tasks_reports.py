"""What a run shows is never what ends it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Event
from unittest import mock

import pytest
from httpx import ConnectError
from ports import free_port
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console
from rich.theme import Theme

from tasks import reports
from tasks.frontend import PREFECT
from tasks.reports import LiveReport, artifact_key, terminal_bars
from trinity_core.base.addresses import page_note
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.base.waits import poll
from trinity_core.config import Config, load_config
from trinity_core.exchange.tracking.metrics_file import MetricsFile, explorer_source
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_has_failed() -> Iterator[None]:
    reports._failed.clear()
    yield
    reports._failed.clear()


def test_a_run_goes_on_where_prefect_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    monkeypatch.setattr(reports, "get_run_logger", lambda: logging.getLogger("run"))
    numbers, others = (MetricsFile(config.job_dir, explorer_source(name)) for name in ("one", "one_more"))
    report = LiveReport(config, explorer_source("one"))
    report.total_steps = 10
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}), caplog.at_level(logging.INFO):
        for step in (1, 2):
            numbers.write(step, {"reward/mean": 0.5})
            others.write(step + 3, {"reward/mean": 0.7})
            report.report()
        report.finish()
    assert [r.getMessage() for r in caplog.records if r.name == "run" and r.levelno == logging.INFO] == [
        f"step {step} of 10: reward/mean 0.5" for step in (1, 2)
    ]
    assert len([r for r in caplog.records if r.name == "run" and r.levelno == logging.WARNING]) == 1


def test_an_ended_run_goes_on_where_prefect_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    summary = {"name": "run", "curve": None, "tracking": "less metrics.jsonl", "results": {}}
    monkeypatch.setattr(reports, "get_run_logger", lambda: logging.getLogger("run"))
    shown = mock.Mock(side_effect=ConnectError("away"))
    monkeypatch.setattr(reports, "_put", shown)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        PREFECT.show(config, summary)
        PREFECT.show(config, summary, is_pipeline=True)
    assert shown.call_count == 1, "nothing more is tried while the API gives no sign of life"
    assert [record.name for record in caplog.records if record.levelno == logging.WARNING] == ["run"]
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
            PREFECT.show(config, summary)
        server.shutdown()
    assert shown.call_count == 2


def test_the_summary_of_a_running_pipeline_leads_to_its_newest_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("configs/quickstart/quickstart.yaml", [f"checkpoint_root_dir={tmp_path}", "name=all"])
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(reports, "_put", lambda config, kind, text, title: shown.append((title, text)))
    reports.begin_summary(config)
    write_json(page_note(tmp_path, "studio"), {"url": "http://127.0.0.1:4220"})
    config.job_dir.mkdir(parents=True)
    write_json(JobLayout(config.job_dir).stages, {"sft": "all_sft"})
    save_rollouts(config.job_dir.with_name("all_sft"), "explorer", 9, [SampledRollout("1 + 1?", "2")])
    curve = config.job_dir / "curve.png"
    curve.write_bytes(b"\x89PNG")
    scores = {"scores": {"before": 0.25, "sft": 0.5}, "stage_seconds": {"before": 18.0, "sft": 500.0}, "seconds": 518.0}
    summary = {"step": 9, "score": 0.5, "curve": str(curve), "tokens": 0, "pauses": [], **scores}
    PREFECT.show_so_far(config, summary, "p/all_rft")
    assert [title for title, _ in shown] == [
        "Summary: no stage has ended yet",
        "Summary: step 9, score 0.500, stage p/all_rft",
        "Learning curve: step 9",
        "Rollouts: explorer, step 9",
    ], "the curve and the rollouts are the stage's"
    assert "**stage** p/all" in shown[1][1]
    assert "**time** 8 min 38 s: base score 18 s, sft 8 min 20 s" in shown[1][1]
    assert "tokens" not in shown[1][1] and "pauses" not in shown[1][1]
    assert "/rollouts/#run=Trinity-Flows%2Fall_sft)" in shown[1][1] and "runs?run=Trinity-Flows%2Fall)" in shown[1][1]


def test_a_report_that_takes_long_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    answered = Event()
    shown: list[bool] = []
    told = mock.Mock()
    monkeypatch.setattr(reports, "get_run_logger", lambda: told)
    monkeypatch.setattr(LiveReport, "show", lambda _, ends=False: answered.wait(60) and shown.append(ends))
    report = LiveReport(config, "trainer")
    for step in (1, 2, 3):
        MetricsFile(config.job_dir, "trainer").write(step, {"reward/mean": 0.5})
        report.report()
        assert [call.args[0] for call in told.info.call_args_list][step - 1 :] == [f"step {step}: reward/mean 0.5"]
    assert not shown
    answered.set()
    report.finish()
    assert shown == [False, True], "the last report waits for the one before"
    assert told.info.call_count == 3


def test_all_reports_of_a_source_come_from_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn in many threads keeps memory for each."""
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    drawn_in: list[threading.Thread] = []
    monkeypatch.setattr(reports, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr(LiveReport, "show", lambda _, ends=False: drawn_in.append(threading.current_thread()))
    report = LiveReport(config, "trainer")
    for step in range(1, 6):
        MetricsFile(config.job_dir, "trainer").write(step, {"reward/mean": 0.5})
        assert any(report.report() or len(drawn_in) >= step for _ in poll(30))
    assert len(drawn_in) == 5 and len({*drawn_in}) == 1


def test_the_curve_is_redrawn_once_a_while_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explorer and trainer draw the same one; each picture stays in Prefect's database for a while."""
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    shown: list[str] = []
    monkeypatch.setattr(reports, "_put", lambda config, kind, *_: shown.append(artifact_key(config, kind)))
    monkeypatch.setattr(reports, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr(reports, "REPORT_SHARE", 1e-6)
    live = [LiveReport(config, source) for source in ("explorer", "trainer")]
    for step in range(1, 6):
        for report in live:
            MetricsFile(config.job_dir, report.source).write(step, {"reward/mean": 0.5})
            report.show()
    assert shown.count(artifact_key(config, "curve")) == 1 and shown.count(artifact_key(config, "summary")) == 10
    live[0].finish()
    assert shown.count(artifact_key(config, "curve")) == 2


def test_artifacts_are_updated_less_often_than_steps_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    caplog.set_level(logging.INFO, "run")
    summaries: list[str] = []
    monkeypatch.setattr(reports, "_put", lambda config, kind, text, title: summaries.append(title))
    monkeypatch.setattr(reports, "get_run_logger", lambda: logging.getLogger("run"))
    report, metrics = LiveReport(config, "trainer"), MetricsFile(config.job_dir, "trainer")
    for step in range(1, 111):
        metrics.write(step, {"reward/mean": 0.5})
        report.report()
    report.finish()
    told = [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "run"]
    assert told == [f"step {step}" for step in range(1, 111)]
    assert len([title for title in summaries if title.startswith("Summary")]) <= 2
    assert "Summary: step 110" in summaries


def screen(output: str) -> list[str]:
    """What a terminal shows of this output."""
    rows, row = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part[0] not in "\x1b\r":
            rows[row] += part
    return [row.strip() for row in rows if row.strip()]


def test_a_terminal_has_a_bar_for_each_actor_below_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The log keeps its lines whole, and no bar is left."""
    config, output = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path)), StringIO()
    handler = PrefectConsoleHandler(output)
    handler.console = Console(file=output, force_terminal=True, width=100, theme=Theme(inherit=False), _environ={})
    run = logging.Logger("run")
    run.addHandler(handler)
    monkeypatch.setattr(reports, "get_run_logger", lambda: run)
    monkeypatch.setattr(LiveReport, "show", lambda *_, ends=False: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    terminal_bars.cache_clear()
    request.addfinalizer(terminal_bars.cache_clear)
    live = [LiveReport(config, source) for source in ("explorer", "trainer")]
    for report in live:
        report.total_steps = 4
    for step in (1, 2):
        for report in live:
            MetricsFile(config.job_dir, report.source).write(step, {"reward/mean": 0.5})
            report.report()
    for report in live:
        report.report()
    run.info("the last line")
    lines = [f"step {step} of 4: reward/mean 0.5" for step in (1, 1, 2, 2)]
    shown = next(rows for _ in poll(30) if (rows := screen(output.getvalue())) and rows[-1].endswith("step 2 of 4"))
    assert shown[:5] == [*lines, "the last line"]
    assert [line.split()[0] for line in shown[5:]] == ["explorer", "trainer"] and "━" in shown[5]
    for report in live:
        report.close()
    assert screen(output.getvalue()) == shown[:5]


def test_nothing_but_the_log_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [PrefectConsoleHandler(StringIO())])
    terminal_bars.cache_clear()
    assert terminal_bars() is None


def test_an_evaluation_has_artifacts_of_its_own() -> None:
    """Prefect's page shows the one of a key that was made last: it is the run's."""
    run = Config(project="My Tests", name="run_1")
    keys = [artifact_key(config, "summary") for config in (run, run.with_values({"mode": "bench"}))]
    assert keys == ["my-tests-run-1-summary", "my-tests-run-1-evaluation-summary"]


def test_runs_whose_names_a_key_cannot_hold_have_artifacts_of_their_own() -> None:
    keys = [artifact_key(Config(project="项目", name=name), "summary") for name in ("实验一", "实验二", "a+b", "a*b")]
    assert len({*keys}) == 4 and all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in keys)
