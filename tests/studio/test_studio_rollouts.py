"""The page of sampled rollouts as Studio serves it: for every run, in a real browser."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from browser import opened
from sqlalchemy import select
from studio_served import Served

from flows.mcp_server import Tools
from studio.settings import studio_settings
from trinity_core.base.addresses import rollouts_page
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.exchange.store.run_store import Identity
from trinity_core.exchange.store.schema import tables
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.view.viewed_run import RunFolders

ROWS = "[...document.querySelectorAll('#table tbody tr')]"
STOLEN = "<script>alert(1)</script>"


def save(folder: Path, run: str, step: int, answer: str) -> None:
    save_rollouts(folder / run, "eval/test", step, [SampledRollout("2 + 2?", answer, float("4" in answer), truth="4")])


def test_two_runs_answers_stand_side_by_side(studio: Served, tmp_path: Path) -> None:
    checkpoints = studio.root / "checkpoints"
    save(checkpoints, "p/one", 2, "It is 4.")
    save(checkpoints, "p/other", 6, STOLEN)

    async def look(address: str) -> None:
        async with opened(address + rollouts_page("p/one", "p/other"), tmp_path / "profile") as page:
            await page.until(f"{ROWS}.length === 2")
            await page.click(f"{ROWS}[1].querySelector('a')")
            await page.until("document.querySelectorAll('.pane').length === 2")
            left, right = await page.text(".pane.left"), await page.text(".pane:not(.left)")
            assert "It is 4." in left and STOLEN in right and "step 6 of p/other" in right
            save(checkpoints, "p/late", 1, "It is 5.")  # a run that begins while the page is served
            await page.value(f"location.hash = {rollouts_page('p/late').partition('#')[2]!r}; true")
            await page.until(f"{ROWS}.map(row => row.innerText).join().includes('It is 5.')")

    asyncio.run(look(studio.address))


def test_tasks_are_sorted_by_their_numbers(studio: Served, tmp_path: Path) -> None:
    samples = [SampledRollout("1 + 1?", "2", 1.0, task_index=task) for task in (10, 2, 1)]
    save_rollouts(studio.root / "checkpoints/p/many", "eval/test", 1, samples)
    tasks = f"{ROWS}.map(row => row.cells[1].innerText.match(/[0-9]+/)[0]).join()"

    async def look(address: str) -> None:
        async with opened(address + rollouts_page("p/many"), tmp_path / "profile") as page:
            await page.until(f"{ROWS}.length === 3")
            for order in ("1,2,10", "10,2,1"):
                await page.click("document.querySelector('[data-by=task]')")
                await page.until(f"{tasks} === '{order}'", order)

    asyncio.run(look(studio.address))


def test_a_pipeline_has_its_own_samples_and_not_its_stages_stores(tmp_path: Path) -> None:
    save(tmp_path, "p/all", 0, "It is 4.")
    write_json(JobLayout(tmp_path / "p/all").stages, {"one": "all_one", "two": "all_two"})
    for name in ("all_one", "all_two"):
        ExperienceStore.open(f"sqlite:///{tmp_path}/p/{name}/buffer/store.db", str(tmp_path / "p" / name)).close()
    save(tmp_path, "p/all_one", 3, "It is 4, or not.")
    told = Tools(replace(studio_settings([]), checkpoints=tmp_path)).rollouts("p/all")
    assert [(rollout["step"], rollout["response"]) for rollout in told] == [(3, "It is 4, or not.")]
    runs = RunFolders(tmp_path)
    assert {name: run.has_store for name, run in runs.items()} == {"p/all": False, "p/all_one": True, "p/all_two": True}
    (tmp_path / "p/all_two/buffer/store.db").write_bytes(b"no database")
    assert list(runs) == ["p/all", "p/all_one", "p/all_two"], "one that is damaged hides no other"


def test_a_run_that_takes_a_deleted_ones_place_has_its_own_store(tmp_path: Path) -> None:
    runs, run = RunFolders(tmp_path), tmp_path / "p" / "run"
    for namespace in ("first", "second"):
        ExperienceStore.open(f"sqlite:///{run}/buffer/explorer_output.db", namespace).close()
        identity = Identity(namespace, namespace, str(run), run.stat().st_ino)
        write_json(JobLayout(run).identity, asdict(identity))
        with runs["p/run"].read() as (connection, own):
            assert own.groups.name == tables(namespace).groups.name
            assert connection.execute(select(own.groups)).all() == []
        shutil.rmtree(run)


def test_a_run_is_named_by_project_and_name_alone(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", "p/one", 2, "It is 4.")
    save(tmp_path, "outside/other", 2, "It is 5.")
    (tmp_path / "checkpoints" / "p" / "champions.lock").touch()
    runs = RunFolders(tmp_path / "checkpoints")
    assert list(runs) == ["p/one"] and "p/one" in runs
    elsewhere = ["../outside/other", "p/../p/one", "p/..", "./p/one", "/p/one", "p//one", "p/one\0"]
    others = ["p", "p/none", *elsewhere, "", None]
    assert not [name for name in others if name in runs]
