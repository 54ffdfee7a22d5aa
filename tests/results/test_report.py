"""`trinity report`: one HTML file without scripts."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from raising import raising
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.errors import DataError
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.config import config_from_dict
from trinity_core.config.load import to_dict
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.exchange.tracking.run_record import RunRecord, config_path, record_path
from trinity_core.results.report import report

STOLEN = "<script>alert(1)</script>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, lr in (("one", 1e-4), ("two", 1e-5)):
        job = tmp_path / "p" / name
        interval = {"eval/test/accuracy_low": 0.4, "eval/test/accuracy_high": 0.6, "eval/test/answers": 400.0}
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
        write_json(JobLayout(job).note, {"text": "the good one"})
        made_from = {"inputs": {"/data/train.jsonl": "7493ac74"}}
        write_json(job / "summary.json", {"seconds": 80.0, "findings": [finding], "made_from": made_from})
        record = RunRecord("finished", began=1e6, ended=1e6 + 60.0, earlier=29.5, software={"torch": "2.13.0"})
        record = replace(record, first_began=5.5 * 86400.0)
        write_json(record_path(job), asdict(record))
    return tmp_path / "p"


def test_a_report_has_scores_findings_curve_differences_and_samples(runs: Path, tmp_path: Path) -> None:
    """It changes nothing in the run's folder, which may be another person's."""
    file, before = tmp_path / "reports" / "one.html", {*runs.rglob("*")}
    done = CliRunner().invoke(app, ["report", "--checkpoint-dir", str(runs / "one"), "-o", str(file)])
    assert done.exit_code == 0 and {*runs.rglob("*")} == before
    text = file.read_text()
    score = "<td>2</td><td>0.500</td><td>0.400 to 0.600</td>"
    shown = (
        score,
        "06 Jan 1970",
        "test (400 answers)",
        "torch 2.13.0",
        "<td>7493ac74</td>",
        "1 min 30 s",
        "sft step 9",
        "<td>grpo</td>",
        "the good one",
        "cut-off",
        "data:image/png",
        "2 + 2?",
    )
    assert all(part in text for part in shown) and text.count("one</h") == 1
    assert STOLEN not in text and "&lt;script&gt;" in text


def settings(run: Path) -> dict[str, list[str]]:
    """Key → value and default in the report of a run."""
    table = report(run).partition("<h3>Settings")[2].partition("</table>")[0]
    rows = [re.findall("<td>(.*?)</td>", row) for row in table.replace("<wbr>", "").split("<tr>")]
    return {row[0]: row[1:] for row in rows if row}


def test_settings_are_those_that_a_file_must_have(runs: Path) -> None:
    """Also those without a default, or with the default of another algorithm; none that follow from others."""
    tasks = {"name": "train", "path": "org/sums", "default_workflow_type": "simple_workflow"}
    file = {
        "name": "one", "seed": 42,
        "model": {"model_path": "org/model", "max_prompt_tokens": 64, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "kl_loss_fn": "none"},
        "buffer": {"batch_size": 4, "total_steps": 60, "explorer_input": {"taskset": tasks}},
    }  # fmt: skip
    config_path(runs / "one").write_text(yaml.safe_dump(to_dict(config_from_dict(file))))
    assert "org/<wbr>sums" in report(runs / "one"), "a path is broken after a slash, never within a name"
    assert settings(runs / "one") == {
        "algorithm.kl_loss_fn": ["none", "k2"],
        "model.model_path": ["org/model", "–"], "model.max_prompt_tokens": ["64", "–"],
        "model.max_response_tokens": ["8", "–"], "buffer.batch_size": ["4", "1"], "buffer.total_steps": ["60", "–"],
        "buffer.explorer_input.taskset.name": ["train", "taskset"],
        "buffer.explorer_input.taskset.path": ["org/sums", "–"],
        "buffer.explorer_input.taskset.default_workflow_type": ["simple_workflow", "math_workflow"],
    }  # fmt: skip
    file["buffer"] = {"explorer_input": {"tasksets": [tasks, tasks | {"name": "more"}]}}
    config_path(runs / "one").write_text(yaml.safe_dump(to_dict(config_from_dict(file))))
    assert "buffer.explorer_input.tasksets[0].path" in settings(runs / "one"), "the first of several"


@pytest.mark.parametrize(("summary", "text"), [({}, "not examined"), ({"findings": []}, "0 findings")])
def test_that_the_doctor_found_nothing_is_said(runs: Path, summary: dict[str, object], text: str) -> None:
    write_json(runs / "one" / "summary.json", summary)
    assert text in report(runs / "one")


def test_a_failed_run_has_its_error(runs: Path) -> None:
    write_json(record_path(runs / "one"), asdict(RunRecord("failed", began=100.0, ended=160.0, error="no data")))
    assert "<td>no data</td>" in report(runs / "one")


def test_the_other_run_decides_which_settings_differ(runs: Path) -> None:
    text = report(runs / "one", runs / "two")
    assert "<td>0.0001</td><td>1e-05</td>" in text and "algorithm_type" not in text


def test_a_pipeline_is_compared_stage_by_stage(runs: Path) -> None:
    """A stage of another pipeline too; any other run with the last scored stage."""
    for name, stages in (("whole", {"sft": "one", "rft": "two"}), ("other", {"rft": "one", "sft": "two"})):
        (runs / name).mkdir()
        write_json(runs / name / "stages.json", stages)
    text = report(runs / "whole", runs / "other")
    assert "<td>0.0001</td><td>1e-05</td>" in text and "<td>1e-05</td><td>0.0001</td>" in text
    assert "differ from two" in report(runs / "one", runs / "other")
    write_json(record_path(runs / "one"), asdict(RunRecord("finished", began=100.0, stage="rft")))
    assert "differ from one" in report(runs / "one", runs / "other")


def test_the_report_of_a_pipeline_begins_with_the_scores_of_base_model_and_stages(runs: Path) -> None:
    (runs / "whole").mkdir()
    write_json(runs / "whole" / "stages.json", {"sft": "one", "rft": "two"})
    assert "base model" not in report(runs / "whole"), "it has not ended"
    write_json(runs / "whole" / "summary.json", {"scores": {"before": 0.0, "sft": 0.5225, "rft": None}})
    text = report(runs / "whole")
    assert "<td>base model</td><td>0.000</td><td>–</td>" in text, "without an interval, as of several sets"
    assert "<td>sft</td><td>0.522</td><td>0.400 to 0.600</td>" in text
    assert "<td>rft</td>" not in text and text.index("base model") < text.index("<h2>one</h2>")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with raising(DataError, key=str(tmp_path)):
        report(tmp_path)
