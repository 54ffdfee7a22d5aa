"""The ledger and its audit: every task drawn is accounted for, and each kind of damage to a real store is named."""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from commands import called
from raising import raising
from sqlalchemy import NullPool, create_engine, inspect
from store_helpers import make_rows

from trinity_core.base.errors import DataError
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import hold, release
from trinity_core.cli import main
from trinity_core.data.task_queue import TaskQueue
from trinity_core.exchange.checkpoints.commit import begin, commit
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.store.archive import Archive
from trinity_core.exchange.store.earlier_rollouts import find_rollouts
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.schema import tables
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.store.strategies import Priority, StalenessControl, make_strategy
from trinity_core.results.audit import audit_json, audit_runs, audit_text

PIPELINE = """
project: project
name: pipe
checkpoint_root_dir: {root}
model: {{model_path: m, max_response_tokens: 8, max_model_len: 16}}
stages:
  - stage_name: warm
    algorithm: {{algorithm_type: sft}}
    mode: train
    buffer: {{trainer_input: {{experience_buffer: {{path: data.jsonl, storage_type: file}}}}}}
  - stage_name: rft
    buffer:
      explorer_input: {{taskset: {{path: data.jsonl}}}}
      trainer_input: {{experience_buffer: {{path: "{url}", storage_type: queue}}}}
"""
GONE = "RuntimeError: the tool is gone"
COUNTED = {
    "tasks_drawn": 30, "experiences_produced": 60, "trained": 12, "dropped": 6, "failed": 6, "pending": 6, "lost": 0,
    "duplicated": 0, "lineage": 0,
}  # fmt: skip
"""By `--json`, of the run in these tests."""


