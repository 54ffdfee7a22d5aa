"""The page of one run, or of several side by side, at `/runs?run=project/name`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from studio.actions import action_for, hindrance, perform
from studio.curves import Curves, chart, first_shown, joined
from studio.launch import FAULTS
from studio.run_table import open_clicked, page_of_runs, show_rows, show_table
from studio.runs import Run, ancestors, curves_by_stage
from studio.settings import StudioSettings
from studio.texts import COLOURS, escaped
from trinity_core.base.addresses import rollouts_page
from trinity_core.base.layout import JobLayout, label_of
from trinity_core.base.timing import duration
from trinity_core.exchange.checkpoints.convert import is_converted
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.mlflow_writer import served_run
from trinity_core.exchange.tracking.run_record import RunState, config_path
from trinity_core.exchange.tracking.scores import latest_scores
from trinity_core.results.audit import stores_of
from trinity_core.results.compare import NO_SCORES, Comparison, compare, comparison_text, difference_text, shown_setting
from trinity_core.results.doctor import Diagnosis, diagnose
from trinity_core.results.evidence import gather
from trinity_core.results.normal import hints
from trinity_core.results.report import report
from trinity_core.view.viewed_run import RunFolders

LOG_BYTES = 40_000
VERDICTS = {"better": "green", "worse": "red", "not distinguishable": "gray"}
CHANGED = ("sample", "prompt", "baseline", "score", "baseline's answer", "answer")


def show_run(run: Run, runs: Sequence[Run], settings: StudioSettings) -> None:
    with st.container(horizontal=True, vertical_alignment="center", key="title"):
        st.subheader(escaped(run.name), anchor=False, width="content")
        badge = st.empty()
        show_state(badge, run.state)
    if run.detail:
        st.text(run.detail)
    show_facts(run)
    show_buttons(run, settings, badge)
    if stages := [stage for stage in runs if stage.parent == run.name]:
        open_clicked(show_table(stages, key="stages", on_select="rerun", selection_mode="single-cell"), stages)
    if run.parent:
        st.page_link(page_of_runs(), label=f"Stage of {run.parent}", query_params={"run": run.parent})
    asks_person = run.flow_run is not None and run.flow_run.kind == "PAUSED"
    if asks_person:
        st.info("It waits for a person's answers: press *Prefect*, then *Resume* on its page.", icon=":material/edit:")
    if run.folder is None:
        text = "The run has not written anything yet. Its state above is renewed every few seconds."
        if run.state.is_over:
            text = "The run ended before it wrote anything."
        if run.state is RunState.FAILED and run.launch is not None:
            text += f" Correct {escaped(settings.shown(Path(run.launch.config)))} as said above, then retry it."
        if not asks_person:
            st.info(text)
        return
    titles = ["Curves", "Rollouts", "Configuration", "Checkpoints", "Logs", "Commands"]
    tab = st.segmented_control(
        "Part", titles, default=titles[0], required=True, label_visibility="collapsed", key="tab", bind="query-params"
    )
    match tab:
        case "Rollouts":
            show_rollouts([*(stages or [run])], settings.checkpoints)
        case "Configuration":
            show_configuration(run)
        case "Checkpoints":
            for part in stages or [run]:
                show_checkpoints(part, settings)
        case "Logs":
            show_logs(stages or [run], run, settings)
        case "Commands":
            show_commands(run, stages[-1] if stages else run, settings)
        case _:
            show_findings(stages or [run])
            show_curves(curves_by_stage(run, runs), [run], is_one_run=True)


def show_comparison(chosen: Sequence[Run], runs: Sequence[Run], settings: StudioSettings) -> None:
    chosen = sorted(chosen, key=lambda run: run.began or datetime.now(UTC))
    show_table(chosen)
    st.caption("The first, the oldest, is the baseline: the others are compared with it.")
    folders = {run.name: run.folder for run in chosen if run.folder is not None and run.config}
    if len(folders) > 1:
        show_differences(compare([*folders.values()]), list(folders))
    st.markdown("**Curves**")
    show_curves({run.name: joined(curves_by_stage(run, runs).values()) for run in chosen}, chosen)
    st.markdown("**Rollouts**")
    last_stages = {stage.parent: stage for stage in runs}  # in whose folders most rollouts of a pipeline are
    show_rollouts([last_stages.get(run.name, run) for run in chosen], settings.checkpoints)


def show_differences(comparison: Comparison, names: Sequence[str]) -> None:
    """Show the verdicts, then different settings, then all samples whose score differs from the baseline's."""
    for group in comparison.others:
        who = f"{', '.join(group.runs)} against {', '.join(comparison.baseline)}"
        for name, compared in group.sets.items():
            verdict, text = compared.difference.verdict, f"{name}: {difference_text(compared.difference)} tasks"
            st.markdown(f":{VERDICTS[verdict]}-badge[{verdict}] **{escaped(who)}**, {escaped(text)}")
        if not group.sets:
            st.markdown(f":gray-badge[no verdict] **{escaped(who)}**, {NO_SCORES.strip()}")
    values = comparison.configuration.items()
    rows = [{"key": key} | dict(zip(names, shown_setting(key, of_runs), strict=True)) for key, of_runs in values]
    st.markdown("**Configuration**" if rows else "The configurations are the same.")
    if rows:
        show_rows(rows)
    st.markdown("**Scores, data and code**")
    others = [
        replace(group, sets={name: replace(compared, changed=()) for name, compared in group.sets.items()})
        for group in comparison.others
    ]
    st.code(comparison_text(replace(comparison, others=others), ("data", "code")), language=None, wrap_lines=True)
    for group in comparison.others:
        for name, compared in group.sets.items():
            changed = ((sample.location, sample.prompt, *sample.scores, *sample.answers) for sample in compared.changed)
            if samples := [dict(zip(CHANGED, cells, strict=True)) for cells in changed]:
                title = f"{name}: {len(samples)} answers of {', '.join(group.runs)} whose score is not the baseline's"
                with st.expander(escaped(title)):
                    show_rows(samples)


