"""reasoning-gym: an environment, a task set and a reward."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from environment_tasks import best_moves, main
from planning import best_return, move_values
from raising import raising
from toy_text import FrozenLake, Taxi
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task

from trinity_core.base.errors import DataError
from trinity_core.workflows import ENVIRONMENTS, EnvironmentFailed, RewardItem, RewardPool, run_workflow
from trinity_core.workflows.environments.process import HOSTS
from trinity_core.workflows.environments.reasoning import EVALUATED, is_evaluable, reasoning_gym_reward, rows
from trinity_core.workflows.environments.workflow import EnvArguments
from trinity_core.workflows.rewards.countdown import countdown_reward

pytest.importorskip("reasoning_gym", reason="requirements/environments.txt is not installed; make dev installs it")
SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(1, 30.0)
    yield pool
    pool.close()


def test_a_made_environment_has_its_package():
    """Otherwise each new process would import it within the time limit of its first reset."""
    made = (
        "import sys; from trinity_core.workflows.environments.reasoning import ReasoningGym; "
        "assert 'reasoning_gym' not in sys.modules; ReasoningGym('chain_sum'); assert 'reasoning_gym' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", made], check=True, timeout=120)


def test_one_seed_asks_one_question():
    gym = ENVIRONMENTS["reasoning_gym"]("chain_sum", SUMS)
    asked = [gym.reset(seed).observation for seed in (1, 2, 1)]
    assert asked[0] == asked[2] != asked[1]
    first, operator, second = asked[2].removesuffix(" =").split()[-3:]
    right = int(first) + int(second) * (1 if operator == "+" else -1)
    assert gym.step(f"I think <answer>{right}</answer>")[:3] == ("", 1.0, True)
    assert gym.step(str(right + 1)).reward < 1


GENERATORS = (
    "basic_arithmetic countdown family_relationships graph_color knights_knaves letter_counting sudoku time_intervals"
)


@pytest.mark.parametrize("dataset", GENERATORS.split())
def test_own_answers_are_right_and_others_are_not(pool, dataset):
    made = list(rows(dataset, 1, 2, {}))
    right = [RewardItem(row["answer"], row["answer"], row["prompt"], row) for row in made]
    wrong = [RewardItem("no idea", row["answer"], row["prompt"], row) for row in made]
    rewards = pool.score_sync("reasoning_gym_reward", right + wrong)
    assert [reward.error for reward in rewards] == [None] * 4
    stored = 0.0 if dataset == "graph_color" else 1.0  # which stores no answer, for there are many
    assert [reward.value for reward in rewards[:2]] == [stored] * 2
    assert max(reward.value for reward in rewards[2:]) < 0.5


def test_countdown_is_judged_as_by_countdown_reward():
    """Stored solutions, the same with a sign or number changed, and randomly joined numbers."""
    rng, verdicts = random.Random(1), Counter()
    for row in rows("countdown", 1, 10, {}):
        entry, solution = json.loads(row["entry"]), row["answer"]
        puzzle = {"nums": entry["metadata"]["numbers"], "target": entry["metadata"]["target"]}
        numbers = [str(number) for number in rng.sample(puzzle["nums"], len(puzzle["nums"]))]
        joined = "".join(number + rng.choice("+-*/") for number in numbers)[:-1]
        signs = [at for at, sign in enumerate(solution) if sign in "+-*/"]
        at = rng.choice(signs)
        changed = solution[:at] + ("-" if solution[at] == "+" else "+") + solution[at + 1 :]
        for text in (
            solution,
            changed,
            solution.replace(numbers[0], numbers[-1], 1),
            joined,
            f"{solution} + 0",
            f"({solution})",
            f"+({solution})",
            solution.replace(numbers[0], f"{numbers[0][0]}_{numbers[0][1:]}", 1),
        ):
            theirs = reasoning_gym_reward(prompt="", response=text, truth=None, task=row)["accuracy"] == 1.0
            ours = countdown_reward(prompt="", response=f"<answer>{text}</answer>", truth=None, task=puzzle)
            assert (ours["accuracy"] == 1.0) == theirs, (text, puzzle)
            verdicts[theirs] += 1
    assert verdicts[True] >= 30 and verdicts[False] >= 30


HOSTILE = (
    "open('PLACE', 'w')", "[open('PLACE', 'w')]", "exec('open(\\'PLACE\\', \\'w\\')')", "open('PLACE', 'w')!",
    "[c for c in open('PLACE', 'w')]", "(lambda: open('PLACE', 'w'))()", "f\"{open('PLACE', 'w')}\"", "(1).__class__",
    "oracle_answer", "9**9**9**9", "(((9**99)**99)**99)**99", "9**(9*9*9*9*9*9*9)", "999999999!",
)  # fmt: skip
"""Answers that make a file PLACE, forge a verdict, or would never finish."""


@pytest.mark.parametrize("dataset", sorted(EVALUATED))
def test_no_answer_is_run(tmp_path, dataset):
    place = tmp_path / "ran"
    [row] = rows(dataset, 1, 1, {})
    gym = ENVIRONMENTS["reasoning_gym"](dataset)
    for text in HOSTILE:
        answer = text.replace("PLACE", str(place))
        gym.reset(1)
        rewards = [reasoning_gym_reward(prompt="", response=answer, truth=None, task=row)["accuracy"]]
        assert max(*rewards, gym.step(answer).reward) == 0.0 and not place.exists(), answer


@pytest.mark.campaign
def test_a_verifier_that_hangs_is_killed():
    """Sympy would differentiate this answer for hours: no rollout of the task is judged, but the next task is."""
    asked = [row["prompt"] for row in rows("simple_integration", 1, 1, {})]
    gym = {"environment": "reasoning_gym", "environment_args": {"dataset": "simple_integration"}, "time_limit": 5.0}

    def play(*turns):
        fields = {"raw": {"question": "Go.", "seed": 1}, "repeat_times": 1, "workflow_args": gym | {"processes": 1}}
        return asyncio.run(run_workflow(make_task("env_workflow", **fields), Turns(*turns)))

    [before] = play("x")
    assert before.reward is not None and before.reward < 1 and before.metrics["turns"] == 1
    [host] = [one for hosts in HOSTS.idle.values() for one in hosts]
    with pytest.raises(EnvironmentFailed):
        play("(sin(x)+cos(x)*tan(x)+exp(x)+log(x)+sqrt(x))**99")
    assert not host.alive
    [after] = play("x")
    assert after.reward == before.reward and after.tokens.tolist() == before.tokens.tolist()
    assert asked[0].strip() in Turns().tokenizer.decode(after.tokens.tolist())


def test_a_process_of_its_own_is_the_default_and_can_be_declined():
    arguments = {"environment": "reasoning_gym", "environment_args": {"dataset": "chain_sum"}}
    assert EnvArguments.model_validate(arguments).separate
    assert not EnvArguments.model_validate(arguments | {"process": False}).separate
    assert not EnvArguments.model_validate({"environment": "openenv"}).separate


def test_every_verifier_that_evaluates_is_known():
    """According to reasoning-gym's source: files that call `eval` or sympy's `parse_expr` on an answer."""
    import reasoning_gym

    root = Path(reasoning_gym.__file__).parent
    call = re.compile(r"(?<!def )\b(?:eval|parse_expr|sympify|exec)\(answer\b")
    evaluating = {path.stem for path in root.rglob("*.py") if call.search(path.read_text())}
    assert evaluating == EVALUATED


def test_rows_that_cannot_be_judged_are_refused(pool):
    with raising(DataError, key="arc_agi"):
        list(rows("arc_agi", 1, 1, {}))
    with raising(DataError, key="composite"):
        list(rows("composite", 1, 1, {"datasets": [{"name": "countdown", "weight": 1.0}]}))
    with raising(DataError, key="no_such"):
        list(rows("no_such", 1, 1, {}))
    with raising(DataError, key="entry"):
        pool.score_sync("reasoning_gym_reward", [RewardItem("4", "4", "", {"answer": "4"})])


def test_best_play_on_ice_is_known():
    """0.744 is the known value for slippery 4x4 in 100 moves."""
    pytest.importorskip("gymnasium")
    for slippery, moves, best in ((False, 6, 1.0), (False, 5, 0.0), (True, 100, 0.744)):
        lake = FrozenLake(is_slippery=slippery)
        lake.reset(0)
        values = move_values(lake.transitions, moves)[lake.seen]
        assert max(values) == pytest.approx(best, abs=1e-3)
    assert best_moves([0.5, 0.0, 0.5]) == [0, 2] and best_moves(()) == []


def test_best_drivers_return_is_known():
    """From each of the 300 starts: 20 minus the length of the shortest path, 7.93 on average."""
    pytest.importorskip("gymnasium")
    taxi = Taxi()
    assert len(taxi.starts) == 300
    assert best_return(taxi.transitions, taxi.starts, 20) == pytest.approx(7.93, abs=1e-6)


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


@pytest.mark.parametrize("answer", ["[[0]]*7**9", "[0]*9**10", "2*([1,2]*3)", "'a'*9**9", "(1,2)*5"])
def test_answers_that_grow_a_list_are_not_evaluated(answer):
    assert not is_evaluable(answer) and is_evaluable("[2*3, x*(1+2)]")
