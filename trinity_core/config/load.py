"""Load a configuration: read, override, interpolate, bind, resolve, check. All problems are raised together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trinity_core.config import dialects, rules, source, verl
from trinity_core.config.interpolation import escaped, interpolate
from trinity_core.config.named import check_arguments, typed_arguments
from trinity_core.config.problems import ConfigError, Problem, Report, SourceLocation
from trinity_core.config.resolve import resolve
from trinity_core.config.schema import Config, VerlConfig
from trinity_core.config.source import Tree, YamlSource
from trinity_core.config.validation import as_written, bound
from trinity_core.errors import TrinityError

WHOLE = frozenset({"experience_buffer", "taskset"})
"""Keys that a stage replaces as a whole: the path of one data set and the columns of another do not go together."""


Plugins = Callable[[str], Any]
"""Loads the user's modules in a folder, so that the names they register are known before anything is checked."""


Check = Callable[[Config, Report], None]
"""Reports mistakes that this package cannot know of."""


def load_config(
    path: Path | str, overrides: Sequence[str] = (), load_plugins: Plugins | None = None, check: Check | None = None
) -> Config:
    """The configuration in a YAML file, resolved and checked.

    `overrides` are `key.path=value`. `load_plugins` is called with `plugin_dir` where that is given, `check` with the
    configuration of each stage. Without `load_plugins` no code of the user's runs: a part of the algorithm that is not
    built in is then trusted to come with `plugin_dir`. Raises ConfigError with every problem found.
    """
    return _load(source.read(Path(path)), overrides, load_plugins, check)


def config_from_text(text: str, overrides: Sequence[str] = (), load_plugins: Plugins | None = None) -> Config:
    """`load_config` of YAML text."""
    return _load(source.parse(text), overrides, load_plugins)


def config_from_dict(
    tree: Mapping[str, Any], overrides: Sequence[str] = (), load_plugins: Plugins | None = None
) -> Config:
    """`load_config` of a mapping."""
    plain = dict(tree)
    return _load(YamlSource(plain, source.spread(plain, "", SourceLocation())), overrides, load_plugins)


def stages(config: Config) -> list[Config]:
    """One configuration for each stage, in order; the configuration itself where it has no stages.

    A stage's run is called `<name>_<stage_name>` and lies beside the others. The model path of a stage after the first
    is set when the one before has ended.
    """
    if not config.stages:
        return [config]
    report = Report()
    made = [_bound(tree, report) for tree, _ in _stage_trees(config.given)]
    report.check()
    return made


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
    return source.dump(escaped(to_dict(config)))


def _load(
    origin: YamlSource, overrides: Sequence[str], load_plugins: Plugins | None, check: Check | None = None
) -> Config:
    given = source.override(origin, overrides)
    given.tree = _as_written(given)
    report = Report(given.places)
    tree = interpolate(given, to_dict(Config()), report)
    _include_trainer_files(tree, report)
    _forget(dialects.noted_keys(Config, given.tree), report)
    tree = dialects.native(tree, report)
    loaded = load_plugins is not None and _plugins_loaded(load_plugins, tree.get("plugin_dir"), report)
    checks = [check] if check is not None else []
    config = _bound(tree, report, None if tree.get("stages") else checks, loaded)
    if config.stages:
        rules.check_stage_list(config, report)
        for stage_tree, key in _stage_trees(tree):
            staged = Report(report.places, key)
            staged.problems = list(report.problems)
            _bound(stage_tree, staged, checks, loaded)
            report.problems = staged.problems
    report.check()
    return config


def _plugins_loaded(load_plugins: Plugins, folder: Any, report: Report) -> bool:
    """Load the user's modules; a folder or a module that cannot be loaded is reported, and its names are trusted."""
    if not isinstance(folder, str):
        return True
    try:
        load_plugins(folder)
    except TrinityError as error:
        report.add("plugin_dir", folder, f"{error}.")
        return False
    return True


def _as_written(given: YamlSource) -> Tree:
    """The tree with the text as written wherever the schema wants text; a stage has the sections of a configuration."""
    tree = as_written(Config, given.tree, given.texts)
    if isinstance(tree.get("stages"), list):
        listed = enumerate(tree["stages"])
        tree["stages"] = [as_written(Config, stage, given.texts, ("stages", index)) for index, stage in listed]
    return tree


def _bound(tree: Tree, report: Report, checks: Sequence[Check] | None = (), plugins_loaded: bool = False) -> Config:
    """A configuration from a tree, resolved; problems are reported, without `checks` those of types alone."""
    plain = dialects.without_noted(tree)
    written = verl.laid_under(bound(Config, plain, report), plain)
    untyped = resolve(written).with_given(tree)
    config = typed_arguments(untyped)
    if checks is not None:
        check_arguments(untyped, report, plugins_loaded)
        rules.check(written, config, report)
        for check in checks:
            check(config, report)
    return config


def _forget(keys: Sequence[str], report: Report) -> None:
    """Drop the problems of keys that have no effect, such as an interpolation that leads nowhere."""
    unread = tuple(f"{key}{end}" for key in keys for end in (".", "["))
    kept = (each for each in report.problems if each.key not in keys and not each.key.startswith(unread))
    report.problems = list(kept)


def _stage_trees(tree: Tree) -> list[tuple[Tree, str]]:
    """The tree of each stage, and the key under which it was given."""
    base = {name: value for name, value in tree.items() if name != "stages"}
    listed = tree.get("stages")
    found = []
    for index, stage in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(stage, dict):
            continue
        own = {name: value for name, value in stage.items() if name != "stage_name" and value is not None}
        merged = source.merge(_inherited(base, own), own, WHOLE)
        merged["name"] = f"{base.get('name') or Config().name}_{stage.get('stage_name')}"
        found.append((merged, f"stages[{index}]"))
    return found


def _inherited(base: Tree, own: Tree) -> Tree:
    """What a stage takes over from the sections above: not the parts of another algorithm, nor another length."""
    base = source.merge({}, base)
    algorithm, above = own.get("algorithm"), base.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(above, dict):
        same = algorithm.get("algorithm_type") in (None, above.get("algorithm_type", Config().algorithm.algorithm_type))
        base["algorithm"] = above if same else {name: above[name] for name in above if name == "optimizer"}
    lengths = (("buffer", "total_steps"), ("buffer", "total_epochs"), ("trainer", "total_steps"))
    if any(isinstance(own.get(section), dict) and name in own[section] for section, name in lengths):
        for section, name in lengths:
            if isinstance(base.get(section), dict):
                base[section].pop(name, None)
    return base


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
        report.add(f"{key}.trainer_config_path", path, "give this or trainer_config, not both.")
        return
    try:
        content = source.read(Path(path))
        content.tree = as_written(VerlConfig, content.tree, content.texts)
    except ConfigError as error:
        for problem in error.problems:
            report.add(f"{key}.trainer_config_path", path, str(problem))
        return
    inner = Report(content.places)
    trainer["trainer_config"] = interpolate(content, {}, inner)
    _forget(dialects.noted_keys(VerlConfig, content.tree), inner)
    trainer["trainer_config_path"] = ""
    report.problems += inner.problems
    report.places |= {f"{key}.trainer_config.{name}": place for name, place in content.places.items() if name}


__all__ = [
    "ConfigError",
    "Problem",
    "SourceLocation",
    "config_from_dict",
    "config_from_text",
    "load_config",
    "stages",
    "to_dict",
    "to_yaml",
]
