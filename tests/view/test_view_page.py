"""The page over HTTP and in a real browser: what it shows, and that a run is not touched by it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import httpx
import numpy as np
import pytest
import uvicorn
from browser import opened
from fastapi.testclient import TestClient
from raising import raising
from viewing import NASTY, rollout

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.gate import key_file, server_key
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.view.app import make_app, serve
from trinity_core.view.tokens import shared_page
from trinity_core.view.viewed_run import viewed_runs

ROWS = "[...document.querySelectorAll('#table tbody tr')]"


def store_file(folder):
    return folder / "buffer" / "explorer_output.db"


def test_the_page_answers_with_what_is_stored(run_folder, serving) -> None:
    with serving(run_folder) as address, httpx.Client(base_url=address) as client:
        assert client.get("/api/runs").json() == ["run"]
        about = client.get("/api/runs/run/about").json()
        assert about["has_store"] and about["samples"] == {"eval-test": [0, 6]}
        page = client.get("/api/runs/run/rollouts", params={"group": "sums"}).json()
        assert [(row["task"], row["place"], row["reward"]) for row in page["rollouts"]] == [
            ("sums/3", 0, 0.0), ("sums/3", 1, 1.0), ("sums/9", 0, None),
            ("sums/2", 0, 0.0), ("sums/2", 1, 1.0), ("sums/1", 0, 0.0), ("sums/1", 1, 1.0),
        ]  # fmt: skip
        assert page["before"] is None and page["rollouts"][2]["response"].startswith("broke on")
        group = client.get(f"/api/runs/run/groups/{page['rollouts'][0]['id']}").json()
        assert [rollout["reward"] for rollout in group["rollouts"]] == [0.0, 1.0]
        assert np.allclose([rollout["advantage"] for rollout in group["rollouts"]], [-(0.5**0.5), 0.5**0.5], atol=1e-3)
        assert (group["rollouts"][1]["response"], group["rollouts"][1]["info"]["half ?"]) == (NASTY, "?")
        tokens = client.get(f"/api/runs/run/groups/{group['id']}/rollouts/1/tokens").json()
        assert "".join(tokens["text"]) == "What is 2 + 2?" + NASTY
        assert tokens["logprob"][tokens["prompt_length"]] == -0.1
        pairs = client.get("/api/runs/run/samples/eval-test/0", params={"beside": 6}).json()["pairs"]
        assert [(pair["left"]["response"], pair["right"]["response"]) for pair in pairs] == [("It is 5.", NASTY)]


def test_the_page_refuses_what_it_is_not_for(run_folder, serving) -> None:
    """Writing, and what there is not; models' text cannot become code. Strangers: tests/test_gate.py."""
    with serving(run_folder) as address, httpx.Client(base_url=address) as client:
        page = client.get("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert client.post("/api/runs").status_code == 405
        for missing in (
            "/api/runs/other/rollouts", "/api/runs/run/groups/99", "/api/runs/run/groups/1/rollouts/2/tokens",
            "/api/runs/run/samples/eval-test/3", "/api/runs/run/rollouts?state=odd", "/static/../app.py",
        ):  # fmt: skip
            assert client.get(missing).status_code == 404, missing
        huge = 10**20
        for odd in (
            f"rollouts?step={huge}", f"rollouts?version=-{huge}", f"rollouts?before={huge}",
            f"groups/{huge}", f"groups/{huge}/rollouts/0/tokens",
        ):  # fmt: skip
            assert client.get(f"/api/runs/run/{odd}").status_code == 422, odd
        beyond = client.get(f"/api/runs/run/groups/1/rollouts/0/tokens?offset={2**63 - 1}").json()
        assert beyond["ids"] == [] and beyond["offset"] == beyond["total"]


def login(root):
    return tuple(server_key(root).split(":"))


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_command_serves_the_page(run_folder, tmp_path, on_terminal) -> None:
    """It prints the password on a terminal; a log says where it is."""
    trinity = Path(sys.executable).with_name("trinity")
    command = [trinity, "view", "--checkpoint-dir", run_folder, "--host", "localhost", "--port", "0", "--no-browser"]
    ours, theirs = os.openpty() if on_terminal else os.pipe()
    with os.fdopen(ours) as output, subprocess.Popen(command, stdout=theirs, cwd=tmp_path) as page:
        os.close(theirs)
        try:
            printed = next(line for line in output if line.startswith("http://"))
            about = f"{printed.split()[0]}/api/runs/run/about"
            assert httpx.get(about, auth=login(tmp_path)).json()["has_store"]
            assert httpx.get(about).status_code == 401
            assert (login(tmp_path)[1] in printed, str(key_file(tmp_path)) in printed) == (on_terminal, not on_terminal)
        finally:
            page.terminate()


@pytest.mark.parametrize("host", ["localhost", socket.gethostname(), "127.0.0.1"])
def test_the_page_is_served_under_any_name_of_this_machine(run_folder, host, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    servers, said = [], SimpleQueue()
    server_class = uvicorn.Server

    def made(config):
        servers.append(server_class(config))
        return servers[0]

    monkeypatch.setattr(uvicorn, "Server", made)
    serving = threading.Thread(target=serve, args=(viewed_runs(run_folder), host, 0, False, said.put), daemon=True)
    serving.start()
    try:
        printed = next(line for line in iter(lambda: said.get(timeout=60), None) if line.startswith("http://"))
        assert printed.startswith(f"http://{host}:")
        about = f"{printed.split()[0]}/api/runs/run/about"
        assert httpx.get(about, timeout=60, auth=login(tmp_path)).json()["has_store"]
    finally:
        for server in servers:
            server.should_exit = True
        serving.join(60)


def test_a_host_that_is_not_this_machine_is_refused(run_folder) -> None:
    with pytest.raises(TrinityError, match=r"cannot be served on no\.such\.host\.invalid:0.*--host"):
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
    fill = (
        "{ const f = document.forms.rows; f.reset(); %s; f.step.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    for what, count in (("f.step.value = '2'", 5), ("f.version.value = '1'", 4), ("f.state.value = 'failed'", 1)):
        await page.value(fill % what)
        await page.until(f"{ROWS}.length === {count}")
        await page.value(fill % "")
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
    await page.press("3")
    assert await page.value(colours) == 1, "the advantage of a rollout is one"
    assert await page.text("#colours [aria-checked=true]") == "advantage"


async def _two_versions(page) -> None:
    """A kept rollout stays on the left; eval samples of two checkpoints stand beside each other."""
    await page.press("b")
    await page.click("document.querySelector('[aria-label=\"next group\"]')")
    await page.until("document.querySelectorAll('.pane').length === 2")
    assert "sums/3, step 3" in await page.text(".pane.left .facts")
    await page.press("b", "s")
    await page.until("document.querySelectorAll('.pair pre').length === 3")
    facts = await page.text("#pairs")
    assert "style 0.500" in facts and "brief 0" in facts and "truncated" not in facts, "a fault is said if there is one"
    assert NASTY in facts and "1 better, 0 worse" in await page.text("#verdict")
    assert not await page.value("!!document.querySelector('#pairs script, #pairs img')")
    await page.press("e")


async def _long(page) -> None:
    for task in ("sums/3", "long"):
        await page.press("k")
        await page.until(f"document.querySelector('#group .facts')?.innerText.includes('{task}')")
    await page.until("document.querySelector('#group .facts')?.innerText.includes('long')")
    await page.until("document.querySelectorAll('.t').length >= 2000")
    assert await page.value("document.querySelectorAll('.t').length") < 10_000, "the rest waits until it is in sight"
    await page.value("document.querySelector('.tokens').scrollTo(0, 1e9); true")
    await page.until("!!document.querySelector('.chunk:last-child .t')")
    await page.press("p", "n")
    await page.until("document.querySelector('#status').innerText.startsWith('token 29100 of 30000')")


DIFFERENCES = (
    ("a b c d", "b x d a", [False, True, False, True]),
    ("the sum is 7", "so the total is\n7", [True, False, True, True]),
    ("4", "", [False]),
    ("", "4", []),
)
"""Reference, answer, and which words of the reference the answer has."""


def test_words_that_an_answer_lacks_are_found(run_folder, serving, tmp_path) -> None:
    load = "import('./static/difference.js')"

    async def ask(address: str) -> None:
        async with opened(address, tmp_path) as page:
            for reference, answer, has in DIFFERENCES:
                difference = await page.value(f"{load}.then((m) => m.difference({reference!r}, {answer!r}))")
                assert difference == [list(pair) for pair in zip(reference.split(), has, strict=True)], answer

    with serving(run_folder) as address:
        asyncio.run(ask(address))


def test_rewards_in_another_order_or_of_more_turns_have_not_changed(run_folder, serving, tokenizer) -> None:
    """0.1 + 0.2 + 0.3 has another rounding from behind; a rollout of three turns counts as much as one of one."""
    draws = {
        4: {"order": [0.1, 0.2, 0.3, 1.25], "turns": [0.0, 1.0], "other": [0.1]},
        5: {"order": [1.25, 0.3, 0.2, 0.1], "turns": [0.0, 1.0], "other": [0.1 + 1e-6]},
    }
    with ExperienceStore.open(store_file(run_folder), str(run_folder)) as store:
        for step, rewards in draws.items():
            rows = [
                rollout(tokenizer, "2 + 2?", "4", reward, f"explorer/{step}/{task}", run, turn=turn)
                for task, each in rewards.items()
                for run, reward in enumerate(each)
                for turn in range(3 if (step, task, run) == (5, "turns", 1) else 1)
            ]
            drawn = [DrawnTask(f"explorer/{step}/{task}", task, len(each)) for task, each in rewards.items()]
            store.put("explorer", step, {}, rows, newest_version=3, drawn=drawn)
    with serving(run_folder) as address, httpx.Client(base_url=f"{address}/api/runs/run") as client:
        assert {row["task"] for row in client.get("/rollouts?since=4").json()["rollouts"]} == {"other"}


def test_tasks_whose_reward_has_changed_are_shown(run_folder, serving, tmp_path, tokenizer) -> None:
    """The mean of a task's latest group against that of its last group up to the step that the address names."""
    with ExperienceStore.open(store_file(run_folder), str(run_folder)) as store:
        for step, rewards in ((4, {"sums/3": 1.0, "words/3": 0.0}), (5, {"sums/3": 1.0})):
            names = {task: f"explorer/{step}/{task}" for task in rewards}
            again = [rollout(tokenizer, "2 + 2?", "4", reward, names[task], 0) for task, reward in rewards.items()]
            store.put("explorer", step, {}, again, newest_version=3, drawn=[DrawnTask(names[t], t, 1) for t in rewards])

    async def look(address: str) -> None:
        async with opened(f"{address}/#run=run&tab=table&since=3", tmp_path) as page:
            await page.until(f"{ROWS}.length === 1")
            assert await page.value(f"{ROWS}[0].cells[0].innerText + ' ' + {ROWS}[0].cells[1].innerText") == "5 sums/3"
            await page.fill("document.forms.rows.since", "4")
            await page.until(f"{ROWS}.length === 0 && location.hash.includes('since=4')")
            await page.value("location.hash = '#run=run&tab=table&since=3&show=changed', true")
            await page.until(f"{ROWS}.length === 1 && document.forms.rows.show.value === 'all'", "an old address")

    with serving(run_folder) as address:
        asyncio.run(look(address))


def test_rollouts_are_a_table_that_sorts_and_an_address_says_all(run_folder, serving, tmp_path) -> None:
    cells = f"{ROWS}.map((row) => [row.cells[0].innerText, row.cells[5].innerText].join(' '))"

    async def look(address: str) -> None:
        async with opened(address, tmp_path) as page:
            await page.until(f"{ROWS}.length === 13")
            assert await page.text("#rows-count") == "12 of 12 rollouts"
            await page.click("document.querySelector('[data-by=reward]')")
            assert (await page.value(cells))[0].endswith(" 1")
            await page.value("document.forms.rows.show.value = 'wrong'")
            await page.value("document.forms.rows.show.dispatchEvent(new Event('input', {bubbles: true})), true")
            await page.until(f"{ROWS}.length === 9")
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
    await page.until("!!document.querySelector('.t.a')")
    await page.value("document.querySelector('.t.a').dispatchEvent(new MouseEvent('mouseover', {bubbles: true})), true")
    await page.until(
        "document.querySelector('#tip').innerText.includes('log-prob')", "what a token is stands beside it"
    )
    assert await page.value("document.querySelector('#loading').hidden")


def test_an_unknown_run_is_not_taken_for_another(run_folder, serving, tmp_path) -> None:
    async def look(address: str) -> None:
        async with opened(f"{address}/#run=nosuch", tmp_path) as page:
            await page.until("document.querySelector('#problem')?.innerText.includes('nosuch')")
            assert await page.value("document.querySelector('#run').value") == ""

    with serving(run_folder) as address:
        asyncio.run(look(address))


def test_everything_is_done_by_keyboard(run_folder, serving, tmp_path) -> None:
    status = "document.querySelector('#status').innerText"

    async def use(address: str) -> None:
        async with opened(f"{address}/#run=run&tab=table", tmp_path) as page:
            await page.until(f"{ROWS}.length === 13")
            stops = await page.tab_stops()
            assert {"Table", "Tokens", "Evaluations", "Keys", "reward", "advantage"} <= {*stops}
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
            await page.until(f"{ROWS}.length === 2 && document.forms.rows.group.value === 'sums/3'")
            await page.press("s")
            await page.until("!!document.querySelector('.pair')")
            await page.tab_stops()

    with serving(run_folder) as address:
        asyncio.run(use(address))


def test_a_group_is_one_file_to_send(run_folder, serving) -> None:
    with serving(run_folder) as address, httpx.Client(base_url=address) as client:
        table = client.get("/api/runs/run/rollouts", params={"step": 3}).json()
        sent = client.get(f"/api/runs/run/groups/{table['rollouts'][0]['id']}/page.html")
        assert "attachment" in sent.headers["content-disposition"]
        assert NASTY not in sent.text and "&lt;" in sent.text and "<script" not in sent.text
        assert 'title="log-prob -0.1000"' in sent.text and "sums/3" in sent.text
        assert client.get("/api/runs/run/groups/99/page.html").status_code == 404
        assert [(row["task"], row["place"], row["reward"]) for row in table["rollouts"]] == [
            ("sums/3", 0, 0.0), ("sums/3", 1, 1.0), ("words/3", 0, 0.0), ("words/3", 1, 0.0),
        ]  # fmt: skip


def test_an_advantage_is_the_mean_of_what_is_in_the_loss(tokenizer) -> None:
    one = rollout(tokenizer, "2 + 2?", "It is 4.", 1.0, "g", 0)
    one.action_mask[1:] = False
    values = np.where(one.action_mask, 2.0, 0.0)
    row = {"task": "sums/1", "group": "g", "step": 1}
    assert "advantage 2.000" in shared_page("p/one", row, [one], [values], tokenizer)


@pytest.mark.parametrize("name", ["p/groups", "p/rollouts", "p/samples", "p/about"])
def test_a_run_may_be_called_as_a_part_of_the_page(run_folder, name) -> None:
    [run] = viewed_runs(run_folder).values()
    with TestClient(make_app({name: run})) as client:
        where = f"/api/runs/{name}"
        assert client.get(f"{where}/about").json()["folder"] == str(run_folder)
        [newest, *_] = client.get(f"{where}/rollouts").json()["rollouts"]
        assert client.get(f"{where}/groups/{newest['id']}").json()["id"] == newest["id"]
        assert client.get(f"{where}/groups/{newest['id']}/rollouts/0/tokens").json()["ids"]
        assert client.get(f"{where}/groups/{newest['id']}/page.html").status_code == 200
        assert client.get(f"{where}/samples/eval-test/0").json()["pairs"]
