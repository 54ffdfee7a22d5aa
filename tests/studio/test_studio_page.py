"""The configuration page in a real browser: a form filled in, a problem beside its field, a file saved."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import httpx

from studio.__main__ import streamlit_command
from trinity_core.addresses import free_port

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

    command = streamlit_command([str(file), "--port", str(port)])
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_served(port)
        asyncio.run(use())
    finally:
        server.terminate()
        server.wait(30)
    assert file.read_text() == TEXT.replace("repeat_times: 8 ", "repeat_times: 16")


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
