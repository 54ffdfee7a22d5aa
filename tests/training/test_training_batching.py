"""Micro-batches: no row lost, no unit split, budget kept, ranks in step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task, run

from trinity_core.algorithms.objective import Objective
from trinity_core.config import config_from_dict
from trinity_core.data.experience import Experience, rollouts_of
from trinity_core.training import micro as micro_module
from trinity_core.training.batch import batch_metrics, make_batch
from trinity_core.training.batching import RowUnit, mask_elements, pairs_of, plan, units_of
from trinity_core.training.distributed import Ranks
from trinity_core.training.micro import build_micro
from trinity_core.training.update import MicroBatchLimits, at_actions, micro_batches, prepare

lengths = st.integers(1, 60)
masks = st.sampled_from([0, 3000, None])
"""Limits of the mask: all rows padded, only larger micro-batches padded, none padded."""
rows = st.lists(st.tuples(st.integers(0, 5), lengths), min_size=1, max_size=60)


def _units(rows, budget, largest_mask=None):
    prompts = [7 + group for group, _ in rows]
    return units_of([str(group) for group, _ in rows], prompts, [r for _, r in rows], budget, largest_mask)


@given(rows, st.integers(20, 300), st.integers(1, 4), masks)
@settings(max_examples=50)
def test_every_row_is_in_exactly_one_micro_batch(rows, budget, ranks, largest_mask):
    shares = plan(_units(rows, budget, largest_mask), budget, ranks, largest_mask)
    assert len(shares) == ranks
    assert sorted(row for share in shares for micro in share for row in micro) == list(range(len(rows)))


@given(rows, st.integers(20, 300), st.integers(1, 4), masks)
@settings(max_examples=50)
def test_ranks_get_equal_and_fewest_micro_batches(rows, budget, ranks, largest_mask):
    shares = plan(_units(rows, budget, largest_mask), budget, ranks, largest_mask)
    counts = {len(share) for share in shares}
    assert len(counts) == 1
    empty = sum(not micro for share in shares for micro in share)
    assert empty < ranks or len(rows) < ranks * counts.pop()


@given(rows, st.integers(20, 300), st.integers(1, 4), masks)
@settings(max_examples=50)
def test_no_micro_batch_of_several_rows_exceeds_the_budget(rows, budget, ranks, largest_mask):
    """Each prompt once, or with too large a mask, every row as long as the longest."""
    for share in plan(_units(rows, budget, largest_mask), budget, ranks, largest_mask):
        for micro in filter(None, share):
            members = [rows[row] for row in micro]
            prompts, responses = [7 + group for group, _ in members], [response for _, response in members]
            cost = sum(7 + group for group in {group for group, _ in members}) + sum(responses)
            mask = mask_elements(len(micro), max(prompts), max(responses))
            if largest_mask is not None and mask > largest_mask:
                cost = len(micro) * max(map(sum, zip(prompts, responses, strict=True)))
            assert cost <= budget or len(micro) == 1


@pytest.mark.parametrize("repeats", [1, 16])
def test_long_prompts_keep_to_the_budget(monkeypatch, repeats):
    """The mask of 16 rollouts with a shared prompt would be too large; padded, each repeats the prompt."""
    monkeypatch.setattr(micro_module, "LARGEST_MASK", 65_000)
    rows = [
        Experience(tokens=np.zeros(280, np.int32) + group, prompt_length=250, action_mask=np.ones(30))
        for group in range(16 // repeats)
        for _ in range(repeats)
    ]
    units = units_of([e.tokens[0] for e in rows], [250] * 16, [30] * 16, 768, 65_000)
    built = [build_micro(rows, micro, 30).inputs.tokens for micro in plan(units, 768, 1, 65_000)[0]]
    assert max(tokens.numel() for tokens in built) <= 768
    assert len(built) == (3 if repeats == 16 else 8)


def test_prompts_of_teachers_keep_to_the_budget():
    """A group of the policy's short prompt, whose rollouts have different demonstrations."""
    prompt = np.arange(3, 7)
    experiences = [
        Experience(np.append(prompt, [run] * 5), len(prompt), np.ones(5, bool), teacher_prompt=np.arange(20 + run))
        for run in range(8)
    ]
    batch = make_batch(experiences, torch.device("cpu"))
    micros = list(micro_batches(batch, MicroBatchLimits(100), Ranks(0, 1, torch.device("cpu"))))
    assert sorted(row for micro in micros for row in micro.rows.tolist()) == list(range(8))
    assert max(micro.for_teacher.inputs.tokens.numel() for micro in micros) <= 100 and len(micros) == 3


