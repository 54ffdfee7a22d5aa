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
beginning.json                       the model that the run began with, until its first checkpoint says so
run_identity.json                    which run this is: where its experiences are in the store's database
openai_api-explorer.json             address and key of an explorer's OpenAI API, for its owner only
latest_checkpointed_iteration.txt    step of the newest full checkpoint
latest_state_dict_iteration.txt      version of the newest published weights
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STEP_NAME = re.compile(r"global_step_(\d+)")
MANIFEST = "manifest.json"
ABANDONED = "abandoned"
"""Mark in the folder of a checkpoint that the run has gone back behind: it is never resumed from, whole or not."""
LATEST_CHECKPOINT = "latest_checkpointed_iteration.txt"
ADAPTER = "lora_adapter"
"""The folder of a checkpoint's adapter, in that of its actor."""
LATEST_STATE_DICT = "latest_state_dict_iteration.txt"


def step_of(path: Path) -> int | None:
    """The step that a folder's name says, or None."""
    match = STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class JobLayout:
    """Paths of one run; nothing is created or read here but by `create` and `steps`."""

    root: Path

    def create(self) -> JobLayout:
        """Make the folders that every run has."""
        for folder in (self.root, self.buffer, self.log, self.monitor):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def buffer(self) -> Path:
        """The experience store's folder."""
        return self.root / "buffer"

    @property
    def archive(self) -> Path:
        """What was trained on, as JSON lines."""
        return self.buffer / "experience_buffer.jsonl"

    @property
    def log(self) -> Path:
        """Log files of the actors."""
        return self.root / "log"

    @property
    def monitor(self) -> Path:
        """Metrics and sampled rollouts."""
        return self.root / "monitor"

    @property
    def rejected_rows(self) -> Path:
        """Rows of data sets that could not be used: a folder for each reader."""
        return self.root / "rejected_rows"

    @property
    def identity(self) -> Path:
        """JSON of the run's identity."""
        return self.root / "run_identity.json"

    @property
    def gpu_lock(self) -> Path:
        """Locked by the side that has the GPU, where explorer and trainer share one."""
        return self.root / ".gpu.lock"

    @property
    def stages(self) -> Path:
        """JSON of a pipeline's stages: name -> the name of its run's folder, next to the pipeline's."""
        return self.root / "stages.json"

    @property
    def scoring_seconds(self) -> Path:
        """JSON of a pipeline: `before`, or a stage whose model was scored after it -> the seconds that took."""
        return self.root / "scoring_seconds.json"

    @property
    def explorer_meta(self) -> Path:
        """JSON of the explorers' state."""
        return self.root / "explorer_meta.json"

    @property
    def beginning(self) -> Path:
        """JSON of the model that the run began with."""
        return self.root / "beginning.json"

    @property
    def trainer_meta(self) -> Path:
        """JSON of the trainer's state."""
        return self.root / "trainer_meta.json"

    @property
    def latest_checkpoint(self) -> Path:
        """Names the newest full checkpoint."""
        return self.root / LATEST_CHECKPOINT

    @property
    def latest_state_dict(self) -> Path:
        """Names the newest published weights."""
        return self.root / LATEST_STATE_DICT

    def step(self, step: int) -> Path:
        """The checkpoint folder of `step`."""
        return self.root / f"global_step_{step}"

    def actor(self, step: int) -> Path:
        """The policy's part of it."""
        return self.step(step) / "actor"

    def critic(self, step: int) -> Path:
        """The critic's part of it."""
        return self.step(step) / "critic"

    def huggingface(self, step: int) -> Path:
        """The policy in Hugging Face format."""
        return self.actor(step) / "huggingface"

    def adapter(self, step: int) -> Path:
        """The policy's LoRA adapter as peft reads it, or before a conversion its configuration alone."""
        return self.actor(step) / ADAPTER

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending, whole or not."""
        return sorted(step for step, _ in self._step_folders())

    def _step_folders(self) -> Iterator[tuple[int, Path]]:
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if (step := step_of(path)) is not None and path.is_dir():
                yield step, path


def shard_name(content: str, world_size: int, rank: int) -> str:
    """File name of one rank's `content`: "model", "optim" or "extra_state"."""
    return f"{content}_world_size_{world_size}_rank_{rank}.pt"
