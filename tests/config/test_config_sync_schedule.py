"""The schedule's arithmetic: the documented example, and the properties that exclude deadlocks."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.config.sync_schedule import StalenessBound, SyncSchedule, least_staleness

steps = st.integers(1, 500)
intervals = st.integers(1, 20)
offsets = st.integers(0, 20)
fixed = st.builds(SyncSchedule, st.just("fixed"), intervals, offsets)


def test_documented_example():
    schedule = SyncSchedule("fixed", 2, 1)
    assert [schedule.required_version(step) for step in range(1, 8)] == [0, 0, 0, 2, 2, 4, 4]
    assert [step for step in range(6) if schedule.publishes_after(step)] == [0, 2, 4]


def test_interval_1_is_on_policy():
    on_policy = SyncSchedule("fixed", 1)
    assert [on_policy.required_version(step) for step in range(1, 5)] == [0, 1, 2, 3] and on_policy.is_lockstep
    assert not SyncSchedule("fixed", 1, 1).is_lockstep and not SyncSchedule("fixed", 2).is_lockstep


@given(steps, fixed)
def test_no_step_waits_for_its_own_batch(step, schedule):
    assert 0 <= schedule.required_version(step) <= step - 1


@given(steps, fixed)
def test_every_required_version_is_published(step, schedule):
    assert schedule.publishes_after(schedule.required_version(step))


@given(steps, fixed)
def test_version_grows_by_the_interval_at_each_sync(step, schedule):
    grown = schedule.required_version(step + 1) - schedule.required_version(step)
    assert grown in (0, schedule.interval)


@given(st.integers(0, 100), st.integers(0, 100), fixed)
def test_enough_versions_are_kept_for_the_next_step(explored, behind, schedule):
    """Whatever step of those explored the trainer has reached, the version that comes next is among the newest."""
    trained = max(explored - behind, 0)
    published = [version for version in range(trained + 1) if schedule.publishes_after(version)]
    due = schedule.required_version(explored + 1)
    assert due > trained or due in published[-schedule.versions_kept :]


@given(st.integers(1, 100), fixed, st.integers(0, 5))
def test_resumed_versions_serve_every_later_step(saved, schedule, ahead):
    """Of a checkpoint that keeps what is needed; `ahead` explore steps are stored beyond those trained."""
    last = next(step for step in count(1) if schedule.required_version(step + 1) > saved)
    explored = min(saved + ahead, last)
    since = schedule.required_version(explored + 1)
    published = {version for version in range(saved + 1) if schedule.publishes_after(version)}
    kept = sorted(published - {saved})[-schedule.versions_kept :]
    there = schedule.resumed_versions(saved, since, [version for version in kept if version >= since])
    for step in range(explored + 1, last + 1):
        assert schedule.required_version(step) in there
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
    assert SyncSchedule("fixed", interval).resumed_versions(step, since, kept) == there


@given(steps, fixed)
def test_staleness_is_bounded(step, schedule):
    assert step - 1 - schedule.required_version(step) <= schedule.largest_lag


@given(steps, intervals, st.none() | st.integers(0, 50), st.none() | st.integers(0, 50))
def test_dynamic_style_takes_the_latest_at_its_interval(step, interval, held, latest):
    schedule = SyncSchedule("explorer_driven", interval)
    version = schedule.dynamic_version(step, held, latest)
    if latest is not None and (held is None or (step - 1) % interval == 0):
        assert version == max(latest, held if held is not None else latest)
    else:
        assert version == held


def versions_used(style, interval, explored=12, pace=1):
    """The versions of the first explore steps if the trainer does `pace` steps meanwhile each."""
    versions, held, schedule = [], None, SyncSchedule(style, interval)
    for step in range(1, explored + 1):
        trained = (step - 1) * pace
        held = schedule.dynamic_version(step, held, trained - trained % schedule.publish_every)
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
    with pytest.raises(ValueError):
        SyncSchedule("fixed", interval, offset)