@given(rows, st.integers(20, 300), st.integers(1, 4))
@settings(max_examples=50)
def test_units_stay_whole_and_in_order(rows, budget, ranks):
    units = _units(rows, budget)
    shares = plan(units, budget, ranks)
    micros = [micro for share in shares for micro in share]
    for unit in units:
        assert any(unit.rows == micro[i : i + len(unit.rows)] for micro in micros for i in range(len(micro)))


def test_group_prompt_counts_once_and_large_group_is_split():
    assert units_of(["a", "a", "b"], [10, 10, 4], [3, 5, 2], 100) == [
        RowUnit((0, 1), 18, 15, 10, 5),
        RowUnit((2,), 6, 6, 4, 2),
    ]
    assert [unit.rows for unit in units_of(["a"] * 4, [10] * 4, [5] * 4, 20)] == [(0, 1), (2, 3)]
    assert [unit.tokens for unit in units_of(["a"] * 4, [10] * 4, [5] * 4, 20)] == [20, 20]
    assert [unit.rows for unit in units_of(["a"] * 2, [10] * 2, [50] * 2, 20)] == [(0,), (1,)]


def test_pairs_are_never_cut():
    pairs = pairs_of([4, 4, 6, 6], [10, 20, 30, 40])
    assert [unit.rows for unit in pairs] == [(0, 1), (2, 3)]
    assert [micro for share in plan(pairs, 5, 1) for micro in share] == [(2, 3), (0, 1)]
    with pytest.raises(ValueError):
        pairs_of([1], [1])


def test_turns_of_a_run_are_one_rollout():
    """Sequences of a session are numbered as turns; rows that share a turn are separate rollouts."""
    numbers = [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0), ("b", 0, 0), ("b", 0, 1), ("b", 1, 0)]
    rows = [Experience([1, 2], 1, [True], group=group, run=run, turn=turn) for group, run, turn in numbers]
    assert rollouts_of(rows) == ["0", "0", "1", "0/3", "0/4", "0/5", "1"]


def advantages_of(algorithm: str, rows: list[Experience], **args) -> list[float]:
    config = config_from_dict({
        "mode": "train", "checkpoint_root_dir": "/nowhere",
        "algorithm": {"algorithm_type": algorithm, "advantage_fn_args": args},
        "model": {"model_path": "m", "max_model_len": 64, "max_response_tokens": 8},
        "buffer": {"batch_size": 1, "total_steps": 1, "trainer_input": {"experience_buffer": {"name": "b"}}},
    })  # fmt: skip
    prepared, _ = prepare(Objective(config.algorithm), make_batch(rows, torch.device("cpu")), None, None, None)
    return prepared.advantages[:, 0].tolist()


