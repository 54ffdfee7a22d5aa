"""One rank reads a model and tries its fast paths; the others get both from it.

The weights themselves follow on the device: DeepSpeed sends rank 0's when it takes or partitions a module, and
`FrozenModule` sends those of a module that DeepSpeed never sees. Host memory thus holds one copy, not one for each
rank.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from trinity_core.training.distributed import Ranks, broadcast_bytes
from trinity_core.training.policy import FastPaths, find_fast_paths


def load_on_first(load: Callable[[bool], Any], ranks: Ranks) -> Any:
    """What `load(reads)` gives, a model: read on rank 0, and with any weights of the same form on the others.

    A rank whose model has another form, because transformers keeps some weights in another dtype when it reads them,
    reads too. Collective.
    """
    lm = load(ranks.first)
    if ranks.world_size == 1:
        return lm
    first = broadcast_bytes(_form(lm) if ranks.first else None, ranks)
    if first != _form(lm):
        lm = load(True)
    stored = lm.state_dict()
    for name, buffer in lm.named_buffers():
        if name in stored:
            torch.distributed.broadcast(buffer, 0)
    return lm


def fast_paths_on_first(lm: Any, ranks: Ranks) -> FastPaths:
    """`find_fast_paths` of rank 0, which alone has the weights yet; all set the attention that it found. Collective."""
    found = find_fast_paths(lm) if ranks.first else None
    told = json.dumps([astuple(found), lm.config._attn_implementation]).encode() if found else None
    paths, implementation = json.loads(broadcast_bytes(told, ranks))
    if not ranks.first:
        lm.set_attn_implementation(implementation)
    return FastPaths(*paths)


def _form(lm: Any) -> bytes:
    """Names, dtypes and shapes of all tensors, and which are tied."""
    tensors = [*lm.named_parameters(remove_duplicate=False), *lm.named_buffers()]
    first: dict[int, str] = {}
    rows = [(name, str(t.dtype), tuple(t.shape), first.setdefault(id(t), name)) for name, t in tensors]
    return str(zlib.crc32(repr(rows).encode())).encode()
