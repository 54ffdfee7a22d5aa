"""Loads a configuration: read, override, interpolate, translate, type, resolve, check.

All problems are raised together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded
from trinity_core.config import rules, source
from trinity_core.config.arguments import typed_arguments
from trinity_core.config.findings import ConfigError, Finding, Report, SourceLocation, value_at
from trinity_core.config.foreign.translate import native
from trinity_core.config.resolve import resolve
from trinity_core.config.schema import Config, VerlConfig
from trinity_core.config.source import WHOLE, Tree, YamlSource, first_line, join_key, merge
from trinity_core.config.validation import typed_section
from trinity_core.config.yaml_text import dump

Plugins = Callable[[str], Any]
"""Loads the user's modules in a folder, so that the names they register are known before anything is checked."""
Check = Callable[[Config, Report], Config]
"""Reports problems that other packages find; returns the configuration with typed arguments."""


def load_config(
    path: Path | str, overrides: Sequence[str] = (), load_plugins: Plugins | None = None, check: Check | None = None
) -> Config:
    """Load a configuration from a YAML file, resolved and checked.

    `overrides` are `key.path=value`. `load_plugins` is called with `plugin_dir` if that is set, `check` with the
    configuration of each stage. Without `load_plugins` no user code runs, and parts of the algorithm that are not built
    in are assumed to come from `plugin_dir`. Raises ConfigError with every problem found.
    """
    return _load(source.read(Path(path)), overrides, load_plugins, check)


def config_from_text(
    text: str, overrides: Sequence[str] = (), load_plugins: Plugins | None = None, name: str = "<text>"
) -> Config:
    """Like `load_config`, for YAML text; `name` stands for the file's name."""
    return _load(source.parse(text, name), overrides, load_plugins)


def config_from_dict(
    tree: Mapping[str, Any],
    overrides: Sequence[str] = (),
    load_plugins: Plugins | None = None,
    check: Check | None = None,
) -> Config:
    """Like `load_config`, for a mapping."""
    return _load(source.from_values(tree), overrides, load_plugins, check)


def stages(config: Config) -> list[Config]:
    """Return one configuration per stage, in order; without stages, the configuration itself.

    A stage's run is called `<name>_<stage_name>`. The model path of a stage after the first is set when the previous
    one has ended.
    """
    return list(config.stage_runs) if config.stages else [config]


def to_dict(config: Any) -> Any:
    """Return a configuration (or a section of it) as plain values for YAML or JSON.

    For a configuration with stages these are the user's values, because each stage has its own defaults.
    """
    values = config.given if isinstance(config, Config) and config.stages else config
    return to_jsonable_python(values, inf_nan_mode="constants")


def without_defaults(config: Any) -> Any:
    """Return a section as plain values without the schema's defaults, so that settings added by later releases do not
    change it."""
    if isinstance(config, BaseModel):
        fields = type(config).model_fields
        values = {name: (value, fields[name].get_default(call_default_factory=True)) for name, value in config}
        return {name: without_defaults(value) for name, (value, default) in values.items() if value != default}
    if isinstance(config, list | tuple):
        return [without_defaults(item) for item in config]
    if isinstance(config, dict):
        return {name: without_defaults(item) for name, item in config.items()}
    return config


def to_yaml(config: Config) -> str:
    """Return YAML text that loads to an equal configuration. It contains passwords and keys, unlike `public_dict`."""
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
    """Return the tree in this schema's keys with `${…}` replaced, and notices; with `stage`, upper sections as that
    stage inherits them."""
    tree = interpolate(origin, lambda: dict(to_dict(Config())), report, stage)
    _include_trainer_files(tree, report)
    tree, notices = native(tree, report)
    if isinstance(folder := tree.get("plugin_dir"), str):
        tree["plugin_dir"] = _plugin_folder(folder, report.places.get("plugin_dir"))
    return tree, notices


def _notices_of(notices: list[Finding], stage: str | None) -> list[Finding]:
    """Return a stage's notices, on its own keys and on keys of all stages, with keys as if it were a separate run."""
    of_stage = {
        finding.key.removeprefix(f"{stage}."): finding for finding in notices if finding.key.startswith(f"{stage}.")
    }
    above = [finding for finding in notices if not finding.key.startswith("stages[") and finding.key not in of_stage]
    return [*above, *(replace(finding, key=key) for key, finding in of_stage.items())]


def _plugin_folder(folder: str, location: SourceLocation | None) -> str:
    """Make a relative folder absolute, so that processes elsewhere find it too: in the current directory if it exists
    there, else next to the file that names it."""
    here = expanded(folder).absolute()
    beside = Path(location.file).parent / folder if location is not None and location.file else here
    return str(beside.resolve() if beside.is_dir() and not here.is_dir() else here)


def _plugins_loaded(load_plugins: Plugins, folder: Any, report: Report) -> bool:
    """Load the user's modules. If the folder or a module cannot be loaded, that is reported, and its names are
    trusted."""
    if not isinstance(folder, str):
        return True
    try:
        load_plugins(folder)
    except TrinityError as error:
        report.add(Finding("plugin_dir", folder, "invalid", f"{error}."))
        return False
    return True


