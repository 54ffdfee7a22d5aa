"""The page of sampled rollouts as Studio serves it: for every run, in a real browser, and behind Studio's token."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from ports import free_port

from studio.access import TOKEN_VARIABLE
from trinity_core.page_notes import rollouts_page
from trinity_core.tracking import SampledRollout, save_rollouts
from trinity_core.view.viewed_run import RunFolders

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import opened

STOLEN = "<script>alert(1)</script>"


@contextmanager
def served(folder: Path, *options: str, token: str = "") -> Iterator[str]:
    """Studio's address, with the runs below `folder`."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "studio", "--checkpoints", str(folder), "--port", str(port), *options]
    studio = subprocess.Popen(command, cwd=folder, env=os.environ | {TOKEN_VARIABLE: token})
    try:
        deadline = time.monotonic() + 60
        while not _is_up(address):
            assert studio.poll() is None and time.monotonic() < deadline, "Studio does not answer"
            time.sleep(0.1)
        yield address
    finally:
        studio.terminate()
        studio.wait(30)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/_stcore/health").is_success
    except httpx.TransportError:
        return False


def save(folder: Path, run: str, step: int, answer: str) -> None:
    save_rollouts(folder / run, "eval/test", step, [SampledRollout("2 + 2?", answer, float("4" in answer), truth="4")])


def test_two_runs_answers_stand_side_by_side(tmp_path: Path) -> None:
    save(tmp_path, "p/one", 2, "It is 4.")
    save(tmp_path, "p/other", 6, STOLEN)

    async def look(address: str) -> None:
        async with opened(address + rollouts_page("p/one", "p/other"), tmp_path / "profile") as page:
            await page.until("document.querySelectorAll('.pair pre').length === 3")
            answers = "[...document.querySelectorAll('.pair > div:not(.both)')].map((side) => side.innerText).join('|')"
            left, right = (await page.value(answers)).split("|")
            assert "It is 4." in left and STOLEN in right and "p/other, step 6" in right
            save(tmp_path, "p/late", 1, "It is 5.")  # a run that begins while the page is served
            await page.value(f"location.hash = {rollouts_page('p/late').partition('#')[2]!r}; true")
            await page.until("document.querySelector('#pairs').innerText.includes('It is 5.')")
            assert page.said == []

    with served(tmp_path) as address:
        asyncio.run(look(address))


def test_without_the_token_nothing_is_shown(tmp_path: Path) -> None:
    save(tmp_path, "p/one", 2, "It is 4.")
    with served(tmp_path, "--host", "0.0.0.0", token="secret") as address, httpx.Client(base_url=address) as client:
        runs = "/rollouts/api/runs"
        assert client.get(runs).status_code == 401
        assert client.get(runs, params={"token": "guess"}).status_code == 401
        assert client.get(runs, params={"token": "secret"}, follow_redirects=True).json() == ["p/one"]
        assert client.get(runs).json() == ["p/one"], "the cookie is enough"


def test_a_run_is_named_by_project_and_name_alone(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", "p/one", 2, "It is 4.")
    save(tmp_path, "outside/other", 2, "It is 5.")
    runs = RunFolders(tmp_path / "checkpoints")
    assert list(runs) == ["p/one"] and "p/one" in runs
    others = (
        "p",
        "p/none",
        "../outside/other",
        "p/../p/one",
        "p/..",
        "./p/one",
        "/p/one",
        "p//one",
        "p/one\0",
        "",
        None,
    )
    assert not [name for name in others if name in runs]
