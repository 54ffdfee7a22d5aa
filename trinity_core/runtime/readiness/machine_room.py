"""Whether this machine has what a run takes of it: folders to write to, a free port, GPUs."""

from __future__ import annotations

import errno
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trinity_core.config import Config
from trinity_core.config.paths import explored_file, operator_input_file
from trinity_core.config.task_output import output_root, uses_pipeline
from trinity_core.errors import TrinityError
from trinity_core.runtime.gpus import survey
from trinity_core.runtime.placement import Machine, place, weakest
from trinity_core.runtime.readiness.obstacle import Obstacle

PORT = "explorer.api_port"


def unwritable_folders(config: Config) -> Iterator[Obstacle]:
    """The folders of a run that cannot be made or written to. Each is tried where it would be, and nothing is left."""
    pipeline = config.data_processor.task_pipeline
    wanted: list[tuple[str, str, Path | None]] = [
        ("checkpoint_root_dir", config.checkpoint_root_dir, config.job_dir),
        ("buffer.trainer_input.experience_buffer.path", "", _folder_of(explored_file(config))),
        ("data_processor.experience_pipeline.input_save_path", "", _folder_of(operator_input_file(config))),
    ]
    if pipeline is not None and uses_pipeline(config):
        wanted.append(("data_processor.task_pipeline.output.path", pipeline.output.path or "", output_root(config)))
    for key, value, folder in wanted:
        if folder is not None and (fault := folder_fault(folder)):
            yield Obstacle(key, value, fault)


def folder_fault(folder: Path) -> str:
    """Why a folder cannot be made or written to; empty if it can."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        return f"{folder} cannot be made: {there} is a file; choose another folder."
    try:
        with tempfile.TemporaryDirectory(prefix=".trinity-", dir=there):
            return ""
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"there is no room in {there} ({error.strerror}); make room, or choose another folder."
        what = "cannot be written to" if there == folder else "cannot be made"
        return f"{folder} {what} ({error.strerror or error}); choose another folder."


def busy_port(config: Config) -> Iterator[Obstacle]:
    """The OpenAI API's port, if something else listens there."""
    explorer = config.explorer
    host, port = explorer.listen_address, explorer.api_port
    if not (explorer.rollout_model.enable_openai_api and port and config.explores):
        return
    try:
        family, kind, protocol, _, place_of = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place_of)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use; choose another, or leave it out for one that is free."
            yield Obstacle(PORT, port, message, passes=True)
        else:
            yield Obstacle("explorer.listen_address", host, f"{host}:{port} cannot be listened at: {error.strerror}.")


def missing_gpus(config: Config, cpus: int) -> Iterator[Obstacle]:
    """That the run asks for more GPUs than this machine has. Which are free is asked when it starts."""
    gpus = 0 if config.cluster.gpu_per_node == 0 else len(survey())
    try:
        place(config, weakest([Machine(cpus, gpus)], config.cluster.node_num))
    except TrinityError as error:
        yield Obstacle("cluster", config.cluster.gpu_per_node, str(error))


def _folder_of(file: Path | None) -> Path | None:
    return None if file is None else file.parent