def show_facts(run: Run) -> None:
    facts = {}
    if run.began:
        facts["Began"] = f"{run.began.astimezone():%d %b %H:%M}"
    if (seconds := run.seconds(datetime.now(UTC))) is not None:
        facts["Took" if run.state.is_over else "So far"] = duration(seconds)
    if run.folder is not None:
        facts = {"Score" + ", 95 % interval" * bool(run.interval): run.score_text, "Step": run.progress or "–"} | facts
        facts |= {"Algorithm": run.method or "–", "Model": run.model or "–"}
    with st.container(horizontal=True, key="facts"):
        for name, value in facts.items():
            st.html(f'<div class="fact"><span>{escape(name)}</span><b>{escape(value)}</b></div>', width="content")


def show_state(badge: DeltaGenerator, state: RunState) -> None:
    badge.badge(state.value, color=COLOURS.get(state, "gray"))


def show_buttons(run: Run, settings: StudioSettings, badge: DeltaGenerator) -> None:
    """Show what the run's state calls for, or why it is not possible, links to other pages, and the note. The `badge`
    of its state says at once what a click does, which may take a minute."""
    action = action_for(run)
    why_not = hindrance(run) if action else ""
    with st.container(horizontal=True):
        if action and st.button(action, key=f"{action} {run.name}", disabled=bool(why_not)):
            show_state(badge, RunState.STARTING if action == "Retry" else RunState.STOPPING)
            try:
                with st.spinner(f"{action} …"):
                    st.toast(perform(run, settings))
                st.rerun()  # the whole page, which is renewed while its run is in progress
            except FAULTS as error:
                show_state(badge, run.state)
                st.error(f"{action}: {error}")
        if run.flow_run is not None:
            page = f"{settings.api_url.removesuffix('/api')}/runs/flow-run/{run.flow_run.id}"
            st.link_button("Prefect", page, icon=":material/open_in_new:")
        if run.folder and (address := served_run(run.folder)):
            st.link_button("MLflow", address, icon=":material/open_in_new:")
        if run.folder and run.curves:
            text, file = partial(report, run.folder), f"{run.folder.name}.html"
            st.download_button("Report", text, file, icon=":material/download:", help="The run as one HTML file")
        if run.folder is not None:
            hint = "A note, shown in the list"
            note = st.text_input("Note", run.note.text, placeholder=hint, label_visibility="collapsed")
            if note != run.note.text:
                replace(run.note, text=note).save(run.folder)
    if why_not:
        st.caption(f"**{action}**: {why_not}")


