"""The list of runs and the page of a run in a real browser: addresses, sorting out, comparing, no console errors."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import Page, button, opened
from studio_served import IDLE, Served
from test_studio_page import field, has
from test_studio_records import run_folder

from trinity_core.base.files import read_json, write_json
from trinity_core.base.layout import JobLayout
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.exchange.tracking.run_record import read_record, record_end, record_path, record_start
from trinity_core.exchange.tracking.writers import RunOutcome

TABLE = "document.querySelector('[data-testid=stDataFrame]')"
FRAME = "document.querySelector('iframe')"
INSIDE = f"{FRAME}?.contentDocument?.body?.innerText"
NO_FAULT = "!document.querySelector('[data-testid=stException]')"


@pytest.fixture(scope="module")
def runs(studio: Served) -> Path:
    """A finished run with all that a run leaves, one in progress with another learning rate, and one without steps."""
    project = studio.root / "checkpoints/hub"
    shutil.rmtree(project, ignore_errors=True)
    for name, lr in (("done", 1e-4), ("going", 2e-4), ("begun", 1e-4)):
        config = {"project": "hub", "name": name, "buffer": {"total_steps": 8}, "algorithm": {"optimizer": {"lr": lr}}}
        record_start(project / name, config, "rft")
    for name in ("done", "going"):
        folder = run_folder(project / name, "org/base", {2: 0.25, 4: 0.75})
        for step in (1, 2, 3, 4):
            MetricsFile(folder, "trainer").write(step, {"actor/final_loss": 1 / step, "timing_s/step": 1.0})
        save_rollouts(folder, "eval/test", 4, [SampledRollout("2 + 2?", "It is 4.", 1.0, truth="4")])
        (JobLayout(folder).log / "trainer_0.log").write_text("the trainer says this\n")
    record_end(project / "done", read_record(project / "done"), RunOutcome.FINISHED)
    stages = {"rft": "done"}
    record_start(project / "pipeline", {"project": "hub", "name": "pipeline"}, "pipeline")
    write_json(JobLayout(project / "pipeline").stages, stages)
    MetricsFile(project / "pipeline", "eval").write(0, {"eval/test/accuracy": 0.0})
    return project


async def go(page: Page, studio: Served, path: str, until: str) -> None:
    """Open an address as from a link elsewhere."""
    await page.call("Page.navigate", url=studio.address + path)
    await page.until(f"{IDLE} && ({until})", f"{path}: {until}")
    assert await page.value(NO_FAULT), path


def part(name: str) -> str:
    every = "[...document.querySelectorAll('[data-testid=stButtonGroup] button')]"
    return f"{every}.find(e => e.innerText === {json.dumps(name)})"


def test_a_run_has_a_page_of_its_own(studio: Served, runs: Path, tmp_path: Path) -> None:
    async def look() -> None:
        address = f"/runs?run={quote('hub/done')}"
        async with opened("about:blank", tmp_path) as page:
            await go(page, studio, address, f"{has('hub/done')} && {has('Configuration')}")
            await page.until("document.title === 'hub/done'", "the browser's tab has its name")
            for fact in ("finished", "0.750", "4 of 8", "base"):
                await page.until(has(fact), fact)
            await page.until("document.querySelectorAll('[data-testid=stVegaLiteChart] canvas, .marks').length >= 2")
            stops = await page.tab_stops()
            assert "Smoothing" in stops and any(stop.endswith("Report") for stop in stops)
            for name, shown in (
                ("Checkpoints", "org/base"), ("Configuration", "optimizer"), ("Logs", "the trainer says this"),
                ("Commands", "trinity doctor --checkpoint-dir checkpoints/hub/done"),
            ):  # fmt: skip
                await page.click(part(name))
                await page.until(f"{has(shown)} && {IDLE}", f"{name} shows {shown}")
                assert f"tab={name}" in await page.value("location.search")
            await page.reload()
            await page.until(f"{has('trinity doctor')} && {IDLE}", "a reload shows the same part of the same run")
            await page.click(part("Rollouts"))
            await page.until(f"{INSIDE}?.includes('It is 4.')", "the rollouts are shown")
            await page.value(f"{FRAME}.contentDocument.querySelector('tbody tr a').click(), true")
            own = f"{FRAME}.contentDocument.querySelector('#own')"
            await page.until(f"/rollout=/.test({own}?.href)", "the link leads to the rollout that is open")
            address = await page.value(f"{own}.href")
        async with opened(address, tmp_path) as page:
            await page.until("!!document.querySelector('.pane') && !document.querySelector('#own').checkVisibility()")

    asyncio.run(look())


def test_a_link_to_a_section_of_the_docs_shows_the_section(studio: Served, tmp_path: Path) -> None:
    top = "document.querySelector('#what-is-normal')?.getBoundingClientRect().top"

    async def look() -> None:
        async with opened("about:blank", tmp_path) as page:
            await go(page, studio, "/docs?page=troubleshooting.md#what-is-normal", f"Math.abs({top}) < 200")

    asyncio.run(look())


def test_a_first_score_stands_at_step_0(studio: Served, tmp_path: Path) -> None:
    """While a pipeline's first stage trains there is no other."""
    folder = studio.root / "checkpoints/first/pipeline"
    shutil.rmtree(folder.parent, ignore_errors=True)
    record_start(folder, {"project": "first", "name": "pipeline"}, "pipeline")
    MetricsFile(folder, "eval").write(0, {"eval/test/accuracy": 0.0})
    labels = "[...document.querySelectorAll('[data-testid=stVegaLiteChart] .role-axis-label text')]"

    async def look() -> None:
        async with opened("about:blank", tmp_path) as page:
            await go(page, studio, "/runs?run=first/pipeline", f"{labels}.length > 0")
            assert await page.value(f"{labels}[0].textContent") == "0"

    asyncio.run(look())
    shutil.rmtree(folder.parent)


