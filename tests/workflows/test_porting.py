"""The workflows of docs/porting.md, written for Trinity-RFT, as printed there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task, run

from trinity_core.base.plugins import load_plugins
from trinity_core.workflows import WORKFLOWS

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"


MAZE = """
class Maze:
    def __init__(self, map):
        self.map, self.at = map, 0

    def reset(self):
        return "start"

    def step(self, said):
        right = said == self.map[self.at]
        self.at += 1
        won = right and self.at == len(self.map)
        return f"room {self.at}", won or not right, won
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    finders = sys.meta_path.copy()
    game, maze = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_games.py").write_text(MAZE)
    (tmp_path / "ported_game.py").write_text(game)
    (tmp_path / "ported_maze.py").write_text(maze)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins(tmp_path)
    yield
    del WORKFLOWS["guess_number"], WORKFLOWS["maze"]
    sys.meta_path[:] = finders
    for name in [*sys.modules]:
        if name.split(".")[0] in ("ported_game", "ported_maze", "my_games", "trinity"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("guesses", "reward", "said"),
    [(["5", "9", "7"], 1.0, ["more", "less"]), (["9", "x", "1"], 0.0, ["less", "more"])],
)
def test_the_ported_game_is_played(plugin, guesses, reward, said):
    model = Turns(*guesses)
    row = {"question": "From 1 to 9?", "answer": "7"}
    task = make_task("guess_number", raw=row, repeat_times=1, workflow_args={"most": 3})
    [one] = run(task, model)
    text = model.tokenizer.decode(one.tokens.tolist())
    expected = [f"<u{answer}><a{guess}>" for answer, guess in zip(["From 1 to 9?", *said], guesses, strict=True)]
    assert text == "".join(expected)
    assert one.reward == reward and one.metrics["turns"] == 3
    assert model.tokenizer.decode(one.tokens[one.prompt_length :][one.action_mask].tolist()) == ">".join(guesses) + ">"


@pytest.mark.parametrize(
    ("said", "reward", "turns"),
    [(["left", "right"], 1.0, 2), (["right"], -0.1, 1), (["left", "left"], -0.1, 2)],
)
def test_the_ported_maze_is_walked(plugin, said, reward, turns):
    model = Turns(*said)
    row = {"question": "?", "answer": "", "map": ["left", "right"]}
    task = make_task("maze", raw=row, repeat_times=1)
    steps = run(task, model)
    assert [(one.turn, one.reward, one.metrics["actual_env_steps"]) for one in steps] == [
        (turn, reward, turns) for turn in range(turns)
    ]
    last = model.tokenizer.decode(steps[-1].tokens.tolist())
    seen = ["start", "room 1"][:turns]
    assert last == "<sSay left or right.>" + "".join(f"<u{a}><a{b}>" for a, b in zip(seen, said, strict=True))
