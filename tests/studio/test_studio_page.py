"""The configuration page in a real browser: a form filled in, a problem beside its field, a file saved."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from ports import free_port

from studio.__main__ import streamlit_command

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import opened

TEXT = "name: mine  # a name\nalgorithm:\n  algorithm_type: grpo\n  repeat_times: 8  # rollouts of a task\n"


def test_a_form_is_filled_in_and_saved(tmp_path: Path) -> None:
    file, port = tmp_path / "config.yaml", free_port()
    file.write_text(TEXT)

    async def use() -> None:
        async with opened(f"http://127.0.0.1:{port}", tmp_path) as page:
            field = "document.querySelector('input[aria-label=repeat_times]')"
            await page.until(f"!!{field}")
            for entered in ("-3", "16"):
                await page.until(f"!!{field} && ({field}.scrollIntoView(), {field}.focus(), {field}.select(), true)")
                await page.call("Input.insertText", text=entered)
                await page.call(
                    "Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r"
                )
                await page.until(f"document.querySelector('textarea')?.value.includes('repeat_times: {entered} ')")
                faults = "[...document.querySelectorAll('[data-testid=stAlert]')].map(e => e.innerText).join()"
                await page.until(f"{faults}.includes('at least 1') === {str(entered == '-3').lower()}")
            save = "[...document.querySelectorAll('button')].find(e => e.innerText.endsWith('Save'))"
            await page.until(f"!!{save} && ({save}.click(), true)")
            await page.until("document.body.innerText.includes('All changes are saved')")
            assert page.said == []

    with served(file, port):
        asyncio.run(use())
    assert file.read_text() == TEXT.replace("repeat_times: 8 ", "repeat_times: 16")


def test_looking_through_all_settings_changes_nothing(tmp_path: Path) -> None:
    """Every section and the search are opened; what is then saved is one change. Keys go only after a question."""
    file, port = tmp_path / "config.yaml", free_port()
    file.write_text(TEXT)
    pills = "[...document.querySelectorAll('[data-testid=stButtonGroup] button')]"
    buttons = "[...document.querySelectorAll('button')]"
    search = "document.querySelector('input[aria-label=Find]')"
    text = "document.querySelector('textarea[aria-label=YAML]')"
    opened_sections: list[str] = []

    async def use() -> None:
        async with opened(f"http://127.0.0.1:{port}", tmp_path) as page:
            await page.click("document.querySelector('[data-testid=stCheckbox] label')")
            names = (await page.until(f"{pills}.length && {pills}.map(e => e.innerText).join('|')")).split("|")
            for name in [*names, "algorithm", "run"]:
                await page.click(f"{pills}.find(e => e.innerText.split(' ')[0] === '{name.split()[0]}')")
                shown = "[...document.querySelectorAll('strong')].map(e => e.innerText)"
                await page.until(f"{shown}.includes('{name.split()[0]}') && !{IS_RUNNING}")
                assert await page.until(f"{text}?.value") == TEXT, name
                assert not await page.value("!!document.querySelector('[data-testid=stException]')"), name
                opened_sections.append(name.split()[0])
            await page.fill(search, "temperature")
            await page.until(f"!!document.querySelector('input[aria-label*=temperature]') && !{IS_RUNNING}")
            assert await page.until(f"{text}?.value") == TEXT
            await page.fill("document.querySelector('input[aria-label=temperature]')", "0.7")
            await page.until(f"{text}?.value.includes('temperature: 0.7') && !{IS_RUNNING}")
            await page.click(f"{buttons}.find(e => e.innerText.endsWith('Save'))")
            await page.until("document.body.innerText.includes('All changes are saved')")
            assert file.read_text() == TEXT + "model:\n  temperature: 0.7\n"
            await page.click(text)
            await page.value(f"{text}.select(), true")
            await page.call("Input.insertText", text="name: other")
            await page.click(search)
            await page.until("document.body.innerText.includes('lacks the latest changes')")
            await page.click(f"{buttons}.find(e => e.innerText.endsWith('Save'))")
            await page.click(f"{buttons}.find(e => e.innerText === 'Save without them')")
            await page.until("document.body.innerText.includes('All changes are saved')")
            assert page.said == []

    with served(file, port):
        asyncio.run(use())
    assert {"algorithm", "model", "buffer", "explorer", "trainer", "monitor"} < set(opened_sections)
    assert file.read_text() == "name: other"


IS_RUNNING = "(document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'running')"
"""Whether Streamlit draws the page anew."""


@contextmanager
def served(file: Path, port: int) -> Iterator[None]:
    """Studio with this file."""
    command = streamlit_command([str(file), "--port", str(port)])
    server = subprocess.Popen(command, cwd=file.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_served(port)
        yield
    finally:
        server.terminate()
        server.wait(30)


def wait_until_served(port: int) -> None:
    """Streamlit takes a second or two to start."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/_stcore/health").is_success:
                return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "Streamlit does not start"
        time.sleep(0.1)
