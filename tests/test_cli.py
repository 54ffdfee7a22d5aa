"""The command line: what it prints, how it fails, how soon it answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from trinity_core import __version__
from trinity_core.cli import run_app

ROOT = Path(__file__).parent.parent


def trinity(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in (
        "run", "evaluate", "quickstart", "up", "down", "status", "tiny", "validate", "convert", "version",
    ):  # fmt: skip
        assert f" {command} " in result.output, command


def test_version() -> None:
    assert CliRunner().invoke(app, ["version"]).output.strip() == __version__


def test_the_command_line_is_light() -> None:
    heavy = ("torch", "vllm", "deepspeed", "ray", "mlflow", "prefect", "transformers", "datasets")
    program = f"import sys, flows.cli, flows.local; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_all_problems_of_a_configuration_at_once_and_no_traceback(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("nmae: x\nalgorithm:\n  repeat_times: many\n")
    done = trinity("validate", "--config", str(bad))
    assert done.returncode == 1
    assert "nmae" in done.stderr and "repeat_times" in done.stderr and "Did you mean 'name'" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_fails_on_a_wrong_configuration_before_a_server_is_waited_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("nmae: x\n")
    done = trinity("run", "--config", str(bad))
    assert done.returncode == 1 and "nmae" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_file_is_named() -> None:
    done = trinity("run", "--config", "nowhere.yaml")
    assert done.returncode == 1 and "nowhere.yaml" in done.stderr and "Traceback" not in done.stderr


def test_validate_shows_the_stages() -> None:
    result = CliRunner().invoke(app, ["validate", "--config", str(ROOT / "configs/quickstart/quickstart.yaml")])
    assert result.exit_code == 0, result.output
    assert "quickstart_sft: sft" in result.output and "quickstart_rft: grpo" in result.output


def test_validate_tells_what_has_no_effect() -> None:
    config = str(ROOT / "configs/quickstart/quickstart.yaml")
    result = CliRunner().invoke(app, ["validate", "--config", config, "service.data_juicer.port=5006"])
    assert result.exit_code == 0, result.output
    assert result.output.count("Accepted, but without effect here: service.data_juicer.") == 2


def test_overrides_reach_the_configuration(tmp_path: Path) -> None:
    config = str(ROOT / "configs/quickstart/quickstart.yaml")
    result = CliRunner().invoke(app, ["validate", "--config", config, "name=other", f"checkpoint_root_dir={tmp_path}"])
    assert f"{tmp_path}/Trinity-Flows/other_rft" in result.output


def test_errors_for_users_end_the_process_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from trinity_core.errors import DataError

    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise DataError("row 7 of x.jsonl has no answer")

    with pytest.raises(SystemExit) as ended:
        sys.argv = ["trinity"]
        run_app(failing)
    assert ended.value.code == 1
    assert capsys.readouterr().err.strip() == "error: row 7 of x.jsonl has no answer"
