"""Random mistakes in configurations, and what must hold for the report of each.

A mistake is made in a recipe's tree or text, in an override or in the environment; `verdict` then does with the file
what commands do. `mutations.py` makes thousands.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from measured import ROOT

from trinity_core.config import (
    ConfigError,
    config_from_text,
    notices,
    public_dict,
    stages,
    store_url,
    to_yaml,
    train_settings,
)
from trinity_core.config.fields import type_at
from trinity_core.config.findings import Finding
from trinity_core.config.schema import Config
from trinity_core.config.validation import key_of
from trinity_core.runtime.configuration import load_checked

DOCUMENTS = ROOT / "tests/config/documents"
ENVIRONMENT = (
    "MODEL_PATH",
    "TRINITY_MODEL_PATH",
    "TRINITY_TASKSET_PATH",
    "TRINITY_SFT_DATASET_PATH",
    "TRINITY_DATASET_PATH",
    "TRINITY_CHECKPOINT_ROOT_DIR",
)
"""Variables that recipes and guides read."""
SLOW = 2.0
"""Seconds that no file may take."""

SCALARS = [
    "null", "~", "true", "off", "0", "-1", "2.5", "1e-6", "1e400", "-.inf", ".nan", "1_000", "0o17", "0x1F", "007",
    "12:30", "2024-01-01", "9" * 400, "9" * 5000, "18446744073709551616", "1e308", "5e-324", "''", "' '", "text",
    "'null'", "'3'", "'1e-6'", "'[1]'", "é", "'日本語'", "'🙂'", '"\\0"', '"\\ud800"', '"\\u2028"', '"a\\nb"',
    "'../..'",
    "'/'", "'a/b'", "'~nobody/x'", "x" * 100_000, "[]", "[null]", "[[]]", "[text, 3]", "{}", "{a: 1}",
    "{a: {b: null}}", "{1: 2}", "{null: 1}", "{[1]: 2}", "[{}]", "[{stage_name: null}]", "[{name: a}, {name: a}]",
    "[" * 300 + "]" * 300, "{a: " * 300 + "1" + "}" * 300, "&it [*it]", "*nothing", "&again text", "!!binary aGk=",
    "!!set {a, b}", "!!python/object:os.system x", "!!int x", "!!float x", "!!float", "!!timestamp x", "!!omap [a: 1]",
    "!own 3", "!!str 3", "? a", "- a", "a: b: c", "%", "@x", "`x`", "|", ">", "'${'", "'${}'", "'${name}'", "'${nope}'",
    "'${model}'", "'${stages}'", "'${.name}'", "'${..x}'", "'${oc.env:NOPE}'", "'${oc.env:NOPE,3}'",
    "'${oc.env:HOME}'", "'${oc.decode:\"[\"}'", "'${oc.create:{a: 1}}'", "'${oc.dict.keys:model}'",
    "'${oc.select:a,b}'", "'${oc.deprecated:name}'", "'$${x}'", "'\\${x}'", "'???'", "'${a[0]}'", "'${a.${b}}'",
    "'${name}${nope}'", "'${trainer.trainer_config.actor_rollout_ref.actr.grad_clip}'",
    "'${actor_rollout_ref.actor}'", "'${oc.env:}'", "'${now:%Y}'",
]  # fmt: skip
"""YAML texts of values, many of them no YAML at all."""
KEYS = [
    "stages", "taskset", "tasksets", "trainer_config", "buffer", "model", "name", "typo", "optim", "actor", "lr",
    "args", "path", "<<", "7", "null", "true", "1.5", "''", "' a'", "a.b", "a[0]", "é", "🙂", "_given", "model_config",
    "__class__", "model_fields", "copy", "self", "x" * 300,
]  # fmt: skip
OVERRIDES = [
    "", "=", "name", "=3", "name=", "name==", ".=1", "a..b=1", "[0]=1", "name[0]=1", "stages[0].name=x",
    "model.model_path.x=1", "buffer.explorer_input.tasksets.0.path=x", "buffer.explorer_input.tasksets[9].path=x",
    "stages.nope.seed=1", "trainer=null", "algorithm=[]", "model=text", "seed=[", "seed={", "seed=*a",
    "seed=!!int x", "seed=${oc.env:NOPE}", "stages=[{stage_name: a}]", "é=1", "name=\0", "name=\udcff", "\udcff=1",
    "trainer.trainer_config=text", "buffer.trainer_input.auxiliary_buffers.a=1", "monitor.monitor_args.uri=3",
    "plugin_dir=/nope", "mode=nope", "algorithm.policy_loss_fn_args.clip_range=text", "explorer.env_vars.A=null",
]  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A recipe with mistakes."""

    text: str
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that are set otherwise, or unset."""
    touched: tuple[str, ...] = ()
    """Names of the keys that were changed; empty where more than one change was made, or one in the text."""
    section: str = ""
    """Key of the section in which it was; empty at the top."""
    misspelt: str = ""
    """The right name of the key, where its name alone is wrong."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mistake."""

    seconds: float
    problems: tuple[Finding, ...] = ()
    fault: str = ""
    """Why the answer is no good: a traceback, no key, another key, a wrong suggestion; empty if it is."""


