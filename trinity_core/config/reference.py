"""All settings, written from the schema: as a page (`python -m trinity_core.config.reference [FILE]`), and as text for
a terminal (`trinity schema`)."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.foreign.table import accepted_keys
from trinity_core.config.schema import Config
from trinity_core.errors import TrinityError, closest

WIDTH = 100
"""Columns of the text for a terminal."""
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

One YAML file describes a run. This page lists every setting. It is generated from the schema
(`python -m trinity_core.config.reference`), the one place that has each setting's meaning, choices, bounds and default.

```bash
trinity run --config configs/gsm8k/gsm8k.yaml                           # run it
trinity run --config configs/gsm8k/gsm8k.yaml buffer.total_steps=10     # with an override
trinity validate --config configs/gsm8k/gsm8k.yaml                      # only check it
```

**Values.** `${oc.env:NAME,default}` is an environment variable, `${model.model_path}` another setting (OmegaConf's
interpolation). Numbers are those of YAML 1.2: `1e-6` is a number, `1_000` and `12:30` are text. A setting whose type is
text keeps what was written: `name: 1.10` names the run 1.10. Relative paths start from the folder in which the command
runs. "derived" as a default means that the value follows from other settings when the file is loaded.

**Overrides** have the form `key.path=value`, where the value is YAML. An entry of a list is addressed by its index or
its name: `buffer.explorer_input.eval_tasksets.gsm8k-eval.repeat_times=4`, `stages.sft_warmup.buffer.total_steps=5`.

**Editors.** `configs/schema.json` (`trinity schema --json`) is the JSON Schema of these files. An editor with a YAML
language server, such as VS Code with the YAML extension, completes and checks a file whose first line names it:
`# yaml-language-server: $schema=../schema.json`. `trinity schema buffer` lists the settings of a section.

**Checks.** All problems are reported together, before anything starts, each with its file, line and key:

```text
The configuration has 2 problems:
  - run.yaml:4: algorithm.repeat_time: is not a known key. Did you mean 'repeat_times'?
  - run.yaml:9: model.min_response_tokens: must be less than max_response_tokens, which is 16; it is 32.
```

Then what the configuration names is opened: model folders must be whole (every file of weights as long as its header
says), names on the hub must exist or be in the cache, of each data set one of the first 16 rows must fit `format`,
sequences may be no longer than the model has positions, workflows and others with a dotted path must be importable,
folders must be writable, the API's port free, and this machine must have the GPUs. `trinity run` and every flow do this
before they start anything. `trinity validate` does it too, without `--offline`; it exits with 0 or 2, `--json` is for
programs. Of a Ray cluster that is joined only the run's folder is looked at, since its nodes open the rest.

`python benchmarks/mutations.py` makes 10,000 random mistakes in the recipes, in overrides and in the environment, and
fails if one ends in a traceback, is reported without its key, or takes 2 s.

A setting that is valid but has no effect, or that changes another setting, causes a notice, which `trinity validate`
prints and a run logs as a warning.

**Folders.** A run keeps everything in `<checkpoint_root_dir>/<project>/<name>/`. Its experience store is a SQLite
database in `buffer/` there, or what `buffer.trainer_input.experience_buffer.path` says.

**Stages** run one after another, each from the model that the stage before has produced. A stage inherits the sections
above it key by key; lists, a `taskset` and an `experience_buffer` are replaced as a whole, except by an override of one
key within them, which starts from what the stage inherits. A stage with another
`algorithm_type` inherits only the optimizer from `algorithm`, and a stage that says how long it trains (`total_steps`,
`total_epochs`) inherits no other length. The run of a stage is called `<name>_<stage_name>` and has its own folder
beside those of the other stages.

**Algorithms** are named sets of defaults over parts (advantage, losses, aggregation …) that can each be replaced.
Arguments that you give are merged into the algorithm's own: `policy_loss_fn_args: {clip_range: 0.1}` changes only the
clip range. A replaced part starts from its own defaults. An argument that a part does not take is reported like an
unknown key, for your own parts in `plugin_dir` too.

**Trinity-RFT and veRL.** Their files are read as they are. A key that has another place or another name on this page
sets what it is called here. A key without effect is accepted, and a notice says why: what it asks for is so in any
case, or it concerns a backend that is not used here. What cannot be had is refused, with the reason and what to write.
`trainer.trainer_config` takes a veRL trainer configuration, also a whole generated one; a key on this page wins where
both are given. `trinity_core/config/foreign` has the verdict on each key. `trinity import-verl` turns a whole veRL
script or Hydra file into a configuration ([porting](porting.md#a-verl-run)).
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, *_section(Config, "", 2, {})]).rstrip() + "\n"


def _section(cls: type, key: str, level: int, shown: dict[type, str]) -> list[str]:
    """Heading, doc and table of a section, then the sections below it that are not `shown` yet."""
    shown[cls] = key
    listed = settings(cls)
    below = {
        setting.name: (f"{key}.{setting.name}" if key else setting.name) + _entry(setting)
        for setting in listed
        if setting.section is not None
    }
    lines = [f"{'#' * min(level, 4)} {f'`{key}`' if key else 'The whole file'}", "", *_doc(cls), ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [_row(setting, shown) for setting in listed]
    if key.startswith("trainer.trainer_config."):
        lines += [f"| `{name}` |  |  | {text} |" for name, text, native in accepted_keys(cls) if native]
    lines += [""]
    for setting in listed:
        if setting.section is not None and setting.section not in shown:
            lines += _section(setting.section, below[setting.name], level + 1, shown)
    return lines


def _entry(setting: Setting) -> str:
    """How an entry of a list or of a mapping of sections is written after its key."""
    if setting.kind == "array":
        return "[i]"
    return ".NAME" if setting.default == {} else ""


def _doc(cls: type) -> list[str]:
    return (inspect.getdoc(cls) or "").splitlines()


def _row(setting: Setting, shown: dict[type, str]) -> str:
    meaning = setting.doc
    if setting.section is not None and setting.section in shown:
        meaning += f" As `{shown[setting.section]}`."
    cells = (f"`{setting.name}`", value_text(setting), default_text(setting), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def value_text(setting: Setting) -> str:
    """What a value may be."""
    if setting.section is not None:
        kinds = {"[i]": "list of sections", ".NAME": "sections by name"}
        return kinds.get(_entry(setting), "section")
    if setting.choices or setting.names:
        return ", ".join(f"`{choice}`" for choice in setting.choices or setting.names)
    words = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "array": "list"}
    text = "text or list" if setting.takes_text_or_list else words.get(setting.kind, "keys and values")
    bounds = f", {setting.bounds}" if setting.bounds else ""
    unit = f" of {setting.unit}" if setting.unit else ""
    return f"{text}{unit}{bounds}"


def default_text(setting: Setting) -> str:
    """The default, empty if there is none to speak of."""
    if setting.section is not None:
        return ""
    if setting.derived:
        return "derived"
    return "null" if setting.default is None else f"`{_plain(setting.default)}`"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def listing(below: str = "") -> str:
    """Each setting with its values, default and doc; `below` is a key: its setting, or those of its section.

    Raises TrinityError if there is no such key.
    """
    rows = [
        (key, text)
        for key, text in _listed()
        if not below or key == below or key.startswith((f"{below}.", f"{below}["))
    ]
    if not rows:
        known = [key for key, _ in sections()] + [key for key, _ in _listed()]
        meant = closest(below, known)
        raise TrinityError(f"There is no setting '{below}'.{f' Did you mean {meant!r}?' if meant else ''}")
    return "\n".join(text for _, text in rows)


def _listed() -> Iterator[tuple[str, str]]:
    for prefix, section in sections():
        for setting in settings(section):
            if setting.section is not None:
                continue
            key = f"{prefix}.{setting.name}" if prefix else setting.name
            default = default_text(setting)
            head = f"{key}: {value_text(setting)}{f' [{default}]' if default else ''}"
            doc = textwrap.fill(setting.doc, WIDTH, initial_indent="    ", subsequent_indent="    ")
            yield key, f"{head}\n{doc}".replace("`", "")


def main() -> None:
    """Write the page."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
