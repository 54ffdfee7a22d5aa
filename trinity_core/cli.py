"""`trinity`: the commands that run no flow. `flows.cli` adds those that do and is the console script.

Nothing heavy is imported before a command runs, so that `trinity --help` answers at once. Errors meant for users are
printed without a traceback (exit codes: `run_app`).
"""

from __future__ import annotations

import sys
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.errors import TrinityError
from trinity_core.base.program import Commands, coloured, ending_on_sigterm, run_app
from trinity_core.version import __version__

if TYPE_CHECKING:
    from trinity_core.data.task_queue import TaskQueue

app = typer.Typer(
    name="trinity",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

BEFORE, RESULTS, OTHER = "Before a run", "Results", "Other"
"""Headings of `trinity --help`, listed below the commands that start a run."""

ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="The run's YAML file, such as my.yaml.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings: algorithm.optimizer.lr=1e-4.", show_default=False),
]
PluginDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of Python files: rewards, workflows …")]
RunFolder = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder checkpoints/PROJECT/RUN of a run or a pipeline.", show_default=False)
]
StoreConfig = Annotated[Path | None, typer.Option(metavar="FILE", help="The run's YAML file, for a store elsewhere.")]
StoreSettings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings on top of --config.")]
StoreUrl = Annotated[str | None, typer.Option(help="URL of the store, as postgresql://host/name.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models as Prefect pipelines.

    Begin with `trinity quickstart`, in a clone or in the folder that `trinity init` makes.

    Exit codes: 0; 1 after an error; 2 for a wrong command or configuration; 3 for a run that waits for a decision.
    """


def with_plugins(overrides: list[str] | None, plugin_dir: Path | None) -> list[str]:
    added = [f"plugin_dir={plugin_dir.absolute()}"] if plugin_dir else []
    return [*(overrides or []), *added]


@app.command(rich_help_panel=BEFORE)
def tiny(
    out: Annotated[Path, typer.Option(help="Folder for `model` and `data`.")],
    seed: Annotated[int, typer.Option(help="Seed of problems and weights.")] = 42,
    size: Annotated[int, typer.Option(help="Hidden size of the model; a multiple of 32 × heads.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    train: Annotated[int, typer.Option(help="Problems for training.")] = 4000,
    test: Annotated[int, typer.Option(help="Problems for evaluation.")] = 400,
    sft: Annotated[int, typer.Option(help="Worked examples for the warm-up.")] = 2000,
    dpo: Annotated[int, typer.Option(help="Pairs of a right and a wrong answer.")] = 1000,
) -> None:
    """Make a small model and word problems in GSM8K's format, to try everything on a laptop."""
    from trinity_core.data.tiny import TinySize, make_tiny

    shape = TinySize(hidden_size=size, intermediate_size=3 * size, layers=layers, heads=heads)
    tiny = make_tiny(out, seed, train, test, sft, shape, count_dpo=dpo)
    rows = ", ".join(f"{count} {split}" for split, count in tiny.rows.items())
    typer.echo(f"model  {tiny.model}  ({tiny.parameters:,} parameters)\ndata   {tiny.data}  ({rows} rows)")


@app.command(rich_help_panel=BEFORE)
def validate(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only read the file: open no model, data, folder or port.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check a configuration and what it names, and report every problem at once. Starts nothing.

    Exits with 2 if a run of it could not start.
    """
    from trinity_core.run.preflight.checks import validate as validation_of

    validation = validation_of(config, with_plugins(overrides, plugin_dir), offline)
    if json:
        typer.echo(validation.json())
    else:
        typer.echo(coloured(validation.text()), err=not validation.accepted)
    if not validation.accepted:
        raise typer.Exit(2)


@app.command(rich_help_panel=BEFORE)
def plan(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    json: AsJson = False,
    measure: Annotated[
        bool,
        typer.Option(
            help="Measure the time per step by a few steps of each stage. Later plans show it too.",
            show_default=False,
        ),
    ] = False,
) -> None:
    """Show what a run would do: stages, steps, memory, disk.

    Exits with 2 if the configuration is refused, or if the folder of its model is missing.
    """
    from trinity_core.run.configuration import load_checked
    from trinity_core.run.preflight.models import report_missing_folder
    from trinity_core.run.preflight.stage_plan import plan_json, plan_text, plans_with_pace

    settings = with_plugins(overrides, plugin_dir)
    loaded = load_checked(config, settings)
    if measure:
        from trinity_core.run.preflight.pace import measure as measure_stages

        with ending_on_sigterm():
            measure_stages(loaded, partial(typer.echo, err=True))
    plans = plans_with_pace(loaded)
    typer.echo(plan_json(plans) if json else coloured(plan_text(plans)))
    load_checked(config, settings, report_missing_folder)


@app.command("import-verl", rich_help_panel=BEFORE)
def import_verl_run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS] | -- COMMAND | KEY=VALUE",
            help="Shell script with its arguments; or a command, `python3 -m verl.trainer.main_ppo key=value …`.",
            show_default=False,
        ),
    ] = None,
    yaml: Annotated[Path | None, typer.Option(help="Hydra's YAML of a run; the words are further key=value.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default the YAML is printed.")
    ] = None,
) -> None:
    """Turn a veRL run into a configuration: YAML in which each value has its veRL key as a comment.

    A script is run by bash in a sandbox (bubblewrap), in which it changes nothing and no training starts. What has no
    counterpart here is listed at the head of the YAML and on stderr; so is what must still be given. Either of

    trinity import-verl run_qwen2-7b.sh -o run.yaml

    trinity import-verl -o run.yaml -- python3 -m verl.trainer.main_ppo data.train_batch_size=1024
    """
    from trinity_core.config.import_verl import import_to

    if yaml and yaml.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"--yaml {yaml}: must end in .yaml or .yml; give a script without --yaml")
    first, *others = [*([str(yaml)] if yaml else []), *(words or [])] or [""]
    if not first:
        raise typer.BadParameter("give a script, a command after --, or --yaml FILE")
    imported, problems = import_to(Path(first), others, out)
    typer.echo(f"wrote {out}" if out else imported.text, nl=out is not None)
    if imported.left_out:
        typer.echo("\n".join(["Without a counterpart here:", *imported.left_out]), err=True)
    if problems:
        typer.echo(f"To be fixed before it runs. {problems}", err=True)


@app.command(rich_help_panel=BEFORE)
def schema(
    key: Annotated[str, typer.Argument(help="Only this setting, or the settings of this section.")] = "",
    json: Annotated[bool, typer.Option("--json", help="JSON Schema for editors, of all settings.")] = False,
) -> None:
    """List the settings of a configuration: values, default and meaning of each."""
    from trinity_core.config.json_schema import text
    from trinity_core.config.reference import listing

    typer.echo(text() if json else listing(key), nl=not json)


@app.command(rich_help_panel=RESULTS)
def convert(
    checkpoint_dir: Annotated[Path, typer.Option(help="A run's folder, one of its global_step_N, or a folder within.")],
    base_model_dir: Annotated[
        Path | None, typer.Option(help="The base model, for checkpoints that lack their config.json.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into their base: whole models.")] = False,
) -> None:
    """Convert checkpoints to Hugging Face folders.

    They are written to `actor/huggingface`, LoRA adapters to `actor/lora_adapter`; existing ones are left unchanged.
    """
    from trinity_core.exchange.checkpoints.convert import convert_all

    for folder in convert_all(checkpoint_dir, base_model_dir, merge):
        typer.echo(folder)


@app.command(rich_help_panel=RESULTS)
def audit(
    checkpoint_dir: RunFolder,
    overrides: StoreSettings = None,
    config: StoreConfig = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Count the outcome of every task drawn: trained, dropped, failed or pending. Changes nothing.

    Exits with 1 if anything was lost or trained on twice without reuse, if store, archive and checkpoints contradict
    each other, or if no task has been drawn.
    """
    from trinity_core.results.audit import accounts_for_all, audit_json, audit_runs, audit_text

    audits = audit_runs(checkpoint_dir, config, overrides or [], store)
    typer.echo(dumps(audit_json(audits), indent=2) if json else "\n".join(audit_text(*pair) for pair in audits.items()))
    if not accounts_for_all(audits):
        raise typer.Exit(1)


@app.command(rich_help_panel=RESULTS)
def doctor(
    checkpoint_dir: RunFolder,
    overrides: StoreSettings = None,
    config: StoreConfig = None,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Say what is wrong with a run, with its evidence, a likely cause and the next step. Changes nothing.

    Exits with 1 if it finds something.
    """
    from trinity_core.results.doctor import diagnose_runs, doctor_json, doctor_text

    found = diagnose_runs(checkpoint_dir, config, overrides or [], store)
    typer.echo(dumps(doctor_json(found), indent=2) if json else coloured(doctor_text(found)))
    if any(found.values()):
        raise typer.Exit(1)


@app.command(rich_help_panel=RESULTS)
def view(
    checkpoint_dir: RunFolder,
    overrides: StoreSettings = None,
    config: StoreConfig = None,
    store: StoreUrl = None,
    host: Annotated[str, typer.Option(help="Address to serve on; the page asks for the folder's password.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port of the page; 0: any that is free.", min=0, max=65535)] = 4210,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
) -> None:
    """Show what a run sampled, token by token, and its eval samples as a page. Changes nothing."""
    from trinity_core.view.app import serve
    from trinity_core.view.viewed_run import viewed_runs

    serve(viewed_runs(checkpoint_dir, config, overrides or [], store), host, port, not no_browser, typer.echo)


@app.command(rich_help_panel=RESULTS)
def log(
    checkpoint_dir: RunFolder,
    level: Annotated[str, typer.Option(help="Least severe level: DEBUG, INFO, WARNING, ERROR or CRITICAL.")] = "INFO",
    actor: Annotated[
        list[str] | None,
        typer.Option(help="Only actors that match: explorer, trainer_*, *engine*; may be repeated."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--once", help="Keep printing new entries until Ctrl+C.")] = False,
) -> None:
    """Print the logs of all actors of a running or finished run as one stream, in order of time. Changes nothing."""
    from trinity_core.exchange.tracking.logs import LogStream, entry_filter, entry_line, is_selected, stream_entries
    from trinity_core.results.audit import runs_in, stored_runs

    folder, actors = checkpoint_dir.absolute(), set[str]()
    if not folder.is_dir():
        raise TrinityError(f"--checkpoint-dir: there is no folder {folder}.")
    logged = LogStream(lambda: [*dict.fromkeys([folder, *runs_in(folder)])])  # the base model is scored in `folder`
    passes = entry_filter(level, actor or [])
    for entry in stream_entries(logged, follow):
        actors.add(entry.actor)
        if passes(entry):
            typer.echo(entry_line(entry))
    if not actors:
        stored_runs(folder)  # raises where there is no run
    elif actor and not any(is_selected(name, actor) for name in actors):
        raise TrinityError(f"--actor {' '.join(actor)}: matches none of {', '.join(sorted(actors))}.", key="--actor")


data_app = typer.Typer(name="data", help="The data sets of a configuration.", no_args_is_help=True)
app.add_typer(data_app, rich_help_panel=BEFORE)


@data_app.command("check")
def check_data(
    config: ConfigOption,
    overrides: Overrides = None,
    plugin_dir: PluginDir = None,
    examples: Annotated[int, typer.Option(help="Rows of each data set that are shown as the model sees them.")] = 2,
    json: Annotated[
        bool, typer.Option("--json", help="JSON instead of text, with all rows that are rejected.")
    ] = False,
    color: Annotated[bool | None, typer.Option(help="Colour the tokens with a loss; by default on a terminal.")] = None,
) -> None:
    """Read all data sets as a run would: bad rows, lengths, truncation, duplicates, examples.

    Changes nothing, except that it runs a task pipeline whose output is needed and missing. Exits with 1 if a run would
    refuse one of them.
    """
    from trinity_core.config import stages
    from trinity_core.data.inspection import inspect
    from trinity_core.data.reports import report_text
    from trinity_core.exchange.store.earlier_rollouts import read_answers
    from trinity_core.pipelines.tasks import with_curated_tasks
    from trinity_core.run.asked_models import RunModels
    from trinity_core.run.configuration import load_checked
    from trinity_core.run.preflight.models import report_missing_policy

    checked = stages(load_checked(config, with_plugins(overrides, plugin_dir), report_missing_policy))
    colour = sys.stdout.isatty() if color is None else color
    reports = {}
    for stage in checked:
        with RunModels(stage) as models:
            reports[stage.name] = inspect(with_curated_tasks(stage, models), examples, read_answers)
    if json:
        typer.echo(dumps({name: [report.to_dict() for report in listed] for name, listed in reports.items()}, indent=2))
    else:
        first: dict[str, str] = {}
        for name, listed in reports.items():
            shown = [
                text if first.setdefault(text, name) == name else f"{text.splitlines()[0]}\n  as in {first[text]}"
                for text in (report_text(report, colour) for report in listed)
            ]
            typer.echo("\n\n".join([name, *(shown or ["no data set is read"])]) + "\n", color=colour)
    if any(report.problem for listed in reports.values() for report in listed):
        raise typer.Exit(1)


env_app = typer.Typer(name="env", help="Environments that a policy acts in.", no_args_is_help=True)
app.add_typer(env_app, rich_help_panel=BEFORE)


@env_app.command("try")
def try_environment(
    target: Annotated[
        str,
        typer.Argument(help="A name, package.module:Class, folder/file.py:Class, or with --config a task set."),
    ],
    texts: Annotated[list[str] | None, typer.Argument(metavar="[ACTIONS]...", help="Actions, after --actions.")] = None,
    actions: Annotated[
        bool,
        typer.Option(
            "--actions", help="Play the following arguments, one a turn; after --, also those that begin with -."
        ),
    ] = False,
    actions_file: Annotated[
        str | None, typer.Option(help="Actions from a file, one a line; - reads them from the terminal.")
    ] = None,
    args: Annotated[str, typer.Option(help="environment_args, a JSON object.")] = "{}",
    row: Annotated[
        str, typer.Option(help="A task's row, a JSON object: columns are arguments too, and the seed.")
    ] = "{}",
    workflow_args: Annotated[
        str,
        typer.Option(help='Further workflow_args, a JSON object: {"process": true, "python": ..., "time_limit": 5}.'),
    ] = "{}",
    seed: Annotated[int | None, typer.Option(help="Seed of the episode, in place of the row's.")] = None,
    config: Annotated[Path | None, typer.Option(help="A configuration: TARGET is one of its task sets.")] = None,
    plugin_dir: PluginDir = None,
) -> None:
    """Play an environment without a model: shows its first observation, then its answer to each action.

    The environment runs as it would in a run of env_workflow: process, limits and checks are the same. Exits with 1,
    and an error that names the environment, if it fails. For example:

    trinity env try frozen_lake --plugin-dir configs/toy_text --seed 3 --actions down right

    trinity env try envs/guess.py:Guess --args '{"largest": 5}' --actions-file -
    """
    from trinity_core.config import stages
    from trinity_core.run.configuration import load_checked
    from trinity_core.workflows.environments.trial import Trial, configured_args, json_object

    if texts and not actions:
        raise typer.BadParameter(f"actions are written after --actions: --actions {' '.join(texts)}")
    if actions and actions_file is not None:
        raise typer.BadParameter("give --actions or --actions-file, not both")
    settings: dict[str, Any] = {"environment": target}
    if config is not None:
        settings = configured_args(stages(load_checked(config, with_plugins(None, plugin_dir))), target)
    settings |= json_object("--workflow-args", workflow_args)
    settings["environment_args"] = (settings.get("environment_args") or {}) | json_object("--args", args)
    columns = json_object("--row", row) | ({} if seed is None else {"seed": seed})
    trial = Trial.of(settings, columns, plugin_dir)
    if actions_file == "-":
        trial.play((line.rstrip("\n") for line in sys.stdin), typer.echo)
    else:
        try:
            lines = Path(actions_file).read_text().splitlines() if actions_file else texts or []
        except OSError as error:
            raise typer.BadParameter(f"--actions-file: {error}") from None
        trial.play(lines, typer.echo)


@app.command(rich_help_panel=OTHER)
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


tasks_app = typer.Typer(name="tasks", help="Task queues that grow during a run.", no_args_is_help=True)
app.add_typer(tasks_app, rich_help_panel=OTHER)
TasksetName = Annotated[str | None, typer.Option("--taskset", help="The task set, if there are several queues.")]


@tasks_app.command("add")
def add_tasks(
    config: ConfigOption,
    file: Annotated[str, typer.Option(help="Tasks as jsonl, json, csv or parquet; - reads JSON lines from the input.")],
    overrides: Overrides = None,
    taskset: TasksetName = None,
) -> None:
    """Add tasks to a task set of `storage_type: queue`, before or during its run. All are added, or none."""
    from trinity_core.data.files import read_rows
    from trinity_core.data.rejected import list_rejected
    from trinity_core.data.task_queue import read_tasks

    queue = _queue(config, overrides, taskset)
    if file == "-":
        rows = read_tasks(sys.stdin)
    else:
        read = read_rows(file)
        if read.rejected:
            raise TrinityError(f"nothing was added, as rows cannot be read: {list_rejected(read.rejected)}")
        rows = read.rows
    typer.echo(f"added {queue.add(rows)} tasks to '{queue.name}' in {queue.path}")


@tasks_app.command("end")
def end_tasks(config: ConfigOption, overrides: Overrides = None, taskset: TasksetName = None) -> None:
    """Announce that no more tasks come: the explorer ends after the remaining ones."""
    queue = _queue(config, overrides, taskset)
    queue.end()
    typer.echo(f"'{queue.name}' ends after {queue.count()[0]} tasks")


@tasks_app.command("count")
def count_tasks(config: ConfigOption, overrides: Overrides = None, taskset: TasksetName = None) -> None:
    """Print the number of tasks added so far."""
    queue = _queue(config, overrides, taskset)
    count, ended = queue.count()
    typer.echo(f"'{queue.name}' has {count} tasks{' and has ended' if ended else ''} ({queue.path})")


def _queue(config: Path, overrides: list[str] | None, taskset: str | None) -> TaskQueue:
    from trinity_core.config import stages
    from trinity_core.data.task_queue import find_queue
    from trinity_core.run.configuration import load_checked

    queue = find_queue(stages(load_checked(config, overrides or [])), taskset)
    queue.create()
    return queue


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
