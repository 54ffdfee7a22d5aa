"""reasoning-gym: an environment, a task set and a reward."""

from __future__ import annotations

import json

import pytest

from trinity_core.errors import DataError
from trinity_core.workflows import ENVIRONMENTS, RewardItem, RewardPool
from trinity_core.workflows.environments.planning import move_values
from trinity_core.workflows.environments.reasoning import answer_in, rows
from trinity_core.workflows.environments.tasks import best_moves, main
from trinity_core.workflows.environments.toy_text import Blackjack, FrozenLake

pytest.importorskip("reasoning_gym", reason="requirements/environments.txt is not installed; make dev installs it")
SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(1, 30.0)
    yield pool
    pool.close()


def test_one_seed_asks_one_question():
    gym = ENVIRONMENTS["reasoning_gym"]("chain_sum", SUMS)
    asked = [gym.reset(seed).observation for seed in (1, 2, 1)]
    assert asked[0] == asked[2] != asked[1]
    first, operator, second = asked[2].removesuffix(" =").split()[-3:]
    right = int(first) + int(second) * (1 if operator == "+" else -1)
    assert gym.step(f"I think <answer>{right}</answer>")[:3] == ("", 1.0, True)
    assert gym.step(str(right + 1)).reward < 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("It is #### 4 ", "4"),
        ("<answer>1</answer> no, <answer>\n2</answer>.", "2"),
        ("#### 1\n#### 3", "3"),
    ],
)
def test_an_answer_is_found_in_a_response(text, answer):
    assert answer_in(text) == answer


def test_own_answers_are_right_and_others_are_not(pool):
    for dataset in ("chain_sum", "countdown", "gcd", "knights_knaves", "letter_counting", "zebra_puzzles"):
        made = list(rows(dataset, 1, 2, {}))
        right = [RewardItem(row["answer"], row["answer"], row["prompt"], row) for row in made]
        wrong = [RewardItem("no idea", row["answer"], row["prompt"], row) for row in made]
        rewards = pool.score_sync("reasoning_gym_reward", right + wrong)
        assert [reward.error for reward in rewards] == [None] * 4, dataset
        assert [reward.value for reward in rewards[:2]] == [1.0] * 2, dataset
        assert max(reward.value for reward in rewards[2:]) < 0.5, dataset


def test_rows_that_cannot_be_judged_are_refused(pool):
    with pytest.raises(DataError, match="env_workflow"):
        list(rows("arc_agi", 1, 1, {}))
    with pytest.raises(DataError, match="no_such"):
        list(rows("no_such", 1, 1, {}))
    with pytest.raises(DataError, match="column 'entry'"):
        pool.score_sync("reasoning_gym_reward", [RewardItem("4", "4", "", {"answer": "4"})])


def test_best_play_on_ice_is_known():
    """0.744 is what is known of slippery 4x4 in 100 moves."""
    pytest.importorskip("gymnasium")
    for slippery, moves, best in ((False, 6, 1.0), (False, 5, 0.0), (True, 100, 0.744)):
        lake = FrozenLake(is_slippery=slippery)
        lake.reset(0)
        values = move_values(lake.transitions, moves)[lake.seen]
        assert max(values) == pytest.approx(best, abs=1e-3)
    assert best_moves([0.5, 0.0, 0.5]) == [0, 2] and best_moves(()) == []
    assert Blackjack().transitions == {}


def write(monkeypatch, folder, *args):
    monkeypatch.setattr("sys.argv", ["tasks", *args, "--out", str(folder), "--train", "4", "--test", "2"])
    main()
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_tasks_and_examples_of_a_lake(monkeypatch, tmp_path):
    pytest.importorskip("gymnasium")
    options = ["--args", '{"show_rules": false}', "--examples", "3", "--skill", "1"]
    made = write(monkeypatch, tmp_path, "frozen_lake", *options)
    assert {split: len(rows) for split, rows in made.items()} == {"train": 4, "test": 2, "sft": 3}
    assert made["test"] == [{"prompt": "Play.", "seed": seed} for seed in (4, 5)]
    for row in made["sft"]:
        lake = FrozenLake(show_rules=False)
        assert row["messages"][0] == {"role": "user", "content": f"Play.\n{lake.reset(0)[0]}"}
        moves = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert len(moves) == 6 and [lake.step(move)[1] for move in moves][-1] == 1.0


def test_tasks_and_examples_of_sums(monkeypatch, tmp_path):
    given = json.dumps({"dataset": "chain_sum", "config": SUMS})
    made = write(monkeypatch, tmp_path, "reasoning_gym", "--args", given, "--examples", "5", "--skill", "1")
    assert {split: len(rows) for split, rows in made.items()} == {"train": 4, "test": 2, "sft": 5}
    question, answer = (message["content"] for message in made["sft"][0]["messages"])
    first, operator, second = question.removesuffix(" =").split()[-3:]
    assert int(answer) == int(first) + int(second) * (1 if operator == "+" else -1)
