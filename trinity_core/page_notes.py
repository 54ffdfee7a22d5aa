"""Files next to the checkpoints that say where `trinity up` serves a page, there while it is served."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from trinity_core.addresses import LOOPBACK, STUDIO_PORT
from trinity_core.files import read_json

ROLLOUTS = "/rollouts"
"""Where Studio serves the page of sampled rollouts, below its own address."""


def page_note(checkpoint_root_dir: Path, page: str) -> Path:
    """The note of a page: `url`, its address, and `uri`, the store that it shows, if that is one."""
    return checkpoint_root_dir / f"{page}_page.json"


def read_page_note(checkpoint_root_dir: Path, page: str) -> dict[str, Any]:
    """What the note says; empty while the page is not served."""
    return read_json(page_note(checkpoint_root_dir, page)) or {}


def mlflow_address(checkpoint_root_dir: Path, uri: str) -> str:
    """Where `trinity up` serves the MLflow store `uri`; empty while it serves none, or another."""
    note = read_page_note(checkpoint_root_dir, "mlflow")
    return str(note["url"]) if note.get("uri") == uri else ""


def studio_links(checkpoint_root_dir: Path, run: str) -> list[str]:
    """Markdown: the page and the rollouts of a run, `project/name`, in Studio; while that is not served, the page by
    its usual address, and commands."""
    served = read_page_note(checkpoint_root_dir, "studio").get("url")
    studio = served or f"http://{LOOPBACK}:{STUDIO_PORT}"
    page = f"[Run in Studio]({studio}/runs?{urlencode({'run': run})})"
    if served:
        return [page, f"[Rollouts]({studio}{rollouts_page(run)})"]
    folder = shlex.quote(str(checkpoint_root_dir / run))
    return [f"{page} after `trinity up`", f"Rollouts: `trinity view --checkpoint-dir {folder}`"]


def rollouts_page(run: str, other: str = "", token: str = "") -> str:
    """The path of a run's sampled rollouts in Studio, next to those of `other` if given (`project/name`)."""
    query = f"?{urlencode({'token': token})}" if token else ""
    compared = {"tab": "samples", "other": other} if other else {}
    return f"{ROLLOUTS}/{query}#{urlencode({'run': run} | compared)}"
