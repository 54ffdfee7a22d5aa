"""The schedule's arithmetic: the documented example, and the properties that exclude deadlocks."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.sync.schedule import (
    StalenessBound,
    dynamic_version,
    largest_lag,
    last_step_with,
    least_staleness,
    look_interval,
    looks_before,
    publish_interval,
    publishes_after,
    required_version,
    resumed_versions,
    syncs_before,
    versions_kept,
)

steps = st.integers(1, 500)
intervals = st.integers(1, 20)
offsets = st.integers(0, 20)


def test_documented_example():
    assert [required_version(e, 2, 1) for e in range(1, 8)] == [0, 0, 0, 2, 2, 4, 4]
    assert [e for e in range(1, 8) if syncs_before(e, 2, 1)] == [4, 6]
    assert [t for t in range(6) if publishes_after(t, 2)] == [0, 2, 4]


def test_interval_1_is_on_policy():
    assert [required_version(e, 1) for e in range(1, 5)] == [0, 1, 2, 3]


@given(steps, intervals, offsets)
def test_no_step_waits_for_its_own_batch(step, interval, offset):
    assert 0 <= required_version(step, interval, offset) <= step - 1


@given(steps, intervals, offsets)
def test_every_required_version_is_published(step, interval, offset):
    assert publishes_after(required_version(step, interval, offset), interval)


@given(steps, intervals, offsets)
def test_version_grows_by_the_interval_at_each_sync(step, interval, offset):
    grown = required_version(step + 1, interval, offset) - required_version(step, interval, offset)
    assert grown == (interval if syncs_before(step + 1, interval, offset) else 0)


@given(st.integers(0, 100), st.integers(0, 100), intervals, offsets)
def test_enough_versions_are_kept_for_the_next_step(explored, behind, interval, offset):
    """Whatever step of those explored the trainer has reached, the version that comes next is among the newest."""
    trained = max(explored - behind, 0)
    published = [version for version in range(trained + 1) if publishes_after(version, interval)]
    due = required_version(explored + 1, interval, offset)
    assert due > trained or due in published[-versions_kept(interval, offset) :]


@given(st.integers(1, 100), intervals, offsets, st.integers(0, 5))
def test_resumed_versions_serve_every_later_step(saved, interval, offset, ahead):
    """Of a checkpoint that keeps what is needed; `ahead` explore steps are stored beyond those trained."""
    explored = min(saved + ahead, last_step_with(saved, interval, offset))
    since = required_version(explored + 1, interval, offset)
    published = {version for version in range(saved + 1) if publishes_after(version, interval)}
    kept = sorted(published - {saved})[-versions_kept(interval, offset) :]
    there = resumed_versions(saved, since, interval, [version for version in kept if version >= since])
    for step in range(explored + 1, last_step_with(saved, interval, offset) + 1):
        assert required_version(step, interval, offset) in there
    assert set(there) <= published


@pytest.mark.parametrize(
    ("step", "since", "interval", "kept", "there"),
    [
        (10, 9, 1, [9], [9, 10]),
        (5, 4, 2, [4], [4]),
        (5, 4, 2, [], [5]),
        (7, 6, 4, [2, 6], [6]),
        (7, 4, 4, [6], [6]),
        (9, 9, 1, [7, 8, 9, 10], [9]),
        (1, 0, 2, [0], [0]),
        (1, 2, 2, [0], []),
    ],
)
def test_resumed_versions_by_example(step, since, interval, kept, there):
    assert resumed_versions(step, since, interval, kept) == there


@given(st.integers(0, 500), intervals, offsets)
def test_last_step_with_inverts_required_version(version, interval, offset):
    last = last_step_with(version, interval, offset)
    assert required_version(last, interval, offset) <= version < required_version(last + 1, interval, offset)


@given(steps, intervals, offsets)
def test_staleness_is_bounded(step, interval, offset):
    assert step - 1 - required_version(step, interval, offset) <= largest_lag(interval, offset)


@given(st.integers(1, 60), intervals, offsets)
def test_lockstep_simulation_never_deadlocks(total, interval, offset):
    explored = trained = published = 0
    while trained < total:
        if explored < total and required_version(explored + 1, interval, offset) <= published:
            explored += 1
        elif trained < explored:
            trained += 1
            published = trained if publishes_after(trained, interval) else published
        else:
            pytest.fail(f"deadlock at explorer {explored}, trainer {trained}")
    assert explored == total


@given(steps, intervals, st.none() | st.integers(0, 50), st.none() | st.integers(0, 50))
def test_dynamic_style_takes_the_latest_at_its_interval(step, interval, held, latest):
    version = dynamic_version(step, interval, held, latest)
    if latest is not None and (held is None or looks_before(step, interval)):
        assert version == max(latest, held if held is not None else latest)
    else:
        assert version == held


def versions_used(style, interval, explored=12, pace=1):
    """The versions of the first explore steps if the trainer does `pace` steps meanwhile each."""
    versions, held = [], None
    for step in range(1, explored + 1):
        trained = (step - 1) * pace
        every = publish_interval(style, interval)
        held = dynamic_version(step, look_interval(style, interval), held, trained - trained % every)
        versions.append(held)
    return versions


def test_the_styles_differ_in_who_decides():
    assert versions_used("explorer_driven", 3, explored=9, pace=5) == [0, 0, 0, 15, 15, 15, 30, 30, 30]
    assert versions_used("trainer_driven", 3, explored=9, pace=5) == [0, 3, 9, 15, 18, 24, 30, 33, 39]
    assert versions_used("fixed", 3, explored=9, pace=5) == [0, 0, 0, 15, 15, 15, 30, 30, 30]
    assert versions_used("fixed", 3, explored=9, pace=1) == [0, 0, 0, 3, 3, 3, 6, 6, 6]


@given(st.integers(1, 4), st.sampled_from(["explorer_driven", "trainer_driven"]))
def test_an_interval_of_1_is_the_same_in_all_styles(pace, style):
    assert versions_used(style, 1, pace=pace) == versions_used("fixed", 1, pace=pace)


bounds = st.builds(StalenessBound, st.integers(0, 5), st.integers(1, 8), st.integers(1, 4))
steps_begun = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 20)), max_size=3)


@given(bounds, st.integers(0, 20), st.integers(1, 8), st.integers(0, 20), st.integers(0, 20), steps_begun)
def test_what_may_begin_is_fresh_whoever_arrives_last(bound, version, rows, leased, ready, begun):
    """The definition, written out: train steps take `batch_rows` rows in order, the oldest step arrives last."""
    begins = bound.awaited(version, rows, leased, ready, begun) is None
    arriving = sorted([*begun, (rows, version)], key=lambda step: -step[1])
    queue = [10**6] * ready + [used for count, used in arriving for _ in range(count)]
    train_steps = [leased + 1 + place // bound.batch_rows for place in range(len(queue))]
    fresh = all(used >= step - 1 - bound.max_staleness for used, step in zip(queue, train_steps, strict=True))
    last = train_steps[-1]
    oldest_last = min(used for _, used in arriving) >= last - 1 - bound.max_staleness
    assert begins == oldest_last
    assert fresh or not begins


@given(bounds, st.integers(0, 20), st.integers(1, 8), st.integers(0, 20))
def test_an_empty_queue_needs_no_further_train_step(bound, leased, rows, version):
    """With the least staleness that the configuration allows, or more, the trainer never skips a step."""
    if bound.max_staleness >= least_staleness(rows, bound.batch_rows, bound.publish_every):
        awaited = bound.awaited(version, rows, leased, 0, [])
        assert awaited is None or version < awaited <= leased - leased % bound.publish_every


@pytest.mark.parametrize(("interval", "offset"), [(0, 0), (-1, 0), (1, -1)])
def test_invalid_settings_are_refused(interval, offset):
    with pytest.raises(ValueError, match="sync_interval"):
        required_version(1, interval, offset)


def test_imports_without_torch():
    code = "import sys, trinity_core.sync.schedule; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
