"""Where a run of the present configuration starts: as a deployment's run, or as a process on this machine."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from studio.draft import Draft
from studio.launch import Launch
from studio.outlook import Outlook
from studio.prefect_runs import PrefectRuns
from studio.started_processes import refusals, start_process
from studio.surroundings import Surroundings
from tasks.retries import api_faults
from trinity_core.config import Config

HERE = ""
"""In place of a deployment's id: a process on this machine."""


def start_form(draft: Draft, found: Outlook, around: Surroundings, show_runs: Callable[[], None]) -> None:
    """Choose where the run starts; save the file, check what it names, and start it."""
    if found.config is None:
        return
    places = deployments(around, found.flow) | {HERE: "a process on this machine"}
    st.markdown(f"The flow **{found.flow}** of `{draft.file.name}`")
    place = st.radio("Start it as", list(places), format_func=places.__getitem__)
    if not st.button("Save and start", type="primary", icon=":material/play_arrow:"):
        return
    draft.save()
    with st.spinner("Opening what it names …"):
        faults = refusals(draft.file, around)
    for fault in faults:
        st.error(fault)
    if not faults:
        start(Launch(found.flow, str(draft.file)), found.config, place, around)
        show_runs()


def start(launch: Launch, config: Config, place: str, around: Surroundings) -> None:
    """Start a flow of a checked configuration."""
    if place == HERE:
        start_process(launch, config.project, config.name, around)
    else:
        PrefectRuns(around.api_url).start(place, launch.parameters)


def deployments(around: Surroundings, flow: str) -> dict[str, str]:
    """Deployments of the flow, id → name; none if there is no Prefect or it does not answer, which is said."""
    if not around.api_url:
        return {}
    try:
        return PrefectRuns(around.api_url).deployments(flow)
    except api_faults() as error:
        st.warning(f"Prefect does not answer at {around.api_url}: {error}")
        return {}
