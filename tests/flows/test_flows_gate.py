"""The gate for real: a stage of a pipeline that promotes a trained model over its base, and a person's approval."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
import yaml

from trinity_core.config import load_config
from trinity_core.data.tiny import TinyFolders, make_tiny
from trinity_core.exchange.tracking.champions import champion

ROOT = Path(__file__).parent.parent.parent


def written(root: Path, tiny: TinyFolders) -> Path:
    data = {"path": str(tiny.data), "format": {"prompt_key": "question", "response_key": "answer"}}
    examples = {"name": "examples", "split": "sft", **data}
    held_out = {"name": "test", "split": "test", "rollout_args": {"temperature": 0.0}, **data}
    tree = {
        "project": "p",
        "name": "gated",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": str(tiny.model), "max_prompt_tokens": 88, "max_response_tokens": 40},
        "explorer": {"rollout_model": {"engine_num": 1, "enforce_eager": True, "kv_cache_gib": 1}},
        "monitor": {"monitor_type": "tensorboard"},
        "stages": [
            {
                "stage_name": "sft",
                "mode": "train",
                "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
                "trainer": {"worker_num": 1, "save_interval": 100},
                "buffer": {"train_batch_size": 64, "total_steps": 80, "trainer_input": {"experience_buffer": examples}},
            },
            {
                "stage_name": "gate",
                "mode": "bench",
                "gate": {"enable": True, "floors": {"test": 0.02}},
                "buffer": {"explorer_input": {"eval_tasksets": [held_out]}},
            },
        ],
    }
    path = root / "gated.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_promotes_what_its_gate_finds_better(tmp_path: Path) -> None:
    """Run again, the finished stages are skipped; promoted again, the candidate is the champion already."""
    tiny = make_tiny(tmp_path / "tiny", seed=0, count_train=8, count_test=300, count_sft=1000)
    file = str(written(tmp_path, tiny))
    run = [sys.executable, "-m", "trinity_core.run", "--config", file]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    gated = json.loads((tmp_path / "p" / "gated_gate" / "summary.json").read_text())["gate"]
    assert gated["verdict"] == "promoted", gated
    assert gated["champion"] == str(tiny.model) and 0 < gated["tasks"]["test"] < 300
    model = tmp_path / "p" / "gated_sft" / "global_step_80" / "actor" / "huggingface"
    assert champion(tmp_path / "p").model == str(model)  # type: ignore[union-attr]
    again = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "nothing is run again" in again.stderr, again.stderr
    promoting = [sys.executable, "-m", "flows.cli", "promote", "--config", file]
    known = subprocess.run(promoting, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert known.returncode == 1 and "is the champion" in known.stdout, known.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("said", "approved"), [("yes", "looks good"), ("no", None), (None, None)])
def test_a_person_approves_a_promotion(
    tmp_path: Path, tiny_folders: TinyFolders, prefect_api: str, monkeypatch: pytest.MonkeyPatch,
    said: str | None, approved: str | None,
) -> None:  # fmt: skip
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter

    from tasks.frontend import PREFECT

    monkeypatch.setattr("tasks.frontend.POLL_SECONDS", 0.5)
    config = load_config(written(tmp_path, tiny_folders))
    config = config.with_values({"gate.approval_timeout": 60.0 if said else 1.0})
    name = f"approving {said}"

    @flow(name=name, persist_result=False)
    def approving() -> str | None:
        return PREFECT.approves(config, "promoted: model")

    def answer() -> None:
        paused = {
            "flow_filter": FlowFilter(name={"any_": [name]}),
            "flow_run_filter": FlowRunFilter(state={"type": {"any_": ["PAUSED"]}}),
        }
        with get_client(sync_client=True) as client:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                for run in client.read_flow_runs(**paused):
                    answer = {"promote": said, "reason": "looks good"}
                    if client.resume_flow_run(run.id, run_input=answer).status.value == "ACCEPT":
                        return
                time.sleep(0.2)

    with ThreadPoolExecutor() as threads:
        person = threads.submit(copy_context().run, answer) if said else None
        assert approving() == approved
        if person is not None:
            person.result(60)
