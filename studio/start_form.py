"""Where a run of the present configuration starts: as a deployment's run, or as a process on this machine."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import TimeoutExpired

import streamlit as st

from studio.checked_draft import CheckedDraft
from studio.config_draft import ConfigDraft
from studio.prefect_runs import PrefectRuns
from studio.run_list import box_of
from studio.save_form import warn_of_lost_keys
from studio.settings import StudioSettings
from studio.started_processes import Launch, refusals, start_process
from tasks.retries import api_faults
from trinity_core.config import Config

HERE = ""
"""In place of a deployment's id: a process on this machine."""
KNOWN_SECONDS = 30
"""For which the deployments of a flow are taken to be those that Prefect has told."""


@st.dialog("Start a run")
def start_dialog(
    draft: ConfigDraft, found: CheckedDraft, settings: StudioSettings, show_runs: Callable[[], None]
) -> None:
    """`start_form` in a dialog of its own, which a redrawn page does not close."""
    start_form(draft, found, settings, show_runs)


def start_form(
    draft: ConfigDraft, found: CheckedDraft, settings: StudioSettings, show_runs: Callable[[], None]
) -> None:
    """Choose where the run starts; save the file, check what it names, and start it."""
    if found.config is None:
        return
    places = deployments(settings, found.flow) | {HERE: "a process on this machine"}
    st.markdown(f"Flow **{found.flow}** with `{settings.shown(draft.file)}`")
    place = st.radio("Start it as", list(places), format_func=places.__getitem__)
    if lost := draft.lost_keys(draft.file):
        warn_of_lost_keys(draft.file, lost, settings)
    if not st.button("Save and start", type="primary", icon=":material/play_arrow:"):
        return
    faults: tuple[type[Exception], ...] = (*api_faults(), OSError, TimeoutExpired)
    try:
        draft.save()
        with st.spinner("Opening what it names …"):
            against = refusals(draft.file, settings)
        key = "" if against else start(Launch(found.flow, str(draft.file)), found.config, place, settings)
    except faults as error:
        st.error(f"It does not start: {error}")
        return
    for refusal in against:
        st.error(refusal)
    if key:
        st.session_state[box_of(key)] = True
        show_runs()


def start(launch: Launch, config: Config, place: str, settings: StudioSettings) -> str:
    """Start a flow of a checked configuration; the key of its row in the list of runs."""
    if place == HERE:
        return start_process(launch, config.project, config.name, settings).log
    return PrefectRuns(settings.api_url).start(place, f"{config.project}/{config.name}", launch.parameters)


def deployments(settings: StudioSettings, flow: str) -> dict[str, str]:
    """Deployments of the flow, id → name; none if there is no Prefect or it does not answer, which is said."""
    try:
        return deployments_at(settings.api_url, flow) if settings.api_url else {}
    except api_faults() as error:
        st.warning(f"Prefect does not answer at {settings.api_url}: {error}")
        return {}


@st.cache_data(ttl=KNOWN_SECONDS, show_spinner="Asking Prefect for deployments …")
def deployments_at(api_url: str, flow: str) -> dict[str, str]:
    """`PrefectRuns.deployments`, asked now and then."""
    return PrefectRuns(api_url).deployments(flow)
