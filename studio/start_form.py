"""The form that starts a run of the current configuration: as a deployment's run, or as a process on this machine.

Streamlit ends the code of a page when the page is redrawn, after any click and after a lost connection. Checks and
measurements take longer, and run in threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from subprocess import CompletedProcess
from tempfile import NamedTemporaryFile

import streamlit as st

from studio.config_draft import CheckedDraft, ConfigDraft, moved
from studio.dialogs import dialog, is_open
from studio.launch import Launch, start_run, trinity
from studio.prefect_runs import PrefectRuns
from studio.settings import StudioSettings
from studio.texts import escaped
from tasks.retries import api_faults
from trinity_core.base.errors import TrinityError
from trinity_core.base.threads import DaemonThreads
from trinity_core.config import Config
from trinity_core.exchange.tracking.run_record import read_record

HERE = ""
"""Used instead of a deployment's id: a process on this machine."""
KNOWN_SECONDS = 30
START_FAULTS: tuple[type[Exception], ...] = (*api_faults(), OSError, TrinityError)
CHANGED = (
    "The run was not started: the configuration was changed elsewhere meanwhile. Close this dialog and start again."
)
VALIDATE_SECONDS, MEASURE_SECONDS = 120.0, 900.0


def start_form(
    draft: ConfigDraft, checked: CheckedDraft, settings: StudioSettings, show_runs: Callable[[str], None]
) -> None:
    """Choose where the run starts; save the checked text, check what it names, and start it."""
    if checked.config is None:
        return
    listed = {
        key: f"a run of {name} in Prefect, with this file" for key, name in deployments(settings, checked.flow).items()
    }
    places = listed | {HERE: "a process on this machine"}
    st.markdown(f"Flow **{checked.flow}** with `{settings.shown(draft.file)}`")
    target = st.radio("Start it as", list(places), format_func=places.__getitem__)
    if present := what_is_there(checked.config):
        st.info(f"{present} Another `name` begins a new run.")
    for objection in draft.objections(draft.file):
        st.warning(objection)
    if not st.button("Save and start", type="primary", icon=":material/play_arrow:"):
        return
    try:
        is_as_shown = draft.save(checked.text)
        if is_as_shown:
            with st.spinner("Opening model and data …"):
                against, _ = validated(replace(draft, text=checked.text), settings)
            is_as_shown = draft.file.read_bytes() == checked.text.encode()
        if not is_as_shown:
            st.error(CHANGED)
            return
        if not against:
            with st.spinner("Starting …"):
                start(Launch(checked.flow, str(draft.file)), checked.config, target, settings)
    except START_FAULTS as error:
        st.error(f"The run cannot start: {error}")
        return
    for refusal in against:
        st.error(refusal)
    if not against:
        show_runs(f"{checked.config.project}/{checked.config.name}")


def what_is_there(config: Config) -> str:
    """Describe what a start does with an existing run of this name; "" if there is none, or if it is only scored."""
    record = read_record(config.job_dir)
    if record is None or config.mode == "bench" or not config.continue_from_checkpoint:
        return ""
    state = record.present_state
    present = f"The run {escaped(f'{config.project}/{config.name}')} already exists ({state.value})"
    if config.is_part:
        return f"{present}, and this part joins it."
    return f"{present} and will be resumed." if state.is_over else f"{present}: it cannot be started again now."


start_dialog = dialog("Start a run")(start_form)


def validated(draft: ConfigDraft, settings: StudioSettings) -> tuple[list[str], list[str]]:
    """Return why a run could not start, and notices, by `trinity validate`, which opens what the configuration
    names."""
    done = with_file(["validate", "--json"], draft, settings, VALIDATE_SECONDS)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return [done.stderr.strip() or f"`trinity validate` ended with {done.returncode}"], []
    problems = [f"{problem['key']}: {problem['message']}" for problem in answer["problems"]]
    return problems, list(dict.fromkeys(notice for stage in answer["stages"] for notice in stage["notices"]))


def look(draft: ConfigDraft, settings: StudioSettings, say: Callable[[str], object]) -> dict[str, object]:
    """Return under `opened`: the checked text, why it could not start, and notices. Raises OSError, TrinityError."""
    return {"opened": (draft.text, *validated(draft, settings))}


