"""The flow `curate` against a real API: what it shows, and that a retry continues where the first attempt ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from raising import raising

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.pipelines.tasks import TASK_OPERATORS, TaskOperator

pytestmark = pytest.mark.slow

SEEN: list[str] = []
ROOT = Path(__file__).parents[2]


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


PLUGIN = """
import os, signal
from pathlib import Path

from trinity_core.pipelines.tasks import TASK_OPERATORS, TaskOperator

HERE = Path(__file__).parent


@TASK_OPERATORS.register("dies_once")
class DiesOnce(TaskOperator):
    def row(self, row, memory):
        with (HERE / "seen").open("a") as seen:
            print(row["question"], file=seen)
        if row["question"] == "q2500" and not (HERE / "died").exists():
            (HERE / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [row]
"""


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


def test_a_killed_flow_goes_on_where_it_was(prefect_api: str, tmp_path: Path) -> None:
    """SIGKILL during the third chunk of 1024 rows; the flow that is started again repeats that chunk alone."""
    from flows.curate import curate

    file, plugins = written(tmp_path, "dies_once"), tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "dies_once.py").write_text(PLUGIN)
    Path(file).write_text(f"{Path(file).read_text()}plugin_dir: {plugins}\n")
    command = [sys.executable, "-c", f"from flows.curate import curate; curate({file!r})"]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    summary = curate(file)
    assert (summary["rows"], summary["read"], summary["rejected"]) == (3000, 3000, 0)
    seen = (plugins / "seen").read_text().split()
    assert seen == [f"q{number}" for number in (*range(2501), *range(2048, 3000))]
    rows = [json.loads(line) for line in (Path(summary["folder"]) / "train.jsonl").read_text().splitlines()]
    assert [row["question"] for row in rows] == [f"q{number}" for number in range(3000)]


def test_a_configuration_without_a_pipeline_is_told_so(prefect_api: str, tmp_path: Path) -> None:
    from flows.curate import curate

    with raising(TrinityError, key="data_processor.task_pipeline"):
        curate(written(tmp_path))
