"""Explorers and a trainer that start, stop, crash and resume in any order: what must hold after each step of it."""

import itertools
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from trinity_core.data.experience import Experience
from trinity_core.exchange.store.audit import judge, read
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.presence import Length
from trinity_core.exchange.store.store import ExperienceStore, LineageChanged

EXPLORERS = ("a", "b")
MORE, AS_MANY, FEWER, TRAINER_HAS_MORE, AT_WORK = range(5)
"""Events in the order of the table in `trinity_core/exchange/store/presence.py`."""
PACES = {
    "level": ("ahead", "level", "level", "behind", "level"),
    "ahead": ("ahead", "ahead", "level", "level", "ahead"),
    "behind": ("both", "behind", "behind", "behind", "behind"),
    "both": ("both", "both", "behind", "behind", "level"),
}
"""Pace of an explorer -> its pace after each of these events."""


class Pace:
    """The model of `presence.Length`, by its table."""

    def __init__(self):
        self.pace = "level"
        self.length = None  # of the explorer's run, when it last began
        self.agreed = None  # of its run while the trainer was at work

    def explorer_begins(self, length, at_work):
        if self.agreed is None:
            self.pace, self.length, self.agreed = "level", length, length
        is_ahead = self.pace in ("ahead", "both")
        known = self.length if is_ahead else self.agreed
        has_more = length > self.agreed or (is_ahead and length >= known)
        self.length = length
        self._happens(MORE if has_more else FEWER if length < known else AS_MANY, at_work, length)

    def trainer_begins(self, has_more, at_work):
        length = self.length if self.pace in ("ahead", "both") else self.agreed
        self._happens(TRAINER_HAS_MORE if has_more else AS_MANY, at_work, length)

    def _happens(self, event, at_work, length):
        self.pace = PACES[self.pace][event]
        if at_work:
            self.pace, self.agreed = PACES[self.pace][AT_WORK], length