def show_findings(runs: Sequence[Run]) -> None:
    """Show what the doctor finds, and which metrics are not normal, beside the curves that they look at."""
    by_run = {run.name: findings(run.folder) if run.folder and run.step else None for run in runs}
    if not any(by_run.values()):
        none = "No findings" if any(found is not None for found in by_run.values()) else "Not checked: no metrics"
        yet = "" if all(run.state.is_over for run in runs) else " so far"
        st.caption(f":material/stethoscope: [Doctor](docs?page=doctor.md): {none}{yet}.")
    for run in runs:
        for found in by_run[run.name] or ():
            name = "" if len(runs) == 1 else f"{escaped(run.name)}: "
            text = f"**{name}{found.check}**: {escaped(found.evidence)}. {escaped(found.cause)}."
            st.warning(f"{text}  \n{escaped(found.next_step)}.", icon=":material/stethoscope:")
        for hint in hints({name: [point.value for point in curve.values()] for name, curve in run.curves.items()}):
            st.caption(f":material/lightbulb: {hint} [What is normal](docs?page=troubleshooting.md#what-is-normal)")


@st.cache_resource(ttl=60, max_entries=64, show_spinner=False)
def findings(folder: Path) -> list[Diagnosis] | None:
    """Return what `trinity doctor` finds without the audit, which reads every row; None without metrics."""
    evidence = gather(folder, stores_of(folder).get(folder.name), audited=False)
    return diagnose(evidence) if evidence.trained or evidence.explored else None


def show_none(what: str, runs: Sequence[Run], ended: str, yet: str) -> None:
    """Say why runs have none of something."""
    over = all(run.state.is_over for run in runs)
    st.info(f"No {what}: the run ended {ended}." if over else f"No {what} yet: {yet}.")


def show_curves(lines: Mapping[str, Curves], runs: Sequence[Run], is_one_run: bool = False) -> None:
    """Show a chart per metric; a line per run, or per stage of one."""
    curves = {name: line for name, line in lines.items() if line}
    names = sorted({name for of_run in curves.values() for name in of_run})
    if not names:
        show_none("metrics", runs, "before its first step: see *Logs*", "they come with its first step or evaluation")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        # Kept in the address, so that a shared link shows the same curves.
        usual = "accuracy, reward, loss, length"
        shown_metrics = st.multiselect("Metrics", names, key="metrics", placeholder=usual, bind="query-params")
        smoothing = st.slider("Smoothing", 0.0, 0.95, 0.0, 0.05, key="smoothing", width=160, bind="query-params")
        units = ["step", "minutes"]
        by = st.segmented_control("Over", units, default="step", required=True, key="over", bind="query-params")
        is_log = st.toggle("Log scale", key="log", bind="query-params")
    shown_metrics = shown_metrics or first_shown(names)
    for start in range(0, len(shown_metrics), 2):
        for column, name in zip(st.columns(2), shown_metrics[start : start + 2], strict=False):
            with column:
                st.caption(f"**{name}**")
                st.vega_lite_chart(chart(curves, name, smoothing, str(by), is_log, is_one_run))


def show_rollouts(runs: Sequence[Run], checkpoints: Path) -> None:
    """Embed the page of `trinity view` for these runs; two runs side by side."""
    folders = RunFolders(checkpoints)
    names = [run.name for run in runs if run.name in folders]
    if not names:
        show_none("rollouts", runs, "without any", "the first ones are kept after the first evaluation or explore step")
        return
    st.iframe(rollouts_page(*(names if len(names) == len(runs) == 2 else names[-1:])), height=900)


def show_configuration(run: Run) -> None:
    """Show the configuration a run was started with."""
    if run.folder is None or not run.config:
        st.info("The run has not recorded its configuration.")
        return
    st.code(config_path(run.folder).read_text(encoding="utf-8"), "yaml", height=600)


