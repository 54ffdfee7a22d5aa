"""Operators between workflow and store; dynamic sampling leaves neither side waiting for the other."""

from dataclasses import replace
from threading import Lock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.config import ConfigError, OperatorConfig, config_from_dict
from trinity_core.config.findings import Report
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.pipelines.named_parts import check_names
from trinity_core.pipelines.operators import OPERATORS, OperatorPipeline, dynamic_sampling, pipeline


def _group(name, *rewards):
    return [
        Experience(np.arange(4), 2, np.ones(2, bool), versions=np.zeros(2), reward=reward, group=name, run=run)
        for run, reward in enumerate(rewards)
    ]


def _names(experiences):
    return [e.group for e in experiences]


def test_zero_variance_groups_are_dropped_others_kept_in_order():
    rows = [
        *_group("right", 1, 1),
        *_group("b", 1, 0, 1),
        *_group("wrong", 0, 0),
        *_group("a", 0, 1),
        *_group("one", 1),
    ]
    assert _names(dynamic_sampling(rows)) == ["b", "b", "b", "a", "a"]
    assert _names(dynamic_sampling(rows, rows=3)) == ["b", "b", "b"]
    assert _names(dynamic_sampling(rows, rows=4)) == ["b", "b", "b", "a", "a"]
    assert _names(dynamic_sampling(rows, std_threshold=0.6)) == ["a", "a"]  # deviations 0.577 and 0.707
    assert dynamic_sampling([]) == []


def test_filters_keep_mixed_groups_and_rows_without_group():
    a, b = _group("a", 1, 0), _group("b", 1, 1)
    assert dynamic_sampling([a[0], b[0], a[1], b[1]]) == a
    assert dynamic_sampling([*_group("", 1), *_group("", 0)]) == []


def test_answers_without_a_verdict_are_not_compared():
    """An unscored answer is neither a third reward nor a failure."""
    unscored = [replace(e, reward=None, action_mask=np.zeros(2, bool)) for e in (*_group("a", 0), *_group("b", 0))]
    rows = [*_group("a", 1, 1), unscored[0], *_group("b", 1, 0), unscored[1]]
    assert _names(dynamic_sampling(rows)) == ["b", "b"]
    assert _names(OPERATORS["zero_variance_group_filter"](rows)) == ["b", "b", "b"]


def test_groups_are_kept_by_deviation_or_by_verdicts():
    even, mixed, long = _group("even", 1, 1), _group("mixed", 1, 0), _group("long", 0.4, 0.9)
    for row in long:
        row.metrics["accuracy"] = 1.0  # the penalty for length differs, the verdict does not
    rows = [*even, *mixed, *long, *_group("one", 1)]
    assert _names(OPERATORS["reward_std_filter"](rows)) == ["mixed"] * 2 + ["long"] * 2
    assert _names(OPERATORS["reward_std_filter"](rows, threshold=0.3)) == ["mixed"] * 2  # 0.5 and 0.25
    assert _names(OPERATORS["dapo_dynamic_sampling"](rows)) == ["mixed"] * 2
    by_reward = OPERATORS["dapo_dynamic_sampling"](rows, metric_key="none", correct_threshold=0.5)
    assert _names(by_reward) == ["mixed"] * 2 + ["long"] * 2
    assert OPERATORS["invalid_reward_filter"]([*mixed, replace(even[0], reward=None)]) == mixed


def test_a_pipeline_runs_operators_with_their_arguments():
    assert set(OPERATORS) >= {"reward_filter", "zero_variance_group_filter", "dynamic_sampling"}
    assert OPERATORS["flat_group_filter"] is OPERATORS["zero_variance_group_filter"]
    one = pipeline([OperatorConfig(name="dynamic_sampling", args={"rows": 2})])
    left, dropped = one.run([*_group("a", 1, 0), *_group("b", 1, 0)])
    assert _names(left) == ["a", "a"] and dropped == {"b": {"dynamic_sampling": 2}}


def test_dropped_rows_are_counted_by_group_and_operator():
    operators = [OperatorConfig(name="reward_filter", args={"max_reward": 1}), OperatorConfig(name="flat_group_filter")]
    left, dropped = pipeline(operators).run([*_group("a", 0, 2, 1), *_group("b", 0, 0, 2), *_group("c", 0, 1)])
    assert _names(left) == ["a", "a", "c", "c"]
    assert {group: list(by_operator.items()) for group, by_operator in dropped.items()} == {
        "a": [("reward_filter", 1)],
        "b": [("reward_filter", 1), ("flat_group_filter", 2)],
    }


