"""A run is examined while it works, each time by a task of its flow."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.runtime import flow_run

from flows.loaded import ended
from tasks.frontend import PREFECT
from tasks.prefect_api import WITH_FINDINGS
from trinity_core.base.waits import poll
from trinity_core.config import load_config
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.results.doctor import Diagnosis
from trinity_core.run import examination
from trinity_core.run.examination import examined


def test_examinations_after_the_first_step_and_at_evaluations(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics of earlier attempts are no reason for one, and a finding is logged once."""
    monkeypatch.setattr(examination, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(examination, "SHARE", 100.0)
    config = load_config("configs/quickstart/quickstart.yaml", [f"checkpoint_root_dir={tmp_path}", "stages=[]"])
    trainer, scores = (MetricsFile(config.job_dir, source) for source in ("trainer", "eval"))
    scores.write(0, {"eval/test/accuracy": 0.5})

    def states() -> dict[str, str]:
        with get_client(sync_client=True) as client:
            runs = client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run.id]}}))
            return {run.name: run.state.name for run in runs if run.state is not None and run.state.is_final()}

    noted: list[Diagnosis] = []

    @flow
    def run() -> dict[str, str]:
        with examined(config, PREFECT, noted.append):
            for count, write in enumerate(
                (
                    lambda: trainer.write(1, {"actor/kl_mean": 0.4}),
                    lambda: trainer.write(2, {"actor/kl_mean": 0.4}),
                    lambda: scores.write(2, {"eval/test/accuracy": 0.6}),
                )
            ):
                write()
                for _ in poll(30):
                    if len(states()) >= (1, 1, 2)[count]:
                        break
        return states()

    assert run() == {"doctor, train step 1": WITH_FINDINGS, "doctor, evaluation of step 2": WITH_FINDINGS}
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert sum("other-reference" in record.getMessage() for record in warnings) == 1
    assert [diagnosis.check for diagnosis in noted].count("other-reference") == 1


def test_a_state_says_why_a_run_ended_early_and_what_was_found() -> None:
    finding = {"check": "cut-off", "evidence": "97% of answers"}
    summary = {"stopped_early": "monitor.stop.hours: 2 of 2 are spent", "findings": [finding]}
    state = ended(summary)
    assert (state.name, state.message) == (WITH_FINDINGS, f"{summary['stopped_early']}; cut-off: 97% of answers")
    assert ended(summary | {"findings": []}).message == summary["stopped_early"]
