"""Adds what `trinity init` writes to the wheel: recipes, `prefect.yaml` and docs. All else is in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # a build does not look beside this file

from flows.project import copy_project  # noqa: E402


class BuildWithProject(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a clone has them at its top
            return
        target = Path(self.build_lib) / "flows" / "project"  # where `files.project_files` looks
        shutil.rmtree(target, ignore_errors=True)
        copy_project(HERE, target)


setup(cmdclass={"build_py": BuildWithProject})
