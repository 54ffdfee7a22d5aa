"""Saves checkpoints atomically, keeps the best and newest, and finds the one to resume from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trinity_core.checkpoints.beginning import Beginning, recorded_beginning, refuse_other_model
from trinity_core.checkpoints.commit import begin, commit
from trinity_core.checkpoints.convert import convert
from trinity_core.checkpoints.resume import latest_whole, update_meta, whole_steps
from trinity_core.config.schema import Config, ModelConfig
from trinity_core.data.tokenizer import configured_chat_template, write_stop_tokens
from trinity_core.errors import TrinityError
from trinity_core.files import clear_errors, when_room
from trinity_core.layout import JobLayout
from trinity_core.tracking.scores import best_steps
from trinity_core.training import checkpoint
from trinity_core.training.distributed import Ranks, barrier, broadcast_bytes

if TYPE_CHECKING:
    from trinity_core.training.learner import Learner
    from trinity_core.training.publish import Publisher


class Savepoints:
    """The checkpoints of one run that trains `lm`. Collective; rank 0 creates and commits the folders."""

    def __init__(self, config: Config, ranks: Ranks, lm: Any) -> None:
        self.layout = JobLayout(config.job_dir)
        self.config = config
        self._model_files = make_model_files(lm, config.model) if ranks.first else {}
        self.keep = config.trainer.max_checkpoints_to_keep
        self.ranks = ranks
        self.began = Beginning.of(config.model.model_path)
        """The model that training started from, also after a resume with another `model_path`."""

    def save(self, learner: Learner, step: int, publisher: Publisher | None, last: bool = False) -> None:
        """Write the checkpoint of `step` and make it the latest; `last`: training ends with it.

        Raises TrinityError if the disk is full.
        """
        folder = str(begin(self.layout, step)) if self.ranks.first else ""
        temporary = Path(broadcast_bytes(folder.encode() if self.ranks.first else None, self.ranks).decode())
        checkpoint.save(learner, step, temporary, self.config.trainer.save_strategy, self.began)
        if self.ranks.first:
            write_model_files(self._model_files, temporary / "actor" / "huggingface")
        if publisher is not None and self.ranks.first:
            publisher.keep_for_resume(step, temporary)
        barrier(self.ranks)
        if self.ranks.first:
            if learner.settings.save_huggingface in (("always", "last") if last else ("always",)):
                convert(temporary, merge=True)
            commit(self.layout, step, temporary, self.keep, self._best())
            update_meta(self.layout.trainer_meta, step=step, world_size=self.ranks.world_size, model=self.began.model)
        barrier(self.ranks)

    def _best(self) -> list[int]:
        """The best whole checkpoints by their scores, which are kept however old they are."""
        return [] if self.keep is None else best_steps(self.config, whole_steps(self.layout))

    def latest(self) -> int:
        """Step of the newest whole checkpoint, 0 without one; the same on every rank."""
        found = latest_whole(self.layout) or 0 if self.ranks.first else 0
        return int(broadcast_bytes(str(found).encode() if self.ranks.first else None, self.ranks))

    def oldest(self) -> int:
        """Step of the oldest checkpoint that is kept; 0 without one."""
        return min(whole_steps(self.layout), default=0)

    def load(self, learner: Learner, step: int) -> None:
        """Restore the checkpoint of `step`.

        Raises TrinityError if the run began with another model than the learner has loaded, and that is its reference
        or the base of its adapter; DataError if the checkpoint holds another adapter.
        """
        began = recorded_beginning(self.layout, step) or self.began
        needs_it = learner.adapter is not None or learner.reference is not None
        if needs_it and began.differs(self.began):
            refuse_other_model(began, self.config.model.model_path, self.layout.root, learner.adapter is not None)
        checkpoint.load(learner, self.layout.step(step))
        self.began = began if began.differs(self.began) or began.digest else self.began


ModelFiles = dict[str, bytes]
"""Path in the model's folder -> content."""


def make_model_files(lm: Any, model: ModelConfig) -> ModelFiles:
    """The files for a checkpoint of `lm`, which was loaded from `model`. The tokenizer carries the chat template that
    the policy is trained with, and `generation_config.json` the tokens that end its answers.

    Made when training starts, so that a model whose files cannot be made is refused then (TrinityError) rather than at
    the first checkpoint.
    """
    from transformers import AutoTokenizer

    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            lm.config_as_given.save_pretrained(folder)
            if lm.generation_config is not None:
                # Unlike save_pretrained, this takes settings that transformers thinks do not go together.
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
                f"checkpoints; repair the model's folder: {error}"
            ) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_model_files(files: ModelFiles, folder: Path) -> None:
    """Put the files into `folder`. Raises TrinityError if the disk is full."""
    with clear_errors("writing", folder):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            when_room(partial((folder / name).write_bytes, content), folder / name)
