"""The quick start's summary: its commands work when pasted, on a machine where no environment is active."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from flows.quickstart import as_text, claim, quickstart
from trinity_core.base.errors import TrinityError


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name needs quotes, below the current one."""
    monkeypatch.chdir(tmp_path)
    Path("my runs/it's/model").mkdir(parents=True)
    return Path("my runs/it's")


def summary(out: Path, **others: Any) -> dict[str, Any]:
    root = out.absolute()
    values = {
        "accuracy_base": 0.0, "accuracy_sft": 0.5, "accuracy_rft": 1.0,
        "steps": {"sft": 1}, "stage_seconds": {"before": 57.0, "sft": 2.0},
        "checkpoint_dir": str(root), "hf_dir": str(root / "model"),
        "mlflow_uri": f"sqlite:///{root}/mlflow.db", "curve": str(root / "curve.png"),
    }  # fmt: skip
    return values | others


def rows(text: str) -> dict[str, list[str]]:
    """Name -> its description, and the command that opens it if it has one."""
    commands: dict[str, list[str]] = {}
    name = ""
    for line in text.strip().splitlines():
        name = line[:11].strip() or name
        commands.setdefault(name, []).append(line[12:])
    return commands


def test_a_folder_without_a_project_is_told_what_makes_one(out: Path) -> None:
    with pytest.raises(TrinityError, match="trinity init"):
        quickstart(out, 42, Path("configs/quickstart/quickstart.yaml"))
    assert [path.name for path in out.iterdir()] == ["model"]


def test_commands_can_be_pasted(out: Path) -> None:
    commands = rows(as_text(summary(out), out))
    assert commands["time"] == ["base score 57 s  sft 2 s"]
    assert commands["checkpoint"][1] == """ls -R 'my runs/it'"'"'s'"""
    assert "model" in subprocess.check_output(commands["checkpoint"][1], shell=True, text=True)
    python, option, program = shlex.split(commands["converted"][1])
    assert Path(python).samefile(sys.executable) and option == "-c"
    compile(program, "pasted", "exec")
    assert """from_pretrained("my runs/it's/model")""" in program
    assert commands["MLflow"] == [summary(out)["mlflow_uri"]], "it is one of the pages"
    trinity, command = shlex.split(commands["pages"][1])
    assert Path(trinity).samefile(Path(sys.executable).with_name("trinity")) and command == "up"


def test_a_run_of_another_seed_is_not_taken_for_this_ones(out: Path) -> None:
    """Neither the run nor its stages are in the folder of model and data, which may have been removed."""
    run, stage = Path("checkpoints/p/run"), Path("checkpoints/p/run_sft")
    claim(out, 1, [run, stage])
    for removed in (out, run):
        rmtree(removed)
        with pytest.raises(TrinityError) as refused:
            claim(out, 2, [run, stage])
        assert not out.exists(), "a refused quick start notes nothing"
    claim(out, 1, [run, stage])
    with pytest.raises(TrinityError) as refused:
        claim(out, 2, [run, stage])
    subprocess.check_call(str(refused.value).split("`")[-2], shell=True)
    claim(out, 2, [run, stage])


def test_make_takes_a_folder_with_any_name(tmp_path: Path) -> None:
    """`trinity` gets it as it was given."""
    root = Path(__file__).parent.parent.parent
    for name in ("Makefile", "requirements/install.sh", ".venv/bin/trinity"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\n[ $# -eq 0 ] || printf "%s\\n" "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Makefile").write_text((root / "Makefile").read_text())
    name = "my runs/it's $HOME"
    command = ["make", "--no-print-directory", "quickstart", f"OUT={name.replace('$', '$$')}"]
    said = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert said.splitlines()[-4:] == ["--out", name, "--seed", "42"]
