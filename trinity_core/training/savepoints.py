"""Saves checkpoints atomically, keeps the best and newest, and finds the one to resume from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trinity_core.checkpoints.beginning import (
    OTHER_BASE,
    OTHER_REFERENCE,
    Beginning,
    recorded_beginning,
    refuse_other_model,
)
from trinity_core.checkpoints.commit import Entry, begin, commit
from trinity_core.checkpoints.resume import abandon_after, latest_whole, update_meta, whole_steps
from trinity_core.config.schema import Config, ModelConfig
from trinity_core.data.tokenizer import configured_chat_template, write_stop_tokens
from trinity_core.errors import TrinityError
from trinity_core.files import clear_errors, when_room
from trinity_core.tracking.scores import best_steps
from trinity_core.training import checkpoint
from trinity_core.training.distributed import Ranks, broadcast_bytes
from trinity_core.training.saving import CheckpointWriter

if TYPE_CHECKING:
    from trinity_core.training.learner import Learner
    from trinity_core.training.publish import Publisher


log = logging.getLogger(__name__)


def nothing() -> None:
    """Do nothing."""


class Savepoints:
    """The checkpoints of one run that trains `lm`. Collective; rank 0 creates and commits the folders."""

    def __init__(self, config: Config, ranks: Ranks, lm: Any) -> None:
        self.layout = config.layout
        self.config = config
        self._model_files = make_model_files(lm, config.model) if ranks.first else {}
        self.keep = config.trainer.max_checkpoints_to_keep
        self.ranks = ranks
        self.began = Beginning.of(config.model.model_path)
        """The model that training started from, even after a resume with another `model_path`."""
        self._turns = checkpoint.writing_turns(config.trainer.save_strategy, ranks)
        nodes = checkpoint.nodes_of(ranks)
        self.writer = CheckpointWriter(ranks, nodes.count(nodes[ranks.rank]))

    def save(
        self, learner: Learner, step: int, publisher: Publisher | None, last: bool = False,
        before_commit: Callable[[], None] = nothing, after_commit: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        """Copy the state after `step`; a background thread writes it and makes it the latest checkpoint.

        `last`: training ends with this step. On rank 0 another thread calls `before_commit` once all other files are on
        disk, and `after_commit` once the checkpoint has its final name. Waits for the previous checkpoint first and
        raises its error.
        """
        self.writer.until_written()
        folder = str(begin(self.layout, step)) if self.ranks.first else ""
        temporary = Path(broadcast_bytes(folder.encode() if self.ranks.first else None, self.ranks).decode())
        converts = learner.settings.save_huggingface in (("always", "last") if last else ("always",))
        began = self.began

        def finish(written: dict[str, Entry]) -> None:
            write_model_files(self._model_files, temporary / "actor" / "huggingface")
            if converts:
                self.writer.call("convert", str(temporary))
            before_commit()
            commit(self.layout, step, temporary, self.keep, self._best(), written)
            update_meta(self.layout.trainer_meta, step=step, world_size=self.ranks.world_size, model=began.model)
            after_commit()

        largest, converted = checkpoint.largest_file(learner), checkpoint.model_bytes(learner) if converts else 0
        with self.writer.start(step, temporary, self._turns, largest, finish, converted) as copying:
            checkpoint.copy(learner, step, copying, began)
            if publisher is not None and self.ranks.first:
                publisher.keep_for_resume(step, copying)

    def _best(self) -> list[int]:
        """Return the steps of the best whole checkpoints by score, which are kept at any age; all if no score is
        known."""
        if self.keep is None:
            return []
        whole = whole_steps(self.layout.root)
        try:
            return best_steps(self.config, whole)
        except (OSError, TrinityError) as error:  # the new checkpoint is worth more than the space of an old one
            log.warning("the scores of checkpoints cannot be compared, so none is removed: %s", error)
            return whole

    def return_to_latest(self) -> int:
        """Return the step of the newest whole checkpoint (0 without one) on every rank, and abandon later ones."""
        step = latest_whole(self.layout.root) or 0 if self.ranks.first else 0
        if self.ranks.first:
            abandon_after(self.layout.root, step)
        return int(broadcast_bytes(str(step).encode() if self.ranks.first else None, self.ranks))

    def oldest(self) -> int:
        """Return the oldest step of the newest `max_checkpoints_to_keep` whole checkpoints; 0 without one.

        Older ones kept for their score do not count: a run that peaks early would keep every row since.
        """
        return min(whole_steps(self.layout.root)[-(self.keep or 0) :], default=0)

    def load(self, learner: Learner, step: int) -> None:
        """Restore the checkpoint of `step`.

        Raises TrinityError if the run began with another model than the learner's and needs it as reference or adapter
        base; DataError if the checkpoint holds another adapter.
        """
        began = recorded_beginning(self.layout.root, step) or self.began
        needs_it = learner.adapter is not None or learner.reference is not None
        if needs_it and began.differs(self.began):
            text = OTHER_REFERENCE if learner.adapter is None else OTHER_BASE
            refuse_other_model(text, began, self.config.model.model_path, self.layout.root)
        checkpoint.load(learner, self.layout.step(step))
        self.began = began if began.differs(self.began) or began.digest else self.began


ModelFiles = dict[str, bytes]
"""Path in the model's folder -> content."""


def make_model_files(lm: Any, model: ModelConfig) -> ModelFiles:
    """Return the files for a checkpoint of `lm`, which was loaded from `model`. The tokenizer carries the chat template
    used in training, and `generation_config.json` the stop tokens.

    Called when training starts, so that a model whose files cannot be written is refused then (TrinityError) rather
    than at the first checkpoint.
    """
    from transformers import AutoTokenizer

    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            lm.config_as_given.save_pretrained(folder)
            if lm.generation_config is not None:
                # Unlike save_pretrained, this accepts settings that transformers considers inconsistent.
                lm.generation_config.to_json_file(folder / "generation_config.json")
            tokenizer = AutoTokenizer.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
            template = configured_chat_template(model)
            if template is not None:
                tokenizer.chat_template = template
            tokenizer.save_pretrained(folder)
            write_stop_tokens(folder, tokenizer)
        except (ValueError, TypeError, OSError) as error:
            raise TrinityError(
                f"model.model_path {model.model_path}: its configuration or tokenizer cannot be written to "
                f"checkpoints; repair the model's folder: {error}",
                key="model.model_path",
            ) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_model_files(files: ModelFiles, folder: Path) -> None:
    with clear_errors("writing", folder):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            when_room(partial((folder / name).write_bytes, content), folder / name)