def show_checkpoints(run: Run, settings: StudioSettings) -> None:
    """Show a run's checkpoints with their scores, and their ancestors."""
    if run.folder is None:
        return
    st.markdown(f"**{escaped(run.name)}**")
    with st.container(horizontal=True, vertical_alignment="center"):
        for ancestor in ancestors(run.folder):
            if folder := ancestor.folder:
                name, score = f"{folder.parent.name}/{folder.name}", latest_scores(folder).get(ancestor.step)
                label = f"{escaped(name)}, step {ancestor.step}{'' if score is None else f', score {score:.3f}'}"
                st.page_link(page_of_runs(), label=label, query_params={"run": name})
            else:
                st.markdown(f"model {escaped(label_of(ancestor.model))}", width="content")
            st.markdown(":material/arrow_forward:", width="content")
        st.markdown("this run", width="content")
    scores, layout = run.scores, JobLayout(run.folder)
    steps = whole_steps(run.folder)
    if not steps:
        show_none("checkpoints", [run], "before it saved one", "one is saved every `trainer.save_interval` steps")
        return
    best = max(scores.keys() & {*steps}, key=lambda step: (scores[step], -step), default=None)
    rows = {
        "step": steps,
        "score": [f"{scores[step]:.3f}" if step in scores else None for step in steps],
        "best": ["★" if step == best else "" for step in steps],
        "Hugging Face": ["converted" if is_converted(layout.step(step)) else "" for step in steps],
        "folder": [settings.shown(layout.step(step)) for step in steps],
    }
    show_rows(rows)


def show_logs(runs: Sequence[Run], run: Run, settings: StudioSettings) -> None:
    """Show the end of a log of the run's actors, or of a process that Studio started."""
    logs = {
        f"{shown.name.rpartition('/')[2]}: {path.relative_to(shown.folder / 'log')}": path
        for shown in {part.name: part for part in (*runs, run)}.values()
        if shown.folder is not None
        for path in sorted((shown.folder / "log").glob("**/*.log"))
    }
    logs |= {f"started by Studio: {path.name}": path for path in settings.logs_of(run.name).glob("*.log")}
    if not logs:
        show_none("logs", runs, "before its actors started", "they appear once the run's actors have started")
        return
    newest = max(logs, key=lambda name: logs[name].stat().st_mtime)
    name = st.selectbox("Log", list(logs), index=list(logs).index(newest))
    with logs[str(name)].open("rb") as file:
        file.seek(max(0, logs[str(name)].stat().st_size - LOG_BYTES))
        st.code(file.read().decode(errors="replace") or "empty", "log", height=600, wrap_lines=True)


def show_commands(run: Run, last: Run, settings: StudioSettings) -> None:
    """Show commands for a run, those that take one stage for the `last` of a pipeline."""
    whole = shlex.quote(settings.shown(run.folder or Path()))
    commands = {
        "Find what is wrong with it": f"trinity doctor --checkpoint-dir {whole}",
        "Read its logs": f"trinity log --checkpoint-dir {whole}{'' if run.state.is_over else ' --follow'}",
    }
    if run.folder and stores_of(run.folder):
        commands["Look at the rollouts"] = f"trinity view --checkpoint-dir {whole}"
        commands["Account for every task"] = f"trinity audit --checkpoint-dir {whole}"
    if last.folder and whole_steps(last.folder):
        commands["Talk to its model"] = f"trinity chat --checkpoint-dir {whole}"
        commands["Convert the checkpoints to Hugging Face folders"] = f"trinity convert --checkpoint-dir {whole}"
    if run.launch:
        launch = replace(run.launch, config=settings.shown(Path(run.launch.config)))
        whole_run = "Start or resume its pipeline" if launch.stage else "Start or resume"
        commands = {whole_run: shlex.join(["trinity", *launch.command])} | commands
        stage = launch.stage or ["", *run.stages][-1]
        words = ["--config", launch.config, "--which", "missing", *(["--stage", stage] if stage else [])]
        words += [*(["--run", launch.run] if launch.run else []), *launch.overrides]
        commands["Score the checkpoints that have no score"] = shlex.join(["trinity", "evaluate", *words])
    for title, command in commands.items():
        st.caption(title)
        st.code(command, "sh", wrap_lines=True)
