"""The flow `curate` against a real API: what it shows, and that a retry goes on where the first attempt was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.pipelines.tasks import TASK_OPERATORS, TaskOperator

pytestmark = pytest.mark.slow

SEEN: list[str] = []


class AwayOnce(TaskOperator):
    """Keeps all rows; the judge that it might ask is away at the first row 2500."""

    def row(self, row, memory):
        SEEN.append(row["question"])
        if row["question"] == "q2500" and SEEN.count("q2500") == 1:
            raise TransientFault("the judge does not answer")
        return [row]


@pytest.fixture
def away_once() -> Iterator[str]:
    SEEN.clear()
    TASK_OPERATORS.register("away_once")(AwayOnce)
    yield "away_once"
    del TASK_OPERATORS["away_once"]


def written(folder: Path, *operators: str) -> str:
    (folder / "data").mkdir()
    rows = [{"question": f"q{number}", "answer": "#### 1"} for number in range(3000)]
    (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {"name": "t", "default_workflow_type": "math_workflow", "format": {"response_key": "answer"}}
    tree = {
        "project": "p", "name": "n", "checkpoint_root_dir": str(folder), "cluster": {"gpu_per_node": 0},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": "m", "max_model_len": 64, "max_response_tokens": 16},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": taskset}},
    }  # fmt: skip
    if operators:
        chosen = [{"name": name} for name in operators]
        tree["data_processor"] = {"task_pipeline": {"inputs": [str(folder / "data")], "operators": chosen}}
    else:
        taskset["path"] = str(folder / "data")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_a_retry_goes_on_where_the_fault_was(prefect_api: str, tmp_path: Path, away_once: str) -> None:
    from flows.curate import curate

    at_once = curate.with_options(retry_delay_seconds=0)
    summary = at_once(written(tmp_path, away_once))
    assert (summary["rows"], summary["read"], summary["rejected"]) == (3000, 3000, 0)
    assert len(SEEN) == 2501 + 3000 - 2048, "two chunks of 1024 rows were done before the fault"
    assert Path(summary["folder"]).name == summary["fingerprint"]
    assert at_once(str(tmp_path / "run.yaml")) == summary and len(SEEN) == 3453, "made once"


def test_a_configuration_without_a_pipeline_is_told_so(prefect_api: str, tmp_path: Path) -> None:
    from flows.curate import curate

    with pytest.raises(TrinityError, match=r"has no data_processor\.task_pipeline"):
        curate(written(tmp_path))
