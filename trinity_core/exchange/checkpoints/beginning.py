"""The model that a run began with: its name and the digest of its weights.

It is the run's reference: a KL term pulls towards the policy before the first step. Each checkpoint records it, and
before the first one `beginning.json` does, so that resuming with another model, or with other weights at the same path,
is noticed. Imports no torch, because flows check this before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import expanded, from_record, write_json
from trinity_core.base.layout import JobLayout
from trinity_core.exchange.weights_digest import weights_digest

STATE = "trainer_state.json"
"""The file in a checkpoint with the trainer's state other than tensors."""
OTHER_ROWS = (
    "model.model_path is {now}, but the run in {folder} began with {began}{why}, which sampled the rollouts in its "
    "store: they would be trained on as if this model had sampled them. To continue, give the model that it began with;"
    " to start from another, give the run another `name`"
)
OTHER_ADAPTER = (
    "model.lora_configs[0].path is {now}, but the run in {folder} began with another adapter or with none, which "
    "sampled the rollouts in its store: they would be trained on as if this one had. To continue, give the adapter that"
    " it began with; to start from another, give the run another `name`"
)
OTHER_REFERENCE = (
    "model.model_path is {now}, but the run in {folder} began with {began}{why}: its KL term would pull towards "
    "another model from here on. To continue, give the model that it began with; for another reference, give the run "
    "another `name`"
)
OTHER_START = (
    "model.model_path is {now}, but the run in {folder} began with {began}{why}: engines would sample with another "
    "model until the trainer first pushes weights into them. To continue, give the model that it began with; to start "
    "from another, give the run another `name`, or set synchronizer.sync_method: memory"
)
OTHER_BASE = (
    "model.model_path is {now}, but the run in {folder} began with {began}{why}, and its adapter belongs to "
    "that model. To continue, give the model that it began with; for an adapter of another, give the run "
    "another `name`"
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The model that a run began with."""

    model: str
    """Absolute path of a folder, or name of a hub model."""
    digest: str = ""
    """Digest of its weights (see `weights_digest`); "" if they could not be read."""
    adapter: str | None = None
    """Digest of the starting adapter; "" without one. None: not recorded, as in checkpoints, which hold their own."""

    @classmethod
    def of(cls, model_path: str, adapter_path: str | None = None) -> Beginning:
        """Return the beginning with a starting model and, optionally, the adapter in a folder."""
        adapter = weights_digest(str(expanded(adapter_path))) if adapter_path else ""
        return cls(model_name(model_path), weights_digest(model_path), adapter)

    def differs(self, other: Beginning) -> bool:
        """Compare the models by content, or by name if a digest is unknown."""
        if self.digest and other.digest:
            return self.digest != other.digest
        return self.model != other.model


def model_name(model_path: str) -> str:
    """Return a starting model's name for a run's files: the absolute path of a folder, or a hub model's name."""
    return str(Path(model_path).resolve()) if Path(model_path).exists() else model_path


def recorded_beginning(job_dir: Path, step: int) -> Beginning | None:
    layout = JobLayout(job_dir)
    state = layout.step(step) / STATE
    began = json.loads(state.read_text()).get("began") if state.exists() else None
    return from_record(Beginning, began, state) if began else None


def other_beginning(job_dir: Path, step: int, model_path: str) -> Beginning | None:
    """Return the beginning recorded in the checkpoint of `step` if it is not the model `model_path`, else None."""
    began = recorded_beginning(job_dir, step)
    return began if began is not None and began.differs(Beginning.of(model_path)) else None


def refuse_other_model(text: str, began: Beginning, model_path: str, job_dir: Path) -> None:
    """Raise TrinityError because a run that `began` with another model cannot use this one; `text` is an `OTHER_…`
    message."""
    same_name = began.model == model_name(model_path)
    why = " with other weights: the folder has been rewritten since" if same_name else ""
    raise TrinityError(text.format(now=model_path, folder=job_dir, began=began.model, why=why), key="model.model_path")


def begin_from(
    job_dir: Path, model_path: str, has_rows: bool, adapter_path: str | None = None,
    forget: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Record the model and adapter that a run without a checkpoint begins with.

    If this content was not recorded before, `forget` first removes what another beginning has left; if it fails or the
    process is killed, the next start repeats it. `has_rows`: rollouts wait in the run's store. Raises TrinityError if
    they come from another model or adapter.
    """
    layout, present = JobLayout(job_dir), Beginning.of(model_path, adapter_path)
    path = layout.beginning
    noted = from_record(Beginning, json.loads(path.read_text()), path) if path.exists() else None
    if noted is not None and has_rows and noted.differs(present):
        refuse_other_model(OTHER_ROWS, noted, model_path, layout.root)
    if noted is not None and has_rows and noted.adapter != present.adapter:
        raise TrinityError(OTHER_ADAPTER.format(now=adapter_path, folder=layout.root), key="model.lora_configs[0].path")
    if noted is None or noted.differs(present) or noted.adapter != present.adapter:
        forget()
        write_json(path, asdict(present))