def measure(draft: ConfigDraft, settings: StudioSettings, say: Callable[[str], object]) -> dict[str, object]:
    """Measure seconds per step for later plans; `say` gets the progress. Raises OSError, TrinityError."""
    done = with_file(["plan", "--measure"], draft, settings, MEASURE_SECONDS, say)
    if done.returncode:
        raise TrinityError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    return {}


def with_file(
    command: list[str],
    draft: ConfigDraft,
    settings: StudioSettings,
    seconds: float,
    say: Callable[[str], object] = lambda line: None,
) -> CompletedProcess[str]:
    """Run a `trinity` command on a draft in a process, which loads the modules of its `plugin_dir`.

    The text is temporarily in a file of Studio's own folder, from which a `plugin_dir` next to the draft is still
    found.
    """
    settings.state.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", suffix=".yaml", dir=settings.state, encoding="utf-8") as file:
        file.write(moved(draft.text, draft.file.parent, settings.state))
        file.flush()
        return trinity([*command, "--config", file.name], settings, seconds, say)


def start(launch: Launch, config: Config, target: str, settings: StudioSettings) -> None:
    if target == HERE:
        start_run(launch, f"{config.project}/{config.name}", config.job_dir, settings)
    else:
        PrefectRuns(settings.api_url).start(target, f"{config.project}/{config.name}", launch.parameters)


def deployments(settings: StudioSettings, flow: str) -> dict[str, str]:
    """Return the flow's deployments, id → name; none, with a warning, if Prefect is missing or does not answer."""
    try:
        return deployments_at(settings.api_url, flow) if settings.api_url else {}
    except api_faults() as error:
        st.warning(f"Prefect does not answer at {settings.api_url}: {error}")
        return {}


@st.cache_data(ttl=KNOWN_SECONDS, show_spinner="Asking Prefect for deployments …")
def deployments_at(api_url: str, flow: str) -> dict[str, str]:
    """Cached `PrefectRuns.deployments`."""
    return PrefectRuns(api_url).deployments(flow)


Say = Callable[[str], object]
Action = Callable[[ConfigDraft, StudioSettings, Say], dict[str, object]]
"""Returns results as values for the session's state; progress messages are shown."""

LOOK_SECONDS = 0.5
TASK, FAILURE = "background task", "background failure"


class BackgroundTask:
    """An action that runs with a snapshot of the draft."""

    def __init__(self, doing: str, action: Action, draft: ConfigDraft, settings: StudioSettings) -> None:
        self.doing, self.text, self.said = doing, draft.text, ""
        self.began = time.monotonic()
        self.outcome = DaemonThreads("studio").submit(action, replace(draft), settings, self._say)

    def _say(self, line: str) -> None:
        self.said = line


def is_busy() -> bool:
    return TASK in st.session_state


def begin(doing: str, action: Action, draft: ConfigDraft, settings: StudioSettings) -> None:
    """Start the session's task, unless one runs: a second click may arrive before the buttons are redrawn."""
    if is_busy():
        return
    st.session_state.pop(FAILURE, None)
    st.session_state[TASK] = BackgroundTask(doing, action, draft, settings)


def take_outcome() -> None:
    """Store a finished task's results, or its failure; the draft is then checked again."""
    task: BackgroundTask | None = st.session_state.get(TASK)
    if task is None or not task.outcome.done():
        return
    del st.session_state[TASK]
    st.session_state.pop("checked", None)  # files on disk may have changed
    try:
        st.session_state.update(task.outcome.result())
    except START_FAULTS as error:
        st.session_state[FAILURE] = (task.text, str(error))


def show_task(text: str) -> None:
    failed, failure = st.session_state.get(FAILURE, ("", ""))
    if is_busy():
        st.fragment(_show_progress, run_every=LOOK_SECONDS)(st.session_state[TASK])
    elif failure and failed == text:
        st.error(failure)


def _show_progress(task: BackgroundTask) -> None:
    if task.outcome.done():
        if not is_open():
            st.rerun()
        st.caption("Done. Close the dialog to see what was found.")
        return
    st.caption(f"{task.doing} {time.monotonic() - task.began:.0f} s")
    st.text(task.said)
