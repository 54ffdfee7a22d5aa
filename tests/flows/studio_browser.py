"""A person at Studio's pages: makes a configuration with the mouse, starts it, watches it, cancels it, retries it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import yaml

from trinity_core.tracking import read_metrics

sys.path.append(str(Path(__file__).parent.parent / "view"))
from browser import Page, opened

WATCHED = 3
"""Train steps that are waited for after a start."""
MOST_SECONDS = 240.0
"""For a run to start, or to save and end, on a busy machine."""


def template(model: Path, data: Path) -> str:
    """What the person begins with: model and data, but another algorithm."""
    columns = {"prompt_key": "question", "response_key": "answer"}
    warm_up = {"name": "worked", "path": str(data), "split": "sft", "format": columns}
    config = {
        "project": "tests",
        "name": "template",
        "checkpoint_root_dir": "checkpoints",
        "mode": "train",
        "model": {"model_path": str(model), "max_prompt_tokens": 88, "max_response_tokens": 12},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"train_batch_size": 8, "total_steps": 5, "trainer_input": {"experience_buffer": warm_up}},
        "trainer": {"save_interval": 1000},
    }
    return "# From a colleague\n" + yaml.safe_dump(config, sort_keys=False)


class Person:
    """Does with a page what a person would do."""

    def __init__(self, page: Page, root: Path) -> None:
        self.page = page
        self.root = root
        self.job = root / "checkpoints/tests/mine"

    async def make_configuration(self) -> None:
        """Choose the template, change algorithm, steps and name, and save it under another name."""
        await self.choose("File", "template.yaml")
        await self.shown("textarea", "From a colleague")
        await self.choose("algorithm_type", "sft")
        await self.shown("textarea", "algorithm_type: sft")
        await self.page.fill(labelled("total_steps (steps)"), "5000")
        await self.shown("textarea", "total_steps: 5000")
        await self.page.fill(labelled("name"), "mine")
        await self.shown("textarea", "name: mine")
        await self.shown("body", "No problems.")
        await self.page.click(button("Save as"))
        await self.page.fill("document.querySelector('[data-testid=stPopoverBody] input')", "mine.yaml")
        await self.page.click(button("Save", "[data-testid=stPopoverBody]"))
        await self.page.until(f"({labelled('File')})?.value == 'mine.yaml'")

    async def start(self) -> None:
        """Start it as a deployment's run, which leads to the list of runs, where it is chosen."""
        await self.page.click(button("Start"))
        await self.patient(f"!!({button('Save and start')})")
        await self.page.click(button("Save and start"))
        await self.patient(f"!!({row('tests/mine')})")
        await self.patient(f"({row('tests/mine')}).querySelector('input')?.checked")

    async def watch(self, after: int) -> int:
        """Wait until it runs, and has done steps that the page draws; the newest step."""
        await self.state("running")
        while (step := self.newest()) < after + WATCHED:
            await self.patient(f"({row('tests/mine')})?.innerText.includes('running')")
            await asyncio.sleep(0.2)
        await self.patient("!!document.querySelector('[data-testid=stVegaLiteChart] :is(canvas, svg)')")
        return step

    async def press(self, action: str) -> None:
        """Press a button of the chosen run."""
        await self.page.click(button(action))

    async def state(self, state: str) -> None:
        """Wait until the list says so."""
        await self.patient(f"({row('tests/mine')})?.innerText.includes('{state}')")

    async def patient(self, script: str) -> None:
        """Wait longer than for a page."""
        deadline = asyncio.get_running_loop().time() + MOST_SECONDS
        while not await self.page.value(script):
            assert asyncio.get_running_loop().time() < deadline, f"{script}: {await self.page.text('body')}"
            await asyncio.sleep(0.2)

    def newest(self) -> int:
        """The newest train step of its run."""
        return max((line.step for line in read_metrics(self.job) if line.source == "trainer"), default=0)

    async def choose(self, label: str, option: str) -> None:
        """Open a list and choose from it."""
        await self.page.click(labelled(label))
        found = f"[...document.querySelectorAll('[role=option]')].find(e => e.innerText.trim() == {json.dumps(option)})"
        await self.page.click(found)

    async def shown(self, selector: str, text: str) -> None:
        """Wait for a text in an element."""
        element = f"document.querySelector('{selector}')"
        await self.page.until(f"(e => (e?.value ?? e?.innerText ?? '').includes({json.dumps(text)}))({element})")


async def at_studio(address: str, root: Path, folder: Path, api_url: str) -> list[int]:
    """The whole visit; the newest train steps when it was cancelled and when it had begun again."""
    async with opened(address, folder) as page:
        person = Person(page, root)
        await page.until(f"!!({labelled('File')})")
        await person.make_configuration()
        await person.start()
        cancelled = await person.watch(0)
        await person.press("Cancel")
        await person.state("cancelled")
        saved = person.newest()
        await person.press("Retry")
        again = await person.watch(saved)
        assert page.said == []
        await page.call("Page.navigate", url=link_to_studio(api_url))
        await person.patient(f"!!({row('tests/mine')})")
        return [cancelled, saved, again]


def link_to_studio(api_url: str) -> str:
    """Where the run's artifact in Prefect leads."""
    body = json.dumps({"artifacts": {"key": {"any_": ["tests-mine-studio"]}}}).encode()
    request = Request(f"{api_url}/artifacts/filter", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as answer:
        [artifact, *_] = json.load(answer)
    return artifact["data"].split("](")[1].rstrip(")")


def labelled(label: str) -> str:
    """The input of a field."""
    return f"[...document.querySelectorAll('input')].find(e => e.ariaLabel?.endsWith({json.dumps(label)}))"


def button(text: str, within: str = "body") -> str:
    """A button by the end of its text, which an icon's name may precede."""
    found = f"[...document.querySelectorAll('{within} button')]"
    return f"{found}.find(e => e.innerText.split('\\n').some(line => line.trim() == {json.dumps(text)}))"


def row(title: str) -> str:
    """A run's line in the list."""
    lines = "[...document.querySelectorAll('[data-testid=stHorizontalBlock]')]"
    is_line = "!e.querySelector('[data-testid=stHorizontalBlock]') && e.querySelector('[data-testid=stCheckbox]')"
    return f"{lines}.find(e => {is_line} && e.innerText.includes('{title}'))"
