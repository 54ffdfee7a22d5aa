"""The script that writes task sets of environments refuses bad input with one line."""

from __future__ import annotations

from pathlib import Path

import environment_tasks
import pytest


@pytest.mark.parametrize("further", [["--args", '{"ulr": "x"}', "--actions", "1"], []])
def test_what_is_refused_is_one_line(
    further: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tasks", "openenv", "--out", str(tmp_path), "--examples", "1", *further])
    with pytest.raises(SystemExit) as ended:
        environment_tasks.main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