class Life(RuleBasedStateMachine):
    """The model: `queue`, every surviving row in order of insertion; `history`, the batches of this lineage.

    The store is right when the history is always the beginning of the queue: then nothing is lost, nothing comes twice,
    nothing overtakes. `states` is what each explorer said last: a batch is short only if nothing more can come.
    """

    def __init__(self, server_url):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.url = server_url or f"sqlite:///{self.folder}/s.db"
        self.trainer = self.open()
        self.sessions = {}
        self.states = {}  # explorer -> {"waiting", "finished", "left"}
        self.total = None  # train steps
        self.ended = self.expected = False  # what was said last of the trainer
        self.paces = {name: Pace() for name in EXPLORERS}
        self.queue = []  # (explorer, step, version, group, row id)
        self.put_versions = {name: [] for name in EXPLORERS}
        self.tasks = {name: [] for name in EXPLORERS}  # tasks of each explore step
        self.history = []
        self.archive = {}
        self.checkpoints = [0]
        self.made = 0

    def teardown(self):
        self.trainer.close()
        for session in self.sessions.values():
            session["store"].close()
        shutil.rmtree(self.folder)

    def open(self):
        return ExperienceStore.open(self.url, str(self.folder))

    @property
    def trained(self):
        return len(self.history)

    # ---- explorers ----

    @rule(name=st.sampled_from(EXPLORERS))
    def start_or_restart_explorer(self, name):
        if name in self.sessions:
            self.sessions[name]["store"].close()
        store = self.open()
        position = store.position(name)
        assert position.step == len(self.put_versions[name])
        assert (position.position or {"n": 0})["n"] == position.step
        self.sessions[name] = {"store": store, "step": position.step, "version": self.trained, "stale": False}
        self.says(name, waiting=None, finished=False)

    def says(self, name, **state):
        self.states.setdefault(name, {"waiting": None, "finished": False, "left": False}).update(state)

    @property
    def nothing_more(self):
        """Every explorer that has not left, or has left but is expected again, has finished or waits."""
        states = [state for state in self.states.values() if not state["left"]]
        waits = [state["waiting"] is not None and state["waiting"] > self.trained for state in states]
        return bool(states) and all(state["finished"] or wait for state, wait in zip(states, waits, strict=True))

    @rule(name=st.sampled_from(EXPLORERS), sizes=st.lists(st.integers(1, 3), max_size=3), newer=st.booleans())
    def put(self, name, sizes, newer):
        session = self.sessions.get(name)
        if session is None:
            return
        if newer and not session["stale"]:
            session["version"] = self.trained
        step, version = session["step"] + 1, session["version"]
        rows = []
        drawn = [DrawnTask(f"{name}/{step}/{group}", f"set/{group}", size) for group, size in enumerate(sizes)]
        drawn.append(DrawnTask(f"{name}/{step}/fails", "set/8", 0, tries=2, failure="it broke"))
        drawn.append(DrawnTask(f"{name}/{step}/goes", "set/9", 2, dropped={"filter": 2}))
        for group, size in enumerate(sizes):
            for run in range(size):
                self.made += 1
                rows.append(
                    Experience(
                        tokens=[1, 2, 3], prompt_length=1, action_mask=[True, True], group=f"{name}/{step}/{group}",
                        versions=np.full(2, version), run=run, info={"id": self.made},
                    )
                )  # fmt: skip
        if session["stale"]:
            try:
                session["store"].put(name, step, {"n": step}, rows, version, drawn=drawn)
            except LineageChanged:
                self.start_or_restart_explorer(name)
                return
            raise AssertionError("an explorer of an abandoned lineage was let in")
        assert session["store"].put(name, step, {"n": step}, rows, version, drawn=drawn)
        assert not session["store"].put(name, step, {"n": -1}, rows, version)
        session["step"] = step
        self.says(name, waiting=None, finished=False)
        self.put_versions[name].append(version)
        self.tasks[name].append(len(drawn))
        self.queue += [(name, step, version, row.group, row.info["id"]) for row in rows]

    @rule(name=st.sampled_from(EXPLORERS), ahead=st.integers(0, 2))
    def wait(self, name, ahead):
        if name in self.sessions and not self.sessions[name]["stale"]:
            self.sessions[name]["store"].mark_waiting(name, self.trained + ahead)
            self.says(name, waiting=self.trained + ahead, finished=False)

    @rule(name=st.sampled_from(EXPLORERS))
    def finish(self, name):
        if name in self.sessions and not self.sessions[name]["stale"]:
            self.sessions[name]["store"].mark_finished(name)
            self.says(name, waiting=None, finished=True)

    @rule(name=st.sampled_from(EXPLORERS))
    def leave(self, name):
        if name in self.sessions:
            self.sessions[name]["store"].leave(name)
            self.says(name, left=True)

    @rule(name=st.sampled_from(EXPLORERS))
    def expect(self, name):
        """The flow of an explorer starts (again): its engines do not load before that."""
        self.trainer.expect(name)
        self.says(name, waiting=None, finished=False, left=False)

    @rule(name=st.sampled_from(EXPLORERS), length=st.integers(1, 9), total=st.integers(1, 9))
    def join(self, name, length, total):
        if name not in self.sessions:
            return
        over, pace = self.trainer_is_over, self.paces[name]
        outlasts = pace.agreed is not None and length > pace.agreed
        assert self.sessions[name]["store"].join(name, total, length) == (over and not outlasts)
        pace.explorer_begins(length, not over)
        self.says(name, left=False, total=total)

    @property
    def trainer_is_over(self):
        return not self.expected and self.total is not None and (self.ended or self.checkpoints[-1] >= self.total)

    # ---- trainer ----

    @rule(expected=st.booleans())
    def expect_trainer(self, expected):
        """Its flow starts, or has failed to; the trainer may die before it begins."""
        self.trainer.expect_trainer(expected)
        self.expected = expected and self.total is not None

    @rule(total=st.integers(1, 9))
    def begin(self, total):
        has_more = self.total is not None and total > self.total
        self.trainer.begin("trainer", total)
        self.total, self.ended, self.expected = total, False, False
        for name in self.states:
            self.paces[name].trainer_begins(has_more, not self.trainer_is_over)
            if has_more and self.paces[name].pace == "behind":
                self.says(name, finished=False)

    @precondition(lambda self: self.total is not None)
    @rule()
    def end(self):
        self.trainer.mark_ended("trainer")
        self.ended = True

    @rule(rows=st.integers(1, 6), whole=st.booleans(), forget=st.booleans())
    def train(self, rows, whole, forget):
        """`whole`: takes an explore step in place of rows."""
        step, nothing_more = self.trained + 1, self.nothing_more
        batch = self.trainer.lease(step, rows, self.trained, whole_step=whole)
        rest = self.queue[sum(map(len, self.history)) :]
        steps = list(dict.fromkeys(row[:2] for row in rest))
        if batch is None:
            assert not nothing_more
            assert not steps if whole else len(rest) < rows
            return
        got = [row.info["id"] for row in batch]
        if not whole:
            assert len(got) >= rows or nothing_more
            groups = [row[3] for row in rest if row[4] in got]
            assert all(row[4] in got for row in rest if row[3] in groups), "groups come whole"
            assert len(got) - groups.count(groups[-1]) < rows if groups else True
        else:
            assert steps or nothing_more
            assert got == [row[4] for row in rest if row[:2] in steps[:1]], "explore steps come whole"
        if forget:  # the trainer dies after the lease and asks again
            self.trainer.close()
            self.trainer = self.open()
        assert [row.info["id"] for row in self.trainer.lease(step, 99, self.trained)] == got
        self.history.append(got)

    @rule()
    def checkpoint(self):
        self.trainer.flush()
        for step in range(len(self.archive) + 1, self.trained + 1):
            self.archive[step] = Counter(row.group for row in self.trainer.batch(step))
        self.trainer.commit(self.trained)
        if self.checkpoints[-1] != self.trained:
            self.checkpoints.append(self.trained)

    @rule(data=st.data())
    def resume(self, data):
        """The trainer dies and resumes from a checkpoint, the newest or (it was damaged) an older one."""
        self.trainer.close()
        self.trainer = self.open()
        step = data.draw(st.sampled_from(self.checkpoints[-3:]), label="checkpoint")
        newer = self.trained > step or any(v > step for versions in self.put_versions.values() for v in versions)
        before = self.trainer.lineage()
        self.trainer.rewind(step)
        assert self.trainer.lineage() == before + newer
        self.checkpoints = [c for c in self.checkpoints if c <= step]
        self.history = self.history[:step]
        self.archive = {kept_step: lines for kept_step, lines in self.archive.items() if kept_step <= step}
        for name, versions in self.put_versions.items():
            kept = [v for v in versions if v <= step]
            if len(kept) < len(versions):
                self.says(name, waiting=None, finished=False)
            self.put_versions[name] = kept
            self.tasks[name] = self.tasks[name][: len(kept)]
            self.queue = [row for row in self.queue if row[0] != name or row[1] <= len(kept)]
        if newer:
            for session in self.sessions.values():
                session["stale"] = True

    @precondition(lambda self: len(self.checkpoints) > 3)
    @rule()
    def prune(self):
        oldest = self.checkpoints[-3]
        self.trainer.prune(oldest)
        self.checkpoints = self.checkpoints[-3:]

    # ---- what must hold ----

    @invariant()
    def the_history_is_the_beginning_of_the_queue(self):
        flat = [row for batch in self.history for row in batch]
        assert flat == [row[4] for row in self.queue[: len(flat)]]

    @invariant()
    def the_store_counts_what_the_model_counts(self):
        stats = self.trainer.stats()
        trained_or_leased = sum(map(len, self.history))
        assert stats.ready == len(self.queue) - trained_or_leased
        assert stats.leased + stats.trained <= trained_or_leased
        assert stats.committed == self.checkpoints[-1]
        known = stats.explorers.items()
        assert self.states == {name: {key: getattr(stored, key) for key in self.states[name]} for name, stored in known}

    @invariant()
    def the_trainer_ends_only_when_nothing_more_comes(self):
        present = [state for state in self.states.values() if not state["left"]]
        done = bool(present) and all(state["finished"] for state in present)
        assert self.trainer.exhausted() == (done and not self.trainer.untrained())
        assert self.trainer.trainer().finished == self.trainer_is_over

    @invariant()
    def every_task_is_accounted_for(self):
        with self.trainer._database.read() as connection:
            audit = judge(read(connection, self.trainer._tables), self.archive, *[self.checkpoints[-1]] * 2)
        assert audit.clean, audit.problems
        steps = sum(map(len, self.tasks.values()))
        assert audit.tasks_drawn == sum(map(sum, self.tasks.values()))
        assert (audit.failed, audit.dropped) == (steps, steps)
        assert audit.trained + audit.pending == len({row[3] for row in self.queue})
        assert audit.trained == sum(map(len, self.archive.values()))


def test_the_pace_of_an_explorer_is_that_of_the_table():
    """For all histories of four beginnings after the first, of explorers and trainers."""
    joins = [("explorer", length, at_work) for length in (1, 2, 3) for at_work in (True, False)]
    begins = [("trainer", has_more, at_work) for has_more in (True, False) for at_work in (True, False)]
    paces = {(False, False): "level", (True, False): "ahead", (False, True): "behind", (True, True): "both"}
    for history in itertools.product([*joins, *begins], repeat=4):
        length, model = Length(), Pace()
        for who, change, at_work in [("explorer", 2, True), *history]:
            length = getattr(length, f"{who}_begins")(change, at_work)
            getattr(model, f"{who}_begins")(change, at_work)
            assert length.agreed == model.agreed, history
            assert paces[length.announced is not None, length.is_behind] == model.pace, history


def test_any_history_is_one_that_the_model_tells(server_url):
    """Each example's run has tables of its own, which takes PostgreSQL longer than a file."""
    options = settings(
        max_examples=6 if server_url else 25, stateful_step_count=30, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Life(server_url), settings=options)
