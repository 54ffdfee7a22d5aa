"""Adds what `trinity init` writes to the wheel: recipes, `prefect.yaml` and docs. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

COPIED = ("configs", "docs", "prefect.yaml", "requirements/data-juicer.sh", "requirements/data-juicer.txt")
"""From the top of the repository into `flows/project`, where `local_paths.project_files` finds them when installed."""


class BuildWithProject(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a clone has them at its top
            return
        target = Path(self.build_lib) / "flows" / "project"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in COPIED:
            if Path(name).is_dir():
                shutil.copytree(name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "pictures"))
            else:
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copy2(name, target / name)


setup(cmdclass={"build_py": BuildWithProject})