def recipes() -> dict[str, str]:
    """The YAML texts of our recipes and of the guides, by name."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "configs").rglob("*.yaml"))}
    shown = {path.stem: path.read_text() for path in sorted(DOCUMENTS.glob("*.yaml"))}
    for name in ("guide", "quick_start"):
        texts |= {name: shown[name], f"{name}_stages": shown[name] + shown[f"{name}_stages"]}
    verl = {"trainer": {"trainer_config": yaml.safe_load(shown["verl_trainer"])}}
    tree = yaml.safe_load(shown["quick_start"])
    tree["trainer"] |= verl["trainer"]
    return texts | {"quick_start_verl": yaml.safe_dump(tree, sort_keys=False)}


def surroundings(folder: Path) -> dict[str, str]:
    """Put what guides and recipes name into a folder, and return the variables that they read."""
    named = folder / "examples/grpo_gsm8k_experience_pipeline/dj_scoring_exp.yaml"
    named.parent.mkdir(parents=True, exist_ok=True)
    named.write_text("process:\n  - text_length_filter: {min_len: 1}\n")
    (folder / "configs").symlink_to(ROOT / "configs")  # where recipes have their plugins
    return dict.fromkeys(ENVIRONMENT[:-1], "x")


def mistake(text: str, dice: random.Random) -> Mistake:
    """The recipe with one mistake or a few."""
    kind = dice.choice(["tree"] * 12 + ["many"] * 3 + ["text"] * 3 + ["override"] * 3 + ["environment"])
    if kind == "text":
        return Mistake(_torn(text, dice))
    if kind == "override":
        return Mistake(text, tuple(_override(yaml.safe_load(text), dice) for _ in range(dice.randint(1, 2))))
    if kind == "environment":
        values = (None, "", "${", "[", "nan", "0", "true", "${oc.env:HOME}", "x" * 10_000)
        return Mistake(text, environment={name: dice.choice(values) for name in ENVIRONMENT})
    made = _changed(text, dice)
    for _ in range(3 if kind == "many" else 0):
        try:
            made = Mistake(_changed(made.text, dice).text)
        except (yaml.YAMLError, RecursionError, ValueError, AttributeError, LookupError, TypeError):
            break  # an earlier change has left no YAML to change
    return made


def verdict(made: Mistake, folder: Path) -> Verdict:
    """What a command says of the file, and whether that is a good answer."""
    file = folder / "run.yaml"
    file.write_text(made.text, encoding="utf-8", errors="surrogatepass")
    before = {name: os.environ.get(name) for name in made.environment}
    _set(made.environment)
    started = time.process_time()  # others may keep the machine busy
    try:
        _use(file, made.overrides)
        problems: tuple[Finding, ...] = ()
    except ConfigError as error:
        problems = tuple(error.problems)
        str(error).encode()  # as a terminal would be told
    except Exception as error:  # noqa: BLE001 - none of them may be raised
        return Verdict(time.process_time() - started, fault=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        _set(before)
    seconds = time.process_time() - started
    fault = "too slow" if seconds > SLOW else _fault(made, problems)
    return Verdict(seconds, problems, fault)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _use(file: Path, overrides: tuple[str, ...]) -> None:
    """What commands do with a configuration."""
    config = load_checked(file, overrides)
    for stage in stages(config):
        notices(stage), public_dict(stage)
        if stage.mode != "bench" and stage.algorithm_type.uses_rollouts:
            store_url(stage)
        if stage.mode in ("both", "train"):
            train_settings(stage)
    config_from_text(to_yaml(config))


def _fault(made: Mistake, problems: tuple[Finding, ...]) -> str:
    """What is wrong with a list of problems."""
    for problem in problems:
        if not problem.message or problem.message != problem.message.strip():
            return f"no message: {problem}"
        if not problem.key and problem.line is None and not _about_the_file(problem):
            return f"no key: {problem}"
        if len(str(problem)) > 1000:
            return f"a message of {len(str(problem))} characters: {str(problem)[:200]}"
    shown = [f"{problem.key} {problem.message}" for problem in problems]
    readable = not any("not valid YAML" in problem.message for problem in problems)
    beside = made.section and any(problem.key.startswith(made.section) for problem in problems)
    named = beside or any(name in text for name in made.touched for text in shown)
    if problems and readable and made.touched and not named:
        return f"another key than {made.touched}: {problems[0]}"
    if made.misspelt:
        unknown = [problem for problem in problems if "is not a known key" in problem.message]
        wrong = [problem for problem in unknown if problem.suggestion and problem.suggestion != made.misspelt]
        if wrong and not any(problem.suggestion == made.misspelt for problem in unknown):
            return f"suggests another key than {made.misspelt}: {wrong[0]}"
    return ""


def _about_the_file(problem: Finding) -> bool:
    """Problems of a whole file or a whole override have no key."""
    return "YAML" in problem.message or "override" in problem.message or "mapping of sections" in problem.message


def _places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """The path, the container and the key of every value of a tree."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key), node, key
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _changed(text: str, dice: random.Random) -> Mistake:
    """One value, key or entry changed; the new value is spliced in as text, so that it may be no YAML."""
    tree = yaml.safe_load(text)
    if not isinstance(tree, dict) or not tree:
        return Mistake(text)
    path, node, key = dice.choice(list(_places(tree)))
    names = tuple(str(part) for part in path if isinstance(part, str))[-1:]
    rarer = ["rename", "remove", "add", "add", "move", "null", "copy", "alias"]
    kind = dice.choice(["value"] * 5 + ["misspell"] * 2 + rarer)
    mark, raw, misspelt = "MUTATED", "", ""
    if kind == "value":
        node[key], raw = mark, dice.choice(SCALARS)
    elif kind == "null":
        names = () if isinstance(node[key], dict) else names  # a key that a section lacks is reported at other keys
        node[key] = None
    elif kind == "remove":
        del node[key]
        names = ()
    elif kind == "misspell" and isinstance(key, str) and len(key) > 4 and _known(path):
        at = dice.randrange(1, len(key) - 1)
        wrong = key[:at] + dice.choice([key[at + 1] + key[at], key[at] * 2, ""]) + key[at + 1 :][dice.choice([0, 1]) :]
        misspelt = "" if _known((*path[:-1], wrong)) else key
        _rename(node, key, wrong)
        names = (wrong,)
    elif kind == "rename" and isinstance(node, dict):
        _rename(node, key, mark)
        raw, names = dice.choice(KEYS), ()
    elif kind == "move":
        value, target = node.pop(key) if isinstance(node, dict) else node[key], dice.choice(list(_places(tree)) or [()])
        if target and isinstance(target[1], dict):
            target[1].setdefault(str(key), value)
        names = ()
    elif kind == "copy" and isinstance(node, list):
        node.append(node[key])
        names = ()
    elif kind == "alias":
        other = dice.choice(list(_places(tree)))
        node[key] = other[1][other[2]] if other[0][: len(path)] != path else None
        names = names if other[0][: len(path)] != path else ()
    else:
        inner = node[key] if isinstance(node[key], dict) else tree
        inner["MUTATEDKEY"], raw = mark, dice.choice(SCALARS)
        dumped = yaml.dump(tree, sort_keys=False, allow_unicode=True, width=1 << 30)
        return Mistake(dumped.replace("MUTATEDKEY", dice.choice(KEYS), 1).replace(mark, raw, 1))
    dumped = yaml.dump(tree, sort_keys=False, allow_unicode=True, width=1 << 30)
    section = key_of(path[:-1])
    return Mistake(dumped.replace(mark, raw, 1) if raw else dumped, touched=names, section=section, misspelt=misspelt)


