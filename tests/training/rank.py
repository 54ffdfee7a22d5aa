"""The ranks of `test_training_ranks`: groups of 1, 2 and 4 train with each config of a list and write their results.
They are forked from one process that has imported everything. All but the first compute wrong advantages: on CUDA those
of two ranks may differ, in bits that decide which rows a rank trains."""

import gc
import importlib
import json
import math
import multiprocessing
import sys
import threading
import time
import zlib
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from batches import make_batch, rows_of, trained_models

from trinity_core.algorithms.objective import Advantages, Objective
from trinity_core.base.processes import die_with_parent
from trinity_core.config import config_from_dict
from trinity_core.training import checkpoint as checkpoint_module
from trinity_core.training import engine as engine_module
from trinity_core.training.checkpoint import copy, load
from trinity_core.training.distributed import Ranks, any_rank, broadcast_bytes, join
from trinity_core.training.learner import Learner
from trinity_core.training.saving import CheckpointWriter
from trinity_core.training.state import sum_of_bits, weights, weights_digest

READ = transformers.AutoModelForCausalLM.from_pretrained
ADVANTAGES = Objective.advantages
IMPORTED_LATER = "deepspeed.runtime.zero.muon.muon_optimizer", "peft", "transformers.models.qwen2.modeling_qwen2"
"""Modules that take seconds to import; imported once here instead of in each rank."""
FORKED = multiprocessing.get_context("fork")
checkpoint_module.PIECE_BYTES = 50_000


def main() -> None:
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    gc.freeze()  # DeepSpeed collects garbage when it partitions a model
    ports, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    assert threading.active_count() == 1
    for world_size, port in ports:
        ranks = [FORKED.Process(target=train, args=(rank, world_size, port, folder)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        while running := [process.sentinel for process in ranks if process.is_alive()]:
            wait(running)
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
        assert not any(process.exitcode for process in ranks), world_size


def train(rank: int, world_size: int, port: int, folder: Path) -> None:
    die_with_parent()
    ranks = join(rank, world_size, "127.0.0.1", port, use_gpu=False)
    ends = [end for end in psutil.Process().net_connections("inet") if end.status == psutil.CONN_LISTEN]
    assert {end.laddr.ip.removeprefix("::ffff:") for end in ends} <= {"127.0.0.1"}, ends
    assert (port in [end.laddr.port for end in ends]) == (rank == 0 and world_size > 1), "a single rank needs no store"
    assert broadcast_bytes(b"from rank 0" if rank == 0 else None, ranks) == b"from rank 0"
    assert broadcast_bytes(b"" if rank == 0 else None, ranks) == b"", "of a run that stops without a batch"
    if rank:
        Objective.advantages = wrong_advantages
    for case in json.loads((folder / "cases.json").read_text()):
        if world_size in case["world_sizes"]:
            train_case(case, ranks, folder)


def wrong_advantages(objective: Objective, *args: Any, **inputs: Any) -> Advantages:
    right = ADVANTAGES(objective, *args, **inputs)
    returns = None if right.returns is None else right.returns + 1.0
    return right._replace(advantages=1.0 - right.advantages, returns=returns)


def train_case(case: dict[str, Any], ranks: Ranks, folder: Path) -> None:
    gc.collect()
    others = held_bytes()
    with (
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", wraps=READ) as read,
        mock.patch.object(engine_module, "AT_ONCE_ON_CPU", case["at_once"]),
    ):
        torch.manual_seed(0)  # for the head of a critic
        learner = Learner(config_from_dict(case["config"]), 4, ranks)
    assert read.called == ranks.first, "one rank reads the models"
    if learner.engine.settings.zero_stage == 3:
        _assert_shares(learner.engine.module, ranks.world_size)
        if learner.adapter is None and learner.reference is not None:
            _assert_shares(learner.reference.module, ranks.world_size)
    learner.cut = learner.reference_cut = replace(learner.cut, max_tokens=case["max_tokens"])
    algorithm = case["config"]["algorithm"]["algorithm_type"]
    metrics = [learner.step(rows_of(algorithm, step), step) for step in (1, 2)]
    held = settled_bytes(others + 1.01 * case["planned"].get(str(ranks.world_size), math.inf)) - others
    models = trained_models(learner).items()
    before = {model + name: w.clone() for model, engine in models for name, w in weights(engine)}
    whole = sum(int(sum_of_bits(w)) * (zlib.crc32(name.encode()) | 1) for name, w in weights(learner.engine)) % 2**64
    assert weights_digest(learner.engine) == f"{whole:016x}"
    if case["saved"]:
        save_and_load(learner, folder / case["name"], before)
    result = {"metrics": metrics, "weights": before, "held": held}
    if "resumes" in case:
        load(learner, folder / case["name"])
        result["following"] = learner.step(rows_of(algorithm, 3), 3)
    if ranks.first:
        torch.save(result, folder / f"{case['name']}_{ranks.world_size}.pt")


def settled_bytes(most: float) -> int:
    """`held_bytes` once they are at most `most`, or after 10 s: gloo's thread keeps a buffer for a while on a busy
    machine."""
    deadline = time.monotonic() + 10
    while (held := held_bytes()) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def held_bytes() -> int:
    """Bytes of all existing tensors."""
    stores = [thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return sum({store.data_ptr(): store.nbytes() for store in stores if store.device.type == "cpu"}.values())


def save_and_load(learner: Learner, checkpoint: Path, before: dict[str, torch.Tensor]) -> None:
    ranks = learner.ranks
    checkpoint.mkdir(exist_ok=True)
    writer = CheckpointWriter(ranks)
    with writer.start(2, checkpoint, [0, 0], 0, lambda written: None) as copying:
        copy(learner, 2, copying)
    learner.step(make_batch(3), 3)  # what has been copied is written
    after = {name: w.clone() for name, w in weights(learner.engine)}
    writer.close()
    any_rank(False, ranks)  # a barrier
    load(learner, checkpoint)
    _assert_files_hold_their_tensors(checkpoint, ranks.rank)
    parts = list((checkpoint / "actor").glob(f"optim_*_rank_{ranks.rank}_part_*.pt"))
    assert (parts or learner.adapter) and not list((checkpoint / "actor").glob("model_*_part_*.pt"))
    for name, w in weights(learner.engine):
        assert torch.equal(before[name], w), name
    learner.step(make_batch(3), 3)  # with the same moments
    for name, w in weights(learner.engine):
        assert torch.equal(after[name], w), name


def _assert_files_hold_their_tensors(checkpoint: Path, rank: int) -> None:
    """Files must not hold the whole buffers of which the tensors are views."""
    for file in (checkpoint / "actor").glob(f"[mo]*_rank_{rank}*.pt"):
        held = sum(t.nbytes for t in torch.load(file, weights_only=True).values())
        assert held <= file.stat().st_size < 1.2 * held + 20_000, (file, held, file.stat().st_size)


def _assert_shares(model: torch.nn.Module, world_size: int) -> None:
    """Each rank holds its share of all tensors but the smallest."""
    large = [p for p in model.parameters() if p.ds_numel >= 1000]
    assert large and all(world_size * p.ds_tensor.numel() == p.ds_numel for p in large)


main()
