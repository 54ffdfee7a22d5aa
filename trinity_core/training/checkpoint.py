"""Saves the trainer's state in checkpoint folders, keeps the best and newest, and restores the one to resume from.

`actor/` (and `critic/`): `model_world_size_W_rank_r.pt` and `optim_…` hold whole tensors by name, each in the file of
one rank (those of `optim_…` also in further files, `…_part_2.pt`); `extra_state_…` holds the rank's random states;
`trainer_state.json` holds the rest. For a policy with an adapter, the tensors are the adapter's alone, and
`actor/lora_adapter/adapter_config.json` describes it. Files are loaded with `weights_only`, so no code in them can run.
"""

from __future__ import annotations

import json
import logging
import math
import random
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import clear_errors, from_record, when_room
from trinity_core.base.layout import ADAPTER, shard_name
from trinity_core.config.schema import Config, ModelConfig
from trinity_core.data.tokenizer import (
    configured_chat_template,
    load_tokenizer,
    model_file,
    name_plain_class,
    write_chat_template,
    write_stop_tokens,
)
from trinity_core.exchange.checkpoints.adapters import CONFIG, read_config
from trinity_core.exchange.checkpoints.beginning import (
    OTHER_BASE,
    OTHER_REFERENCE,
    STATE,
    Beginning,
    recorded_beginning,
    refuse_other_model,
)
from trinity_core.exchange.checkpoints.commit import Entry, begin, commit
from trinity_core.exchange.checkpoints.convert import copy_companions
from trinity_core.exchange.checkpoints.resume import abandon_after, latest_whole, update_meta, whole_steps
from trinity_core.exchange.pinned import CopyStream
from trinity_core.exchange.tracking.champions import champion_steps
from trinity_core.exchange.tracking.pauses import undo_pauses
from trinity_core.exchange.tracking.scores import best_steps, steps_to_evaluate, valid_scores
from trinity_core.training.distributed import Ranks, broadcast_bytes, sum_over_ranks
from trinity_core.training.engine import TrainingEngine
from trinity_core.training.learner import Learner
from trinity_core.training.lora import refuse_other_adapter
from trinity_core.training.saving import CheckpointWriter, Copying
from trinity_core.training.state import (
    loss_scale,
    optimizer_state,
    optimizer_steps,
    parameters,
    restore,
    weights,
    whole_shape,
)

if TYPE_CHECKING:
    from trinity_core.training.learner import Learner
    from trinity_core.training.publish import Publisher


PIECE_BYTES = 2 << 30
"""Bytes of optimiser state in one file of a rank."""
UNRESTRICTED = "unrestricted"
"""The `trainer.save_strategy` with which all ranks write at once."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State other than tensors, the same on every rank."""

    step: int
    optimizer_steps: dict[str, int]
    """Number of updates, by folder (`actor`, `critic`)."""
    objective: dict[str, float] = field(default_factory=dict)
    loss_scales: dict[str, dict[str, float]] = field(default_factory=dict)
    began: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Read the state from a checkpoint's folder. Raises DataError for a newer release's."""
        return from_record(cls, json.loads((folder / STATE).read_text()), folder / STATE)


def engines_by_folder(learner: Learner) -> dict[str, TrainingEngine]:
    engines = {"actor": learner.engine}
    if learner.critic is not None:
        engines["critic"] = learner.critic.engine
    return engines


def copy(learner: Learner, step: int, copying: Copying, began: Beginning | None = None) -> None:
    """Copy the state after `step`: this rank's share of the tensors and, on rank 0, the shared files. Collective.

    The engines' next update waits until their tensors are copied.
    """
    ranks = learner.ranks
    engines = engines_by_folder(learner)
    for part, engine in engines.items():
        names = [f"{part}/{shard_name(kind, ranks.world_size, ranks.rank)}" for kind in ("model", "optim")]
        stream = engine.copies if engine.plain else None  # tensors that ZeRO gathers are gone at the next one
        _copy_files(_share(weights(engine), ranks), names[0], copying, stream)
        moments = optimizer_state(engine)  # if plain, the rank's own already
        _copy_files(moments if engine.plain else _share(moments, ranks), names[1], copying, stream, PIECE_BYTES)
        file = BytesIO()
        torch.save(random_state(ranks), file)
        copying.small[f"{part}/{shard_name('extra_state', ranks.world_size, ranks.rank)}"] = file.getvalue()
    if ranks.first:
        counts = {part: optimizer_steps(engine) for part, engine in engines.items()}
        scales = {part: loss_scale(engine) for part, engine in engines.items()}
        state = TrainerState(step, counts, learner.objective.state(), scales, asdict(began) if began else {})
        copying.small[STATE] = json.dumps(asdict(state), indent=1).encode() + b"\n"
        if learner.adapter is not None:
            config = json.dumps(learner.adapter.config, indent=1).encode() + b"\n"
            copying.small[f"actor/{ADAPTER}/{CONFIG}"] = config


def largest_file(learner: Learner) -> int:
    """Return the size in bytes of the largest file that `copy` makes on one rank."""
    sizes = []
    for engine in engines_by_folder(learner).values():
        saved = sum(math.prod(whole_shape(p, engine)) for _, p in parameters(engine))
        share = saved // learner.ranks.world_size
        state = sum(p.numel() for p in engine.masters) if engine.plain else share
        sizes.append(max(share * engine.settings.dtype.itemsize, min(PIECE_BYTES, state * 12)))
    return max(sizes)


def model_bytes(learner: Learner) -> int:
    """Return the size in bytes of the whole policy, an adapter's base included: the output of a conversion."""
    engine = learner.engine
    return sum(math.prod(whole_shape(p, engine)) for p in engine.module.parameters()) * engine.settings.dtype.itemsize


