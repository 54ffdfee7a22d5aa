"""`trinity` with the commands that run flows, serve pages, load models or look at several runs: run, up, chat …"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.local.worker import RESTARTS
from trinity_core.base.addresses import LOOPBACK, STUDIO_PORT
from trinity_core.base.errors import InputError
from trinity_core.base.program import coloured, ending_on_sigterm
from trinity_core.cli import (
    RESULTS,
    AsJson,
    ConfigOption,
    Overrides,
    PluginDir,
    RunFolder,
    StoreConfig,
    StoreUrl,
    app,
    run_app,
    with_plugins,
)

Restarts = Annotated[int, typer.Option(help="Restarts of a killed run within an hour; 0: none.", min=0)]
MlflowPort = Annotated[int, typer.Option(help="Port of MLflow on 127.0.0.1; 0: do not serve it.", min=0, max=65535)]
StudioPort = Annotated[int, typer.Option(help="Port of Studio on 127.0.0.1; 0: do not serve it.", min=0, max=65535)]
StageName = Annotated[str, typer.Option(help="Stage of a configuration that has several.")]
Port = Annotated[int, typer.Option(help="Port of the Prefect server, on 127.0.0.1.", min=1, max=65535)]


@app.command()
def quickstart(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of model, data and summary; the run is in TRINITY_CHECKPOINT_ROOT_DIR (./checkpoints)."
        ),
    ] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of model, data and run.")] = 42,
    config: Annotated[Path, typer.Option(help="The pipeline to run.")] = Path("configs/quickstart/quickstart.yaml"),
) -> None:
    """The whole pipeline in minutes on a laptop: SFT warm-up, GRPO, evaluation and conversion of a tiny model."""
    typer.echo("Making a small model and its data …", err=True)  # importing what makes them takes seconds
    from flows.quickstart import quickstart as run_quickstart

    typer.echo(run_quickstart(out, seed, config))


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Create a project folder: recipes, the deployments of `trinity up`, docs."""
    from flows.project import init_project

    typer.echo(f"{init_project(folder)} is ready; next: cd {folder} && trinity quickstart")


@app.command()
def run(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    decide: Annotated[
        str, typer.Option(help="Decision on a paused run: continue, 'continue key=value …' or stop.")
    ] = "",
) -> None:
    """Run a configuration with all its stages in this process; needs no running server.

    trinity run --config configs/quickstart/quickstart.yaml name=mine algorithm.optimizer.lr=1e-4
    """
    typer.echo("Checking the configuration …", err=True)  # which imports much
    from flows.local.connection import PrefectConnection
    from trinity_core.exchange.tracking.pauses import Decision
    from trinity_core.hosting.placement import flow_of
    from trinity_core.run.pauses import require_waiting
    from trinity_core.run.preflight.checks import load_ready
    from trinity_core.run.summary import summary_text

    try:
        decision = Decision.parse(decide) if decide else None
    except InputError as error:
        raise typer.BadParameter(f"--decide: {error}") from None
    settings = with_plugins(overrides, plugin_dir)
    with PrefectConnection() as prefect:
        loaded = load_ready(config, settings)
        if decision:
            require_waiting(loaded)
        flow = flow_of(loaded)
        more = {"which": ""} if flow == "evaluate" else {}  # as configured in mode `bench`
        summary = prefect.run(flow, loaded, config, settings, is_ready=True, decision=decision, **more)
    typer.echo(coloured(summary_text(summary)))


@app.command()
def evaluate(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    which: Annotated[
        str, typer.Option(help="base, latest, missing (those without a score), all, or a step.")
    ] = "latest",
    stage: StageName = "",
    run: Annotated[str, typer.Option(help="Name of the run to score, if not the configuration's.")] = "",
) -> None:
    """Score a model or the checkpoints of a run on the configuration's eval sets."""
    from flows.local.connection import PrefectConnection
    from flows.parameters import check_which
    from trinity_core.exchange.tracking.scores import evaluation_text
    from trinity_core.run.configuration import load_checked
    from trinity_core.run.preflight.checks import require_ready
    from trinity_core.run.stage import for_evaluation, pick_stage

    check_which(which)
    settings = with_plugins(overrides, plugin_dir)
    with PrefectConnection() as prefect:
        loaded = load_checked(config, settings)
        stage_config, _ = pick_stage(loaded, stage)
        require_ready(for_evaluation(stage_config, which == "base"))
        summary = prefect.run("evaluate", loaded, config, settings, is_ready=True, stage=stage, which=which, run=run)
    typer.echo(json.dumps(summary["scores"], indent=2))
    typer.echo(evaluation_text(summary["evaluation"]), err=True)


@app.command(rich_help_panel=RESULTS)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Folders of at least two runs, pipelines or checkpoints.", show_default=False
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="List every difference and every changed sample.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text, with all samples.")] = False,
) -> None:
    """Compare runs: configuration, data and code, then scores paired by task, and samples that changed sides.

    Runs that differ in their seeds alone form one group. The first group is the baseline. Changes nothing.
    """
    from trinity_core.results.compare import compare as compared
    from trinity_core.results.compare import comparison_text

    comparison = compared(runs)
    text = comparison_text(comparison, everything=everything)
    typer.echo(json.dumps(comparison.json(), indent=2, default=str) if as_json else text)


