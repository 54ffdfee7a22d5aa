"""Load a configuration: read, override, interpolate, translate, type, resolve, check.

All problems are raised together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trinity_core.config import rules, source
from trinity_core.config.arguments import typed_arguments
from trinity_core.config.findings import ConfigError, Finding, Report, SourceLocation
from trinity_core.config.foreign.translate import native
from trinity_core.config.interpolation import escaped, interpolate
from trinity_core.config.resolve import resolve
from trinity_core.config.schema import Config, VerlConfig
from trinity_core.config.source import Tree, YamlSource
from trinity_core.config.validation import typed_section
from trinity_core.config.yaml_text import dump
from trinity_core.errors import TrinityError
from trinity_core.local_paths import expanded

Plugins = Callable[[str], Any]
"""Loads the user's modules in a folder, so that the names they register are known before anything is checked."""
Check = Callable[[Config, Report], Config]
"""Reports mistakes that this package cannot know of; returns the configuration with what it has typed."""


def load_config(
    path: Path | str, overrides: Sequence[str] = (), load_plugins: Plugins | None = None, check: Check | None = None
) -> Config:
    """The configuration in a YAML file, resolved and checked.

    `overrides` are `key.path=value`. `load_plugins` is called with `plugin_dir` where that is given, `check` with the
    configuration of each stage. Without `load_plugins` no code of the user's runs: a part of the algorithm that is not
    built in is then trusted to come with `plugin_dir`. Raises ConfigError with every problem found.
    """
    return _load(source.read(Path(path)), overrides, load_plugins, check)


def config_from_text(
    text: str, overrides: Sequence[str] = (), load_plugins: Plugins | None = None, name: str = "<text>"
) -> Config:
    """`load_config` of YAML text; `name` is that of its file."""
    return _load(source.parse(text, name), overrides, load_plugins)


def config_from_dict(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), load_plugins: Plugins | None = None
) -> Config:
    """`load_config` of a mapping."""
    return _load(source.from_values(tree), overrides, load_plugins)


def stages(config: Config) -> list[Config]:
    """One configuration for each stage, in order; the configuration itself where it has no stages.

    A stage's run is called `<name>_<stage_name>` and lies beside the others. The model path of a stage after the first
    is set when the one before has ended.
    """
    return list(config.stage_runs) if config.stages else [config]


def to_dict(config: Any) -> Any:
    """A configuration (or a section of it) as plain values for YAML or JSON.

    Of a configuration with stages it is what the user gave, because the defaults of each stage follow from its own.
    """
    if isinstance(config, Config) and config.stages:
        return source.merge({}, config.given)
    if isinstance(config, BaseModel):
        return {name: to_dict(value) for name, value in config}
    if isinstance(config, list | tuple):
        return [to_dict(item) for item in config]
    if isinstance(config, dict):
        return {name: to_dict(item) for name, item in config.items()}
    return config


def to_yaml(config: Config) -> str:
    """YAML text that loads to an equal configuration. Passwords and keys are in it: `public_dict` has none."""
    return dump(escaped(to_dict(config)))


def _load(
    origin: YamlSource, overrides: Sequence[str], load_plugins: Plugins | None, check: Check | None = None
) -> Config:
    source.override(origin, overrides)
    report = Report(origin.places)
    report.problems += origin.problems
    tree, notices = _native(origin, report)
    plugins_loaded = load_plugins is not None and _plugins_loaded(load_plugins, tree.get("plugin_dir"), report)

    def checked(tree: Tree, of_stage: Tree | None = None) -> Config:
        written = typed_section(Config, tree, report)
        config = resolve(written).as_written(tree, _notices_of(notices, report.stage), of_stage=of_stage)
        config = typed_arguments(config, report, plugins_loaded)
        rules.check(written, config, report)
        return config if check is None else check(config, report)

    if not tree.get("stages"):
        config = checked(tree, tree)
    else:
        config = resolve(typed_section(Config, tree, report))
        rules.check_stage_list(config, report)
        runs = []
        for index, stage in enumerate(tree["stages"] if config.stages else ()):
            if isinstance(stage, dict):
                report.stage = f"stages[{index}]"
                whole = _native(origin, report, index)[0] if origin.refers else tree
                runs.append(checked(_stage_tree(whole, index), whole["stages"][index]))
        config = config.as_written(tree, notices, runs)
    report.check()
    return config


