"""The configuration page in a real browser: a form filled in, problems beside fields, no work lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from browser import Page, button, opened
from studio_served import Served

from trinity_core.config import config_from_text
from trinity_core.run.preflight.pace import Pace, cache_file, keep

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


async def write(page: Page, text: str) -> None:
    """Put a text in place of the whole YAML."""
    await page.click("[...document.querySelectorAll('[role=tab]')].find(e => e.innerText === 'Edit as text')")
    await page.click(TEXT_AREA)
    await page.value(f"{TEXT_AREA}.select(), true")
    await page.call("Input.insertText", text=text)
    await page.press_with_control("Enter")
    await page.until(f"{has('Unsaved changes')} && {IDLE}")


async def save(page: Page) -> None:
    await page.click(button("Save"))


SAVED = f"{has('All changes are saved')} && !document.querySelector('{DIALOG}') && {IDLE}"


def test_nothing_in_a_file_is_lost_unasked(studio: Served, tmp_path: Path) -> None:
    """Keys that would go, changes by another program, and another file that is there already."""
    file, other = studio.root / "asked.yaml", studio.root / "other.yaml"
    file.write_text(TEXT)
    other.write_text("name: other\n")

    async def act(page: Page) -> None:
        await write(page, "name: fewer\n")
        await save(page)
        await page.until(f"!!document.querySelector('{DIALOG}') && {has('algorithm.algorithm_type')}")
        assert file.read_text() == TEXT
        await page.click(button("Save anyway"))
        await page.until(SAVED)
        assert file.read_text() == "name: fewer\n"
        file.write_text("name: elsewhere\n")
        await write(page, "name: again\n")
        await save(page)
        await page.until(f"!!({button('Save anyway')}) && {has('another program')}")
        await page.press("Escape")
        await page.until(f"!document.querySelector('{DIALOG}')")
        assert file.read_text() == "name: elsewhere\n"
        await page.click(button("Save as"))
        for refused, reason in (("plain", "must end in"), ("../elsewhere.yaml", "must be below")):
            await page.fill(f"document.querySelector('{DIALOG} input')", refused)
            await page.until(f"{has(reason)} && ({button('Save', DIALOG)})?.disabled", f"{refused} could not be opened")
        await page.fill(f"document.querySelector('{DIALOG} input')", other.name)
        await page.until(f"!!({button('Overwrite')}) && {IDLE}")
        assert other.read_text() == "name: other\n"
        await page.click(button("Overwrite"))
        await page.until(f"{has('All changes are saved in other.yaml')} && {IDLE}")

    use(studio, tmp_path, file.name, act)
    assert other.read_text() == "name: again\n" and file.read_text() == "name: elsewhere\n"


def test_a_reload_keeps_what_is_not_saved(studio: Served, tmp_path: Path) -> None:
    file = studio.root / "reloaded.yaml"
    file.write_text(TEXT)

    async def act(page: Page) -> None:
        await page.fill(field("repeat_times"), "16")
        await page.until(f"{TEXT_AREA}?.value.includes('repeat_times: 16') && {IDLE}")
        await page.reload()
        await page.until(f"{has('Unsaved changes in reloaded.yaml')} && {IDLE}")
        await page.until(f"{TEXT_AREA}?.value.includes('repeat_times: 16')")
        assert file.read_text() == TEXT
        await page.click(button("Discard changes"))
        await page.until(SAVED)
        assert await page.until(f"{TEXT_AREA}?.value") == TEXT

    use(studio, tmp_path, file.name, act)
    assert file.read_text() == TEXT


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


def test_green_needs_a_look_at_model_data_and_machine(studio: Served, tmp_path: Path) -> None:
    """Valid settings with a model that is nowhere, and with more GPUs than there are."""
    (studio.root / "nowhere.yaml").write_text(RUNS.replace("org/model", "./no_such_model"))
    alerts = "[...document.querySelectorAll('[data-testid=stAlert]')].map(e => e.innerText).join('|')"
    green = "!!document.querySelector('[data-testid=stAlertContentSuccess]')"

    async def act(page: Page) -> None:
        await page.until(f"{alerts}.includes('have not been opened yet')")
        assert not await page.value(green)
        await page.click(button("Check model and data"))
        await page.until(f"{alerts}.includes('cannot start') && {alerts}.includes('model.model_path')", "refused", 90)
        assert not await page.value(green)
        await page.until(f"!({button('Check model and data')}).disabled", "what was missing may be there the next time")
        await page.fill("document.querySelector('input[aria-label^=gpu_per_node]')", "64")
        await page.until(f"{alerts}.includes('Not on this machine') && {IDLE}")
        await page.until(f"({button('Measure time')}).disabled")
        assert not await page.value(green)

    use(studio, tmp_path, "nowhere.yaml", act)


def test_measuring_time_adds_it_to_the_plan(studio: Served, tmp_path: Path) -> None:
    """The command gets what the form shows, what it says is shown, and the plan is made anew: a pace is kept before."""
    file, plugins = studio.root / "measured.yaml", studio.root / "measuring"
    file.write_text(RUNS + "plugin_dir: measuring\n")
    plugins.mkdir()
    (plugins / "tells.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(__file__).parent\n"
        "(folder / 'told').write_text(' '.join(sys.argv))\n"
        "print('step 2 of 7 is done', file=sys.stderr, flush=True)\n"
        "deadline = time.monotonic() + 240\n"
        "while not (folder / 'seen').exists() and time.monotonic() < deadline:\n"
        "    time.sleep(0.1)\n"
    )
    config = config_from_text(file.read_text().replace("response_tokens: 16", "response_tokens: 24"), name=str(file))

    async def act(page: Page) -> None:
        await page.fill("document.querySelector('input[aria-label^=max_response_tokens]')", "24")
        await page.until(f"{TEXT_AREA}?.value.includes('response_tokens: 24') && {has('Measure time runs')}")
        keep(config, Pace(step=7.0, start=5.0, measured="now"))
        await page.click(button("Measure time"))
        await page.until(has("step 2 of 7 is done"), "what is measured now is shown", 90)
        await page.click("document.querySelector('[data-testid=stCheckbox] label')")
        await page.until(f"!!{field('Find')}", "another click does not end the measurement")
        await page.click(button("Save as"))
        await page.until(f"!!document.querySelector('{DIALOG}')")
        (plugins / "seen").touch()
        await page.until(has("Close the dialog"), "nor does its end close a dialog", 90)
        await page.press("Escape")
        await page.until(f"{has('7 s a step')} && {IDLE}", "the plan has the time", 90)
        await page.until(f"({button('Measure time')}).disabled", "what is known is not measured again")

    try:
        use(studio, tmp_path, file.name, act)
    finally:
        cache_file(config).unlink(missing_ok=True)
    assert "plan --measure" in (plugins / "told").read_text()
    assert "response_tokens: 16" in file.read_text()


def test_a_stage_has_fields_of_its_own(studio: Served, tmp_path: Path) -> None:
    file = studio.root / "stages.yaml"
    file.write_text(TEXT + "stages:\n  - stage_name: sft\n    mode: train\n  - stage_name: rft\n")

    async def act(page: Page) -> None:
        await page.click(button("rft"))
        await page.until(f"({field('repeat_times')})?.placeholder === 'all stages: 8' && {IDLE}")
        await page.fill(field("repeat_times"), "4")
        await page.until(f"{has('Unsaved changes')} && {IDLE}")
        await save(page)
        await page.until(SAVED)

    use(studio, tmp_path, file.name, act)
    assert file.read_text().endswith("- stage_name: rft\n    algorithm:\n      repeat_times: 4\n")
