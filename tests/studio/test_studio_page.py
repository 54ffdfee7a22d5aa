"""The configuration page in a real browser: a form filled in, problems beside fields, a file changed and undone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from browser import Page, button, opened
from studio_served import Served

TEXT = "name: mine  # a name\nalgorithm:\n  algorithm_type: grpo\n  repeat_times: 8  # rollouts of a task\n"
RUNS = """\
name: mine
model: {model_path: org/model, max_prompt_tokens: 16, max_response_tokens: 16}
buffer: {batch_size: 4, train_batch_size: 32, explorer_input: {taskset: {path: org/data}}}
"""
DIALOG = "[role=dialog]"
IDLE = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
"""Streamlit has drawn the page."""


def field(label: str) -> str:
    return f"document.querySelector('input[aria-label={json.dumps(label)}]')"


def has(text: str) -> str:
    return f"document.body?.innerText.includes({json.dumps(text)})"


TEXT_AREA = "document.querySelector('textarea[aria-label=YAML]')"


def use(studio: Served, folder: Path, file: str, actions: Callable[[Page], Awaitable[None]]) -> None:
    """A person at the form with a file; nothing may appear in the browser's console."""

    async def visit() -> None:
        async with opened(f"{studio.address}/?file={file}", folder) as page:
            await page.until(f"{IDLE} && ({has(file)} || !!{field('File')})", "the page is drawn")
            await actions(page)

    asyncio.run(visit())


def test_a_new_file_has_a_name_of_its_own(studio: Served, tmp_path: Path) -> None:
    """A copy of the present one, below the folder, under a name that the list of files has; its run has that name."""
    (studio.root / "present.yaml").write_text(TEXT)
    name = f"document.querySelector('{DIALOG} input[type=text]')"

    async def act(page: Page) -> None:
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

    use(studio, tmp_path, "present.yaml", act)
    assert (studio.root / "copied.yaml").read_text().endswith(TEXT.replace("mine ", "copied"))
    assert (studio.root / "present.yaml").read_text() == TEXT and not (studio.root.parent / "up.yaml").exists()


def test_a_change_is_in_the_file_until_it_is_undone(studio: Served, tmp_path: Path) -> None:
    file = studio.root / "changed.yaml"
    file.write_text(TEXT)

    async def act(page: Page) -> None:
        await page.fill(field("repeat_times"), "16")
        await page.until(f"{TEXT_AREA}?.value.includes('repeat_times: 16') && {IDLE}")
        assert file.read_text() == TEXT.replace("repeat_times: 8 ", "repeat_times: 16")
        await page.click(button("Undo changes"))
        await page.until(f"({field('repeat_times')})?.value === '8' && {IDLE}")
        assert file.read_text() == TEXT
        await page.click(TEXT_AREA)
        await page.value(f"{TEXT_AREA}.select(), true")
        await page.call("Input.insertText", text=TEXT.replace("8", "4"))
        await page.press_with_control("Enter")
        await page.until(f"({field('repeat_times')})?.value === '4' && {IDLE}")
        file.write_text(TEXT.replace("8", "2"))  # in an editor
        await page.reload()
        await page.until(f"({field('repeat_times')})?.value === '2' && {IDLE}")

    use(studio, tmp_path, file.name, act)


def test_the_list_of_files_opens_only_files(studio: Served, tmp_path: Path) -> None:
    """Part of a name and Enter opens the file of that name; a name that fits none opens nothing."""
    (studio.root / "configs/gsm8k").mkdir(parents=True)
    (studio.root / "configs/gsm8k/gsm8k.yaml").write_text(RUNS)
    (studio.root / "first.yaml").write_text(TEXT)

    async def act(page: Page) -> None:
        await page.click(field("File"))
        await page.call("Input.insertText", text="gsm8k/gsm8k")
        await page.press("Enter")
        await page.until(f"({field('File')})?.value === 'configs/gsm8k/gsm8k.yaml' && {IDLE}")
        await page.until(f"{TEXT_AREA}?.value.includes('org/model')")
        await page.click(field("File"))
        await page.call("Input.insertText", text="no/such/file")
        await page.press("Enter")
        await page.press("Escape")
        assert "configs/gsm8k/gsm8k.yaml" in await page.value("location.search.replaceAll('%2F', '/')")

    use(studio, tmp_path, "first.yaml", act)
    assert not [*studio.root.rglob("*such*")]


def test_a_start_needs_model_data_and_machine(studio: Served, tmp_path: Path) -> None:
    """Valid settings with a model that is nowhere, and with more GPUs than there are."""
    (studio.root / "nowhere.yaml").write_text(RUNS.replace("org/model", "./no_such_model"))
    alerts = "[...document.querySelectorAll('[data-testid=stAlert]')].map(e => e.innerText).join('|')"

    async def act(page: Page) -> None:
        await page.until(f"{alerts}.includes('settings are valid')")
        await page.click(button("Start"))
        await page.until(f"{alerts}.includes('model.model_path')", "refused", 90)
        assert not await page.value("!!document.querySelector('[data-testid=stAlertContentSuccess]')")
        assert not await page.value(f"!!({button('Start', DIALOG)})")
        await page.press("Escape")
        await page.fill("document.querySelector('input[aria-label^=gpu_per_node]')", "64")
        await page.until(f"{alerts}.includes('Not on this machine') && {IDLE}")

    use(studio, tmp_path, "nowhere.yaml", act)


def test_a_stage_has_fields_of_its_own(studio: Served, tmp_path: Path) -> None:
    file = studio.root / "stages.yaml"
    file.write_text(TEXT + "stages:\n  - stage_name: sft\n    mode: train\n  - stage_name: rft\n")

    async def act(page: Page) -> None:
        await page.click(button("rft"))
        await page.until(f"({field('repeat_times')})?.placeholder === 'all stages: 8' && {IDLE}")
        await page.fill(field("repeat_times"), "4")
        await page.until(f"{TEXT_AREA}?.value.includes('repeat_times: 4') && {IDLE}")

    use(studio, tmp_path, file.name, act)
    assert file.read_text().endswith("- stage_name: rft\n    algorithm:\n      repeat_times: 4\n")
