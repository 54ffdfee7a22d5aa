"""Older weight versions in a checkpoint: those that the explorer's next steps still need after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_core.files import clear_errors, when_room
from trinity_core.sync.weight_check import WeightCheck

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.sync.versions import WeightVersions

NAME = "rollout_weights"
"""Beginning of the names of the files, which hold one version each; checkpoints of older releases have one file."""


def keep(versions: WeightVersions, version: int, checkpoint: Path) -> None:
    """Copy `version` with its weight check into the folder `checkpoint`."""
    from safetensors.torch import save_file

    check = versions.check(version)
    metadata = {"version": str(version), "check": json.dumps(None if check is None else check.to_json())}
    tensors = {name: tensor.clone() for name, tensor in versions.load(version)}
    path = checkpoint / f"{NAME}_{version}.safetensors"
    with clear_errors("writing", path):
        when_room(lambda: save_file(tensors, path, metadata), path)


def kept(checkpoint: Path) -> dict[int, Path]:
    """The file of each version that `checkpoint` holds. A file without a version is of no use."""
    from safetensors import safe_open

    found: dict[int, Path] = {}
    for path in checkpoint.glob(f"{NAME}*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if version := (file.metadata() or {}).get("version"):
                found[int(version)] = path
    return found


def read(path: Path) -> tuple[WeightCheck | None, dict[str, Tensor]]:
    """Weight check and tensors of the version in `path`."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        check = json.loads(metadata.get("check") or metadata["probe"])  # "probe" in checkpoints of older releases
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    return None if check is None else WeightCheck.from_json(check), tensors
