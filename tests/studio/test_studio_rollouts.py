"""The page of sampled rollouts as Studio serves it: for every run, in a real browser, and behind Studio's token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from browser import opened
from studio_served import Served, serve

from trinity_core.addresses import rollouts_page
from trinity_core.files import write_json
from trinity_core.layout import JobLayout
from trinity_core.store.store import ExperienceStore
from trinity_core.tracking.rollouts import SampledRollout, save_rollouts
from trinity_core.view.viewed_run import RunFolders

STOLEN = "<script>alert(1)</script>"


def save(folder: Path, run: str, step: int, answer: str) -> None:
    save_rollouts(folder / run, "eval/test", step, [SampledRollout("2 + 2?", answer, float("4" in answer), truth="4")])


def test_two_runs_answers_stand_side_by_side(studio: Served, tmp_path: Path) -> None:
    checkpoints = studio.root / "checkpoints"
    save(checkpoints, "p/one", 2, "It is 4.")
    save(checkpoints, "p/other", 6, STOLEN)

    async def look(address: str) -> None:
        async with opened(address + rollouts_page("p/one", "p/other"), tmp_path / "profile") as page:
            await page.until("document.querySelectorAll('.pair pre').length === 3")
            answers = "[...document.querySelectorAll('.pair > div:not(.both)')].map((side) => side.innerText).join('|')"
            left, right = (await page.value(answers)).split("|")
            assert "It is 4." in left and STOLEN in right and "p/other, step 6" in right
            save(checkpoints, "p/late", 1, "It is 5.")  # a run that begins while the page is served
            await page.value(f"location.hash = {rollouts_page('p/late').partition('#')[2]!r}; true")
            await page.until("document.querySelector('#pairs').innerText.includes('It is 5.')")

    asyncio.run(look(studio.address))


def test_without_the_token_nothing_is_shown(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", "p/one", 2, "It is 4.")
    with (
        serve(tmp_path, "--host", "0.0.0.0", token="secret") as served,
        httpx.Client(base_url=served.address) as client,
    ):
        runs = "/rollouts/api/runs"
        assert client.get(runs).status_code == 401
        assert client.get(runs, params={"token": "guess"}).status_code == 401
        assert client.get(runs, params={"token": "secret"}, follow_redirects=True).json() == ["p/one"]
        assert client.get(runs).json() == ["p/one"], "the cookie is enough"


def test_a_site_whose_name_leads_here_is_refused(tmp_path: Path) -> None:
    """For a browser it is of the same origin, so it could start runs. A token that was chosen is asked for too."""
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol": "streamlit"}
    with serve(tmp_path, token="secret") as served, httpx.Client(base_url=served.address) as client:
        port = served.address.rpartition(":")[2]

        def answer(path: str, host: str, **headers: str) -> int:
            here = headers | {"Host": f"{host}:{port}", "Origin": f"http://{host}:{port}"}
            with client.stream("GET", path, headers=here) as response:
                return response.status_code

        paths = {"/": {}, "/runs": {}, "/_stcore/stream": upgrade, "/rollouts/api/runs": {}}
        assert [answer(path, "evil.example", **headers) for path, headers in paths.items()] == [400] * 4
        for own in ("127.0.0.1", "localhost"):
            assert [answer(path, own, **headers) for path, headers in paths.items()] == [200, 200, 101, 401]


def test_a_pipeline_has_its_own_samples_and_not_its_stages_stores(tmp_path: Path) -> None:
    save(tmp_path, "p/all", 0, "It is 4.")
    write_json(JobLayout(tmp_path / "p/all").stages, {"one": "all_one", "two": "all_two"})
    for name in ("all_one", "all_two"):
        ExperienceStore.open(f"sqlite:///{tmp_path}/p/{name}/buffer/store.db", str(tmp_path / "p" / name)).close()
    runs = RunFolders(tmp_path)
    assert {name: run.has_store for name, run in runs.items()} == {"p/all": False, "p/all_one": True, "p/all_two": True}


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