@app.command(rich_help_panel=RESULTS)
def lineage(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, a run or a pipeline; with --row, the folder whose runs are searched.")
    ],
    row: Annotated[str, typer.Option(help="FILE:LINE of a data row: which checkpoints saw it?")] = "",
    rows: Annotated[bool, typer.Option("--rows", help="List every row that was trained on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say where a checkpoint comes from: runs, data rows, code, gates; or which checkpoints saw a row.

    Changes nothing.
    """
    from dataclasses import asdict

    from trinity_core.results import lineage as found

    if row:
        file, _, line = row.rpartition(":")
        if not file or not line.isdigit():
            raise typer.BadParameter(f"--row {row}: write FILE:LINE")
        sighted = found.sightings(path, Path(file), int(line))
        text = found.sightings_text(sighted)
        typer.echo(json.dumps([asdict(sighting) for sighting in sighted], indent=2) if as_json else text)
        return
    links = found.lineage(path, rows)
    text = found.lineage_text(links)
    typer.echo(json.dumps([asdict(link) for link in links], indent=2, default=str) if as_json else text)


@app.command(rich_help_panel=RESULTS)
def promote(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    candidate: Annotated[
        str, typer.Option(help="Checkpoint or model folder; by default the run's latest checkpoint.")
    ] = "",
    stage: StageName = "",
    back: Annotated[bool, typer.Option("--back", help="Make the champion before the present one champion.")] = False,
) -> None:
    """Let a candidate and the project's champion answer held-out tasks, and promote the candidate if it is better.

    Exits with 1 if it is not promoted.
    """
    from flows.local.connection import PrefectConnection
    from trinity_core.exchange.tracking.champions import go_back, point_alias
    from trinity_core.results.lineage import newest_checkpoint
    from trinity_core.run.configuration import load_checked
    from trinity_core.run.promotion import PROMOTED, Verdict
    from trinity_core.run.stage import job_dir_of, stage_names

    settings = with_plugins(overrides, plugin_dir)
    loaded = load_checked(config, settings)
    if back:
        entry = go_back(loaded.job_dir.parent)
        point_alias(loaded, entry)
        typer.echo(f"{entry.model} is the champion of {loaded.project} again")
        return
    if loaded.stages:
        stage = stage or stage_names(loaded)[-1]
        candidate = candidate or newest_checkpoint(job_dir_of(loaded))
    with PrefectConnection() as prefect:
        summary = prefect.run("gate", loaded, config, settings, stage=stage, model_path=candidate)
    verdict = Verdict(**summary["gate"])
    typer.echo(verdict.text)
    if verdict.verdict != PROMOTED:
        raise typer.Exit(1)


@app.command()
def curate(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    stage: StageName = "",
) -> None:
    """Run a configuration's task pipeline, which filters, orders and splits tasks."""
    from flows.local.connection import PrefectConnection
    from trinity_core.run.configuration import load_checked

    settings = with_plugins(overrides, plugin_dir)
    with PrefectConnection() as prefect:
        summary = prefect.run("curate", load_checked(config, settings), config, settings, stage=stage)
    typer.echo(json.dumps(summary, indent=2))


@app.command()
def up(
    port: Port = 4200,
    restarts: Restarts = RESTARTS,
    mlflow_port: MlflowPort = 5000,
    studio_port: StudioPort = STUDIO_PORT,
) -> None:
    """Start Prefect here: server on SQLite, work pool, one worker, all deployments of prefect.yaml; MLflow and Studio.

    Loopback only. MLflow and Studio show the runs below TRINITY_CHECKPOINT_ROOT_DIR, by default ./checkpoints.
    """
    from flows.local.commands import mlflow_page, studio_page
    from flows.local.commands import up as start
    from flows.project import require_own_packages
    from trinity_core.base.gate import asked_for, server_key
    from trinity_core.base.program import ending_on_sigterm
    from trinity_core.hosting.gpus import survey

    require_own_packages(Path.cwd())
    pages = [mlflow_page(Path.cwd(), mlflow_port)] if mlflow_port else []
    pages += [studio_page(Path.cwd(), studio_port)] if studio_port else []
    with ending_on_sigterm():
        state = start(Path.cwd(), port, lambda line: typer.echo(coloured(line)), restarts, pages)
    typer.echo(f"\nPrefect UI  {state.api_url.removesuffix('/api')}")
    for page in pages:
        for process in state.running(page.name):
            typer.echo(f"{page.title:11} {process.url}{page.home}")
    typer.echo(f"Key         each page {asked_for(server_key(Path.cwd()))}")
    typer.echo(f"Try         {first_try(bool(survey()))}")
    if (Path(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR") or "checkpoints") / JUDGED).is_dir():
        typer.echo("            prefect deployment run sft/human   (asks you which answers are good)")


JUDGED = "Trinity-Flows/quickstart_rft"
"""The run of the quick start whose answers `sft/human` shows to a person."""


def first_try(gpus: bool) -> str:
    """Return the command that shows a run on this machine: with the quick start's model unless there is a GPU."""
    if gpus:
        return "prefect deployment run rft/gsm8k --watch"
    first = "" if Path("runs/quickstart/model").is_dir() else "trinity tiny --out runs/quickstart && "
    return f"{first}prefect deployment run pipeline/quickstart --watch"


@app.command()
def down() -> None:
    """Stop everything that `trinity up` started in this folder; runs save first."""
    from flows.local.commands import down as stop

    typer.echo(
        "All that `trinity up` started is down. `trinity up` starts it again; `prefect` commands need it."
        if stop(Path.cwd(), typer.echo)
        else "Nothing was running in this folder."
    )


@app.command()
def status() -> None:
    """Show what `trinity up` has started in this folder."""
    from flows.local.commands import status as lines

    typer.echo("\n".join(lines(Path.cwd())))


@app.command()
def studio(
    file: Annotated[Path, typer.Argument(help="YAML file to begin with; made when it is saved.")] = Path("config.yaml"),
    plugin_dir: Annotated[
        Path | None, typer.Option("--plugin-dir", help="Folder of Python files that bring sections to the form.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on; the pages ask for the folder's password.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port of the pages.", min=1, max=65535)] = STUDIO_PORT,
) -> None:
    """Edit configurations, start and compare runs in the browser. Loopback only, unless --host is given."""
    from flows.local.commands import serve_studio

    serve_studio(Path.cwd(), file, plugin_dir, host, port)


@app.command()
def mcp(
    port: Annotated[
        int, typer.Option(help="Serve on 127.0.0.1 over HTTP, to those who have the folder's key; 0: on stdin/stdout.")
    ] = 0,
) -> None:
    """Let an agent plan, run, follow, examine and stop runs: tools of the Model Context Protocol.

    Add to an agent, from the project's folder: claude mcp add trinity -- trinity mcp
    """
    from flows.local.commands import serve_mcp

    serve_mcp(Path.cwd(), port)


@app.command(rich_help_panel=RESULTS)
def report(
    checkpoint_dir: RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.", dir_okay=False)] = Path("report.html"),
    against: Annotated[
        Path | None, typer.Option(help="Folder of another run: the settings that differ from its settings.")
    ] = None,
) -> None:
    """Write a run as one HTML file: scores, findings, curve, settings that differ, samples."""
    from trinity_core.base.files import write_atomically
    from trinity_core.results.report import report as report_of

    page = report_of(checkpoint_dir, against).encode(errors="replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    typer.echo(f"wrote {out}")


@app.command(rich_help_panel=RESULTS)
def chat(
    checkpoint_dir: RunFolder,
    prompt: Annotated[list[str] | None, typer.Argument(help="Ask this, and end.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint to talk to.", show_default="the latest")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="The likeliest answer, as most scores are made, not a sampled one.")
    ] = False,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Ask the model that the run began with too.")] = True,
) -> None:
    """Talk to a run's model, and to the one it began with, with the run's chat template and sampling.

    Lines are read from the terminal, or from a pipe; /new begins a new conversation, Ctrl+D ends.
    """
    from trinity_core.results.chat import Conversation, chat_models
    from trinity_core.results.chat import chat as talk

    models = chat_models(checkpoint_dir, step, base)
    trained, name = [*models.values()][-1], checkpoint_dir.resolve().name
    typer.echo(trained.sampling_text(greedy), err=True)
    typer.echo(f"To serve {[*models][-1]}: {trained.serve_command(name)}\n", err=True)
    if prompt is None and sys.stdin.isatty():
        typer.echo("A question, /new for a new conversation, Ctrl+D to end.", err=True)
    talk(Conversation(models, greedy), sys.stdin if prompt is None else [" ".join(prompt)], typer.echo)


@app.command(rich_help_panel=RESULTS)
def replay(
    checkpoint_dir: RunFolder,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="The train step to repeat.", min=1, show_default=False)] = None,
    rollout: Annotated[
        str, typer.Option(help="A rollout to sample again: GROUP:RUN or GROUP:RUN:TURN.", show_default=False)
    ] = "",
    config: StoreConfig = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a train step, or sample a rollout again, from what a run has stored; say what differs. Changes nothing.

    Exits with 1 if something differs.
    """
    from trinity_core.results.replay import Replay

    if (step is None) == (not rollout):
        raise typer.BadParameter("give either --step or --rollout")
    with ending_on_sigterm(), Replay(checkpoint_dir, config, overrides or [], store) as repeating:
        repeated = repeating.step(step) if step is not None else repeating.rollout(rollout)
    result = repeated.json()
    typer.echo(json.dumps(result, indent=2) if as_json else repeated.text())
    if not result["equal"]:
        raise typer.Exit(1)


def main() -> None:
    from flows.local.connection import ServerLost

    try:
        run_app(app)
    except SystemExit as end:
        if isinstance(end.__context__, ServerLost):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # At exit Prefect would try for 7 s to send each remaining event to a server that is gone.
        raise


if __name__ == "__main__":
    main()
