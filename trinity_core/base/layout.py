"""The names inside `<checkpoint_root_dir>/<project>/<name>/`, the folder of one run.

```
buffer/                              the experience store; experience_buffer.jsonl: what was trained on;
                                     sessions-explorer.jsonl: what was sampled in sessions of the OpenAI API;
                                     serving-explorer/: users' sessions that are not in the store yet
log/  monitor/                       logs; metrics, TensorBoard, sampled rollouts
rejected_rows/explorer/taskset.jsonl rows that a data set's reader rejected: file, line and reason
global_step_58/actor/                model_world_size_4_rank_0.pt, optim_..., extra_state_..., huggingface/
global_step_58/critic/               the same for a critic
global_step_58/manifest.json         sizes and SHA-256; there only when the checkpoint is whole
global_step_58/abandoned             there if the run went back to an earlier checkpoint and went on from that
explorer_meta.json  trainer_meta.json
beginning.json                       the model that the run began with, until its first checkpoint names it
run_identity.json                    which run this is: where its experiences are in the store's database
openai_api-explorer.json             address and key of an explorer's OpenAI API, for its owner only
latest_checkpointed_iteration.txt    step of the newest full checkpoint
latest_state_dict_iteration.txt      version of the newest published weights
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trinity_core.base.files import private_folder, read_json

STEP_NAME = re.compile(r"global_step_(\d+)")
MANIFEST = "manifest.json"
ABANDONED = "abandoned"
"""Marks a checkpoint that the run went back behind. It is never resumed from, complete or not."""
LATEST_CHECKPOINT = "latest_checkpointed_iteration.txt"
ADAPTER = "lora_adapter"
"""Folder of a checkpoint's LoRA adapter, inside the actor's folder."""
LATEST_STATE_DICT = "latest_state_dict_iteration.txt"


def step_of(path: Path) -> int | None:
    """Return the step in a folder's name, or None."""
    match = STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def run_of(model: str | Path) -> tuple[Path | None, int]:
    """Return run folder and step of a model that is, or lies in, a checkpoint; (None, 0) for other models."""
    path = Path(model)
    steps = ((folder, step_of(folder)) for folder in (path, *path.parents))
    return next(((folder.parent, step) for folder, step in steps if step is not None), (None, 0))


def label_of(path: str | Path) -> str:
    """Return `quickstart_sft step 110` for a checkpoint's model, else a hub name, or the last two parts of a path."""
    run, step = run_of(path)
    return "/".join(Path(path).parts[-2:]) if run is None else f"{run.name} step {step}"


def now_at(model: str, root: Path) -> str:
    """Return where a recorded model is: if its run is gone from there, below `root`, to which all runs were moved."""
    run, _ = run_of(model)
    if run is None or run.exists():
        return model
    moved = root.joinpath(*run.parts[-2:])
    return str(moved / Path(model).relative_to(run)) if moved.is_dir() else model


@dataclass(frozen=True)
class JobLayout:
    """Paths of one run. Only `create` and `steps` touch the file system."""

    root: Path

    def create(self) -> JobLayout:
        for folder in (self.root, self.buffer, self.log, self.monitor):
            private_folder(folder)
        return self

    @property
    def buffer(self) -> Path:
        return self.root / "buffer"

    @property
    def archive(self) -> Path:
        """Experiences that were trained on, as JSON lines."""
        return self.buffer / "experience_buffer.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def monitor(self) -> Path:
        return self.root / "monitor"

    @property
    def note(self) -> Path:
        """What people wrote about the run."""
        return self.monitor / "note.json"

    @property
    def rejected_rows(self) -> Path:
        """Unusable rows of data sets, in one folder per reader."""
        return self.root / "rejected_rows"

    @property
    def identity(self) -> Path:
        return self.root / "run_identity.json"

    @property
    def gpu_lock(self) -> Path:
        """Locked by the side that uses the GPU, where explorer and trainer share one."""
        return self.root / ".gpu.lock"

    @property
    def stages(self) -> Path:
        """JSON of a pipeline's stages: name → name of the run's folder, next to the pipeline's."""
        return self.root / "stages.json"

    @property
    def explorer_meta(self) -> Path:
        return self.root / "explorer_meta.json"

    @property
    def beginning(self) -> Path:
        return self.root / "beginning.json"

    @property
    def trainer_meta(self) -> Path:
        return self.root / "trainer_meta.json"

    @property
    def latest_checkpoint(self) -> Path:
        return self.root / LATEST_CHECKPOINT

    @property
    def latest_state_dict(self) -> Path:
        return self.root / LATEST_STATE_DICT

    def step(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def actor(self, step: int) -> Path:
        return self.step(step) / "actor"

    def critic(self, step: int) -> Path:
        return self.step(step) / "critic"

    def huggingface(self, step: int) -> Path:
        return self.actor(step) / "huggingface"

    def adapter(self, step: int) -> Path:
        """The policy's LoRA adapter in peft's format; before a conversion only its configuration."""
        return self.actor(step) / ADAPTER

    def steps(self) -> list[int]:
        """Return the steps that have a folder, complete or not, in ascending order."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(step for path in folders if (step := step_of(path)) is not None and path.is_dir())


def stages_of(job_dir: Path) -> dict[str, Path]:
    """Return stage → folder of its run, for the pipeline in `job_dir`; empty for other runs."""
    return {stage: job_dir.parent / name for stage, name in read_json(JobLayout(job_dir).stages).items()}


def shard_name(content: str, world_size: int, rank: int) -> str:
    """Return the file name of one rank's `content`: "model", "optim" or "extra_state"."""
    return f"{content}_world_size_{world_size}_rank_{rank}.pt"
