"""Make all pictures of the docs: run the quick start under `trinity up` in a project of its own, and take its pages.

    python docs/make_pictures.py        # some 8 minutes on two cores; needs Chromium

The project is a new folder, `runs/pictures` by default, and its ports are not those of `trinity up`. The browser
is driven as the tests do, with a window of 1400 by 900 pixels; `HEIGHTS` has the lower pictures. For each picture it
prints the seconds until the page is drawn: everything that Streamlit draws, or that the page of rollouts loads, except
curves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT), str(ROOT / "tests/view")]
from browser import Page, button, opened  # noqa: E402 - the tests' driver of Chromium

from trinity_core.base.gate import server_key  # noqa: E402

PREFECT, STUDIO = "http://127.0.0.1:4298", "http://127.0.0.1:4299"
WIDTH, HEIGHT = 1400, 900
HEIGHTS = {"view": 400}
"""Heights of the pictures that would be empty below."""
CHART_SECONDS, PAUSE_SECONDS = 4.0, 300.0
CHAT = "document.querySelector('[data-testid=stChatInput] textarea')"
QUESTION = "Uwe has 5 eggs and breaks 2. How many eggs does Uwe have now?"
FIELDS = "[...document.querySelectorAll('textarea')]"
FORM = """(({x, y, width, height}) => ({x, y, width, height, scale: 1}))(
    document.querySelector(".p-modal__card").getBoundingClientRect())"""
"""The place of Prefect's form."""
SOMETHING = "[data-testid=stMainBlockContainer] [data-testid], #table tbody tr, .tokens .t, .texts, \
.flow-run-graph canvas"
"""What stands on a page only once it has been drawn, in Studio, in the page of rollouts, or on Prefect's page."""
DRAWN = """(app => !app || app.dataset.testScriptState === "notRunning")(document.querySelector("[data-testid=stApp]"))
    && (loading => !loading || loading.hidden)(document.querySelector("#loading"))"""
PROJECT = "Trinity-Flows"
RUN = quote(f"{PROJECT}/quickstart_rft", safe="")
PAGES = {
    "studio_configuration": "/?file=configs/quickstart/quickstart.yaml",
    "studio_runs": "/runs",
    "studio_run": f"/runs?run={RUN}",
    "studio_compare": f"/runs?run={RUN}&run={RUN.replace('_rft', '_sft')}",
    "studio_checkpoints": f"/runs?run={RUN}&tab=Checkpoints",
    "studio_chat": f"/chat?run={RUN}",
    "view_table": f"/rollouts/#run={RUN}&tab=table&by=reward",
    "view": f"/rollouts/#run={RUN}&tab=experiences&group=110&rollout=7",
    "view_samples": f"/rollouts/#run={RUN}&source=eval_test&group=25&rollout=6",
}


def main() -> None:
    """Run the quick start and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/pictures", help="new folder of the project")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures")
    options = parser.parse_args()
    folder, out = options.folder.absolute(), options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    trinity("init", str(folder), at=ROOT)
    trinity("up", "--port", PREFECT[-4:], "--studio-port", STUDIO[-4:], "--mlflow-port", "0", at=folder)
    try:
        trinity("quickstart", at=folder)
        shutil.copy(folder / "checkpoints" / PROJECT / "quickstart_rft/monitor/curve.png", out)
        asyncio.run(take_all(folder, out))
    finally:
        trinity("down", at=folder)


def trinity(*arguments: str, at: Path) -> None:
    """Run a command of this clone in a folder."""
    own = {"PYTHONPATH": str(ROOT), "TRINITY_CHECKPOINT_ROOT_DIR": "checkpoints"}
    subprocess.run([sys.executable, "-m", "flows.cli", *arguments], cwd=at, env=os.environ | own, check=True)


async def take_all(folder: Path, out: Path) -> None:
    """Take the pages of Studio and of Prefect; a person's verdicts are asked for by a run of its own."""
    key = server_key(folder)
    newest = {"flows": {"name": {"any_": ["pipeline"]}}, "sort": "START_TIME_DESC", "limit": 1}
    [pipeline] = prefect("/flow_runs/filter", key, newest)
    asking = prefect("/deployments/name/sft/human", key)["id"]
    human = prefect(f"/deployments/{asking}/create_flow_run", key, {})["id"]
    for name, path in PAGES.items():
        await take(f"{STUDIO}{path}", out / f"{name}.png", key)
    await take(f"{PREFECT}/runs/flow-run/{pipeline['id']}", out / "prefect_pipeline.png", key)
    deadline = time.monotonic() + PAUSE_SECONDS
    while (state := prefect(f"/flow_runs/{human}", key)["state_type"]) != "PAUSED":
        if time.monotonic() > deadline:
            raise TimeoutError(f"sft/human is {state} and does not pause")
        await asyncio.sleep(1)
    await take(f"{PREFECT}/runs/flow-run/{human}", out / "human_verdicts.png", key)


def prefect(path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    """Return what Prefect's API answers."""
    headers = {"Authorization": f"Basic {b64encode(key.encode()).decode()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"{PREFECT}/api{path}", data, headers), timeout=30) as answer:  # noqa: S310 - this machine's
        return json.load(answer)


async def take(address: str, picture: Path, key: str) -> None:
    """Save a page as a picture, once it is drawn and its charts have had their time."""
    async with opened(address.replace("://", f"://{key}@"), picture.parent, is_ours=False) as page:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        began = time.monotonic()
        await page.call("Page.navigate", url=address)
        await page.until(f"!!document.querySelector({SOMETHING!r}) && {DRAWN}")
        seconds = time.monotonic() - began
        await asyncio.sleep(CHART_SECONDS)
        if picture.stem == "studio_chat":
            await ask(page)
        if picture.stem == "human_verdicts":
            await give_verdicts(page)
            form = await page.call("Page.captureScreenshot", format="png", clip=await page.value(FORM))
            picture.write_bytes(b64decode(form["data"]))
        else:
            await page.until(DRAWN)
            await page.picture(picture, WIDTH, HEIGHTS.get(picture.stem, HEIGHT))
    print(f"{picture}  {picture.stat().st_size / 1000:.0f} kB  {seconds:.2f} s")


async def ask(page: Page) -> None:
    """Let both models of the Chat page answer."""
    await page.click("document.querySelector('[data-testid=stCheckbox] label')")  # greedy
    await page.until(DRAWN)
    await page.click(CHAT)
    await page.type(QUESTION)
    await page.press("Enter")
    await page.until("document.querySelectorAll('[data-testid=stChatMessage]').length === 4", "answers", 120)


async def give_verdicts(page: Page) -> None:
    """Fill in the form of a paused run for its last task: keep its best answer, drop its worst."""
    await page.click(button("Resume"))
    await page.until(f"{FIELDS}.length >= 3", "the form")
    for field, verdict in ((-3, "keep"), (-2, "drop")):
        await page.click(f"{FIELDS}.at({field})")
        await page.type(verdict)
    await asyncio.sleep(1)  # the form has moved


if __name__ == "__main__":
    main()