def test_an_operator_that_fails_costs_the_groups_it_fails_with():
    def shaped(experiences):
        for e in experiences:
            e.metrics["shaped"] = e.metrics.get("shaped", 0) + 1
            e.reward = 1 / (e.reward or 0)
        return experiences

    seen = []
    one = OperatorPipeline([("shaped", shaped)])
    left, dropped = one.run([*_group("a", 2, 4), *_group("b", 1, 0), *_group("c", 5)], seen.append)
    assert [(e.group, e.reward, e.metrics["shaped"]) for e in left] == [("a", 0.5, 1), ("a", 0.25, 1), ("c", 0.2, 1)]
    assert dropped == {"b": {"shaped failed": 2}} and [(failure.group, failure.operator) for failure in seen] == [
        ("b", "shaped")
    ]
    for _ in range(7):
        assert one.run(_group("b", 0)) == ([], {"b": {"shaped failed": 1}}), "a step of a single bad row"
    with pytest.raises(ZeroDivisionError):
        one.run(_group("b", 0))


def test_a_reward_that_is_not_finite_reaches_no_train_step():
    def spoilt(experiences):
        return [replace(e, reward=e.reward / 3 if e.reward else float("nan")) for e in experiences]

    both = [*_group("a", 3, 6), *_group("b", 3, 0)]
    left, dropped = OperatorPipeline([("spoilt", spoilt)]).run(both)
    assert [e.reward for e in left] == [1, 2] and dropped == {"b": {"spoilt failed": 2}}
    filtered = OperatorPipeline([("spoilt", spoilt), ("filter", OPERATORS["invalid_reward_filter"])])
    left, dropped = filtered.run(both)
    assert [e.reward for e in left] == [1, 2, 1] and dropped == {"b": {"filter": 1}}


def test_info_that_json_cannot_hold_costs_its_group():
    def notes_moves(experiences):
        return [replace(e, info={(0, 1): "a move"} if e.group == "b" else {}) for e in experiences]

    left, dropped = OperatorPipeline([("notes", notes_moves)]).run([*_group("a", 1), *_group("b", 1)])
    assert [e.group for e in left] == ["a"] and dropped == {"b": {"notes failed": 1}}


variances = st.lists(st.lists(st.booleans(), min_size=2, max_size=4), min_size=1, max_size=6)


