"""Workflows as users of Trinity-RFT write them run unchanged: several turns, and an experience for each turn."""

from __future__ import annotations

import sys

import pytest
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task, run

from trinity_core.base.plugins import load_plugins
from trinity_core.workflows import WORKFLOWS

GAME = """
from trinity.common.workflows.workflow import WORKFLOWS, MultiTurnWorkflow


@WORKFLOWS.register_module("guess_number")
class GuessNumber(MultiTurnWorkflow):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.most = task.workflow_args.get("most", 5)

    def run(self):
        experiences = []
        for i in range(self.repeat_times):
            number, reward = int(self.task.truth), 0.0
            messages = [{"role": "user", "content": self.task.task_desc}]
            for turn in range(self.most):
                answer = self.model.chat(messages, n=1)[0].response_text
                messages.append({"role": "assistant", "content": answer})
                if answer.strip() == str(number):
                    reward = 1.0
                    break
                guess = int(answer) if answer.strip().isdigit() else 0
                messages.append({"role": "user", "content": "more" if guess < number else "less"})
            experience = self.process_messages_to_experience(messages, reward, {"turns": turn + 1})
            experience.eid.run = i + self.run_id_base
            experiences.append(experience)
        return experiences
"""

MAZE_WORKFLOW = """
from trinity.common.workflows.step_wise_workflow import RewardPropagationWorkflow
from trinity.common.workflows.workflow import WORKFLOWS

from my_games import Maze


@WORKFLOWS.register_module("maze")
class MazeWorkflow(RewardPropagationWorkflow):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False)
        self.maze = Maze(task.raw_task["map"])
        self.memory = [{"role": "system", "content": "Say left or right."}]
        self.seen, self.won = self.maze.reset(), False

    def step(self, step_num):
        self.memory.append({"role": "user", "content": self.seen})
        said = self.model.chat(self.memory)[0].response_text
        self.memory.append({"role": "assistant", "content": said})
        self.seen, done, self.won = self.maze.step(said)
        return not done

    def reward(self, exps):
        return 1.0 if self.won else -0.1

    @property
    def max_step_num(self):
        return 30
"""

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
    (tmp_path / "my_games.py").write_text(MAZE)
    (tmp_path / "ported_game.py").write_text(GAME)
    (tmp_path / "ported_maze.py").write_text(MAZE_WORKFLOW)
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