def _rename(node: Any, key: Any, name: str) -> None:
    items = [(name if each == key else each, value) for each, value in node.items()]
    node.clear()
    node.update(items)


def _known(path: tuple[str | int, ...]) -> bool:
    """Whether the schema has this key."""
    inner = path[2:] if path[:1] == ("stages",) and len(path) > 2 else path
    section = type_at(Config, inner[:-1]) if len(inner) > 1 else None
    if len(inner) > 1 and (section is None or section.section is None):
        return False
    return type_at(Config, inner) is not None


def _torn(text: str, dice: random.Random) -> str:
    """The text with lines or characters lost, repeated or in the wrong place."""
    lines = text.splitlines(keepends=True)
    at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    place = dice.randrange(len(text))
    return dice.choice([
        "".join(lines[:at] + lines[at + 1 :]),
        "".join([*lines[:at], lines[other], *lines[at:]]),
        "".join([*lines[:at], "  " + lines[at], *lines[at + 1 :]]),
        "".join([*lines[:at], lines[at].lstrip(" "), *lines[at + 1 :]]),
        "".join([*lines[:at], "\t" + lines[at], *lines[at + 1 :]]),
        "".join([*lines[:at], lines[at].rstrip("\n") + ": x\n", *lines[at + 1 :]]),
        text[:place],
        text[:place] + dice.choice("\0\x07\ufeff\u202e:{}[]&*!|>'\"%@`#-,?") + text[place:],
        text.replace("\n", "\r\n"),
        text + "---\n" + text,
        "- " + text.replace("\n", "\n  "),
        text.upper(),
        "",
    ])  # fmt: skip


def _override(tree: Any, dice: random.Random) -> str:
    """`key=value` with a key of the recipe or any, and any value."""
    if dice.random() < 0.4:
        return dice.choice(OVERRIDES)
    path, _, _ = dice.choice(list(_places(tree)))
    key = ".".join(str(part) for part in path)
    return f"{dice.choice([key, key + 's', key + '.x', key[:-1]])}={dice.choice(SCALARS)}"