def test_an_address_shows_the_curves_that_were_chosen(studio: Served, runs: Path, tmp_path: Path) -> None:
    """Metrics, smoothing, scale, and wall time in place of steps: whoever opens it sees the same, also of a run in
    progress when its page is renewed."""
    charts = "[...document.querySelectorAll('[data-testid=stVegaLiteChart]')]"
    axes = "[...document.querySelectorAll('.role-axis-title text')].map(e => e.textContent)"
    lines = "document.querySelectorAll('.mark-line path').length"
    chosen = f"{charts}.length === 1 && {axes}.includes('minutes') && {lines} === 2"
    checked = "document.querySelector('[data-testid=stCheckbox] input')?.checked"
    controls = f"{chosen} && document.querySelector('[data-testid=stSlider] input')?.value === '0.05' && {checked}"
    parameters = {"metrics": "actor/final_loss", "smoothing": "0.05", "over": "minutes", "log": "true"}

    async def look() -> None:
        async with opened("about:blank", tmp_path) as page:
            await go(page, studio, "/runs?run=hub/done", f"{charts}.length >= 2 && {axes}.includes('step')")
            assert await page.value("location.search.match(/[a-z]+=/g).join()") == "run=", "what is usual is not in it"
            await page.click(field("Metrics"))
            await page.type("final_loss")
            await page.press("Enter", "Escape")
            await page.until(f"{charts}.length === 1 && {IDLE}", "only the chosen metric is shown")
            await page.click(button("minutes"))
            await page.until(f"{axes}.includes('minutes') && {IDLE}")
            await page.click("document.querySelector('[data-testid=stCheckbox] label')")
            await page.until(f"location.search.includes('log=') && {IDLE}")
            await page.value("document.querySelector('[data-testid=stSlider] input').focus()")
            await page.press("ArrowRight")
            await page.until(f"{controls} && {IDLE}")
            search = await page.value("Object.fromEntries(new URLSearchParams(location.search))")
            assert search == {"run": "hub/done"} | parameters
            address = (await page.value("location.pathname + location.search")).replace("done", "going")
        async with opened("about:blank", tmp_path) as page:
            await go(page, studio, address, controls)
            points = "document.querySelector('.mark-line path').getAttribute('d').split(/[ML]/).length"
            before = await page.value(points)
            MetricsFile(runs / "going", "trainer").write(8, {"actor/final_loss": 0.1, "timing_s/step": 1.0})
            await page.until(f"{points} > {before} && {controls} && {IDLE}", "the page is renewed")
            assert await page.value("location.pathname + location.search") == address

    asyncio.run(look())


