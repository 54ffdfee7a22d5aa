"""Files next to the checkpoints with the addresses of the pages of `trinity up`. They exist while a page is served."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from trinity_core.addresses import LOOPBACK, STUDIO_PORT
from trinity_core.files import read_json

ROLLOUTS = "/rollouts"


def page_note(checkpoint_root_dir: Path, page: str) -> Path:
    """Return the file for a page. It holds `url`, the address, and for MLflow `uri`, the store that the page shows."""
    return checkpoint_root_dir / f"{page}_page.json"


def read_page_note(checkpoint_root_dir: Path, page: str) -> dict[str, Any]:
    return read_json(page_note(checkpoint_root_dir, page)) or {}


def mlflow_address(checkpoint_root_dir: Path, uri: str) -> str:
    """Return the address where `trinity up` serves the MLflow store `uri`, or ""."""
    note = read_page_note(checkpoint_root_dir, "mlflow")
    return str(note["url"]) if note.get("uri") == uri else ""


def studio_links(checkpoint_root_dir: Path, run: str) -> list[str]:
    """Return Markdown links to a run (`project/name`) and its rollouts in Studio. While Studio is not served, they give
    its usual address and commands instead."""
    served = read_page_note(checkpoint_root_dir, "studio").get("url")
    studio = served or f"http://{LOOPBACK}:{STUDIO_PORT}"
    page = f"[Run in Studio]({studio}/runs?{urlencode({'run': run})})"
    if served:
        return [page, f"[Rollouts]({studio}{rollouts_page(run)})"]
    folder = shlex.quote(str(checkpoint_root_dir / run))
    return [f"{page} after `trinity up`", f"Rollouts: `trinity view --checkpoint-dir {folder}`"]


def rollouts_page(run: str, other: str = "", token: str = "") -> str:
    """Return the path of a run's sampled rollouts in Studio, next to those of `other` (`project/name`) if given."""
    query = f"?{urlencode({'token': token})}" if token else ""
    compared = {"tab": "samples", "other": other} if other else {}
    return f"{ROLLOUTS}/{query}#{urlencode({'run': run} | compared)}"