def by_turn(*runs: tuple[float, ...]) -> list[Experience]:
    """Rows of one group, with the rewards of each run's turns."""
    return [
        Experience([1, 2], 1, [True], group="a", run=run, turn=turn, reward=reward)
        for run, rewards in enumerate(runs)
        for turn, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_equal_rollouts_have_no_advantage_in_any_summation_order(algorithm: str) -> None:
    """By token in any order, or by several rows: float32 sums of 40 times 1.7 differ by more than the epsilon."""
    rng = np.random.default_rng(0)

    def by_token(run: int) -> Experience:
        rewards = np.zeros(200, np.float32)
        rewards[rng.choice(200, 40, replace=False)] = 1.7
        return Experience(range(201), 1, [True] * 200, group="a", run=run, token_rewards=rewards)

    assert set(advantages_of(algorithm, [by_token(run) for run in range(8)])) == {0.0}
    rows = by_turn((10.1, 90.3), (50.2, 50.2), (50.2, 50.2), (90.3, 10.1))
    assert set(advantages_of(algorithm, rows)) == {0.0}


def test_equal_episodes_of_other_turns_have_no_advantage() -> None:
    assert set(advantages_of("gigpo", by_turn((10.1, 20.2), (30.3, 0.0)), step_weight=0.0)) == {0.0}


def test_length_metrics_ignore_expert_rows() -> None:
    def row(length: int, is_expert: bool = False) -> Experience:
        return Experience(range(length + 2), 2, [True] * length, is_expert=is_expert)

    mixed = batch_metrics(make_batch([row(10), row(20), row(200, True)], torch.device("cpu")), 0)
    assert (mixed["response_length/mean"], mixed["response_length/max"]) == (15, 20)
    taught = batch_metrics(make_batch([row(100, True), row(200, True)], torch.device("cpu")), 0)
    assert taught["response_length/mean"] == 150


def test_rewards_of_a_batch_are_those_of_its_rollouts():
    """A rollout of three sequences counts once, and unnumbered rows count each, as in the explorer's metrics."""
    sessions = [("a", 0, 0, 1.0), ("a", 0, 1, 1.0), ("a", 0, 2, 1.0), ("a", 1, 0, 0.0)]
    steps = [("b", 0, 0, 0.5), ("b", 0, 1, -1.5), ("b", 1, 0, None)]
    rows = [Experience([1, 2], 1, [True], group=g, run=r, turn=t, reward=x) for g, r, t, x in [*sessions, *steps]]
    metrics = batch_metrics(make_batch(rows, torch.device("cpu")), 0)
    assert metrics["reward/mean"] == pytest.approx((1.0 + 0.0 - 0.5) / 3)
    assert (metrics["reward/max"], metrics["reward/min"]) == (1.0, -0.5)
    assert (metrics["experience/rows"], metrics["experience/rollouts"], metrics["experience/groups"]) == (7, 4, 2)
    alike = [Experience([1, 2], 1, [True], group="c", reward=float(x)) for x in (1, 0, 0)]
    alone = batch_metrics(make_batch(alike, torch.device("cpu")), 0)
    assert alone["reward/mean"] == pytest.approx(1 / 3) and alone["experience/rollouts"] == 3


def test_turns_are_compared_by_their_states():
    """Run 0 passes A and B and wins, run 1 passes only B and loses: in B the returns 1 and 0 are compared."""
    turns = [(0, 0, "A", 0.0), (0, 1, "B", 1.0), (1, 0, "B", 0.0)]
    rows = [Experience([1, 2], 1, [True], group="g", run=r, turn=t, state=s, reward=x) for r, t, s, x in turns]
    assert advantages_of("gigpo", rows, std_normalize=False) == pytest.approx([0.5, 0.5 + 0.5, -0.5 - 0.5])
    for row in rows:
        row.metrics, row.reward = {"step_reward": row.reward}, float(row.run == 0)
    assert advantages_of("gigpo", rows, std_normalize=False) == pytest.approx([0.5, 0.5 + 0.5, -0.5 - 0.5])
    won = [Experience([1, 2], 1, [True], group="g", run=r, turn=t, reward=float(t == 1)) for r, t, _, _ in turns]
    assert advantages_of("multi_step_grpo", won, std_normalize=False) == pytest.approx([0.5, 0.5, -0.5])


def test_gigpo_prefers_an_early_win():
    """Four runs of `multi_turn_workflow`: one wins at once, one at the third try, two lose; gamma is 0.95.

    Runs are worth 1, 1, 0, 0, so +-0.5. Returns of the first turns, which all begin with the question, are 1, 0.9025, 0
    and 0; of the second ones 0.95, 0, 0; of the third ones 1, 0, 0.
    """
    right, wrong = "#### 2", "#### 3"
    arguments = {"step_wise": True, "discount": 0, "feedback": "no"}
    rows = []
    for number, turns in enumerate([[right], [wrong, wrong, right], [wrong] * 3, [wrong] * 3]):
        task = make_task("multi_turn_workflow", repeat_times=1, workflow_args=arguments)
        for row in run(task, Turns(*turns)):
            row.run = number
            rows.append(row)
    once, third = [0.5 + 0.524375], [0.5 + 0.426875, 0.5 + 0.95 * 2 / 3, 0.5 + 2 / 3]
    lost = [-0.5 - 0.475625, -0.5 - 0.95 / 3, -0.5 - 1 / 3]
    advantages = advantages_of("gigpo", rows, std_normalize=False)
    assert advantages == pytest.approx([*once, *third, *lost, *lost], abs=1e-5)
    assert advantages[0] > advantages[1], "the same decision, and an earlier win"


def test_token_rewards_at_observations_count_at_the_action_before():
    """Sums are equal under advantages by token and by sequence; a reward before all actions counts at the first."""
    mask = torch.tensor([[False, True, False, True, False], [True, False, False, False, False]])
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    assert at_actions(rewards, mask).tolist() == [[0, 7, 0, 24, 0], [1, 0, 0, 0, 0]]