def test_what_a_run_does_now_is_said(studio: Served, runs: Path, tmp_path: Path) -> None:
    """Of one in progress its step; of one whose process is gone that; of one that does not exist what to do."""

    async def look() -> None:
        async with opened("about:blank", tmp_path) as page:
            record = read_json(record_path(runs / "begun"))
            write_json(record_path(runs / "begun"), record | {"began": time.time()})
            await go(page, studio, "/runs?run=hub/going", f"{has('running')} && {has(' of 8')}")
            MetricsFile(runs / "going", "trainer").write(5, {"reward/mean": 0.5, "timing_s/step": 1.0})
            await page.until(has("reward/mean"), "a chart is added with its first value")
            await go(page, studio, "/runs?run=hub/begun", has("No metrics yet"))
            write_json(record_path(runs / "begun"), record | {"pid": 2**22 + 1, "mark": ""})
            await page.until(f"{has('killed')} && {has('No metrics: the run ended')}", "the page is renewed")
            assert not await page.value(has("yet")), "nothing more comes of a run that is over"
            await go(page, studio, "/runs?run=hub/nothing", has("There is no run hub/nothing"))
            await go(page, studio, "/runs?run=hub/pipeline", f"!!{TABLE} && {has('Report')}")
            first = "document.querySelector('[data-testid=stVegaLiteChart] .role-axis-label text')?.textContent"
            await page.until(f"{first} === '0'", "the curves begin with the score of the first model")
            await go(page, studio, "/runs?run=hub/pipeline&tab=Rollouts", f"!!{FRAME}")
            await page.until(f"{INSIDE}?.includes('It is 4.')", "the rollouts of its stage are shown")

    asyncio.run(look())


def test_runs_are_listed_opened_and_compared(studio: Served, runs: Path, tmp_path: Path) -> None:
    async def look() -> None:
        async with opened("about:blank", tmp_path) as page:
            await go(page, studio, "/configuration", f"{has('New')} && location.pathname === '/'")
            assert not await page.value(has("not found"))
            for width in (1400, 1000, 800):
                await page.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
                )
                await go(page, studio, "/runs", f"!!{TABLE} && {has('Click a run')}")
                assert await page.value("document.documentElement.scrollWidth <= innerWidth"), width
            cell = f"(() => {{ const box = {TABLE}.getBoundingClientRect(); return [box.x, box.y] }})()"
            x, y = await page.value(cell)
            for row in (1, 2):
                await page.click_at(x + 16, y + 35 * row + 17)
                await page.until(f"{IDLE} && !!({button('Open')} || {button('Compare 2 runs')})")
            await page.click(button("Compare 2 runs"))
            await page.until(f"location.search.match(/run=/g)?.length === 2 && {IDLE}")
            await go(page, studio, "/runs", f"!!{TABLE} && {has('Click a run')}")
            await page.until(
                "(e => e && (e.focus(), true))(document.querySelector('canvas[data-testid=data-grid-canvas]'))"
            )
            await page.press("ArrowDown")
            await page.until(f"location.search === '' && {IDLE}", "the way through the table opens no run")
            await page.press("ArrowRight")
            await page.until(f"location.search.includes('run=') && {IDLE}")
            await go(page, studio, "/runs?run=hub/done&run=hub/going", f"{has('Rollouts')} && {has('All runs')}")
            keys = "[...document.querySelectorAll('[data-testid=stDataFrame] td')].map(e => e.innerText)"
            await page.until(f"{keys}.includes('algorithm.optimizer.lr')", "the configurations differ in the rate")
            assert not await page.value(f"{keys}.includes('name')"), "runs differ in their names anyway"

    asyncio.run(look())
