"""The ported workflow of docs/porting.md, as printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task, run

from trinity_core.plugins import load_plugins
from trinity_core.workflows import WORKFLOWS

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    before, after = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    compile(before, "before", "exec")
    (tmp_path / "ported_game.py").write_text(after)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins(tmp_path)
    yield
    del WORKFLOWS["guess_number"], sys.modules["ported_game"]


@pytest.mark.parametrize(
    ("guesses", "reward", "said"),
    [(["5", "9", "7"], 1.0, ["more", "less"]), (["9", "x", "1"], 0.0, ["less", "more"])],
)
def test_the_ported_game_is_played(plugin, guesses, reward, said):
    model = Turns(*guesses)
    row = {"question": "From 1 to 9?", "answer": "7"}
    task = make_task("guess_number", raw=row, repeat_times=1, workflow_args={"max_turns": 3})
    [one] = run(task, model)
    text = model.tokenizer.decode(one.tokens.tolist())
    expected = [f"<u{answer}><a{guess}>" for answer, guess in zip(["From 1 to 9?", *said], guesses, strict=True)]
    assert text == "".join(expected)
    assert one.reward == reward and one.metrics["turns"] == 3
    assert model.tokenizer.decode(one.tokens[one.prompt_length :][one.action_mask].tolist()) == ">".join(guesses) + ">"
