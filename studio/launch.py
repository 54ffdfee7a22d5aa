"""A flow to start, with its parameters: as a deployment's run, or as a command on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A flow and what it is given. An empty value is left to the flow."""

    flow: str
    """`rft`, `sft`, `pipeline`, `evaluate` or `convert`."""
    config: str
    """Path of the YAML file."""
    overrides: tuple[str, ...] = ()
    stage: str = ""
    which: str = ""
    """The checkpoints that `evaluate` scores."""
    checkpoint_dir: str = ""
    """The folder in which `convert` looks for checkpoints."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a deployment's run."""
        more = {"stage": self.stage, "which": self.which, "checkpoint_dir": self.checkpoint_dir}
        given = {name: value for name, value in more.items() if value}
        return {"config": self.config, "overrides": list(self.overrides), **given}

    @property
    def command(self) -> list[str]:
        """The arguments of `trinity`."""
        if self.flow == "convert":
            return ["convert", "--checkpoint-dir", self.checkpoint_dir]
        if self.flow != "evaluate":
            return ["run", "--config", self.config, *self.overrides]
        options = {"--which": self.which, "--stage": self.stage}
        given = [word for name, value in options.items() if value for word in (name, value)]
        return ["evaluate", "--config", self.config, *given, *self.overrides]
