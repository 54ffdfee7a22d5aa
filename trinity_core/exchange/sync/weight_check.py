"""Two checks after a weight sync: an engine's log-probs of fixed tokens, and the values of its parameters.

An engine that loaded a tensor under the wrong name, in the wrong order, or not at all still generates text, but its
log-probs differ. The check cannot distinguish versions whose difference is below the dtype's noise (consecutive
versions of a bfloat16 run, say); the version's record settles which one was loaded.

An engine's parameters are not the tensors it received: `q_proj`, `k_proj` and `v_proj` become `qkv_proj`, experts are
stacked, and each tensor-parallel rank has a shard. But value digests add up: the digests of a module's parameters over
all ranks sum to those of the tensors that belong there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from trinity_core.base.errors import WeightSyncError

log = logging.getLogger(__name__)

TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "fp8": 2.0}
"""Largest difference of a token's log-prob (nats) between kernels with the same weights, by compute dtype. The log-prob
is a difference of logits of size 10 to 40: one bfloat16 rounding (2^-8, relative) is 0.04 to 0.16. The value for an
engine with fp8 weights or cache is assumed, not measured."""
MEAN_SHARE = 0.25
"""Share of the tolerance that the mean difference may reach where digests agree."""
PACKED = " (packed)"
"""Suffix for a weight of which the engine's kernels keep a copy in their own layout."""
COMPUTED = " (computed)"
"""Suffix for a parameter whose loader does not copy the published values."""
ABSORBED = " (absorbed)"
"""Suffix for a weight that the engine also holds divided into the matrices of latent attention."""
KINDS = (PACKED, COMPUTED, ABSORBED)
SAME = " = "
"""Separates the names of a parameter that several modules share."""
FEW = 4
"""Maximum number of tensors per parameter that ranks may hold a different number of times (q, k and v)."""

