"""What Studio is served with, from its command line and its environment; who may use it beyond this machine."""

from __future__ import annotations

import ipaddress
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from trinity_core.addresses import LOOPBACK, STUDIO_PORT


@dataclass(frozen=True, slots=True)
class StudioSettings:
    """Where Studio is served, and where it finds configurations, runs and modules. Paths are absolute."""

    root: Path
    """Runs start here; YAML files below it are offered."""
    file: Path
    """The configuration that is opened first; it need not exist."""
    checkpoints: Path
    """`checkpoint_root_dir` of the runs that are shown."""
    state: Path
    """Unsaved changes, and logs of the processes that Studio has started."""
    api_url: str = ""
    """Prefect's API (PREFECT_API_URL); empty: there is none, and runs start as processes."""
    plugin_dir: Path | None = None
    """The user's modules, which may register sections."""
    host: str = LOOPBACK
    port: int = STUDIO_PORT

    @property
    def drafts(self) -> Path:
        """Folder of unsaved changes."""
        return self.state / "drafts"

    def flow_run_page(self, run: str) -> str:
        """Address of a flow run's page in Prefect."""
        return f"{self.api_url.removesuffix('/api')}/runs/flow-run/{run}"

    def logs_of(self, run: str) -> Path:
        """Folder of what the processes that Studio has started for `project/name` have printed."""
        return self.state / "logs" / run

    def shown(self, path: Path) -> str:
        """A path as a person reads it: relative to the root if it is below that."""
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)


def studio_settings(arguments: Sequence[str]) -> StudioSettings:
    """The settings that these arguments name; relative paths are below the current directory."""
    parser = ArgumentParser("studio", description="Serve Studio's pages.")
    parser.add_argument("file", nargs="?", default="config.yaml")
    parser.add_argument("--checkpoints", default=os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR") or "checkpoints")
    parser.add_argument("--plugin-dir", default="")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=STUDIO_PORT)
    options = parser.parse_args(arguments)
    root = Path.cwd()
    return StudioSettings(
        root=root,
        file=root / options.file,
        checkpoints=root / Path(options.checkpoints).expanduser(),
        state=root / ".trinity/studio",
        api_url=os.environ.get("PREFECT_API_URL", ""),
        plugin_dir=root / Path(options.plugin_dir).expanduser() if options.plugin_dir else None,
        host=options.host,
        port=options.port,
    )


TOKEN_VARIABLE = "TRINITY_STUDIO_TOKEN"  # noqa: S105 - the name of a variable
"""Holds the token, which no list of processes shows; empty where none is asked for."""


def is_local(host: str) -> bool:
    """True if only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def admits(token: str, attempt: str) -> bool:
    """True if `attempt` is the token, or none is asked for."""
    return not token or compare_digest(attempt.encode(), token.encode())
