"""Saves checkpoints atomically, keeps the best and newest, and finds the one to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_core.checkpoints.commit import begin, commit
from trinity_core.checkpoints.convert import convert
from trinity_core.checkpoints.resume import latest_whole, model_name, read_meta, update_meta, whole_steps
from trinity_core.config.schema import Config
from trinity_core.layout import JobLayout
from trinity_core.tracking.forwarder import eval_scores
from trinity_core.tracking.metrics_file import read_evaluations
from trinity_core.training import checkpoint
from trinity_core.training.distributed import Ranks, barrier, broadcast_bytes
from trinity_core.training.model_files import make_model_files, write_model_files

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
        self.began_from = model_name(config.model.model_path)
        """The model that training started from, also after a resume with another `model_path`."""

    def save(self, learner: Learner, step: int, publisher: Publisher | None, last: bool = False) -> None:
        """Write the checkpoint of `step` and make it the latest; `last`: training ends with it.

        Raises TrinityError if the disk is full.
        """
        folder = str(begin(self.layout, step)) if self.ranks.first else ""
        temporary = Path(broadcast_bytes(folder.encode() if self.ranks.first else None, self.ranks).decode())
        checkpoint.save(learner, step, temporary, self.config.trainer.save_strategy)
        if self.ranks.first:
            write_model_files(self._model_files, temporary / "actor" / "huggingface")
        if publisher is not None and self.ranks.first:
            publisher.keep_for_resume(step, temporary)
        barrier(self.ranks)
        if self.ranks.first:
            if learner.settings.save_huggingface in (("always", "last") if last else ("always",)):
                convert(temporary)
            commit(self.layout, step, temporary, self.keep, self._best())
            update_meta(self.layout.trainer_meta, step=step, world_size=self.ranks.world_size, model=self.began_from)
        barrier(self.ranks)

    def _best(self) -> list[int]:
        """The checkpoint with the highest eval score (the first of equals), which is kept however old it is."""
        scores = eval_scores(read_evaluations(self.layout.root)) if self.keep is not None else {}
        return sorted(scores.keys() & set(self.layout.steps()), key=lambda step: (-scores[step], step))[:1]

    def latest(self) -> int:
        """Step of the newest whole checkpoint, 0 without one; the same on every rank."""
        found = latest_whole(self.layout) or 0 if self.ranks.first else 0
        return int(broadcast_bytes(str(found).encode() if self.ranks.first else None, self.ranks))

    def oldest(self) -> int:
        """Step of the oldest checkpoint that is kept; 0 without one."""
        return min(whole_steps(self.layout), default=0)

    def load(self, learner: Learner, step: int) -> None:
        """Restore the checkpoint of `step`."""
        checkpoint.load(learner, self.layout.step(step))
        self.began_from = read_meta(self.layout.trainer_meta).get("model", self.began_from)
