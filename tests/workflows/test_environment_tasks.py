"""What the command that writes task sets of environments says to bad input."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trinity_core.workflows.environments import tasks


@pytest.mark.parametrize(("text", "reason"), [('{"url": bad', "is no JSON"), ("[4]", "not \\[4\\]")])
def test_arguments_that_are_no_object_are_named(text: str, reason: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=reason):
        tasks.json_object(text)


@pytest.mark.parametrize(
    ("further", "reason"),
    [
        (["--args", '{"ulr": "x"}', "--actions", "1"], "arguments of environment 'openenv'"),
        ([], "does not list its moves"),
    ],
)
def test_what_is_refused_is_one_line(
    further: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["tasks", "openenv", "--out", str(tmp_path), "--examples", "1", *further])
    with pytest.raises(SystemExit) as ended:
        tasks.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and reason in said and said.count("\n") == 1
