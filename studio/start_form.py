"""The dialog that checks a configuration and starts a run of it: as a deployment's run, or as a process here."""

from __future__ import annotations

import json

import streamlit as st

from studio.config_draft import CheckedDraft, ConfigDraft
from studio.launch import FAULTS, Launch, start_run, trinity
from studio.prefect_runs import Place, places, start_deployment
from studio.run_table import open_runs
from studio.settings import StudioSettings
from studio.texts import escaped
from tasks.retries import api_faults
from trinity_core.config import Config
from trinity_core.exchange.tracking.run_record import RunState, read_record
from trinity_core.hosting.placement import flow_of

VALIDATE_SECONDS = 120.0
OPENED = "opened"
"""Key of the session for what was found when the dialog was opened."""


def start_form(draft: ConfigDraft, checked: CheckedDraft, settings: StudioSettings) -> None:
    """Open what the configuration names; choose where the run starts, and start it."""
    config = checked.config
    assert config is not None, "else there is nothing to start"
    run, flow = f"{config.project}/{config.name}", flow_of(config)
    st.markdown(f"Flow **{flow}** with `{settings.shown(draft.file)}`, as **{escaped(run)}**")
    try:
        if OPENED not in st.session_state:
            with st.spinner("Opening model and data …"):
                st.session_state[OPENED] = (*validated(draft, settings), *workers_for(flow, draft, settings))
        refusals, notices, workers, away = st.session_state[OPENED]
        for refusal in refusals:
            st.error(refusal)
        if refusals:
            return
        for notice in [*notices, *away]:
            st.warning(escaped(notice), icon=":material/info:")
        st.success("**Ready to start.** Model, data and machine were checked.", icon=":material/check_circle:")
        titles = {key: "Prefect" if len(workers) == 1 else f"Prefect, as {workers[key].name}" for key in workers}
        titles[""] = "A process on this machine"  # the others have a deployment's id
        captions = [place.caption for place in workers.values()]
        captions.append("Like `trinity run` in a terminal. It keeps running when Studio ends.")
        target = st.radio("Start it with", list(titles), format_func=titles.__getitem__, captions=captions)
        present, may_start = what_is_there(config)
        if present:
            st.info(f"{present} Another `name` begins a new run.")
        if st.button("Start", type="primary", icon=":material/play_arrow:", key="start", disabled=not may_start):
            launch = Launch(str(draft.file))
            with st.spinner("Starting …"):
                if target:
                    more = {"which": ""} if flow == "evaluate" else {}  # as configured in mode `bench`
                    start_deployment(settings.api_url, target, run, launch.parameters | more)
                else:
                    start_run(launch, run, config.job_dir, settings)
            open_runs(run)
    except FAULTS as error:
        st.error(f"The run cannot start: {error}")


start_dialog = st.dialog("Start a run", on_dismiss="rerun")(start_form)


def what_is_there(config: Config) -> tuple[str, bool]:
    """Describe what a start does with an existing run of this name, and whether it may start; "" if there is none, or
    if it is only scored."""
    record = read_record(config.job_dir)
    if record is None or config.mode == "bench" or not config.continue_from_checkpoint:
        return "", True
    state = record.present_state
    present = f"The run {escaped(f'{config.project}/{config.name}')} already exists ({state.value})"
    what = " and will be resumed." if state.is_over else ": it cannot be started again now."
    if state is RunState.FINISHED:
        what = ". Only what is left is done, such as the steps by which `buffer.total_steps` was raised."
    return f"{present}{', and this part joins it.' if config.is_part else what}", config.is_part or state.is_over


def workers_for(flow: str, draft: ConfigDraft, settings: StudioSettings) -> tuple[dict[str, Place], list[str]]:
    """Return deployment → place where Prefect's workers run the flow, and why there are none if it does not answer."""
    try:
        found = places(settings.api_url, flow, draft.text, settings.root) if settings.api_url else ()
    except api_faults() as error:
        return {}, [f"Prefect does not answer at {settings.api_url}: {error}"]
    return {place.deployment: place for place in found}, []


def validated(draft: ConfigDraft, settings: StudioSettings) -> tuple[list[str], list[str]]:
    """Return why a run could not start, and notices, by `trinity validate`, which opens what the configuration names
    and loads the modules of its `plugin_dir`. Raises OSError, TrinityError."""
    answer = json.loads(trinity(["validate", "--json", "--config", str(draft.file)], settings, VALIDATE_SECONDS))
    problems = [f"{problem['key']}: {problem['message']}" for problem in answer["problems"]]
    return problems, list(dict.fromkeys(notice for stage in answer["stages"] for notice in stage["notices"]))
