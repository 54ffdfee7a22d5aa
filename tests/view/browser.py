"""Chromium without a window, driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

SECONDS = 30.0
"""For Chromium to start, and for what a test waits for; a machine may be busy."""


QUIET = (
    "--process-per-site",  # tabs of one site share the scripts that one of them has compiled
    "--force-prefers-reduced-motion",
    *("--disable-extensions", "--disable-component-update", "--disable-background-networking"),
)
"""Spare a third of the processor's time."""
MOST_STOPS = 300
FROM_THE_TOP = """(() => {
    for (const e of document.querySelectorAll("[data-reached]")) delete e.dataset.reached
    document.body.tabIndex = -1
    document.body.focus()
    document.body.removeAttribute("tabindex")
})()"""
"""The next Tab leads to the first control of the page."""
STOP = """(() => {
    const e = document.activeElement
    if (!e || e === document.body || e.dataset.reached) return null
    e.dataset.reached = 1
    const around = [e, e.parentElement, e.parentElement.parentElement].map((each) => getComputedStyle(each))
    const isArea = ["IFRAME", "MAIN", "CANVAS"].includes(e.tagName)
    const hasCaret = e.tagName === "TEXTAREA" || (e.tagName === "INPUT" && e.type !== "checkbox")
    const label = e.ariaLabel || e.innerText || e.labels?.[0]?.innerText
    const name = label || e.title || e.placeholder || (isArea && e.tagName)
    const shown = isArea || hasCaret
        || around.some((style) => style.outlineStyle !== "none" || style.boxShadow !== "none")
    return {name: (name || "").trim(), shown, html: e.outerHTML.slice(0, 300)}
})()"""
"""The control that has the focus, if it is reached for the first time."""
MISSED = """[...document.querySelectorAll("button, a[href], input, select, textarea, summary, [tabindex='0']")]
    .filter((e) => !e.disabled && !e.dataset.reached && e.tabIndex >= 0 && e.role !== "radio")
    .filter((e) => e.checkVisibility({visibilityProperty: true}))
    .map((e) => e.outerHTML.slice(0, 200))"""
"""Visible controls that Tab has not led to; from one radio button to the next lead the arrow keys."""
NUMBERS = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
CODES = {name: {"windowsVirtualKeyCode": number} for name, number in NUMBERS.items()} | {
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"}
}
"""Of keys that an application tells by their number."""


class Navigated(Exception):
    """The page was left while an expression was evaluated in it."""


