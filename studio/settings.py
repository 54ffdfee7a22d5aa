"""Studio's settings, from its command line and its environment."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_core.base.addresses import LOOPBACK, STUDIO_PORT


@dataclass(frozen=True, slots=True)
class StudioSettings:
    """Where Studio is served, and where it finds configurations, runs and modules. Paths are absolute."""

    root: Path
    """Working folder of runs; YAML files below it are offered."""
    file: Path
    checkpoints: Path
    """`checkpoint_root_dir` of the runs that are shown."""
    api_url: str = ""
    """Prefect's API (PREFECT_API_URL); if empty, runs start as processes."""
    plugin_dir: Path | None = None
    """The user's modules, which may register sections."""
    host: str = LOOPBACK
    port: int = STUDIO_PORT

    def logs_of(self, run: str) -> Path:
        """Return the folder with the output of processes that Studio started for `project/name`."""
        return self.root / ".trinity/studio/logs" / run

    def shown(self, path: Path) -> str:
        """Return a path for display: relative to the root if it is below that."""
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)


def studio_settings(arguments: Sequence[str]) -> StudioSettings:
    """Parse the settings from these arguments; relative paths start in the current directory."""
    parser = ArgumentParser("studio", description="Serve Studio's pages.")
    parser.add_argument("file", nargs="?", default="config.yaml")
    parser.add_argument("--checkpoints", default=os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR") or "checkpoints")
    parser.add_argument("--plugin-dir", default="")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=STUDIO_PORT)
    options = parser.parse_args(arguments)
    root = Path.cwd()
    checkpoints = root / Path(options.checkpoints).expanduser()
    plugin_dir = root / Path(options.plugin_dir).expanduser() if options.plugin_dir else None
    api_url = os.environ.get("PREFECT_API_URL", "")
    return StudioSettings(root, root / options.file, checkpoints, api_url, plugin_dir, options.host, options.port)