def _native(origin: YamlSource, report: Report, stage: int | None = None) -> tuple[Tree, list[Finding]]:
    """The tree in this schema's words, without `${…}`, and notices; sections above as the `stage` of that index sees
    them."""
    tree = interpolate(origin, lambda: to_dict(Config()), report, stage)
    _include_trainer_files(tree, report)
    tree, notices = native(tree, report)
    if isinstance(folder := tree.get("plugin_dir"), str):
        tree["plugin_dir"] = _plugin_folder(folder, report.places.get("plugin_dir"))
    return tree, notices


def _notices_of(notices: list[Finding], stage: str | None) -> list[Finding]:
    """The notices of keys above all stages, and of a stage's own keys, as they are called in a run of their own."""
    own = {finding.key.removeprefix(f"{stage}."): finding for finding in notices if finding.key.startswith(f"{stage}.")}
    above = [finding for finding in notices if not finding.key.startswith("stages[") and finding.key not in own]
    return [*above, *(replace(finding, key=key) for key, finding in own.items())]


def _plugin_folder(folder: str, place: SourceLocation | None) -> str:
    """A relative folder as an absolute one, as processes elsewhere load it too: below the present folder if it is
    there, else beside the file that names it."""
    here = expanded(folder).absolute()
    beside = Path(place.file).parent / folder if place is not None and place.file else here
    return str(beside.resolve() if beside.is_dir() and not here.is_dir() else here)


def _plugins_loaded(load_plugins: Plugins, folder: Any, report: Report) -> bool:
    """Load the user's modules; a folder or a module that cannot be loaded is reported, and its names are trusted."""
    if not isinstance(folder, str):
        return True
    try:
        load_plugins(folder)
    except TrinityError as error:
        report.add(Finding("plugin_dir", folder, "invalid", f"{error}."))
        return False
    return True


def _stage_tree(tree: Tree, index: int) -> Tree:
    """The tree of a stage: its own values laid on those above."""
    base = {name: value for name, value in tree.items() if name != "stages"}
    stage = tree["stages"][index]
    own = {name: value for name, value in stage.items() if name != "stage_name" and value is not None}
    merged = source.merge(source.inherited(base, own), own, source.WHOLE)
    merged["name"] = f"{base.get('name') or Config().name}_{stage.get('stage_name')}"
    return merged


def _include_trainer_files(tree: Tree, report: Report) -> None:
    """Put the content of every `trainer_config_path` in place of it."""
    listed = tree.get("stages")
    _include_trainer_file(tree, "trainer", report)
    for index, stage in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(stage, dict):
            _include_trainer_file(stage, f"stages[{index}].trainer", report)


def _include_trainer_file(tree: Tree, key: str, report: Report) -> None:
    trainer = tree.get("trainer")
    path = trainer.get("trainer_config_path") if isinstance(trainer, dict) else None
    if not trainer or not path or not isinstance(path, str):
        return
    if trainer.get("trainer_config"):
        report.add(
            Finding(f"{key}.trainer_config_path", path, "two-spellings", "give this or trainer_config, not both.")
        )
        return
    try:
        content = source.read(Path(path), VerlConfig)
    except ConfigError as error:
        for problem in error.problems:
            report.add(Finding(f"{key}.trainer_config_path", path, problem.code, str(problem)))
        return
    inner = Report(content.places)
    inner.problems += content.problems
    trainer["trainer_config"] = interpolate(content, dict, inner)
    trainer["trainer_config_path"] = ""
    problems = [replace(problem, key=f"{key}.trainer_config.{problem.key}") for problem in inner.problems]
    report.problems += [problem for problem in problems if problem not in report.problems]
    report.places |= {f"{key}.trainer_config.{name}": place for name, place in content.places.items() if name}
