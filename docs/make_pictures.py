"""Make the pictures of Studio in `docs/pictures` from the runs below a folder of checkpoints, with headless Chromium.

    python docs/make_pictures.py --checkpoints checkpoints --run Trinity-Flows/quickstart_rft
    python docs/make_pictures.py --pipeline http://127.0.0.1:4200/runs/flow-run/ID     # while `trinity up` runs here

The second one is of a pipeline on Prefect's page, `prefect_pipeline`.

It drives the browser as the tests do, with a window of 1400 by 900 pixels. For each picture it prints the seconds until
the page is drawn: everything that Streamlit draws, or that the page of rollouts loads, except curves.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests/view"))
from browser import opened  # noqa: E402 - the tests' driver of Chromium

from trinity_core.base.gate import server_key  # noqa: E402

PORT = 4299
CHART_SECONDS = 4.0
CHAT = "document.querySelector('[data-testid=stChatInput] textarea')"
QUESTION = "Uwe has 5 eggs and breaks 2. How many eggs does Uwe have now?"
SOMETHING = "[data-testid=stMainBlockContainer] [data-testid], #table tbody tr, .tokens .t, .texts, \
.flow-run-graph canvas"
"""What stands on a page only once it has been drawn, in Studio, in the page of rollouts, or on Prefect's page."""
DRAWN = """(app => !app || app.dataset.testScriptState === "notRunning")(document.querySelector("[data-testid=stApp]"))
    && (loading => !loading || loading.hidden)(document.querySelector("#loading"))"""


def main() -> None:
    """Serve Studio and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--run", default="Trinity-Flows/quickstart_rft")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures")
    parser.add_argument("--pipeline", default="", help="address of a pipeline's run on Prefect's page")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.pipeline:
        asyncio.run(take(options.pipeline, options.out / "prefect_pipeline.png"))
        return
    run = quote(options.run, safe="")
    pages = {
        "studio_configuration": "/?file=configs/quickstart/quickstart.yaml",
        "studio_runs": "/runs",
        "studio_run": f"/runs?run={run}",
        "studio_compare": f"/runs?run={run}&run={quote(options.run.replace('_rft', '_sft'), safe='')}",
        "studio_checkpoints": f"/runs?run={run}&tab=Checkpoints",
        "studio_chat": f"/chat?run={run}",
        "view_table": f"/rollouts/#run={run}&tab=table&by=reward",
        "view": f"/rollouts/#run={run}&tab=experiences&group=40&rollout=5",
        "view_samples": f"/rollouts/#run={run}&source=eval_test&group=25&rollout=6",
    }
    checkpoints = str(options.checkpoints.absolute())
    command = [sys.executable, "-m", "studio", "--port", str(PORT), "--checkpoints", checkpoints]
    studio = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(f"http://127.0.0.1:{PORT}/_stcore/health")
        for name, path in pages.items():
            asyncio.run(take(f"http://127.0.0.1:{PORT}{path}", options.out / f"{name}.png"))
    finally:
        studio.terminate()
        studio.wait(30)


def wait_for(address: str) -> None:
    """Wait until a server answers, for a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urlopen(address, timeout=5).close()  # noqa: S310 - this machine's server
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


async def take(address: str, picture: Path) -> None:
    """Save a page as a picture, once Streamlit has drawn it and its charts have had their time."""
    with_key = address.replace("://", f"://{server_key(ROOT)}@")
    async with opened(with_key, picture.parent, is_ours=False) as page:
        size = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        began = time.monotonic()
        await page.call("Page.navigate", url=address)
        await page.until(f"!!document.querySelector({SOMETHING!r}) && {DRAWN}")
        seconds = time.monotonic() - began
        await asyncio.sleep(CHART_SECONDS)
        if await page.value(f"!!{CHAT}"):
            await page.click("document.querySelector('[data-testid=stCheckbox] label')")  # greedy
            await page.until(DRAWN)
            await page.click(CHAT)
            await page.type(QUESTION)
            await page.press("Enter")
            await page.until("document.querySelectorAll('[data-testid=stChatMessage]').length === 4", "answers", 120)
        await page.until(DRAWN)
        await page.picture(picture, 1400, 900)
    print(f"{picture}  {picture.stat().st_size / 1000:.0f} kB  {seconds:.2f} s")


if __name__ == "__main__":
    main()
