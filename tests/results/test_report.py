"""`trinity report`: one HTML file without scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from raising import raising
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.exchange.tracking.run_record import config_path
from trinity_core.results.report import report

STOLEN = "<script>alert(1)</script>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, lr in (("one", 1e-4), ("two", 1e-5)):
        job = tmp_path / "p" / name
        interval = {"eval/test/accuracy_low": 0.4, "eval/test/accuracy_high": 0.6}
        MetricsFile(job, "eval").write(2, {"eval/test/accuracy": 0.5} | interval)
        model = {"model_path": str(tmp_path / "p/sft/global_step_9/actor/huggingface")}
        config = {
            "name": name,
            "seed": 42,
            "model": model,
            "algorithm": {"algorithm_type": "grpo", "optimizer": {"lr": lr}},
        }
        config_path(job).write_text(yaml.safe_dump(config))
        save_rollouts(job, "eval/test", 2, [SampledRollout("2 + 2?", STOLEN, 1.0, truth="4")])
        finding = {"check": "cut-off", "evidence": "97% of them", "cause": "a limit", "next_step": "raise it"}
        write_json(job / "summary.json", {"seconds": 89.5, "findings": [finding]})
    return tmp_path / "p"


def test_a_report_has_scores_findings_curve_differences_and_samples(runs: Path, tmp_path: Path) -> None:
    """It changes nothing in the run's folder, which may be another person's."""
    file, before = tmp_path / "reports" / "one.html", {*runs.rglob("*")}
    done = CliRunner().invoke(app, ["report", "--checkpoint-dir", str(runs / "one"), "-o", str(file)])
    assert done.exit_code == 0 and {*runs.rglob("*")} == before
    text = file.read_text()
    assert all(
        part in text
        for part in ("step 2: 0.500 [0.400, 0.600]", "1 min 30 s", "sft step 9", "cut-off", "data:image/png", "2 + 2?")
    )
    assert "algorithm.optimizer.lr</td><td>0.0001" in text and "<td>seed</td>" not in text, "the seed is the default"
    assert STOLEN not in text and "&lt;script&gt;" in text


def test_the_other_run_decides_which_settings_differ(runs: Path) -> None:
    text = report(runs / "one", runs / "two")
    assert "<td>0.0001</td><td>1e-05</td>" in text and "algorithm_type" not in text


def test_the_report_of_a_pipeline_begins_with_the_scores_of_base_model_and_stages(runs: Path) -> None:
    (runs / "whole").mkdir()
    write_json(runs / "whole" / "stages.json", {"sft": "one", "rft": "two"})
    assert "base model" not in report(runs / "whole"), "it has not ended"
    write_json(runs / "whole" / "summary.json", {"scores": {"before": 0.0, "sft": 0.5225, "rft": None}})
    text = report(runs / "whole")
    assert "<td>base model</td><td>0.000</td>" in text, "without an interval, as of several sets"
    assert "<td>sft</td><td>0.522 [0.400, 0.600]</td>" in text
    assert "<td>rft</td>" not in text and text.index("base model") < text.index("<h2>one</h2>")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with raising(DataError, key=str(tmp_path)):
        report(tmp_path)