def _stage_tree(tree: Tree, index: int) -> Tree:
    base = {name: value for name, value in tree.items() if name != "stages"}
    stage = tree["stages"][index]
    of_stage = {name: value for name, value in stage.items() if name != "stage_name" and value is not None}
    merged = source.merge(source.inherited(base, of_stage), of_stage, source.WHOLE)
    merged["name"] = f"{base.get('name') or Config().name}_{stage.get('stage_name')}"
    return merged


def _include_trainer_files(tree: Tree, report: Report) -> None:
    """Replace every `trainer_config_path` by the file's content."""
    stages = tree["stages"] if isinstance(tree.get("stages"), list) else []
    holders = {"trainer": tree} | {f"stages[{index}].trainer": stage for index, stage in enumerate(stages)}
    for key, holder in holders.items():
        trainer = holder.get("trainer") if isinstance(holder, dict) else None
        path = trainer.get("trainer_config_path") if isinstance(trainer, dict) else None
        if not trainer or not path or not isinstance(path, str):
            continue
        key, at = f"{key}.trainer_config", f"{key}.trainer_config_path"
        if trainer.get("trainer_config"):
            report.add(Finding(at, path, "two-spellings", "give this or trainer_config, not both."))
            continue
        try:
            content = source.read(Path(path), VerlConfig)
        except ConfigError as error:
            for problem in error.problems:
                report.add(Finding(at, path, problem.code, str(problem)))
            continue
        inner = Report(content.places)
        inner.problems += content.problems
        trainer["trainer_config"] = interpolate(content, dict, inner)
        trainer["trainer_config_path"] = ""
        problems = [replace(problem, key=f"{key}.{problem.key}") for problem in inner.problems]
        report.problems += [problem for problem in problems if problem not in report.problems]
        report.places |= {f"{key}.{name}": location for name, location in content.places.items() if name}


def interpolate(source: YamlSource, defaults: Callable[[], Tree], report: Report, stage: int | None = None) -> Tree:
    """Return the tree with every `${…}` replaced; `defaults` provides values of keys that were not given.

    References in a stage look in the stage's own values first. With the index of a `stage`, so do references in upper
    sections, as this stage inherits them, and other stages become None. What cannot be replaced (an unset environment
    variable, an unknown key, a cycle) is reported and becomes None, too.
    """
    if not source.refers:
        return source.tree
    tree = source.tree
    stages = tree["stages"] if isinstance(tree.get("stages"), list) else []
    above = {name: value for name, value in tree.items() if name != "stages" or not stages}

    def replaced(node: Tree, index: int | None, key: str = "") -> Any:
        of_stage = stages[index] if index is not None and isinstance(stages[index], dict) else {}
        seen = merge(tree, {name: value for name, value in of_stage.items() if value is not None}, WHOLE)
        return _replaced(node, seen, _container(seen, defaults), key, report)

    result: Tree = replaced(above, stage)
    if stages:
        result["stages"] = [inner if stage in (None, index) else None for index, inner in enumerate(stages)]
        for index, inner in enumerate(result["stages"]):
            if isinstance(inner, dict):
                result["stages"][index] = replaced(inner, index, f"stages[{index}]")
    return result


def _container(tree: Tree, defaults: Callable[[], Tree]) -> Any:
    """Return OmegaConf's container of a tree with its defaults, in which references are resolved."""
    from omegaconf import OmegaConf

    whole = merge(defaults(), tree)
    verl = value_at(tree, ["trainer", "trainer_config"])
    # Sections of a veRL configuration refer to each other as in a file of their own.
    sections = [name for name in ("actor_rollout_ref", "critic") if isinstance(verl, dict) and name in verl]
    whole |= {name: f"${{trainer.trainer_config.{name}}}" for name in sections if name not in tree}
    return OmegaConf.create(whole)


def _replaced(node: Any, seen: Any, resolved: Any, key: str, report: Report) -> Any:
    """Return `node` with its interpolations taken from `resolved`, the OmegaConf container of the tree `seen` at that
    place. A value that differs from the one in `seen` is overridden and never read: it becomes None."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def replaced(name: Any, value: Any) -> Any:
        path, inner = join_key(key, name), value_at(seen, [name])
        if isinstance(value, dict | list):
            return _replaced(value, inner, resolved[name], path, report) if type(inner) is type(value) else None
        if not isinstance(value, str) or "${" not in value or inner != value:
            return value
        try:
            other = resolved[name]
            return OmegaConf.to_container(other, resolve=True) if OmegaConf.is_config(other) else other
        except OmegaConfBaseException as error:
            report.add(Finding(path, value, "unresolved", f"cannot be resolved: {first_line(error)}."))
            return None

    if isinstance(node, dict):
        return {name: replaced(name, value) for name, value in node.items()}
    return [replaced(index, value) for index, value in enumerate(node)]


def escaped(node: Any) -> Any:
    """Escape literal `${` in texts; the inverse of `interpolate`."""
    if isinstance(node, dict):
        return {name: escaped(value) for name, value in node.items()}
    if isinstance(node, list):
        return [escaped(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", node)
    return node


def unescaped(node: Any) -> Any:
    """Return what `escaped` was given; other `${` stay as they are."""
    if isinstance(node, dict):
        return {name: unescaped(value) for name, value in node.items()}
    if isinstance(node, list):
        return [unescaped(value) for value in node]
    return re.sub(r"(\\*)\1\\\$\{", r"\1${", node) if isinstance(node, str) else node
