"""Opens the experience store of a run. The run's identity determines its tables.

The identity is a small file in the run's folder, created when the run first starts. It moves with the folder and its
checkpoints. The folder's path is no identity: another machine may have another run at the same path.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import NAMESPACE_OID, uuid4, uuid5

from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.files import from_record, write_json
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import one_at_a_time
from trinity_core.config import Config, store_url
from trinity_core.exchange.store.database import is_of_one_machine, parsed_url
from trinity_core.exchange.store.presence import SEEN_SECONDS
from trinity_core.exchange.store.store import ExperienceStore

log = logging.getLogger(__name__)

LOCK = ".identity.lock"


@dataclass(frozen=True)
class Identity:
    """Identity of a run, stored in its folder."""

    id: str
    namespace: str
    """Namespace of its tables in the store's database."""
    folder: str
    """The folder's path, links resolved, when the run last started."""
    inode: int
    """The folder's inode at that time. Together with `folder` it tells a moved folder from a copy."""


def open_run_store(config: Config) -> ExperienceStore:
    """Open the store of a configuration's run, creating it and the run's folder if needed."""
    namespace = identify(config).namespace
    config.layout.create()
    return ExperienceStore.open(store_url(config), namespace, config.synchronizer.sync_timeout)


@contextmanager
def present(note: Callable[[], object], who: str) -> Iterator[None]:
    """Within this context, call `note` (see `ExperienceStore.mark_seen`) at once and then every few seconds.

    Its errors are only logged: a store that is temporarily away must not end the run.
    """
    done = threading.Event()

    def keep_noting() -> None:
        while True:
            try:
                note()
            except (TransientFault, TrinityError) as fault:
                log.warning("%s cannot note that it is at work: %s", who, fault)
            if done.wait(SEEN_SECONDS):
                return

    noting = threading.Thread(target=keep_noting, name="presence", daemon=True)
    noting.start()
    try:
        yield
    finally:
        done.set()
        noting.join(SEEN_SECONDS)


def identify(config: Config) -> Identity:
    """Return the identity of a configuration's run, creating it if needed.

    Raises TrinityError for a copied run folder if both runs would share a store.
    """
    folder = config.job_dir
    identity = read_identity(folder)
    if identity is not None and _is_here(identity, folder):
        return identity
    with one_at_a_time(folder / LOCK):
        identity = read_identity(folder)
        if identity is None:
            identity = _first(config)
        elif _is_copy(identity, folder):
            identity = _branched(identity, config)
        here = replace(identity, folder=str(folder.resolve()), inode=folder.stat().st_ino)
        write_json(JobLayout(folder).identity, asdict(here))
    return here


def read_identity(folder: Path) -> Identity | None:
    """Return the identity of the run in a folder, or None. Raises DataError if it is unreadable."""
    path = JobLayout(folder).identity
    try:
        return from_record(Identity, json.loads(path.read_bytes()), path)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is damaged, so the run's store is not known: restore that file ({error})", key=str(path)
        ) from error


def identity_of(folder: Path) -> str:
    """Return the id of the run in a folder; for a copy, the id that it will get when started. Empty if there is none
    yet."""
    identity = read_identity(folder)
    if identity is None or not _is_copy(identity, folder):
        return identity.id if identity else ""
    return uuid5(NAMESPACE_OID, f"{identity.id} {folder.resolve()} {folder.stat().st_ino}").hex


def file_owner(config: Config, path: Path) -> dict[str, str]:
    """Return the owner of an explorer's file: the explorer, plus the run if the file is outside the run's folder."""
    explorer = {"explorer": config.explorer.name}
    if path.resolve().is_relative_to(config.job_dir.resolve()):
        return explorer
    return explorer | {"run": identify(config).id}


def is_own_file(url: str, folder: Path) -> bool:
    """True if the database is a file in the run's `buffer` folder, and so is copied with the folder."""
    parsed = parsed_url(url)
    buffer = JobLayout(folder).buffer.resolve()
    return is_of_one_machine(url) and Path(parsed.database or "").resolve().parent == buffer


def _is_here(identity: Identity, folder: Path) -> bool:
    return identity.folder == str(folder.resolve()) and identity.inode == folder.stat().st_ino


def _is_copy(identity: Identity, folder: Path) -> bool:
    """True if the folder was copied, and the original still exists at its old path."""
    original = Path(identity.folder)
    if identity.folder == str(folder.resolve()) or identity.inode == folder.stat().st_ino or not original.is_dir():
        return False
    original_identity = read_identity(original)
    return original_identity is not None and original_identity.id == identity.id


def _branched(identity: Identity, config: Config) -> Identity:
    """Return the identity of a copied run folder: a separate run, whose store is the copied file."""
    if not config.is_supervised and not is_own_file(store_url(config), config.job_dir):
        raise TrinityError(
            f"{config.job_dir} is a copy of {identity.folder}, and both would write the same store in their database "
            f"(buffer.trainer_input.experience_buffer.path). Remove one of the two folders, or begin a run with "
            "another `name` from the checkpoint's weights: model.model_path = .../global_step_N/actor/huggingface",
            key="name",
        )
    return replace(identity, id=identity_of(config.job_dir))


def _first(config: Config) -> Identity:
    new = uuid4().hex
    return Identity(new, f"{new}/{config.project}/{config.name}", "", 0)
