"""The page over HTTP and in a real browser: what it shows, and that a run is not touched by it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from browser import Page, opened
from fastapi.testclient import TestClient
from raising import raising
from viewing import NASTY, rollout

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.gate import key_file, server_key
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.view.app import make_app, serve
from trinity_core.view.viewed_run import viewed_runs

ROWS = "[...document.querySelectorAll('#table tbody tr')]"


def store_file(folder):
    return folder / "buffer" / "explorer_output.db"


def test_the_page_answers_with_what_is_stored(run_folder, serving) -> None:
    with serving(run_folder) as address, httpx.Client(base_url=address) as client:
        assert client.get("/api/runs").json() == ["run"]
        about = client.get("/api/runs/run/about").json()
        assert about["has_store"] and about["sources"] == ["eval-test"]
        page = client.get("/api/runs/run/rollouts", params={"task": "sums"}).json()
        assert [(row["task"], row["place"], row["reward"]) for row in page["rollouts"]] == [
            ("sums/3", 0, 0.0), ("sums/3", 1, 1.0), ("sums/9", 0, None),
            ("sums/2", 0, 0.0), ("sums/2", 1, 1.0), ("sums/1", 0, 0.0), ("sums/1", 1, 1.0),
        ]  # fmt: skip
        assert page["before"] is None and page["rollouts"][2]["response"].startswith("broke on")
        assert [row.get("advantage") for row in page["rollouts"]] == [*[None] * 5, -0.25, 0.5], "what the batch has had"
        group = client.get(f"/api/runs/run/groups/{page['rollouts'][0]['id']}").json()
        assert [rollout["reward"] for rollout in group["rollouts"]] == [0.0, 1.0]
        assert (group["rollouts"][1]["response"], group["rollouts"][0]["truth"]) == (NASTY, "#### 4 ?")
        tokens = client.get(f"/api/runs/run/groups/{group['id']}/rollouts/1/tokens").json()
        assert "".join(tokens["text"]) == "What is 2 + 2?" + NASTY
        assert tokens["logprob"][tokens["prompt_length"]] == -0.1
        where = "/api/runs/run/samples/eval-test"
        sampled = [("It is 5.", 0, 0.0), (NASTY, 6, 1.0)]
        for found in (client.get(where).json(), client.get(f"{where}/7").json()):
            assert [(one["response"], one["step"], one["reward"]) for one in found["rollouts"]] == sampled
        filtered = client.get(where, params={"step": 6, "task": "test 7"}).json()["rollouts"]
        assert [one["place"] for one in filtered] == [1], "its place among the samples of its task"
        of_two_sets = [SampledRollout("2?", "two", 1.0, task_index=3, task=f"{name}/3") for name in ("sums", "words")]
        save_rollouts(run_folder, "explorer", 1, of_two_sets)
        sums, words = client.get("/api/runs/run/samples/explorer").json()["rollouts"]
        assert (sums["task"], sums["place"], words["task"], words["place"]) == ("sums/3", 0, "words/3", 0)
        [one] = client.get(f"/api/runs/run/samples/explorer/{words['id']}").json()["rollouts"]
        assert one["task"] == "words/3", "the same row of another task set is another task"


def test_the_page_refuses_what_it_is_not_for(run_folder, serving) -> None:
    """Writing, and what is missing; models' text cannot become code. Strangers: tests/test_gate.py."""
    with serving(run_folder) as address, httpx.Client(base_url=address) as client:
        page = client.get("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert client.post("/api/runs").status_code == 405
        for missing in (
            "/api/runs/other/rollouts", "/api/runs/run/groups/99", "/api/runs/run/groups/1/rollouts/2/tokens",
            "/api/runs/run/samples/eval-test/3", "/static/../app.py",
        ):  # fmt: skip
            assert client.get(missing).status_code == 404, missing
        huge = 10**20
        for odd in (
            f"rollouts?step={huge}", f"rollouts?version=-{huge}", f"rollouts?before={huge}",
            f"groups/{huge}", f"groups/{huge}/rollouts/0/tokens", "rollouts?state=odd",
        ):  # fmt: skip
            assert client.get(f"/api/runs/run/{odd}").status_code == 422, odd
        beyond = client.get(f"/api/runs/run/groups/1/rollouts/0/tokens?offset={2**63 - 1}").json()
        assert beyond["ids"] == [] and beyond["offset"] == beyond["total"]


def login(root):
    return tuple(server_key(root).split(":"))


@pytest.mark.parametrize(
    ("host", "on_terminal"), [("localhost", True), (socket.gethostname(), False), ("127.0.0.1", False)]
)
def test_the_command_serves_the_page(run_folder, tmp_path, host, on_terminal) -> None:
    """Under any name of this machine. It prints the password on a terminal; a log says where it is."""
    trinity = Path(sys.executable).with_name("trinity")
    command = [trinity, "view", "--checkpoint-dir", run_folder, "--host", host, "--port", "0", "--no-browser"]
    ours, theirs = os.openpty() if on_terminal else os.pipe()
    with os.fdopen(ours) as output, subprocess.Popen(command, stdout=theirs, cwd=tmp_path) as page:
        os.close(theirs)
        try:
            printed = next(line for line in output if line.startswith("http://"))
            assert printed.startswith(f"http://{host}:")
            about = f"{printed.split()[0]}/api/runs/run/about"
            assert httpx.get(about, auth=login(tmp_path)).json()["has_store"]
            assert httpx.get(about).status_code == 401
            assert (login(tmp_path)[1] in printed, str(key_file(tmp_path)) in printed) == (on_terminal, not on_terminal)
        finally:
            page.terminate()


def test_a_host_that_is_not_this_machine_is_refused(run_folder) -> None:
    with pytest.raises(TrinityError, match=r"cannot serve on no\.such\.host\.invalid:0.*--host"):
        serve(viewed_runs(run_folder), "no.such.host.invalid", 0, False, print)


def test_a_run_that_goes_on_is_read_but_not_touched(run_folder, serving, tokenizer) -> None:
    """The page reads while an explorer writes, and sees what was committed; its reads change no byte of the store."""
    with (
        ExperienceStore.open(store_file(run_folder), str(run_folder)) as store,
        serving(run_folder) as address,
        httpx.Client(base_url=address) as client,
    ):
        with store._database.write():
            digest = hashlib.sha256(store_file(run_folder).read_bytes()).hexdigest()
            assert len(client.get("/api/runs/run/rollouts").json()["rollouts"]) == 13
        assert hashlib.sha256(store_file(run_folder).read_bytes()).hexdigest() == digest
        store.put("explorer", 4, {}, [rollout(tokenizer, "2?", "4", 1.0, "new", 0)], newest_version=3)
        assert client.get("/api/runs/run/rollouts").json()["rollouts"][0]["response"] == "4"


def test_only_a_run_can_be_viewed(run_folder, tmp_path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        with raising(DataError, key=str(folder)):
            viewed_runs(folder)
    shutil.rmtree(run_folder / "buffer")
    [run] = viewed_runs(run_folder).values()
    assert not run.has_store, "an evaluation has samples only"


def test_a_browser_shows_text_as_text(run_folder, serving, tmp_path, tokenizer) -> None:
    """Filter, open, colour and compare by keyboard; code in a model's answer is text; 30,000 tokens open at once."""
    long = Experience(
        np.tile(tokenizer("What is 2 + 2?\n", add_special_tokens=False)["input_ids"], 5000)[:30_000], 100,
        np.ones(29_900, bool), np.where(np.arange(29_900) == 29_000, -4.0, -0.01), np.full(29_900, 3), group="long",
    )  # fmt: skip
    with ExperienceStore.open(store_file(run_folder), str(run_folder)) as store:
        store.put("explorer", 4, {}, [long], newest_version=3)

    async def look(address: str) -> None:
        async with opened(address, tmp_path) as page:
            await page.until(f"{ROWS}.length === 14")
            await _filters(page)
            await _nasty(page)
            await _two_versions(page)
            await _long(page)

    with serving(run_folder) as address:
        asyncio.run(look(address))


async def _filters(page) -> None:
    for field, value, count in (("step", "2", 5), ("version", "1", 4), ("state", "failed", 1)):
        await choose(page, field, value)
        await page.until(f"{ROWS}.length === {count}")
        await choose(page, field, "")
        await page.until(f"{ROWS}.length === 14")


async def _nasty(page) -> None:
    """The group with the script, by keyboard: the second in the table, its second rollout."""
    assert not await page.value("!!document.querySelector('#table script, #table img')")
    for key, task in (("e", "long"), ("j", "sums/3")):
        await page.press(key)
        await page.until(f"document.querySelector('#group .facts')?.innerText.includes('{task}')")
    await page.press("l")
    await page.until(f"document.querySelector('.tokens')?.innerText.includes({NASTY!r})")
    assert not await page.value("!!document.querySelector('#group script, #group img')")
    marked = "[...document.querySelectorAll('.reference mark')].map((word) => word.innerText)"
    assert await page.value(marked) == ["####", "4"], "what the answer lacks of the reference"
    colours = "[...new Set([...document.querySelectorAll('.t.a')].map((t) => t.style.background))].length"
    assert await page.value(colours) > 3, "each log-prob has its own shade"


async def _two_versions(page) -> None:
    """A kept rollout stays on the left; a task's samples of two checkpoints stand beside each other."""
    await page.press("b")
    await page.click("document.querySelector('[aria-label=\"next group\"]')")
    await page.until("document.querySelectorAll('.pane').length === 2")
    assert "sums/3, step 3" in await page.text(".pane.left .facts")
    await page.press("b", "r")
    await choose(page, "source", "eval-test")
    await page.until(f"{ROWS}.length === 2")
    await page.click(f"{ROWS}[0].querySelector('a')")
    await page.until("document.querySelectorAll('.pane').length === 2")
    left, right = await page.text(".pane.left"), await page.text(".pane:not(.left)")
    assert "step 0" in left and "It is 5." in left and "step 6" in right and NASTY in right
    assert "style 0.500" in right and "brief 0" in right and "truncated" not in right, (
        "faults show only if there are any"
    )
    assert not await page.value("!!document.querySelector('#group script, #group img')")
    await choose(page, "source", "")
    await page.until(f"{ROWS}.length === 14")
    await page.press("e")


async def choose(page: Page, field: str, value: str) -> None:
    """Choose a value in a field above the table."""
    await page.value(
        f"(f => {{ f.value = {value!r}; f.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
        f"(document.forms.rows.{field})"
    )


async def _long(page) -> None:
    await page.until("document.querySelector('#group .facts')?.innerText.includes('long')")
    await page.until("document.querySelectorAll('.t').length >= 2000")
    assert await page.value("document.querySelectorAll('.t').length") < 10_000, "the rest waits until it is in sight"
    await page.value("document.querySelector('.tokens').scrollTo(0, 1e9); true")
    await page.until("!!document.querySelector('.chunk:last-child .t')")
    await page.press("p", "n")
    await page.until("document.querySelector('#status').innerText.startsWith('token 29100 of 30000')")


def test_rollouts_are_a_table_that_sorts_and_an_address_says_all(run_folder, serving, tmp_path) -> None:
    cells = f"{ROWS}.map((row) => [row.cells[0].innerText, row.cells[5].innerText].join(' '))"

    async def look(address: str) -> None:
        async with opened(address, tmp_path) as page:
            await page.until(f"{ROWS}.length === 13")
            assert await page.text("#rows-count") == "12 rollouts"
            await page.click("document.querySelector('[data-by=reward]')")
            assert (await page.value(cells))[0].endswith(" 1")
            await choose(page, "show", "wrong")
            await page.until(f"{ROWS}.length === 9")
            assert (await page.text("#rows-count")).endswith(" of 12 rollouts")
            await page.until("location.hash.includes('show=wrong') && location.hash.includes('by=reward')")
            await page.reload()
            await page.until(f"{ROWS}.length === 9")
            assert not await page.value("!!document.querySelector('#table script, #table img')")
            await page.click("document.querySelector('#table tbody td.text')")
            await page.until("!!document.querySelector('.tokens .t')", "a row leads to its tokens")
            await _addresses(page)

    with serving(run_folder) as address:
        asyncio.run(look(address))


async def _addresses(page) -> None:
    """Another group's address in the same tab opens it; filters and colour are in the address, and outlive a reload."""
    await page.value("location.hash = '#run=run&group=1&rollout=1', true")
    facts = "document.querySelector('#group .facts')?.innerText"
    await page.until(f"{facts}?.includes('words/1')")
    await page.value("location.hash = '#run=run&group=2&rollout=0', true")
    await page.until(f"{facts}?.includes('sums/1')")
    await page.press("3")
    await page.until("/show=wrong/.test(location.hash) && /colour=advantage/.test(location.hash)")
    await page.reload()
    await page.until(f"{ROWS}.length === 9 && {facts}?.includes('sums/1')")
    assert "pushed up" in await page.text("#legend")
    assert await page.text("#colours [aria-checked=true]") == "advantage"
    colours = "[...document.querySelectorAll('.t.a')].map((t) => t.style.background)"
    await page.until(f"new Set({colours}).size === 2", "the advantages of this rollout's tokens are -0.5 and 0")
    await page.value("document.querySelector('.t.a').dispatchEvent(new MouseEvent('mouseover', {bubbles: true})), true")
    await page.until(
        "document.querySelector('#tip').innerText.includes('log-prob')", "what a token is stands beside it"
    )
    assert await page.value("document.querySelector('#loading').hidden")


def test_parts_named_like_columns_and_rollouts_without_a_verdict(run_folder, serving, tmp_path, tokenizer) -> None:
    parts = {"answer": 0.5, "tokens": 7.0, "step": 9.0}
    rewards: dict[str, list[float | None]] = {"flat": [1, 1, None], "one": [0, None], "mixed": [0, 1, None]}
    rows = [
        rollout(tokenizer, "2?", "two", reward, group, run, metrics=parts)
        for group, given in rewards.items()
        for run, reward in enumerate(given)
    ]
    rows[0].info["truth"] = None
    with ExperienceStore.open(store_file(run_folder), str(run_folder)) as store:
        store.put("explorer", 4, {}, rows, newest_version=3)

    async def look(address: str) -> None:
        async with opened(address, tmp_path) as page:
            await page.until(f"{ROWS}.length === 21")
            await choose(page, "step", "4")
            await page.until(f"{ROWS}.length === 8")
            cells = f"{ROWS}.at(-3).innerText.split('\\t')"
            assert await page.value(cells) == ["4", "", "2?", "two", "", "1", "–", "3", "0.500", "7", "9"]
            for show, count in (("flat", 3), ("mixed", 3), ("wrong", 2), ("", 8)):
                await choose(page, "show", show)
                assert await page.value(f"{ROWS}.length") == count, show
            await page.click(f"{ROWS}.at(-3).querySelector('a')")
            await page.until("!!document.querySelector('.tokens .t')")
            assert not await page.value("!!document.querySelector('.reference')"), "its task has no reference answer"

    with serving(run_folder) as address:
        asyncio.run(look(address))


def test_everything_is_done_by_keyboard(run_folder, serving, tmp_path) -> None:
    status = "document.querySelector('#status').innerText"

    async def use(address: str) -> None:
        async with opened(f"{address}/#run=run&tab=table", tmp_path) as page:
            await page.until(f"{ROWS}.length === 13")
            stops = await page.tab_stops()
            assert {"Table", "Tokens", "Keys", "reward", "advantage"} <= {*stops}
            await page.press("j", "j", "k")
            row = "document.activeElement.closest('tbody tr')"
            assert await page.value(f"{row} === {ROWS}[0]"), "j and k lead through the rows"
            await page.press("e")
            await page.until("!!document.querySelector('.t')", "the first rollout is open")
            assert {"all groups of this task", "keep on the left", "next group", "Tokens"} <= {*await page.tab_stops()}
            await page.value("document.querySelector('.tokens').focus(), true")
            await page.press("ArrowRight", "ArrowRight")
            await page.until(f"{status}.startsWith('token 1 of')")
            await page.press("?")
            await page.until("document.querySelector('#keys').open")
            await page.press("Escape")
            await page.until("!document.querySelector('#keys').open")
            await page.press("t")
            await page.until(f"{ROWS}.length === 2 && document.forms.rows.task.value === 'sums/3'")

    with serving(run_folder) as address:
        asyncio.run(use(address))


@pytest.mark.parametrize("name", ["p/groups", "p/rollouts", "p/samples", "p/about"])
def test_a_run_may_be_called_as_a_part_of_the_page(run_folder, name) -> None:
    [run] = viewed_runs(run_folder).values()
    with TestClient(make_app({name: run})) as client:
        where = f"/api/runs/{name}"
        assert client.get(f"{where}/about").json()["folder"] == str(run_folder)
        [newest, *_] = client.get(f"{where}/rollouts").json()["rollouts"]
        assert client.get(f"{where}/groups/{newest['id']}").json()["id"] == newest["id"]
        assert client.get(f"{where}/groups/{newest['id']}/rollouts/0/tokens").json()["ids"]
        assert client.get(f"{where}/samples/eval-test/7").json()["rollouts"]