def writing_turns(strategy: str, ranks: Ranks) -> list[int]:
    """Return the turn in which each rank writes, by `trainer.save_strategy`. Collective.

    `unrestricted`: all at once; `single_node`: one node after the other; `single_process` and `single_thread`: one rank
    after the other (each worker writes with one thread, so both mean the same).
    """
    if strategy == UNRESTRICTED or ranks.world_size == 1:
        return [0] * ranks.world_size
    if strategy != "single_node":
        return list(range(ranks.world_size))
    nodes = nodes_of(ranks)
    order = {node: turn for turn, node in enumerate(sorted(set(nodes)))}
    return [order[node] for node in nodes]


def nodes_of(ranks: Ranks) -> list[int]:
    """Return a number for the node of each rank. Collective."""
    nodes = torch.zeros(ranks.world_size, dtype=torch.int64)
    nodes[ranks.rank] = zlib.crc32(socket.gethostname().encode())
    return sum_over_ranks(nodes, ranks).tolist()


def _share(tensors: Iterator[tuple[str, Tensor]], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's share of `tensors`. Collective: every rank iterates over all of them."""
    for number, tensor in enumerate(tensors):
        if number % ranks.world_size == ranks.rank:
            yield tensor


def _copy_files(
    tensors: Iterator[tuple[str, Tensor]], file: str, copying: Copying, stream: CopyStream | None,
    piece: float = math.inf,
) -> None:  # fmt: skip
    """Copy `tensors` to `file`, and anything beyond `piece` bytes to `…_part_2.pt`, `…_part_3.pt` and so on."""
    parts, following = 1, next(tensors, None)

    def next_piece() -> Iterator[tuple[str, Tensor]]:
        nonlocal following
        passed = 0
        while following is not None and passed < piece:
            passed += following[1].nbytes
            yield following
            following = next(tensors, None)

    copying.file(file, next_piece(), stream=stream)
    while following is not None:
        parts += 1
        copying.file(part_of(file, parts), next_piece(), stream=stream)


def part_of(file: str, number: int) -> str:
    return f"{file.removesuffix('.pt')}_part_{number}.pt"


def load(learner: Learner, folder: Path) -> TrainerState:
    """Restore the state in `folder`, written by any number of workers. Collective.

    Raises DataError for a checkpoint of another adapter, or of none, and for one of a newer release.
    """
    saved = folder / "actor" / ADAPTER
    refuse_other_adapter(read_config(saved) if saved.exists() else None, learner.adapter, folder)
    state = TrainerState.read(folder)
    zero_losses = learner.zero_losses()
    for part, engine in engines_by_folder(learner).items():
        if part not in state.optimizer_steps:
            raise DataError(f"the checkpoint {folder} has no {part}; was it made with another algorithm?")
        source = folder / part
        restore(
            engine,
            _load_all(source, "model"),
            _load_all(source, "optim"),
            state.optimizer_steps[part],
            zero_losses[part],
            state.loss_scales.get(part, {}),
        )
    learner.objective.load_state(state.objective)
    extra_state = folder / "actor" / shard_name("extra_state", learner.ranks.world_size, learner.ranks.rank)
    if extra_state.exists():
        set_random_state(torch.load(extra_state, weights_only=True))
    return state


def _load_all(folder: Path, content: str) -> dict[str, Tensor]:
    files = sorted(folder.glob(f"{content}_world_size_*_rank_*.pt"))
    if not files:
        raise DataError(f"the checkpoint {folder} has no {content}_world_size_*_rank_*.pt")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    return tensors


def random_state(ranks: Ranks) -> dict[str, Any]:
    """Return the states of this process's random generators, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


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
        self._turns = writing_turns(config.trainer.save_strategy, ranks)
        nodes = nodes_of(ranks)
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
        began, threads = self.began, torch.get_num_threads()

        def finish(written: dict[str, Entry]) -> None:
            write_model_files(self._model_files, temporary / "actor" / "huggingface")
            if converts:
                self.writer.call("convert", str(temporary))
            before_commit()
            commit(self.layout, step, temporary, self.keep, self._best(), written)
            size = {"world_size": self.ranks.world_size, "threads": threads}
            update_meta(self.layout.trainer_meta, step=step, model=began.model, **size)
            after_commit()

        largest, converted = largest_file(learner), model_bytes(learner) if converts else 0
        with self.writer.start(step, temporary, self._turns, largest, finish, converted) as copying:
            copy(learner, step, copying, began)
            if publisher is not None and self.ranks.first:
                publisher.keep_for_resume(step, copying)

    def _best(self) -> list[int]:
        """Return the steps of checkpoints that are kept at any age: the best whole ones by score, those yet to be
        scored, the project's champions; all if no score is known."""
        if self.keep is None:
            return []
        whole = whole_steps(self.layout.root, or_unreadable=True)
        try:
            kept = {*best_steps(self.config, whole), *champion_steps(self.layout.root)}
            if self.config.evaluates_beside:
                kept |= {*steps_to_evaluate(self.config, whole)} - valid_scores(self.config).keys()
            return sorted(kept)
        except (OSError, TrinityError) as error:  # the new checkpoint is worth more than the space of an old one
            log.warning("the scores of checkpoints cannot be compared, so none is removed: %s", error)
            return whole

    def return_to_latest(self) -> int:
        """Return the step of the newest whole checkpoint (0 without one) on every rank. Abandon later ones, and undo
        what was decided at them."""
        step = latest_whole(self.layout.root) or 0 if self.ranks.first else 0
        if self.ranks.first:
            abandon_after(self.layout.root, step)
            undo_pauses(self.layout.root, step)
        return int(broadcast_bytes(str(step).encode() if self.ranks.first else None, self.ranks))

    def oldest(self) -> int:
        """Return the oldest step of the newest `max_checkpoints_to_keep` whole checkpoints; 0 without one.

        Older ones kept for their score do not count: a run that peaks early would keep every row since.
        """
        return min(whole_steps(self.layout.root, or_unreadable=True)[-(self.keep or 0) :], default=0)

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
        load(learner, self.layout.step(step))
        self.began = began if began.differs(self.began) or began.digest else self.began


ModelFiles = dict[str, bytes]
"""Path in the model's folder -> content."""


def make_model_files(lm: Any, model: ModelConfig) -> ModelFiles:
    """Return the files for a checkpoint of `lm`, which was loaded from `model`. Tokenizer and code are the model's own,
    with the chat template used in training; `generation_config.json` has the stop tokens.

    Called when training starts, so that a model whose files cannot be written is refused then (TrinityError) rather
    than at the first checkpoint.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
            if (original := model_file(model.model_path, "config.json")) is None:
                raise OSError("config.json is missing")
            _write_config(lm, model, Path(original), folder)
            if lm.generation_config is not None:
                # Unlike save_pretrained, this accepts settings that transformers considers inconsistent.
                lm.generation_config.to_json_file(folder / "generation_config.json")
            copy_companions(Path(original).parent, folder)
            template = configured_chat_template(model)
            if template is not None:
                tokenizer.chat_template = template
                write_chat_template(folder, template)
            name_plain_class(folder)
            write_stop_tokens(folder, tokenizer)
        except (ValueError, TypeError, OSError) as error:
            raise TrinityError(
                f"model.model_path {model.model_path}: its configuration or tokenizer cannot be written to "
                f"checkpoints; repair the model's folder: {error}",
                key="model.model_path",
            ) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write_config(lm: Any, model: ModelConfig, original: Path, folder: Path) -> None:
    """Write config.json: the model's own if the run changes nothing in it but the dtype, which a conversion sets.

    Transformers 5 would save it in a form whose rotary settings transformers 4 silently ignores.
    """
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
    theirs, ours = own.to_dict(), lm.config_as_given.to_dict()
    if theirs | {"dtype": None} == ours | {"dtype": None}:
        (folder / "config.json").write_bytes(original.read_bytes())
    else:
        lm.config_as_given.save_pretrained(folder)


def write_model_files(files: ModelFiles, folder: Path) -> None:
    with clear_errors("writing", folder):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            when_room(partial((folder / name).write_bytes, content), folder / name)
