"""`trinity quickstart`: creates a tiny model and its data, runs the whole pipeline, and writes a summary."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from shutil import which
from typing import Any

from flows.local.connection import PrefectConnection
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import private_folder, read_json, write_json
from trinity_core.config import stages
from trinity_core.data.tiny import make_tiny
from trinity_core.run.configuration import load_checked

DEFAULT_OUT = Path("runs/quickstart")
NOTE = "quickstart.json"
"""File in each folder of a quick start that records its seed."""
VIEWERS = ("xdg-open", "open")


def quickstart(out: Path, seed: int, config: Path) -> str:
    """Create model and data in `out` and run the pipeline; return the summary as text, also written to
    `<out>/summary.json`.

    The run's folder is below the one that `trinity up` shows, named `run_name`. Raises TrinityError if `out` or the run
    belongs to another seed, or if the configuration does not exist.
    """
    if not config.is_file():
        raise TrinityError(f"There is no {config} here. `trinity init FOLDER` makes a project; go there and try again.")
    began = time.monotonic()
    out = out.expanduser()
    checkpoints = Path(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR") or "checkpoints").expanduser()
    overrides = [
        f"seed={seed}",
        f"name={run_name(out)}",
        f"checkpoint_root_dir={checkpoints}",
        f"model.model_path={out / 'model'}",
    ]
    os.environ["TRINITY_TASKSET_PATH"] = str((out / "data").absolute())
    with PrefectConnection() as prefect:
        checked = load_checked(config, overrides)
        claim(out, seed, [checked.job_dir, *(stage.job_dir for stage in stages(checked))])
        make_tiny(out, seed)
        prepared = time.monotonic()
        result = prefect.run("pipeline", checked, config, overrides)
    summary = summarise(result, prepared - began, time.monotonic() - began)
    write_json(out / "summary.json", summary)
    return as_text(summary, out)


def run_name(out: Path) -> str:
    """Return the last part of `out`, with eight hexadecimal digits of its path unless it is `DEFAULT_OUT`.

    All runs are in one folder, and `a/first` and `b/first` are different runs.
    """
    name = re.sub(r"[^\w.-]+", "-", out.absolute().name)
    if out.absolute() == DEFAULT_OUT.absolute():
        return name
    return f"{name}_{sha256(str(out.resolve()).encode()).hexdigest()[:8]}"


def claim(out: Path, seed: int, run_folders: Sequence[Path] = ()) -> None:
    """Record the seed in `out` and the folders of the run and its stages.

    Raises TrinityError, without recording anything, if one of them belongs to another seed.
    """
    folders = list(dict.fromkeys([out, *run_folders]))
    for folder in folders:
        note = read_json(folder / NOTE)
        if note.get("seed", seed) != seed:
            another = shlex.quote(f"OUT={out}_{seed}")
            there = shlex.join(str(folder) for folder in folders if folder.exists())
            raise TrinityError(
                f"{folder} holds the quick start of seed {note['seed']}. Give seed {seed} its own folder "
                f"(`make quickstart SEED={seed} {another}` or `trinity quickstart --out`), or remove what is there: "
                f"`rm -r {there}`."
            )
    for folder in folders:
        private_folder(folder)
        write_json(folder / NOTE, {"seed": seed})


def summarise(result: dict[str, Any], prepared: float, total: float) -> dict[str, Any]:
    """Return the summary with fixed keys, from the pipeline's result and the seconds before and including it.

    `other` is the time of Prefect's start, and of what its flows do before, between and after the stages.
    `weights_digest` is the SHA-256 over the final tensors in order of their names (see
    `trinity_core.exchange.checkpoints.huggingface`).
    """
    from trinity_core.exchange.checkpoints.huggingface import tensors_sha256

    scores, parts = result["scores"], {**result["stage_seconds"], "model and data": prepared}
    seconds = {**parts, "other": max(total - sum(parts.values()), 0.0), "total": total}
    return {
        "accuracy_base": scores["before"],
        "accuracy_sft": scores["sft"],
        "accuracy_rft": scores["rft"],
        "steps": result["steps"],
        "stage_seconds": {name: round(value, 1) for name, value in seconds.items()},
        "checkpoint_dir": result["checkpoint_dir"],
        "hf_dir": result["hf_dir"],
        "mlflow_uri": result["tracking_uri"],
        "curve": result["curve"],
        "weights_digest": tensors_sha256(Path(result["hf_dir"])),
    }


def as_text(summary: dict[str, Any], out: Path) -> str:
    """Format the summary on one screen, with commands that work without an activated environment."""
    accuracy = "  ".join(
        f"{title} {summary[key]:.3f}"
        for title, key in (("base", "accuracy_base"), ("SFT", "accuracy_sft"), ("RFT", "accuracy_rft"))
    )
    from trinity_core.run.summary import named_stages

    seconds = "  ".join(f"{name} {value:.0f} s" for name, value in named_stages(summary["stage_seconds"]).items())
    steps = "  ".join(f"{name} {value}" for name, value in summary["steps"].items())
    python, trinity = shown(sys.executable), shlex.quote(shown(str(Path(sys.executable).with_name("trinity"))))
    model = f"transformers.AutoModelForCausalLM.from_pretrained({json.dumps(shown(summary['hf_dir']))})"
    store, curve = summary["mlflow_uri"], summary["curve"]
    viewer = next(filter(which, VIEWERS), None)
    rows = {
        "accuracy": [accuracy],
        "steps": [steps],
        "time": [seconds],
        "checkpoint": [summary["checkpoint_dir"], shlex.join(["ls", "-R", shown(summary["checkpoint_dir"])])],
        "converted": [summary["hf_dir"], shlex.join([python, "-c", f"import transformers; print({model})"])],
        "MLflow": [store or "not used (monitor.monitor_type)"],
        "curve": [curve, shlex.join([viewer, shown(curve)])] if curve and viewer else [str(curve)],
        "summary": [str(out / "summary.json")],
        "pages": ["all of this in Studio and MLflow, the rollouts, and a form for runs of your own", f"{trinity} up"],
    }
    return "\n" + "\n".join(f"{name:11} " + "\n            ".join(lines) for name, lines in rows.items())


def shown(path: str) -> str:
    return min(os.path.relpath(path), path, key=len)
