"""One rank of two, started by `test_training_ranks`: trains by each config of a list and writes what came of it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from batches import make_batch

from trinity_core.config import config_from_dict
from trinity_core.training import checkpoint as checkpoint_module
from trinity_core.training.checkpoint import copy, load
from trinity_core.training.distributed import any_rank, broadcast_bytes, join
from trinity_core.training.learner import Learner
from trinity_core.training.saving import CheckpointWriter
from trinity_core.training.state import weights

READ = transformers.AutoModelForCausalLM.from_pretrained
checkpoint_module.PIECE_BYTES = 50_000


def main() -> None:
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    ranks = join(rank, 2, "127.0.0.1", port, use_gpu=False)
    ends = [end for end in psutil.Process().net_connections("inet") if end.status == psutil.CONN_LISTEN]
    assert ends and {end.laddr.ip.removeprefix("::ffff:") for end in ends} == {"127.0.0.1"}, ends
    assert broadcast_bytes(b"from rank 0" if rank == 0 else None, ranks) == b"from rank 0"
    assert broadcast_bytes(b"" if rank == 0 else None, ranks) == b"", "of a run that stops without a batch"
    for case in json.loads((folder / "cases.json").read_text()):
        with mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", wraps=READ) as read:
            learner = Learner(config_from_dict(case["config"]), 4, ranks)
        assert read.called == ranks.first, "one rank reads the models"
        if learner.engine.settings.zero_stage == 3:
            _assert_halves(learner.engine.module)
            if learner.adapter is None:
                _assert_halves(learner.reference.module)
        learner.cut = replace(learner.cut, max_tokens=case["max_tokens"])
        metrics = [learner.step(make_batch(step, groups=3), step) for step in (1, 2)]
        before = {name: w.clone() for name, w in weights(learner.engine)}
        checkpoint = folder / case["name"]
        checkpoint.mkdir(exist_ok=True)
        writer = CheckpointWriter(ranks)
        with writer.start(2, checkpoint, [0, 0], 0, lambda written: None) as copying:
            copy(learner, 2, copying)
        learner.step(make_batch(3), 3)  # what has been copied is written
        after = {name: w.clone() for name, w in weights(learner.engine)}
        writer.close()
        any_rank(False, ranks)  # a barrier
        load(learner, checkpoint)
        _assert_files_hold_their_tensors(checkpoint, rank)
        parts = list((checkpoint / "actor").glob(f"optim_*_rank_{rank}_part_*.pt"))
        assert (parts or learner.adapter) and not list((checkpoint / "actor").glob("model_*_part_*.pt"))
        for name, w in weights(learner.engine):
            assert torch.equal(before[name], w), name
        learner.step(make_batch(3), 3)  # with the same moments
        for name, w in weights(learner.engine):
            assert torch.equal(after[name], w), name
        if rank == 0:
            torch.save({"metrics": metrics, "weights": before}, folder / f"{case['name']}.pt")


def _assert_files_hold_their_tensors(checkpoint: Path, rank: int) -> None:
    """And not the whole buffers that the tensors are parts of."""
    for file in (checkpoint / "actor").glob(f"[mo]*_rank_{rank}*.pt"):
        held = sum(t.nbytes for t in torch.load(file, weights_only=True).values())
        assert held <= file.stat().st_size < 1.2 * held + 20_000, (file, held, file.stat().st_size)


def _assert_halves(model: torch.nn.Module) -> None:
    """Of its tensors, all but the smallest, each of the two ranks holds one half."""
    large = [p for p in model.parameters() if p.ds_numel >= 1000]
    assert large and all(2 * p.ds_tensor.numel() == p.ds_numel for p in large)


main()