class Run:
    """A run's folder with its store, archive and checkpoints, and what explorer and trainer do to them."""

    def __init__(self, job: Path, server_url: str = "") -> None:
        self.layout = JobLayout(job).create()
        self.elsewhere = {"url": server_url} if server_url else {}
        self.url = server_url or f"sqlite:///{job}/buffer/explorer_output.db"
        self.store = ExperienceStore.open(self.url, str(job))
        self.archive = Archive(self.layout.archive)

    def explore(self, step: int, version: int, explorer: str = "e") -> None:
        """Five tasks: two keep all rows, one keeps half of them, one is dropped, one fails."""
        tag = f"{explorer}{step}"
        drawn = [
            DrawnTask(f"{tag}g0", "train/0", 2),
            DrawnTask(f"{tag}g3", "train/3", 2, dropped={"first": 1, "second": 1}),
            DrawnTask(f"{tag}g1", "train/1", 2),
            DrawnTask(f"{tag}g4", "train/4", 0, tries=3, failure=GONE),
            DrawnTask(f"{tag}g2", "train/2", 4, dropped={"first": 2}),
        ]
        rows = make_rows(3, 2, version, tag=tag)
        assert self.store.put(explorer, step, {"step": step}, rows, version, drawn=drawn)

    def train(self, step: int, **options: object) -> None:
        assert self.store.lease(step, 6, step - 1, **options)

    def save(self, step: int) -> None:
        self.archive.extend(step, self.store.batch)
        folder = begin(self.layout, step)
        (folder / "weights").write_text(str(step))
        commit(self.layout, step, folder)
        self.store.commit(step)

    def audit(self):
        [audit] = audit_runs(self.layout.root, **self.elsewhere).values()
        total = audit.trained + audit.dropped + audit.failed + audit.pending + audit.lost
        assert not audit.clean or total == audit.tasks_drawn
        return audit

    def damage(self, *statements: str) -> None:
        """Change the database behind the store's back; `{groups}` and the like are the tables' names."""
        self.store.close()
        known = tables(str(self.layout.root))
        names = {name: getattr(known, name).name for name in vars(known) if name != "metadata"}
        engine = create_engine(self.url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
        with engine.begin() as connection:
            for statement in statements:
                assert connection.exec_driver_sql(statement.format(**names)).rowcount > 0, statement


@pytest.fixture
def run(server_url: str, tmp_path: Path) -> Run:
    return worked(Run(tmp_path / "project" / "run", server_url))


@pytest.fixture
def run_in_a_file(tmp_path: Path) -> Run:
    return worked(Run(tmp_path / "project" / "run"))


def worked(run: Run) -> Run:
    """Six explore steps, five of which were trained on, four of them in a checkpoint."""
    for step in range(1, 7):
        run.explore(step, step - 1)
        if step < 6:
            run.train(step)
    run.save(2)
    run.save(4)
    return run


def counts(audit) -> tuple[int, ...]:
    return audit.trained, audit.dropped, audit.failed, audit.pending, audit.lost, audit.duplicated


def test_every_task_is_accounted_for(run: Run) -> None:
    audit = run.audit()
    assert audit.clean, audit.problems
    assert (audit.tasks_drawn, audit.experiences_produced) == (30, 60)
    assert counts(audit) == (12, 6, 6, 6, 0, 0)
    assert audit.dropped_by == {"second": 6}
    assert audit.experiences_dropped_by == run.store.dropped_by("e") == {"first": 18, "second": 6}
    assert audit.failed_because == {f"{GONE} (after 3 tries)": 6}
    assert audit.trained_at == {1: 3, 2: 3, 3: 3, 4: 3}
    text = audit_text("run", audit)
    assert "12  at steps 1 to 4" in text and "experiences dropped 24\n    18 × first\n    6 × second" in text


def test_rewind_undoes_the_ledger_with_its_steps(run: Run) -> None:
    (run.layout.step(4) / "weights").unlink()
    run.store.rewind(2)
    run.archive.rewind(2)
    audit = run.audit()
    assert audit.clean and audit.lineage == 1
    assert (audit.tasks_drawn, *counts(audit)) == (15, 6, 3, 3, 3, 0, 0), "explore steps 4 to 6 used versions 3 to 5"
    run.store.position("e")
    for step in (4, 5):
        run.train(step - 1)
        run.explore(step, step - 1)
    run.save(4)
    assert run.audit().clean and counts(run.audit()) == (12, 5, 5, 3, 0, 0)


def test_rows_pruned_before_a_rewind_are_lost(server_url: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", server_url)
    for step in (1, 2, 3):
        run.explore(step, 0)
    for step in (1, 2, 3):
        run.train(step)
    run.save(3)
    run.store.prune(3)
    run.store.rewind(1)
    run.archive.rewind(1)
    audit = run.audit()
    assert counts(audit) == (3, 3, 3, 0, 6, 0)
    assert any("is PRUNED, but no batch of a checkpoint has it" in problem for problem in audit.problems)


def test_stale_and_unscored_tasks_are_dropped_by_these_rules(server_url: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", server_url)
    run.explore(1, 0)
    unscored = make_rows(1, 2, 0, tag="u")
    for row in unscored:
        row.reward, row.action_mask = None, row.action_mask & False
    run.store.put("e", 2, {}, unscored, 0, drawn=[DrawnTask("ug0", "train/9", 2)])
    run.train(1)
    assert len(run.store.lease(2, 2, 1)) == 2 and run.store.lease(3, 2, 2, final=True) == []
    fresh = make_rows(3, 2, 3, tag="f")
    run.store.put("e", 3, {}, fresh, 3, drawn=[DrawnTask(f"fg{number}", "train/7", 2) for number in range(3)])
    assert len(run.store.lease(4, 2, 3)) == 2
    assert run.store.lease(5, 2, 9, StalenessControl(1), final=True) == []
    run.save(4)
    audit = run.audit()
    assert audit.clean, audit.problems
    assert audit.dropped_by == {"second": 1, "unscored": 1, "stale": 2}
    assert audit.experiences_dropped_by["unscored"] == 2
    run.save(5)
    run.store.prune(5)
    assert run.audit().dropped_by == audit.dropped_by


def test_reuse_that_was_asked_for_is_no_duplicate(server_url: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", server_url)
    run.explore(1, 0)
    again = Priority(reuse_cooldown_time=0.0)
    for step in (1, 2, 3):
        run.train(step, strategy=again, now=float(step))
    run.save(3)
    audit = run.audit()
    assert audit.clean and audit.trained == 3 and audit.trained_at == {1: 3}


def test_replay_stays_clean_through_rewind_and_pruning(server_url: str, tmp_path: Path) -> None:
    """Steps are undone and taken again, and rows that are used up leave the store."""
    run = Run(tmp_path / "run", server_url)
    run.explore(1, 0)
    limited = {"priority_fn": "decay_limit_randomization", "priority_fn_args": {"use_count_limit": 2, "sigma": 1.0}}
    again = make_strategy("default", replay={"reuse_cooldown_time": 0.5, **limited})
    for step in (1, 2):
        run.train(step, strategy=again, now=float(step))
    run.explore(2, 1)
    run.train(3, strategy=again, now=3.0)
    run.save(2)
    run.store.rewind(2)
    for step in (3, 4):
        run.train(step, strategy=again, now=10.0 + step)
    names = [{one.group for one in run.store.batch(step)} for step in (1, 2, 3, 4)]
    assert names[0] == names[1] and names[2] == names[3] and not names[0] & names[2], "each is used twice"
    run.save(4)
    assert run.store.prune(4, again) == 12 and not run.store.batch(1)
    audit = run.audit()
    assert audit.clean and audit.trained == 6 and audit.trained_at == {1: 3, 3: 3}, audit.problems


def test_groups_of_an_operator_and_several_explorers(server_url: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", server_url)
    run.explore(1, 0, "a")
    run.explore(1, 0, "b")
    drawn = [DrawnTask("b2/0", "train/5", 4, dropped={"split": 4})]
    run.store.put("b", 2, {}, make_rows(2, 2, 0, tag="split"), 0, drawn=drawn)
    run.train(1)
    audit = run.audit()
    assert audit.clean, audit.problems
    assert audit.tasks_drawn == 11 and audit.dropped_by == {"second": 2, "split": 1}
    assert audit.experiences_produced == 28, "an operator's own groups count too"


def test_an_audit_beside_writers_sees_one_moment(server_url: str, tmp_path: Path) -> None:
    """Explorer, trainer and checkpoints go on between the queries of an audit."""
    run = Run(tmp_path / "run", server_url)
    ended = threading.Event()

    def work() -> None:
        for step in itertools.count(1):
            run.explore(step, step - 1)
            run.train(step)
            run.save(step)
            if ended.wait(0.002):
                return

    with ThreadPoolExecutor(1) as worker:
        work_done = worker.submit(work)
        audits = [run.audit()]
        limit = time.monotonic() + 60
        while (len(audits) < 20 or audits[-1].tasks_drawn == audits[0].tasks_drawn) and time.monotonic() < limit:
            audits.append(run.audit())
        ended.set()
        work_done.result()
    assert not any(audit.problems for audit in audits)
    assert audits[0].tasks_drawn < audits[-1].tasks_drawn, "the writers were at work"


DAMAGE = {
    "experiences deleted": (
        ["DELETE FROM {experiences} WHERE group_id = (SELECT max(id) FROM {groups} WHERE state = 0)"],
        "is READY, but its experiences are gone", (1, 0),
    ),
    "ledger entry deleted": (
        ["DELETE FROM {groups} WHERE step = 3 AND task = 'train/4'"],
        "explore step 3 of e drew 5 tasks, 1 of them are not in the ledger", (1, 0),
    ),
    "trained group deleted": (
        ["DELETE FROM {groups} WHERE step = 3 AND task = 'train/1'"],
        "batch of train step 3 has groups that are not in the ledger", (1, 0),
    ),
    "ledger entry repeated": (
        ["INSERT INTO {groups} SELECT id + 1000, explorer, step, name, 0, newest, oldest, 5, stale_at, task, produced, "
         "tries, dropped, failure FROM {groups} WHERE step = 2 AND task = 'train/3'"],
        "explore step 2 of e has the task e2g3 more than once", (0, 1),
    ),
    "lease repeated": (
        ["INSERT INTO {lease_groups} SELECT 5, 99, group_id FROM {lease_groups} WHERE step = 2 AND ordinal = 0"],
        "group e2g0 is in the batches of steps [2, 5], without reuse", (0, 1),
    ),
    "lease deleted": (
        ["DELETE FROM {lease_groups} WHERE step = 2 AND ordinal = 1"],
        "group e2g1 (train/1) is TRAINED, but no batch of a checkpoint has it", (1, 0),
    ),
    "batch deleted": (["DELETE FROM {leases} WHERE step = 3"], "the batch of train step 3 is not recorded", (0, 0)),
    "groups swapped between batches": (
        ["UPDATE {lease_groups} SET group_id = (SELECT group_id FROM {lease_groups} WHERE step = 3 AND ordinal = 0) "
         "WHERE step = 2 AND ordinal = 0"],
        "group e3g0 of version 2 is in the batch of the earlier step 2", (1, 1),
    ),
    "experiences swapped": (
        ["UPDATE {experiences} SET blob = (SELECT blob FROM {experiences} WHERE group_id = 1) WHERE group_id = 2"],
        "group e1g1 has 2 experiences, stored are {'e1g0': 2}", (0, 0),
    ),
    "explore step deleted": (["DELETE FROM {steps} WHERE step = 2"], "explore step 2 of e is missing", (0, 0)),
    "explore step and its tasks deleted": (
        ["DELETE FROM {steps} WHERE step = 6", "UPDATE {steps} SET step = 6 WHERE step = 5",
         "DELETE FROM {groups} WHERE step = 5"],
        "explore step 5 of e is missing", (5, 0),
    ),
    "position changed": (
        ["""UPDATE {steps} SET position = '{{"step": 9}}' WHERE step = 2"""],
        "explore step 2 of e has the position of step 9", (0, 0),
    ),
    "taken back from a batch": (
        ["UPDATE {groups} SET state = 0 WHERE step = 1 AND task = 'train/0'"],
        "group e1g0 (train/0) waits for a batch, but that of step 1 has it", (1, 0),
    ),
    "dropped task trained": (
        ["INSERT INTO {lease_groups} SELECT 1, 9, id FROM {groups} WHERE step = 1 AND task = 'train/3'"],
        "group e1g3 (train/3) is DROPPED, but has experiences", (1, 0),
    ),
    "checkpoint claimed": (
        ["UPDATE {meta} SET committed = 5"], "the store has checkpoint 5, but the newest whole one is 4", (0, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_the_store_is_found_and_named(run_in_a_file: Run, kind: str) -> None:
    run = run_in_a_file
    statements, expected, (lost, duplicated) = DAMAGE[kind]
    run.damage(*statements)
    audit = run.audit()
    assert not audit.clean
    assert any(expected in problem for problem in audit.problems), audit.problems
    assert (audit.lost, audit.duplicated) == (lost, duplicated)


def test_damage_to_archive_and_checkpoints_is_found(run: Run) -> None:
    whole = run.layout.archive.read_text().splitlines(keepends=True)
    for lines, expected in (
        ([line for line in whole if json.loads(line)["group"] != "e3g1"], "2 of the batch's experiences are not in it"),
        ([*whole, whole[0]], "1 others are (e1g0)"),
        ([], "6 of the batch's experiences are not in it"),
    ):
        run.layout.archive.write_text("".join(lines))
        assert any(expected in problem for problem in run.audit().problems), run.audit().problems
    run.layout.archive.write_text("".join(whole))
    assert run.audit().clean
    (run.layout.step(4) / "weights").unlink()
    assert run.audit().problems == ["the store has checkpoint 4, but the newest whole one is 2"]


def test_the_command_reports_and_exits_honestly(run: Run) -> None:
    def trinity(*arguments: str) -> CompletedProcess[str]:
        return called(main, "audit", *store, "--checkpoint-dir", *arguments)

    store = [word for url in run.elsewhere.values() for word in ("--store", url)]
    folder = str(run.layout.root)
    before = {path: path.read_bytes() for path in run.layout.buffer.iterdir() if path.suffix == ".db"}
    done = trinity(folder, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: report[name] for name in COUNTED} == COUNTED and report["clean"]
    assert all(path.read_bytes() == data for path, data in before.items())
    run.damage("DELETE FROM {groups} WHERE step = 3 AND task = 'train/4'")
    done = trinity(folder)
    assert done.returncode == 1 and "NOT every task is accounted for" in done.stdout
    done = trinity(str(run.layout.root.parent / "nothing"))
    assert done.returncode == 1 and str(run.layout.root.parent / "nothing") in done.stderr


def test_queue_of_tasks_beside_the_store_is_no_store(run_in_a_file: Run) -> None:
    queue = TaskQueue(run_in_a_file.layout.buffer / "tasks.db", "train")
    queue.create()
    queue.add([{"question": "2 + 2?"}])
    assert run_in_a_file.audit().tasks_drawn == 30
    assert len(list(find_rollouts(str(run_in_a_file.layout.root), None))) == 36


def test_a_pipelines_folder_means_its_stages(run_in_a_file: Run, tmp_path: Path) -> None:
    """Those of its newest run, before its summary, and no neighbour whose name begins with the pipeline's."""
    (tmp_path / "project/pipe").mkdir()
    for name in ("pipe_rft", "pipe_rft_20260102030405", "pipe_big"):
        Run(tmp_path / "project" / name).explore(1, 0)
    update_meta(JobLayout(tmp_path / "project/pipe").stages, sft="pipe_sft", rft="pipe_rft")
    audits = audit_runs(tmp_path / "project/pipe")
    assert list(audits) == ["pipe_rft"] and audit_json(audits)["pending"] == 3
    update_meta(JobLayout(tmp_path / "project/pipe").stages, rft="pipe_rft_20260102030405")
    assert list(audit_runs(tmp_path / "project/pipe")) == ["pipe_rft_20260102030405"]
    with raising(DataError, key=str(tmp_path)):
        audit_runs(tmp_path)


def test_a_configured_pipeline_is_audited_by_its_stages(postgresql_url: str, tmp_path: Path) -> None:
    """Of the folders beside it those alone, whose store may be elsewhere; a stage on its own too."""
    config = tmp_path / "pipeline.yaml"
    config.write_text(PIPELINE.format(root=tmp_path, url=postgresql_url))
    stage, other = (Run(tmp_path / "project" / name, postgresql_url) for name in ("pipe_rft", "pipe_other"))
    stage.explore(1, 0)
    other.explore(1, 0)
    (tmp_path / "project/pipe_warm").mkdir()
    pipeline = tmp_path / "project/pipe"
    pipeline.mkdir()
    for folder in (pipeline, stage.layout.root):
        audits = audit_runs(folder, config)
        assert list(audits) == ["pipe_rft"] and audits["pipe_rft"].clean and audits["pipe_rft"].tasks_drawn == 5


def test_a_run_without_its_store_reports_no_neighbours(run_in_a_file: Run, tmp_path: Path) -> None:
    """Its store is in PostgreSQL, or lost: the runs that are named after it are others."""
    folder = tmp_path / "project/r"
    hold(folder, "training")
    run_in_a_file.layout.root.rename(folder.with_name("r_2"))
    with pytest.raises(DataError):
        audit_runs(folder)
    release(folder, "training")


def test_store_of_an_older_release_is_refused_before_anything_is_created(run: Run) -> None:
    """On a server also to a role that may create nothing."""
    run.damage("UPDATE {meta} SET schema = 2")
    known, url = tables(str(run.layout.root)), run.url
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
    known.lengths.drop(engine)
    if "tester@" in url:
        url = url.replace("tester@", "reader@")
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE ROLE reader LOGIN")
            connection.exec_driver_sql(f"GRANT SELECT ON {known.meta.name} TO reader")
    before = set(inspect(engine).get_table_names())
    for attempt in (run.audit, lambda: ExperienceStore.open(url, str(run.layout.root))):
        with pytest.raises(DataError):
            attempt()
    assert set(inspect(engine).get_table_names()) == before