@given(variances, st.integers(1, 3), st.integers(0, 2), st.sampled_from([None, 4]))
@settings(max_examples=25)
def test_both_loops_finish_whatever_an_operator_drops(tmp_path_factory, steps, interval, offset, rows):
    """Fixed style, batches of 4 rows; each step's groups of 2 have variance or not. Nobody is stuck in any round."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    explored = trained = published = 0
    schedule = SyncSchedule("fixed", interval, offset)
    with ExperienceStore.open(path) as store:
        store.position("explorer")
        while trained < len(steps):
            before = (explored, trained)
            if explored < len(steps):
                needed = schedule.required_version(explored + 1)
                if needed <= published:
                    sampled = [
                        e for i, varies in enumerate(steps[explored]) for e in _group(f"{explored}/{i}", 1, not varies)
                    ]
                    explored += 1
                    store.put("explorer", explored, {}, dynamic_sampling(sampled, rows=rows), needed)
                    if explored == len(steps):
                        store.mark_finished("explorer")
                else:
                    store.mark_waiting("explorer", needed)
            batch = store.lease(trained + 1, 4, trained)
            if batch is not None:
                assert all({e.reward for e in batch if e.group == row.group} == {0, 1} for row in batch)
                trained += 1
                published = trained if schedule.publishes_after(trained) else published
            assert (explored, trained) != before


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("reward_filter", {"min_reward": 2, "max_reward": 1}, ".max_reward"),
        ("dynamic_sampling", {"rows": 0}, ".rows"),
        ("overlong_penalty", {"max_response_length": 4, "cache_length": 5}, ".cache_length"),
        ("reward_shaping_mapper", {}, ""),
        ("taskset_balance_filter", {"shares": {"sums": 1}}, ".shares.sums"),
    ],
)
def test_arguments_that_do_not_suit_each_other_are_told_at_load(tmp_path, name, args, key):
    taskset = {"name": "t", "path": "tasks.jsonl", "default_workflow_type": "math_workflow"}
    config = config_from_dict({
        "checkpoint_root_dir": str(tmp_path), "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": taskset}},
        "data_processor": {"experience_pipeline": {"operators": [{"name": name, "args": args}]}},
    })  # fmt: skip
    report = Report()
    check_names(config, report)
    with raising(ConfigError, key=f"data_processor.experience_pipeline.operators[0].args{key}"):
        report.check()


TURNS = (0.1, 0.2, 0.7)
"""Rewards of the turns of a rollout; their mean is 1/3."""


def _turns(group, *rollouts):
    rows = [(run, turn, reward) for run, rewards in enumerate(rollouts) for turn, reward in enumerate(rewards)]
    return [replace(_group(group, reward)[0], run=run, turn=turn) for run, turn, reward in rows]


@pytest.mark.parametrize("name", ["zero_variance_group_filter", "dynamic_sampling"])
def test_groups_of_equal_rollouts_are_dropped(name):
    rows = [*_turns("equal", TURNS, TURNS, TURNS), *_turns("unequal", TURNS, (0, 0))]
    assert _names(OPERATORS[name](rows)) == ["unequal"] * 5


@pytest.mark.parametrize("name", ["zero_variance_group_filter", "dynamic_sampling", "reward_filter"])
def test_token_rewards_are_rewards(name):
    args = {"min_reward": 0.0} if name == "reward_filter" else {}
    rows = [
        replace(e, reward=None, token_rewards=np.array([0, e.reward])) for e in (*_group("a", 1, 0), *_group("b", 1, 1))
    ]
    assert _names(OPERATORS[name](rows, **args)) == ["a", "a"] + ["b", "b"] * (name == "reward_filter")


def test_reward_filter_keeps_whole_rollouts():
    kept = OPERATORS["reward_filter"](_turns("a", TURNS, (0.9, 0.0)), min_reward=0.4)
    assert [(e.run, e.turn) for e in kept] == [(1, 0), (1, 1)]


def test_changes_in_place_are_applied_once():
    def cost(experiences):
        for e in experiences:
            if e.group == "bad":
                raise ValueError("bad")
            e.token_rewards -= 0.5
            e.info["costs"].append(0.5)
        return experiences

    rows = [replace(e, token_rewards=np.zeros(2), info={"costs": []}) for e in (*_group("a", 1), *_group("bad", 1))]
    left, dropped = OperatorPipeline([("cost", cost)]).run(rows)
    assert [(e.token_rewards.tolist(), e.info) for e in left] == [([-0.5, -0.5], {"costs": [0.5]})]
    assert list(dropped) == ["bad"]
    assert (rows[0].token_rewards.tolist(), rows[0].info) == ([0, 0], {"costs": []})


def test_an_info_may_hold_what_cannot_be_copied():
    lock = Lock()
    rows = [replace(e, info={"seen": [lock]}) for e in _group("a", 1)]
    left, dropped = OperatorPipeline([("all", list)]).run(rows)
    assert left[0].info == {"seen": [lock]} and not dropped


def test_a_missing_reward_is_an_error():
    with raising(TrinityError, key="reward"):
        dynamic_sampling([*_group("a", 1, 0), replace(_group("b", 1)[0], reward=None)])


def test_a_server_that_is_away_costs_no_group():
    """Also when the groups are tried one by one, because another one is at fault."""

    def asks(experiences):
        groups = {e.group for e in experiences}
        if "bad" in groups:
            raise ValueError("bad")
        raise TransientFault("the server is away")

    with pytest.raises(TransientFault):
        OperatorPipeline([("asks", asks)]).run([*_group("bad", 1), *_group("b", 1)])


def test_only_steps_without_any_success_count_towards_the_end_of_the_run():
    """Each operator counts alone: the second one works in every step."""

    def sometimes(experiences):
        if any(e.group == "bad" for e in experiences):
            raise ValueError("bad")
        return experiences

    pipeline = OperatorPipeline([("sometimes", sometimes), ("fine", list)])
    for _ in range(20):
        assert pipeline.run(_group("bad", 1))[0] == []
        assert len(pipeline.run(_group("good", 1))[0]) == 1
    with pytest.raises(ValueError, match="bad"):
        for _ in range(20):
            pipeline.run(_group("bad", 1))