RankDigests = Sequence[Mapping[str, int | None]]
"""For each rank of an engine: parameter → value digest; None for a parameter that no load has touched yet."""


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """`logprobs[i]` is the trainer's log-prob (nats, temperature 1) of `tokens[i + 1]` after `tokens[: i + 1]`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.logprobs) != len(self.tokens) - 1:
            raise ValueError(f"a weight check of {len(self.tokens)} tokens cannot have {len(self.logprobs)} log-probs")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightCheck:
        return cls(tuple(value["tokens"]), tuple(value["logprobs"]), value["dtype"])


def verify_weights(
    check: WeightCheck, got: Sequence[float], dtype: str = "float32", digests_agree: bool = False
) -> float:
    """Compare the engine's log-probs `got` with the trainer's; return the largest difference in nats.

    `dtype` is the engine's; the tolerance is that of the coarser of both compute dtypes. Raises WeightSyncError if a
    difference exceeds the tolerance or is not a number, or if the lengths differ. With `digests_agree` (the engine is
    known to hold the published tensors) single tokens beyond it only warn, as rounding in a large model may take them
    there; the mean may be up to `MEAN_SHARE` of it.
    """
    expected, tolerance = check.logprobs, max(TOLERANCES[check.dtype], TOLERANCES[dtype])
    if len(expected) != len(got):
        raise WeightSyncError(f"the engine returned {len(got)} log-probs for a weight check of {len(expected)}")
    gaps = [abs(float(a) - float(b)) for a, b in zip(expected, got, strict=True)]
    worst = max(range(len(gaps)), key=lambda i: math.inf if math.isnan(gaps[i]) else gaps[i])
    if digests_agree and gaps[worst] > tolerance and sum(gaps) / len(gaps) <= MEAN_SHARE * tolerance:
        log.warning(
            "%d of the weight check's %d log-probs differ by up to %.3g nats from the trainer's (mean %.3g), although "
            "the engine holds its weights: watch rollout_gap in the metrics, and max_rollout_gap",
            sum(gap > tolerance for gap in gaps), len(gaps), gaps[worst], sum(gaps) / len(gaps),
        )  # fmt: skip
    elif math.isnan(gaps[worst]) or gaps[worst] > tolerance:
        raise WeightSyncError(
            f"the engine does not hold the weights that the trainer published: log-prob {worst} of the weight check is "
            f"{float(got[worst]):.6g} in the engine and {float(expected[worst]):.6g} in the trainer (allowed gap "
            f"{tolerance:g}, {sum(not gap <= tolerance for gap in gaps)} of {len(gaps)} tokens beyond it). "
            "Check that every tensor reaches the engine, `lm_head.weight` of tied embeddings included."
        )
    return gaps[worst]


def verify_parameters(
    version: int, published: Mapping[str, int], ranks: RankDigests, before: RankDigests = (), held: int = 0
) -> None:
    """Raise WeightSyncError unless the parameters of all `ranks` hold the tensors `published` as `version`.

    `published` maps Hugging Face names to value digests. `before` is `ranks` when the engine held version `held`.
    """
    ranks, before = ([_chosen(rank, published) for rank in digests] for digests in (ranks, before))
    names = sorted({name for rank in ranks for name in rank})
    wrong = []
    for packed in (False, True):
        others = [name for name in names if name.endswith(PACKED) is not packed]
        for parameters, tensors in match([name for name in names if name not in others], published, others):
            if any(name.endswith(COMPUTED) for name in parameters):
                continue
            digests = [rank.get(name) for rank in ranks for name in parameters]
            if not _adds_up(digests, [published[name] for name in tensors], len(ranks)):
                stale = [rank.get(name) for rank in before for name in parameters] == digests
                reason = _explain(parameters, tensors, held if stale or None in digests else None)
                wrong.append((parameters[0], reason))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        name, reason = wrong[0]
        raise WeightSyncError(f"the engine does not hold version {version} of the weights: {reason}{more}", key=name)


def _chosen(rank: Mapping[str, int | None], published: Collection[str]) -> dict[str, int | None]:
    """Keep one name per parameter: one under which a tensor was published, or else the shortest."""
    digests: dict[str, int | None] = {}
    for names, value in rank.items():
        kind = next((kind for kind in KINDS if names.endswith(kind)), "")
        aliases = names.removesuffix(kind).split(SAME)
        published_names = [name for name in aliases if name in published] or [
            min(aliases, key=lambda name: name.count("."))
        ]
        digests |= {f"{name}{kind}": value for name in published_names}
    return digests


def match(
    parameters: Collection[str], tensors: Collection[str], others: Collection[str] = ()
) -> Iterator[tuple[list[str], list[str]]]:
    """Match parameters to the tensors that make them up, by name: groups of parameters with the group's tensors.

    A parameter is made up of the tensor with its own name. Otherwise it is made up of the tensors without such a
    parameter (here or among `others`) that are nearest in the module tree, preferring the same last part of the name.
    Every parameter is in one group; tensors in no group are unused by the engine.
    """
    bare = {name: name.removesuffix(next(filter(name.endswith, KINDS), "")) for name in parameters}
    taken = {name.removesuffix(PACKED) for name in others}
    yield from (([name], [tensor_name]) for name, tensor_name in bare.items() if tensor_name in tensors)
    left = (
        {name: tensor_name for name, tensor_name in bare.items() if tensor_name not in tensors},
        set(tensors) - set(bare.values()) - taken,
    )
    depths = range(max((name.count(".") for name in left[0].values()), default=-1), -1, -1)
    for by_leaf in (True, False):
        for depth in depths:
            groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
            for name, tensor_name in left[0].items():
                groups.setdefault(_place(tensor_name, depth, by_leaf), ([], []))[0].append(name)
            for name in sorted(left[1]):
                groups.get(_place(name, depth, by_leaf), ([], []))[1].append(name)
            for members, sources in groups.values():
                if sources:
                    yield members, sources
                    left = (
                        {n: tensor_name for n, tensor_name in left[0].items() if n not in members},
                        left[1] - set(sources),
                    )
    yield from (([name], []) for name in left[0])


def _place(name: str, depth: int, by_leaf: bool) -> tuple[str, ...]:
    """Return the first `depth` modules of a name and, if `by_leaf`, its last part; the whole name if it is shorter."""
    *modules, leaf = name.split(".")
    if len(modules) < depth:
        return (name,)
    return (*modules[:depth], leaf) if by_leaf else tuple(modules[:depth])


def _adds_up(values: Sequence[int | None], tensors: Sequence[int], ranks: int) -> bool:
    """True if each tensor is present a whole number of times among the ranks: once in shards, or copied to several
    ranks."""
    present = [value for value in values if value is not None]
    if not tensors or len(present) != len(values):
        return False
    copies = [count for count in range(1, ranks + 1) if ranks % count == 0]
    ways = product(copies, repeat=len(tensors)) if len(tensors) <= FEW else ((c,) * len(tensors) for c in copies)
    return any(sum(c * value for c, value in zip(way, tensors, strict=True)) == sum(present) for way in ways)


def _explain(parameters: Sequence[str], tensors: Sequence[str], held: int | None) -> str:
    name = ", ".join(parameters)
    if not tensors:
        return f"no tensor was published for its parameter {name}"
    made_of = (
        "" if list(tensors) == [p.removesuffix(PACKED) for p in parameters] else f" (made of {', '.join(tensors)})"
    )
    return f"its parameter {name}{made_of} " + (
        "holds other values than the trainer published" if held is None else f"still holds the values of version {held}"
    )
