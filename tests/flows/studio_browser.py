"""A person at Studio's pages: makes a configuration from a recipe, starts a run of it, watches and leads it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import Page, button, opened

DIALOG = "[role=dialog]"
RUN_SECONDS = 300.0
"""For a run to start, to take a few steps, or to save and end, on a busy machine."""
VISIT_SECONDS = 600.0


class Person:
    """Does with the pages what a person would do. Whatever does not come is named, with the page as a picture."""

    def __init__(self, page: Page) -> None:
        self.page = page

    async def choose_file(self, name: str, begin: str) -> None:
        """Open the list of files and choose one, which begins with this line."""
        await self.page.click(labelled("File"))
        options = "[...document.querySelectorAll('[role=option]')]"
        await self.page.click(f"{options}.find(e => e.innerText.trim() == {json.dumps(name)})")
        await self.written(begin)

    async def fill(self, label: str, value: str) -> None:
        """Fill in a field, and see it in the text."""
        await self.page.fill(labelled(label), value)
        await self.written(f"{label.split()[0]}: {value}")

    async def written(self, line: str) -> None:
        """Wait until the text beside the fields has a line: the page has been drawn anew."""
        script = f"document.querySelector('textarea')?.value.split('\\n').some(e => e.trim() == {json.dumps(line)})"
        await self.page.until(script, f"the text has the line {line}")

    async def copy(self, name: str) -> None:
        """Make a copy of the chosen file, which is then the chosen one, and whose run has its name."""
        await self.page.click(button("New"))
        await self.page.fill(f"document.querySelector('{DIALOG} input[type=text]')", name)
        await self.page.click(button("Create"))
        await self.page.until(f"({labelled('File')})?.value == '{name}'", f"the file {name} is chosen")
        await self.written(f"name: {name.removesuffix('.yaml')}")

    async def start(self, title: str) -> None:
        """Start a run, which leads to its page."""
        await self.page.until("document.body?.innerText.includes('The settings are valid')", "there are no problems")
        await self.page.click(button("Start"))
        await self.page.until(f"!!({button('Start', DIALOG)})", "model and data are opened", RUN_SECONDS)
        await self.page.click(button("Start", DIALOG))
        heading = f"document.querySelector('h3')?.innerText.trim() == {json.dumps(title)}"
        await self.page.until(f"{heading} && !!({button('Cancel')})", f"the page of {title}", RUN_SECONDS)

    async def press(self, action: str) -> None:
        """Press a button, once it can be pressed."""
        await self.page.click(button(action))

    async def state(self, title: str, *states: str) -> None:
        """Wait until the run whose page is open is in one of these states."""
        shown = f"/^({'|'.join(states)})$/m.test(document.body?.innerText ?? '')"
        await self.page.until(shown, f"{title} is {' or '.join(states)}", RUN_SECONDS)

    async def drawn(self, steps: int) -> None:
        """Wait until a line of the chosen run's charts has that many points."""
        lines = "[...document.querySelectorAll('[data-testid=stVegaLiteChart] .mark-line path')]"
        points = f"Math.max(0, ...{lines}.map(e => e.getAttribute('d').split(/[ML]/).length - 1))"
        await self.page.until(f"{points} >= {steps}", f"a chart has {steps} points", RUN_SECONDS)


@asynccontextmanager
async def person_at(address: str, folder: Path) -> AsyncIterator[Person]:
    """A person at a page, at which no script fails."""
    async with opened(address, folder, VISIT_SECONDS) as page:
        yield Person(page)


def labelled(label: str) -> str:
    """The input of a field."""
    return f"[...document.querySelectorAll('input')].find(e => e.ariaLabel?.endsWith({json.dumps(label)}))"
