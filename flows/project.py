"""`trinity init`: creates a folder with recipes, `prefect.yaml` and docs, in which every command works as in a
clone."""

from __future__ import annotations

import shutil
from pathlib import Path

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import project_files

TOP = Path(__file__).parent.parent
COPIED = ("configs", "docs", "prefect.yaml", "requirements/data-juicer.sh", "requirements/data-juicer.txt")
PACKAGES = ("flows", "tasks", "studio", "trinity_core")
README = """# {name}

Reinforcement fine-tuning with Trinity Flows. In this folder:

    trinity quickstart                             # SFT, GRPO, evaluation, conversion of a tiny model, in minutes
    trinity up                                     # Prefect, all deployments, MLflow, Studio; `trinity down` ends them
    trinity run --config configs/gsm8k/gsm8k.yaml  # one run, no server needed
    trinity --help

`configs/` holds recipes to copy and change, `docs/` a page per topic, `prefect.yaml` the deployments.
"""
SETTINGS_FILE = "prefect.toml"
WRITTEN = "# Written by `trinity up`"
SETTINGS_NOTE = f"{WRITTEN}, `down` and `init`: tells `prefect` in this folder where a server runs, if one does.\n"
NO_SERVER = f"{SETTINGS_NOTE}[server.ephemeral]\nenabled = false\n"
"""Settings while no server runs: `prefect` says so at once. Otherwise it would start one without our deployments."""
IGNORED = "/runs/\n/checkpoints/\n/.trinity/\n/prefect.toml\n"


def init_project(folder: Path) -> Path:
    """Create a project in the new folder `folder` and return it.

    Raises TrinityError, without writing anything, if one of its files already exists.
    """
    source = project_files()
    texts = {"README.md": README.format(name=folder.absolute().name), ".gitignore": IGNORED, SETTINGS_FILE: NO_SERVER}
    if there := [name for name in (*COPIED, *texts) if (folder / name).exists()]:
        raise TrinityError(
            f"{folder} already has {', '.join(there)}, which `trinity init` would write: choose a new folder"
        )
    copy_project(source, folder)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def copy_project(source: Path, folder: Path) -> None:
    """Copy `COPIED` into `folder`, creating it if needed. `setup.py` uses this for the wheel."""
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "pictures")
            shutil.copytree(source / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(source / name, folder / name)


def require_own_packages(root: Path) -> None:
    """Raise TrinityError if a module in `root` would shadow one of our packages.

    The worker's flow runs have the folder of the deployments first on their path.
    """
    for name in PACKAGES:
        here = (TOP / name).resolve()
        for other in (root / name, root / f"{name}.py"):
            if other.exists() and other.resolve() != here and (other.suffix or (other / "__init__.py").exists()):
                raise TrinityError(f"{other} hides the package {name} of Trinity Flows from runs in {root}: rename it")