class Page:
    """A page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._count = 0
        self.said: list[str] = []
        """Errors, warnings and dialogs of the page."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; its result, however much the page says meanwhile."""
        self._count += 1
        async with asyncio.timeout(2 * SECONDS):
            await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
            return await self._result()

    async def _result(self) -> dict[str, Any]:
        while True:
            message = json.loads((await self._socket.receive(SECONDS)).data)
            # Streamlit's frames draw a warning about their sandbox, which holds pages of the same origin.
            sent = message.get("params", {})
            is_error = sent.get("entry", {}).get("level") == "error"
            is_error |= message.get("method") == "Runtime.consoleAPICalled" and sent["type"] in ("error", "warning")
            if message.get("method") in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening") or is_error:
                self.said.append(json.dumps(message["params"]))
            if message.get("id") == self._count:
                if "navigated" in message.get("error", {}).get("message", ""):
                    raise Navigated(message["error"]["message"])
                assert "error" not in message, message
                return message["result"]

    async def value(self, script: str) -> Any:
        """The value of an expression in the page, by JSON: of an element only an empty dict arrives."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str, what: str = "", seconds: float = SECONDS) -> Any:
        """The value of an expression, once it is true; `what` says in words what is waited for."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            with suppress(Navigated):  # ask the page that comes
                if value := await self.value(script):
                    return value
            if asyncio.get_running_loop().time() > deadline:
                shows = await self.value("document.body?.innerText")
                raise AssertionError(
                    f"not within {seconds:g} s: {what or script}; the page said {self.said} and shows:\n{shows}"
                )
            await asyncio.sleep(0.1)

    async def reload(self) -> None:
        """Load the page anew; what is asked of it from then on is asked of the new one."""
        before = await self.value("performance.timeOrigin")
        await self.call("Page.reload")
        await self.until(f"performance.timeOrigin !== {before} && !!document.body", "the page is loaded anew")

    async def text(self, selector: str) -> str:
        """The text of an element as a person sees it, once it is there."""
        element = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"!!{element}")
        return await self.value(f"{element}.innerText")

    async def _acts(self) -> None:
        """Note the time of an action, from which on a page may be busy that does not say so yet."""
        await self.value("window.actedAt = performance.now()")

    async def type(self, text: str) -> None:
        """Type a text into the field that has the focus."""
        await self._acts()
        await self.call("Input.insertText", text=text)

    async def press(self, *keys: str) -> None:
        """Press keys, as on a keyboard."""
        await self._acts()
        for key in keys:
            named = {"key": key, **({"text": key} if len(key) == 1 else {"code": key, **CODES.get(key, {})})}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **named)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def tab_stops(self) -> list[str]:
        """The names of the controls that Tab leads to, in order.

        Each has a name, shows that it has the focus, and none that is visible is left out.
        """
        await self.value(FROM_THE_TOP)
        shown = await self.value(MISSED)
        names = list[str]()
        while len(names) < MOST_STOPS:
            await self.press("Tab")
            if not (stop := await self.value(STOP)):
                break
            assert stop["name"] and stop["shown"], stop
            names.append(stop["name"])
        missed = [control for control in await self.value(MISSED) if control in shown]
        assert missed == [], (missed, names)
        return names

    async def press_with_control(self, key: str) -> None:
        """Press a key while Control is held."""
        await self._acts()
        for kind in ("keyDown", "keyUp"):
            code = {"key": key, "code": key, "windowsVirtualKeyCode": 13 if key == "Enter" else ord(key.upper())}
            await self.call("Input.dispatchKeyEvent", type=kind, modifiers=2, **code)

    async def click(self, element: str) -> None:
        """Click with the mouse in the middle of an element, an expression, once it is there and stays in its place."""
        middle = """(e => {
            if (!e || e.disabled) return null
            e.scrollIntoView({block: 'center'})
            const box = e.getBoundingClientRect()
            return box.width ? [box.x + box.width / 2, box.y + box.height / 2] : null
        })(ELEMENT)""".replace("ELEMENT", element)
        before, place = None, await self.until(middle)
        while before != place:
            await asyncio.sleep(0.1)
            before, place = place, await self.until(middle)
        await self.click_at(*place)

    async def click_at(self, x: float, y: float) -> None:
        """Click with the mouse at a place of the window."""
        await self._acts()
        where = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, **where)

    async def fill(self, element: str, text: str) -> None:
        """Click into a field, put a text in place of its own, and press Enter."""
        await self.click(element)
        await self.value(f"({element}).select(), true")
        await self.type(text)
        await self.press("Enter")

    async def picture(self, path: Path, width: int = 1280, height: int = 760) -> None:
        """Save what is to be seen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await asyncio.sleep(0.3)
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


def button(text: str, within: str = "body") -> str:
    """A button by its text, which an icon's name may precede."""
    selector = f"[...document.querySelectorAll('{within} button')]"
    return f"{selector}.find(e => e.innerText.split('\\n').some(line => line.trim() == {json.dumps(text)}))"


class Browser:
    """One Chromium for all tests of this process; it ends with the process."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += [*QUIET, f"--user-data-dir={self._folder.name}", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        atexit.register(self.close)

    async def address(self) -> str:
        """Of its debugging protocol."""
        path = Path(self._folder.name, "DevToolsActivePort")
        deadline = asyncio.get_running_loop().time() + SECONDS
        while not (path.exists() and path.read_text().count("\n")):
            in_time = asyncio.get_running_loop().time() < deadline
            assert self._process.poll() is None and in_time, "Chromium does not start"
            await asyncio.sleep(0.05)
        return f"http://127.0.0.1:{path.read_text().split()[0]}"

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(SECONDS)
        self._folder.cleanup()


@cache
def browser() -> Browser:
    """The browser; the test is skipped without Chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (Debian's package: chromium)")
    return Browser(program)


@asynccontextmanager
async def opened(
    address: str, folder: Path, most_seconds: float = 10 * SECONDS, is_ours: bool = True
) -> AsyncIterator[Page]:
    """A page in a tab of its own; skipped without Chromium.

    One of ours may say nothing in the browser's console, where requests that fail stand too. What it shows when an
    assertion fails is in `folder`, as `failed.png`. The browser enters a key in the address (`//user:password@`), and
    then leaves it out of the address, with which scripts could send no requests.
    """
    plain = re.sub(r"//[^/@]*@", "//", address)
    async with aiohttp.ClientSession() as session, asyncio.timeout(most_seconds):
        devtools = await browser().address()
        async with session.put(f"{devtools}/json/new?about:blank") as answer:
            tab = await answer.json(content_type=None)
        try:
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                if plain != address:
                    await page.call("Page.navigate", url=address)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.bringToFront")
                await page.call("Page.navigate", url=plain)
                try:
                    yield page
                    await page.value("true")  # hear what was said until now
                    assert not is_ours or page.said == [], page.said
                except AssertionError:
                    await page.picture(folder / "failed.png")
                    raise
        finally:
            await (await session.get(f"{devtools}/json/close/{tab['id']}")).release()
