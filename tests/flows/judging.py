"""A person who answers a paused flow on Prefect's page, in a real browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin

from ports import free_port

from flows.local.server import answers
from trinity_core.addresses import LOOPBACK

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import SECONDS, Page, opened

SERVE = (
    "import sys, uvicorn; from prefect.server.api.server import create_ui_app;"
    "uvicorn.run(create_ui_app(ephemeral=False), port=int(sys.argv[1]), log_level='error')"
)


@contextmanager
def prefect_page(api_url: str, folder: Path) -> Iterator[str]:
    """Prefect's page for a server that serves none itself; its address."""
    address = f"http://{LOOPBACK}:{(port := free_port())}"
    settings = {"PREFECT_UI_API_URL": api_url, "PREFECT_UI_ENABLED": "1", "PREFECT_UI_STATIC_DIRECTORY": str(folder)}
    settings["PREFECT_SERVER_API_AUTH_STRING"] = os.environ["PREFECT_API_AUTH_STRING"]
    with subprocess.Popen([sys.executable, "-c", SERVE, str(port)], env=os.environ | settings) as server:
        try:
            deadline = time.monotonic() + 2 * SECONDS
            while not answers(address):
                assert server.poll() is None and time.monotonic() < deadline, "Prefect's page does not come up"
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()


async def sign_in(page: Page, address: str, key: str) -> None:
    """Open an address of Prefect's pages after those have got the key, which they ask for once in a browser."""
    await page.call("Page.navigate", url=urljoin(address, "/login"))
    await page.fill("document.querySelector('input[type=password]')", key)
    await page.until("location.pathname !== '/login'", "the key opens Prefect's pages")
    page.said.clear()  # of the requests without it
    await page.call("Page.navigate", url=address)


async def give_verdicts(address: str, said: Mapping[str, str], folder: Path) -> str:
    """Resume the paused run at this address with verdicts and answers by the titles of their fields.

    Returns what the form shows. A picture of it is left in `folder`.
    """
    async with opened("about:blank", folder, is_ours=False) as page:
        await sign_in(page, address, os.environ["PREFECT_API_AUTH_STRING"])
        await page.click_until(_named("button", "Resume"), "document.querySelector('[role=dialog] textarea')")
        for title, answer in said.items():
            await _fill(page, title, answer)
        shown = await page.text("[role=dialog]")
        await page.picture(folder / "verdicts.png", height=1000)
        await page.click_until(_named("[role=dialog] button", "Submit"), "!document.querySelector('[role=dialog]')")
        return shown


async def _fill(page: Page, title: str, answer: str) -> None:
    """Type into the field of this title."""
    fields = "[...document.querySelectorAll('[role=dialog] .schema-form-property')]"
    field = f"{fields}.find((e) => e.innerText.startsWith({json.dumps(title)}))?.querySelector('textarea')"
    await page.click_until(field, f"document.activeElement === {field}")
    await page.call("Input.insertText", text=answer)
    await page.until(f"{field}.value === {json.dumps(answer)}")


def _named(selector: str, text: str) -> str:
    """The element that shows this text alone."""
    shows = f"e.innerText.trim() === {json.dumps(text)}"
    return f"[...document.querySelectorAll({json.dumps(selector)})].find((e) => {shows})"
