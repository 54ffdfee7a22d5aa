"""The configuration page in a real browser: a form filled in, problems beside fields, a file changed and undone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from browser import Page, button, opened
from studio_served import IDLE, Served

TEXT = "name: mine  # a name\nalgorithm:\n  algorithm_type: grpo\n  repeat_times: 8  # rollouts of a task\n"
OTHER = "name: mine\nmodel: {model_path: org/model}\n"
DIALOG = "[role=dialog]"


def field(label: str) -> str:
    return f"document.querySelector('input[aria-label={json.dumps(label)}]')"


def has(text: str) -> str:
    return f"document.body?.innerText.includes({json.dumps(text)})"


TEXT_AREA = "document.querySelector('textarea[aria-label=YAML]')"


def test_a_person_writes_configurations(studio: Served, tmp_path: Path) -> None:
    """From a new file to an old one by one page; nothing may appear in the browser's console."""
    root, name = studio.root, f"document.querySelector('{DIALOG} input[type=text]')"
    (root / "configs/gsm8k").mkdir(parents=True, exist_ok=True)
    (root / "configs/gsm8k/gsm8k.yaml").write_text(OTHER)
    (root / "present.yaml").write_text(TEXT)

    async def new(page: Page) -> None:
        """A copy of the present file, below the folder, under a name that the list of files has."""
        await page.click(button("New"))
        refused = {"plain": "must end in", "../up.yaml": "must be below", "present.yaml": "already exists"}
        for given, reason in refused.items():
            await page.fill(name, given)
            await page.until(IDLE)
            await page.click(button("Create"))
            await page.until(has(reason), reason)
        await page.fill(name, "copied.yaml")
        await page.until(IDLE)
        await page.click(button("Create"))
        await page.until(f"!document.querySelector('{DIALOG}') && ({field('File')})?.value === 'copied.yaml' && {IDLE}")
        assert copied.read_text().endswith(TEXT.replace("mine ", "copied")), "its run has its name"
        assert (root / "present.yaml").read_text() == TEXT and not (root.parent / "up.yaml").exists()

    async def change(page: Page) -> None:
        copy = copied.read_text()
        await page.fill(field("repeat_times"), "16")
        await page.until(f"{TEXT_AREA}?.value.includes('repeat_times: 16') && {IDLE}")
        assert copied.read_text() == copy.replace("repeat_times: 8 ", "repeat_times: 16")
        await page.click(button("Undo changes"))
        await page.until(f"({field('repeat_times')})?.value === '8' && {IDLE}")
        assert copied.read_text() == copy
        await page.click(TEXT_AREA)
        await page.value(f"{TEXT_AREA}.select(), true")
        await page.type(copy.replace("8", "4"))
        await page.press_with_control("Enter")
        await page.until(f"({field('repeat_times')})?.value === '4' && {IDLE}")
        copied.write_text(copy.replace("8", "2"))  # in an editor
        await page.reload()
        await page.until(f"({field('repeat_times')})?.value === '2' && {IDLE}")

    async def open_other(page: Page) -> None:
        """Part of a name and Enter opens the file of that name; a name that fits none opens nothing."""
        await page.click(field("File"))
        await page.type("gsm8k/gsm8k")
        await page.press("Enter")
        await page.until(f"({field('File')})?.value === 'configs/gsm8k/gsm8k.yaml' && {IDLE}")
        await page.until(f"{TEXT_AREA}?.value.includes('org/model')")
        await page.click(field("File"))
        await page.type("no/such/file")
        await page.press("Enter", "Escape")
        await page.until(IDLE)
        assert "configs/gsm8k/gsm8k.yaml" in await page.value("location.search.replaceAll('%2F', '/')")
        assert not [*root.rglob("*such*")]

    async def visit() -> None:
        async with opened(f"{studio.address}/?file=present.yaml", tmp_path) as page:
            await page.until(f"{IDLE} && !!{field('File')}", "the page is drawn")
            for act in (new, change, open_other):
                await act(page)

    copied = root / "copied.yaml"
    asyncio.run(visit())
