"""Writes checkpoints in the background: a step waits for the copy in memory, not for the disk. On a GPU, tensors that
keep their values until the next update are copied during the passes, and only that update waits for the copy.

A thread of each rank hands the copied files one by one to a separate process (`exchange/checkpoints/shard_writer.py`;
the thread writes small ones itself). It leaves the manifest entries of the written files, or a failure mark, next to
the temporary folder. Rank 0's thread waits for those of all ranks and finishes the checkpoint. If memory has no room
for the copies, a step waits until files are written. One checkpoint is written at a time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from trinity_core.base.children import CallFailed, NoAnswer, Worker
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import clear_errors, when_room, write_json
from trinity_core.base.processes import allow_open_files, free_memory, yield_cores
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.waits import Wait, poll
from trinity_core.exchange.checkpoints.commit import Entry, entry_of
from trinity_core.exchange.checkpoints.shard_writer import Piece, Segment, ShardWriter

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.exchange.pinned import CopyStream
    from trinity_core.training.distributed import Ranks

WRITE_SECONDS = 7200.0
"""Time for all ranks to write one checkpoint; equal to the time limit of a collective."""
POLL_SECONDS = 0.05
"""Polling interval for the files of other ranks."""
SPARE_MEMORY = 1 << 30
"""Bytes of host memory that copies leave free."""
PROCESS_BYTES = 32 << 20
"""Size of a file, or of a model to convert, from which a separate process writes: it takes seconds to start."""
FAILED = "failed_{}"
TARGET = "trinity_core.exchange.checkpoints.shard_writer:ShardProcess"

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of one rank. Only the writing thread calls `call` and `trim`."""

    def __init__(self, ranks: Ranks, ranks_here: int = 1) -> None:
        allow_open_files()  # Python keeps one for each chunk of a segment: 700 for 43 GB
        self._ranks = ranks
        self._ranks_here = ranks_here
        self._worker: Worker | None = None
        self._written: Future[None] | None = None
        self._segments: dict[int, Segment] = {}
        """Index of a file in its checkpoint -> its memory."""
        self._is_scarce = False
        """True if steps have waited for memory."""
        self._uses_process = False
        self._is_closed = False
        self.step = 0
        """Step of the checkpoint that is being written, or was written last."""
        self.doing = ""
        """Current activity of the writing thread, for messages."""

    @property
    def failed(self) -> bool:
        """True if the last checkpoint could not be written; `check` raises its error."""
        return self._written is not None and self._written.done() and self._written.exception() is not None

    def check(self) -> None:
        if self.failed:
            self.until_written()

    def until_written(self, seconds: float = WRITE_SECONDS) -> None:
        """Wait until the last checkpoint is complete. Raises its error, or TransientFault on timeout."""
        if self._written is None:
            return
        wait = Wait(f"the checkpoint of step {self.step} to be written")
        for _ in poll(seconds):
            if self._written.done():
                self._written.result()
                return
            wait.note(self.doing)
        raise TransientFault(
            f"the checkpoint of step {self.step} has not been written within {seconds:g} s: rank {self._ranks.rank} "
            f"{self.doing}"
        )

    def start(
        self, step: int, folder: Path, turns: list[int], largest: int, finish: Callable[[dict[str, Entry]], None],
        converted: int = 0,
    ) -> Copying:  # fmt: skip
        """Start writing the checkpoint of `step` into `folder`. The previous one must be complete.

        `turns` come from `checkpoint.writing_turns`; `largest` is the size in bytes of this rank's largest file. On
        rank 0 another thread calls `finish` with the manifest entries once the files of all ranks are written;
        `converted` is the size in bytes of the model that it converts, if any.
        """
        self.step, self.doing, self._is_closed = step, "begins", False
        self._uses_process = max(largest, converted) >= PROCESS_BYTES
        copying = Copying(self, SPARE_MEMORY + self._ranks_here * largest)
        work = _Writing(self, copying, folder, turns, finish).run
        self._written = DaemonThreads(f"checkpoint-{step}").submit(work)
        return copying

    def close(self) -> None:
        """Wait for the checkpoint that is being written, end the process and free the memory.

        Raises what `until_written` raises.
        """
        try:
            self.until_written()
        finally:
            self._end()

    def let_go(self) -> None:
        """`close` after an error: log, rather than raise, what keeps the checkpoint from being written."""
        try:
            self.close()
        except (TrinityError, TransientFault, OSError) as error:
            log.warning("the checkpoint of step %d is lost: %s", self.step, error)

    def _end(self) -> None:
        self._is_closed = True
        if self._worker is not None:
            try:
                self._worker.kill(daemons=False)
            except subprocess.TimeoutExpired:  # in the middle of a write to a disk that does not answer
                log.warning("the process that writes checkpoints (%d) does not end", self._worker.process.pid)
            self._worker = None
        self._give_back()
        self._written = None

    def segment(self, number: int, spare: int) -> Segment:
        """Return memory for the file with this index: the previous checkpoint's, or new.

        If less than `spare` bytes are free for new memory, first waits for files to be written and frees their memory.
        """
        while number not in self._segments and self._segments and free_memory() < spare:
            self._is_scarce = True
            self._segments.pop(self._written_file()).close()
        if number not in self._segments:
            self._segments[number] = Segment()
        self._segments[number].begin()
        return self._segments[number]

    def _written_file(self) -> int:
        """Wait until a file has been written; return its index."""
        wait = Wait("room in memory for a copy of the weights")
        for _ in poll(WRITE_SECONDS):
            self.check()
            wait.note(self.doing)
            for number, segment in self._segments.items():
                if segment.is_free:
                    return number
        raise TransientFault(f"memory has had no room for the checkpoint of step {self.step} for {WRITE_SECONDS:g} s")

    def trim(self) -> None:
        """Once the checkpoint is written, free memory that others may need."""
        if self._is_scarce:
            self._give_back()

    def _give_back(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments, self._is_scarce = {}, False

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `ShardWriter`. Raises TrinityError, and TransientFault if its process dies twice."""
        if not self._uses_process:
            return getattr(ShardWriter(), method)(*arguments)
        try:
            return self._ask(method, *arguments)
        except NoAnswer as error:
            self._worker = None
            if not error.died or self._is_closed:
                raise TransientFault(f"the process that writes the checkpoint of step {self.step} {error}") from error
            log.warning("the process that writes the checkpoint of step %d %s; another one continues", self.step, error)
        try:
            return self._ask(method, *arguments)
        except NoAnswer as error:
            self._worker = None
            raise TransientFault(f"the process that writes the checkpoint of step {self.step} {error}") from error

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            if self._worker is None:
                self._worker = Worker(TARGET, environment=os.environ | {"OMP_NUM_THREADS": "1"})
                self._worker.make({})
                yield_cores(self._worker.process.pid)
            return self._worker.call(method, *arguments, seconds=WRITE_SECONDS)
        except CallFailed as error:
            text = str(error) if error.is_for_users else f"writing the checkpoint of step {self.step} failed: {error}"
            raise TrinityError(text) from error


class Copying:
    """The files of one checkpoint while they are copied into memory."""

    def __init__(self, writer: CheckpointWriter, spare: int) -> None:
        self.files: SimpleQueue[tuple[Piece, Segment] | BaseException | None] = SimpleQueue()
        """Files to write; None at the end, an exception if the copy failed."""
        self.small: dict[str, bytes] = {}
        """Files that need no memory of their own."""
        self._writer, self._spare, self._count = writer, spare, 0

    def file(
        self, name: str, tensors: Iterator[tuple[str, Tensor]], metadata: dict[str, str] | None = None,
        stream: CopyStream | None = None,
    ) -> None:  # fmt: skip
        """Copy the tensors of one file, each before the next is requested; in `stream` if they keep their values that
        long."""
        segment, piece = self._writer.segment(self._count, self._spare), Piece(name, metadata=metadata)
        self._count += 1
        for tensor_name, tensor in tensors:
            segment.add(piece, tensor_name, tensor, stream)
        self.files.put((piece, segment))

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.files.put(error)


class _Writing:
    def __init__(
        self, writer: CheckpointWriter, copying: Copying, folder: Path, turns: list[int],
        finish: Callable[[dict[str, Entry]], None],
    ) -> None:  # fmt: skip
        self._writer, self._copying, self._folder, self._finish = writer, copying, folder, finish
        self._ranks, self._turns = writer._ranks, turns
        self._marks = folder.with_name(f"{folder.name}-ranks")
        """Folder in which ranks record what they have written. Its name makes it a temporary folder too."""

    def run(self) -> None:
        try:
            written = self._write_own()
            if self._ranks.first:
                for rank in range(1, self._ranks.world_size):
                    written |= self._of_rank(f"all_{rank}", rank)
                shutil.rmtree(self._marks, ignore_errors=True)
                self._writer.doing = "is finishing it"
                self._finish(written)
            self._writer.trim()
        except Exception as error:
            self._record_failure(error)
            raise

    def _write_own(self) -> dict[str, Entry]:
        written: dict[str, Entry] = {}
        while (item := self._copying.files.get()) is not None:
            if isinstance(item, BaseException):
                raise TransientFault("its copy in memory was not finished") from item
            piece, segment = item
            number = len(written)
            if any(self._turns):
                self._await_turn(number)
            segment.until_copied()
            self._writer.doing = f"writes {piece.file}"
            written[piece.file] = self._writer.call("write", str(self._folder), piece)
            segment.is_free = True
            if any(self._turns):
                self._mark(f"{number}_{self._ranks.rank}", {})
        for name, content in self._copying.small.items():
            written[name] = self._write_small(self._folder / name, content)
        if self._ranks.world_size > 1:
            self._mark(f"all_{self._ranks.rank}", written)
        return written

    def _write_small(self, path: Path, content: bytes) -> Entry:
        with clear_errors("writing", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            when_room(partial(path.write_bytes, content), path)
        return entry_of(path)

    def _await_turn(self, number: int) -> None:
        """Wait until ranks with earlier turns have written their file `number`, and the others file `number - 1`."""
        my_turn = self._turns[self._ranks.rank]
        for rank, turn in enumerate(self._turns):
            if turn < my_turn:
                self._of_rank(f"{number}_{rank}", rank)
            elif turn > my_turn and number:
                self._of_rank(f"{number - 1}_{rank}", rank)

    def _mark(self, name: str, content: dict[str, Any]) -> None:
        self._marks.mkdir(exist_ok=True)
        # Not durable: that would open the folder once more, which rank 0 removes as soon as it has read the last mark.
        write_json(self._marks / f"{name}.json", content, durable=False)

    def _of_rank(self, name: str, rank: int) -> dict[str, Any]:
        """Return what a rank has recorded under `name`. Raises the rank's error, or TransientFault on timeout."""
        self._writer.doing = f"waits for rank {rank}"
        for _ in poll(WRITE_SECONDS, POLL_SECONDS):
            for mark in (FAILED.format(rank), f"all_{rank}", name):
                with suppress(FileNotFoundError):
                    content: dict[str, Any] = json.loads((self._marks / f"{mark}.json").read_text())
                    if mark == FAILED.format(rank):
                        kind = TrinityError if content["is_final"] else TransientFault
                        raise kind(f"rank {rank}: {content['error']}")
                    return content
        raise TransientFault(f"rank {rank} has not written its part of the checkpoint within {WRITE_SECONDS:g} s")

    def _record_failure(self, error: Exception) -> None:
        if not self._ranks.first:
            with suppress(OSError, TrinityError):
                failure = {"error": str(error), "is_final": isinstance(error, TrinityError)}
                self._mark(FAILED.format(self._ranks.rank), failure)
