"""Every interleaving of explorers and a trainer, crashes included: no deadlock, no row too old, every step reached.

In fixed style also: each explore step finds exactly the version that is due, whatever was lost before.

The model below holds the rules of `trinity_core.exchange.store` (a batch is whole, or short if nothing more comes; a
rewind undoes what came after a checkpoint) without its database, and asks `config/sync_schedule.py` everything else. A
state has no clock: whatever may happen next is an edge, so silence of any length is covered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pytest

from trinity_core.config.sync_schedule import StalenessBound, SyncSchedule, least_staleness


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    style: str = "trainer_driven"
    interval: int = 1
    offset: int = 0
    slack: int = 0
    """`max_staleness` beyond the least that the settings allow."""
    rows: int = 2
    """Rows of an explore step."""
    batch: int = 2
    explorers: int = 1
    steps: int = 3
    """Of each explorer."""
    save_every: int = 2
    crashes: int = 0
    """Explorers or trainers that die, in all."""
    whole: int = 0
    """Explore steps that a train step takes in place of `batch` rows."""
    sequences: tuple[int, ...] = ()
    """Rows of each explore step, if they are not all `rows`: its rollouts became several, or were dropped."""
    sizes: tuple[int, ...] = ()
    """Rows of each explorer's steps, if they differ."""

    def size(self, explorer: int) -> int:
        return self.sizes[explorer] if self.sizes else self.rows

    @cached_property
    def schedule(self) -> SyncSchedule:
        return SyncSchedule(self.style, self.interval, self.offset)

    @cached_property
    def bound(self) -> StalenessBound:
        every = self.schedule.publish_every
        least = least_staleness(max(self.sizes, default=self.rows), self.batch, every)
        if self.style == "fixed":
            least = self.schedule.largest_lag
        return StalenessBound(least + self.slack, self.batch, every)

    @cached_property
    def train_steps(self) -> int:
        """Fixed: one for each explore step. Else as many as the rows fill."""
        rows = self.steps * sum(self.size(explorer) for explorer in range(self.explorers))
        return self.steps if self.style == "fixed" else -(-rows // self.batch)


class Explorer(NamedTuple):
    """What the store knows of an explorer, and what the explorer knows itself."""

    done: int = 0
    held: int | None = None
    begun: int | None = None
    """The version of the step that it has begun."""
    waiting: int | None = None
    overtaken: int = 0
    """Steps that others have begun since it waits to begin one."""
    lost: str = ""
    """`silent`: dead or frozen, but not known to be; `known`: the others no longer wait for it."""


class State(NamedTuple):
    explorers: tuple[Explorer, ...]
    queue: tuple[tuple[int, int, int], ...] = ()
    """(explorer, its step, version) of each row that is ready, oldest first."""
    trained: int = 0
    training: bool = False
    published: int = 0
    committed: int = 0
    leased_rows: tuple[tuple[int, int, int], ...] = ()
    """Rows of the batches since the checkpoint."""
    crashes: int = 0
    dropped: bool = False
    """Whether a row was found to be too old when its turn came."""
    loadable: tuple[int, ...] = (0,)
    """Fixed style: the published versions that are there."""
    saved: tuple[int, ...] = ()
    """Fixed style: the older versions that the checkpoint holds."""
    inexact: bool = False
    """Whether an explore step began with another version than the one that was due."""
    turns: tuple[int, ...] = ()
    """Explorers that wait to begin a step, the longest wait first."""

    @property
    def leased(self) -> int:
        return self.trained + self.training


Edges = Iterator[tuple[str, State]]


def with_explorer(state: State, index: int, **changes: object) -> State:
    explorers = list(state.explorers)
    explorers[index] = explorers[index]._replace(**changes)
    return state._replace(explorers=tuple(explorers))


def explorer_edges(run: Run, state: State, index: int) -> Edges:
    me = state.explorers[index]
    if me.lost:
        over = {"held": None, "begun": None, "waiting": None, "overtaken": 0, "lost": ""}
        yield "restart", with_explorer(without_turn(state, index), index, **over)
        if me.lost == "silent" and run.style != "fixed":
            yield "given up", with_explorer(state, index, lost="known")
        if me.begun is not None:  # it was only slow
            yield "late", put(run, with_explorer(state, index, lost=""), index)
        return
    if state.crashes < run.crashes and me.done < run.steps:
        lost = with_explorer(state, index, lost="silent")
        yield "crash", lost._replace(crashes=state.crashes + 1)
    if me.begun is not None:
        yield "put", put(run, state, index)
    elif me.done < run.steps and state.leased < run.train_steps:
        yield "begin", begin(run, state, index)


def begin(run: Run, state: State, index: int) -> State:
    me = state.explorers[index]
    if run.style == "fixed":
        due = run.schedule.required_version(me.done + 1)
        version = min((v for v in state.loadable if v >= due), default=due)
        awaited = due if version not in state.loadable else None
        state = state._replace(inexact=state.inexact or (awaited is None and version != due))
    else:
        version = run.schedule.dynamic_version(me.done + 1, me.held, state.published)
        awaited = admitted(run, state, index, version)
        if awaited is not None:
            version = state.published
            awaited = admitted(run, state, index, version)
    if awaited is not None:
        turns = state.turns if run.style == "fixed" or index in state.turns else (*state.turns, index)
        return with_explorer(state._replace(turns=turns), index, waiting=awaited)
    for other in state.turns:
        state = with_explorer(state, other, overtaken=state.explorers[other].overtaken + (other != index))
    state = without_turn(state, index)
    return with_explorer(state, index, begun=version, held=version, waiting=None, overtaken=0)


def without_turn(state: State, index: int) -> State:
    return state._replace(turns=tuple(other for other in state.turns if other != index))


def admitted(run: Run, state: State, index: int, version: int) -> int | None:
    known = {i: e for i, e in enumerate(state.explorers) if i != index and e.lost != "known"}
    begun = [(run.size(i), e.begun) for i, e in known.items() if e.begun is not None]
    before = state.turns[: state.turns.index(index)] if index in state.turns else state.turns
    earlier = [run.size(i) for i in before if i in known and known[i].waiting is not None]
    return run.bound.awaited(version, run.size(index), state.leased, len(state.queue), begun, earlier)


def put(run: Run, state: State, index: int) -> State:
    me = state.explorers[index]
    rows = ((index, me.done + 1, me.begun),) * (run.sequences[me.done] if run.sequences else run.size(index))
    waits = run.style == "fixed" and me.done + 1 < run.steps
    waiting = run.schedule.required_version(me.done + 2) if waits else None
    state = state._replace(queue=state.queue + rows)
    return with_explorer(state, index, done=me.done + 1, begun=None, waiting=waiting)


def nothing_more_comes(run: Run, state: State) -> bool:
    present = [e for e in state.explorers if e.lost != "known"]
    waits = [e for e in present if e.waiting is not None and e.waiting > state.trained]
    return all(e.done == run.steps or e in waits for e in (present if waits else state.explorers))


def trainer_edges(run: Run, state: State) -> Edges:
    if state.crashes < run.crashes and state.leased:
        crashed = state._replace(crashes=state.crashes + 1)
        yield "crash", rewound(run, crashed)
        if run.style == "fixed":
            yield "crash", rewound(run, all_lost(crashed))
            if not state.training and state.trained > state.committed:
                yield "crash", rewound(run, all_lost(checkpoint(run, crashed)))
    if state.training:
        yield "train", trained(run, state)
    elif state.trained < run.train_steps:
        fresh = tuple(row for row in state.queue if row[2] >= state.trained - run.bound.max_staleness)
        dropped = state.dropped or len(fresh) < len(state.queue)
        steps = list(dict.fromkeys(row[:2] for row in fresh))
        full = len(steps) >= run.whole if run.whole else len(fresh) >= run.batch
        if full or nothing_more_comes(run, state):
            taken = sum(row[:2] in steps[: run.whole] for row in fresh) if run.whole else run.batch
            batch, rest = fresh[:taken], fresh[taken:]
            leased = state._replace(queue=rest, leased_rows=state.leased_rows + batch, training=True, dropped=dropped)
            yield "lease" if batch else "empty", leased


def trained(run: Run, state: State) -> State:
    step = state.trained + 1
    published = step if run.schedule.publishes_after(step) else state.published
    state = state._replace(trained=step, training=False, published=published)
    if published == step:
        state = with_versions(run, state, (*state.loadable, step))
    if step % run.save_every == 0 or step == run.train_steps:
        state = checkpoint(run, state)
    return state


def with_versions(run: Run, state: State, versions: tuple[int, ...]) -> State:
    if run.style != "fixed":
        return state
    return state._replace(loadable=versions[-run.schedule.versions_kept :])


def oldest_needed(run: Run, state: State) -> int:
    return run.schedule.required_version(state.explorers[0].done + 1)


def checkpoint(run: Run, state: State) -> State:
    """Also what the trainer does when the run is asked to stop."""
    older = [v for v in state.loadable if oldest_needed(run, state) <= v < state.trained]
    return state._replace(committed=state.trained, leased_rows=(), saved=tuple(older) if run.style == "fixed" else ())


def all_lost(state: State) -> State:
    """Every process has ended, and shared memory with them; they are started again."""
    explorers = tuple(explorer._replace(lost="") for explorer in state.explorers)
    return state._replace(explorers=explorers, loadable=())


def rewound(run: Run, state: State) -> State:
    """The trainer resumes from its checkpoint; explorers start over from their positions."""
    back = state.committed
    rows = state.leased_rows + state.queue
    first: dict[int, int] = {}
    for index, step, version in rows:
        if version > back:
            first[index] = min(step, first.get(index, step))
    kept = tuple(row for row in rows if row[1] < first.get(row[0], row[1] + 1))
    over = {"begun": None, "waiting": None, "held": None, "overtaken": 0}
    for index, explorer in enumerate(state.explorers):
        done = min(explorer.done, first.get(index, run.steps + 1) - 1)
        state = with_explorer(state, index, done=done, **over)
    published = back - back % run.bound.publish_every
    state = state._replace(queue=kept, leased_rows=(), trained=back, training=False, published=published)
    there = {version for version in (*state.loadable, *state.saved) if version <= back}
    needed = run.schedule.resumed_versions(back, oldest_needed(run, state), there)
    return with_versions(run, state, tuple(sorted({v for v in state.loadable if v <= back} | set(needed))))


def edges(run: Run, state: State) -> Edges:
    for index in range(run.explorers):
        yield from explorer_edges(run, state, index)
    yield from trainer_edges(run, state)


def ended(run: Run, state: State) -> bool:
    """Nothing is left to do: the trainer has done its steps, or (some explorer died for good) has no rows for one."""
    if state.trained == run.train_steps:
        return all(e.begun is None or e.lost for e in state.explorers)
    alive = [e for e in state.explorers if not e.lost]
    return len(alive) < run.explorers and not state.training and all(e.done == run.steps for e in alive)


HELP = ("crash", "restart", "late")
"""What nobody may count on: a run must end without."""


def explored(run: Run) -> dict[State, list[tuple[str, State]]]:
    """Every state that can be reached, with its edges."""
    start = State(tuple(Explorer() for _ in range(run.explorers)))
    reached: dict[State, list[tuple[str, State]]] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state in reached:
            continue
        reached[state] = [(name, after) for name, after in edges(run, state) if after != state]
        waiting += [after for _, after in reached[state]]
    return reached


def check(run: Run) -> dict[State, list[tuple[str, State]]]:
    """Explore a run. From every state its end can be reached without help, so there is no deadlock."""
    graph = explored(run)
    before: dict[State, list[State]] = defaultdict(list)
    for state, after in graph.items():
        for name, other in after:
            if name not in HELP:
                before[other].append(state)
    reaching = [state for state in graph if ended(run, state)]
    good = set(reaching)
    while reaching:
        for state in before[reaching.pop()]:
            if state not in good:
                good.add(state)
                reaching.append(state)
    assert good == set(graph), f"{run} cannot end from {next(iter(set(graph) - good))}"
    return graph


def names(graph: dict[State, list[tuple[str, State]]]) -> set[str]:
    return {name for after in graph.values() for name, _ in after}


SIZES = [(2, 2), (4, 2), (1, 2), (3, 2), (2, 3)]


@pytest.mark.parametrize("explorers", [1, 2])
@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("style", ["explorer_driven", "trainer_driven"])
def test_asynchronous_runs_keep_the_bound(style, interval, slack, explorers):
    """No row is too old when its turn comes, no step is empty for nothing, and no side waits for the other forever."""
    for rows, batch in SIZES:
        run = Run(style, interval, 0, slack, rows, batch, explorers)
        graph = check(run)
        assert not any(state.dropped for state in graph), run
        if rows % batch == 0:
            assert "empty" not in names(graph), run
            last = [state for state in graph if ended(run, state)]
            assert all(e.done == run.steps for state in last for e in state.explorers), run
            assert not any(state.queue for state in last), run


@pytest.mark.parametrize(("interval", "sizes", "steps"), [(1, (2, 4), 3), (1, (2, 2), 4), (2, (2, 2), 4)])
def test_no_explorer_waits_without_end(interval, sizes, steps):
    """However fast others are: few of their steps begin before the one that has waited longer."""
    run = Run("trainer_driven", interval, batch=2, explorers=2, steps=steps, sizes=sizes, save_every=100)
    graph = check(run)
    most = 1 + interval * run.batch // min(sizes)  # steps that fit in beside it
    assert max(e.overtaken for state in graph for e in state.explorers) <= most
    assert not any(state.dropped for state in graph)


@pytest.mark.parametrize("crashes", [1, 2])
@pytest.mark.parametrize("style", ["explorer_driven", "trainer_driven"])
def test_crashes_cost_work_but_never_the_bound(style, crashes):
    """Rows that come later than anybody waited for are dropped rather than trained."""
    for interval, slack, explorers in ((1, 0, 1), (2, 1, 1), (1, 1, 2)):
        run = Run(style, interval, 0, slack, 2, 2, explorers, steps=2 if explorers == 2 else 3, crashes=crashes)
        graph = check(run)
        if explorers == 1:
            assert not any(state.dropped for state in graph), run


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_fixed_style_is_exact_and_keeps_its_own_bound(interval, offset):
    for crashes, save_every in ((0, 2), (1, 2), (2, 2), (2, 3)):
        for rows, batch in ((2, 2), (1, 2), (2, 3)):
            run = Run("fixed", interval, offset, 0, rows, batch, steps=6, crashes=crashes, save_every=save_every)
            graph = check(run)
            assert not any(state.dropped for state in graph), run
            assert not any(state.inexact for state in graph), run


SEQUENCES = [(2, 5, 1, 3, 4, 2), (3, 3, 3, 3, 3, 3), (4, 0, 3, 0, 0, 2)]
"""Of six explore steps of two rollouts: agents that rewrite their history, and steps of which nothing is left."""


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_fixed_style_takes_explore_steps_whole(interval, offset):
    """However many sequences a rollout became: no row is too old, no version other than the due one, none is left."""
    for sequences in SEQUENCES:
        for crashes, save_every in ((0, 2), (1, 2), (2, 3)):
            saving = {"crashes": crashes, "save_every": save_every}
            run = Run("fixed", interval, offset, steps=6, whole=1, sequences=sequences, **saving)
            graph = check(run)
            assert not any(state.dropped for state in graph), run
            assert not any(state.inexact for state in graph), run
            assert not any(state.queue for state in graph if ended(run, state) and not state.explorers[0].lost), run
        if 0 not in sequences:
            assert "empty" not in names(check(Run("fixed", interval, offset, steps=6, whole=1, sequences=sequences)))
