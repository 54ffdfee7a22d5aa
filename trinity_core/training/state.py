"""An engine's weights and optimiser state as whole tensors by parameter name, under any ZeRO stage.

Names are those of the Hugging Face model. As tensors are whole, two workers can load a state that four have saved, also
under another ZeRO stage. All functions are collective: every rank calls them and iterates over the same names.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trinity_core.base.errors import DataError
from trinity_core.exchange.checkpoints.adapters import A, B, is_adapter, merged_weight, plain_name
from trinity_core.exchange.sync.tensorfile import CHUNK, MIX, SPREAD
from trinity_core.training.engine import TrainingEngine, uncompiled

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square, float32."""
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of DeepSpeed's loss scaler that changes from step to step."""
MASTER = "master"
"""Prefix for the float32 weights of a model trained in half precision."""


def parameters(engine: TrainingEngine, tied: bool = False) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each parameter with its name; with an adapter only the adapter's. `tied` adds tied names."""
    for name, p in engine.module.named_parameters(remove_duplicate=not tied):
        if engine.adapter is None:
            yield name.removeprefix("lm."), p
        elif is_adapter(plain := plain_name(name.removeprefix("lm."))):
            yield plain, p


def weights(engine: TrainingEngine, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight as a whole tensor, buffers included; with an adapter only the adapter's. `tied` adds tied names
    (`lm_head.weight`).

    A tensor is valid until the next iteration. Under ZeRO 3 it is gathered for that time.
    """
    for name, p in parameters(engine, tied):
        with whole([p], engine):
            yield name, p.detach()
    yield from buffers(engine).items()


def base_weights(engine: TrainingEngine, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the `weights` of an adapter's base model, tied names included; `merged` merges the adapter into them."""
    assert engine.adapter is not None
    adapter, scale = dict(parameters(engine)) if merged else {}, engine.adapter.scaling
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        plain = plain_name(name.removeprefix("lm."))
        if is_adapter(plain):
            continue
        module = plain.removesuffix(".weight")
        changed = module + A in adapter
        pair = [adapter[module + A], adapter[module + B]] if changed else []
        with whole([p, *pair], engine):
            weight = p.detach()
            yield plain, merged_weight(weight, pair[0].detach(), pair[1].detach(), scale) if changed else weight
    yield from stored_buffers(engine).items()


def buffers(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return stored tensors that are not trained (such as a router's bias); whole under every ZeRO stage. Empty for an
    adapter."""
    return {} if engine.adapter is not None else stored_buffers(engine)


def stored_buffers(engine: TrainingEngine) -> dict[str, Tensor]:
    stored = engine.module.state_dict()
    return {plain_name(name.removeprefix("lm.")): b for name, b in engine.module.named_buffers() if name in stored}


def whole(params: list[torch.nn.Parameter], engine: TrainingEngine, modifier_rank: int | None = None) -> Any:
    """A context in which `params` are whole; on exit, changes by `modifier_rank` are sent to the other ranks."""
    from contextlib import nullcontext

    if engine.settings.zero_stage < 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank)


def whole_shape(p: torch.nn.Parameter, engine: TrainingEngine) -> tuple[int, ...]:
    """Return the full shape of a parameter that ZeRO 3 may have partitioned."""
    return tuple(p.ds_shape) if engine.settings.zero_stage == 3 else tuple(p.shape)  # type: ignore[attr-defined]


@torch.no_grad()
def weights_digest(engine: TrainingEngine) -> str:
    """Return 16 hex digits that change with any bit of the trained weights, equal under every ZeRO stage. Collective.

    It is the sum of `sum_of_bits` over the tensors, each times an odd number drawn from its name, modulo 2^64. Ranks
    that partition the weights (ZeRO 3) digest their own parts, so that nothing is gathered.
    """
    total = torch.zeros((), dtype=torch.int64, device=engine.device)
    partitioned = engine.settings.zero_stage == 3
    for name, p in parameters(engine):
        part, start = _own_part(p, engine) if partitioned else (p, 0)
        total += sum_of_bits(part, start).to(total.device) * (zlib.crc32(name.encode()) | 1)
    if partitioned and engine.ranks.world_size > 1:
        torch.distributed.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


BLOCK = CHUNK["cpu"]
"""Elements after which the weights of positions repeat; blocks have weights too."""


def sum_of_bits(tensor: Tensor, start: int = 0) -> Tensor:
    """Return the int64 sum of v (2 v + w) over the elements' bits v, each block times an odd number. w, odd, depends on
    the position: elements that change places change the sum. `start` is the position of the first element.

    For an odd w this is a permutation of v modulo 2^32 (the mixing of RC6), without which opposite changes of two
    elements would cancel out.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    bits = tensor.detach().reshape(-1).view(words)
    start *= tensor.element_size() // words.itemsize
    head = min(-start % BLOCK, len(bits))  # up to the end of a block
    tail = head + (len(bits) - head) // BLOCK * BLOCK
    whole_blocks = bits[head:tail].view(-1, BLOCK).split(CHUNK[bits.device.type] // BLOCK)
    weights = _weights_of_positions(bits.device)
    sums = [torch.zeros(0, dtype=torch.int64, device=bits.device)]
    for blocks, first in ((bits[None, :head], start % BLOCK), *((b, 0) for b in whole_blocks), (bits[None, tail:], 0)):
        if blocks.numel():
            mixed = torch.add(weights[first : first + blocks.shape[1]], blocks, alpha=2).mul_(blocks)
            sums.append(mixed.sum(1, dtype=torch.int64))
    by_block = torch.cat(sums)
    number = start // BLOCK + torch.arange(len(by_block), device=bits.device)
    return (by_block * (2 * number + 1)).sum()


@cache
def _weights_of_positions(device: torch.device) -> Tensor:
    """int32 [BLOCK]: odd numbers without a pattern."""
    mixed = torch.arange(1, BLOCK + 1, dtype=torch.int32, device=device) * SPREAD
    return (mixed ^ (mixed >> 15)) * MIX | 1


def _own_part(p: Any, engine: TrainingEngine) -> tuple[Tensor, int]:
    """Return this rank's elements of a partitioned parameter, without the padding after the last ones, and the position
    of the first."""
    part: Tensor = p.ds_tensor.reshape(-1)
    start = engine.ranks.rank * part.numel()
    return part[: max(0, p.ds_numel - start)], start


def optimizer_steps(engine: TrainingEngine) -> int:
    """Return the number of updates so far, by Adam's own count, which all parameters share; 0 on a rank that owns
    none."""
    return next((int(state["step"]) for state in engine.optimizer.state.values() if "step" in state), 0)


def loss_scale(engine: TrainingEngine) -> dict[str, float]:
    """Return the state of float16's loss scaler; empty for other formats."""
    scaler = vars(engine.deepspeed.optimizer.loss_scaler) if engine.settings.dtype == torch.float16 else {}
    return {name: scaler[name] for name in SCALER if name in scaler}


def optimizer_state(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield whole float32 tensors named `<moment>.<parameter>`, and in half precision `master.<parameter>`.

    Those of all parameters, or if the engine is `plain` only of those that this rank owns. There are no moments before
    the first update.
    """
    if not engine.plain:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    moments = MOMENTS if optimizer_steps(engine) else ()
    for name, p in parameters(engine):
        if p not in engine.masters:
            continue
        for moment in moments:
            if engine.plain:
                yield f"{moment}.{name}", engine.optimizer.state[engine.masters[p]][moment]
            else:
                yield f"{moment}.{name}", safe_get_full_optimizer_state(p, moment)
        if engine.settings.dtype != torch.float32:
            master = engine.masters[p].detach() if engine.plain else safe_get_full_fp32_param(p)
            yield f"{MASTER}.{name}", master


def restore(
    engine: TrainingEngine,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    steps: int,
    zero_loss: Callable[[], Tensor],
    scaler: Mapping[str, float] = {},
) -> None:
    """Restore `weights`, `optimizer_state`, `optimizer_steps` and `loss_scale`, bit for bit under the same settings.

    `zero_loss` computes a loss with a zero gradient: a partitioned optimiser allocates its state in its first step.
    Raises DataError for a missing tensor.
    """
    if not engine.plain:
        with uncompiled():
            engine.backward(zero_loss(), last=True)
        engine.step(0.0)
    for name, p in parameters(engine):
        value = optimizer.get(f"{MASTER}.{name}", _find(model, name))  # the master: this run may have a finer dtype
        with torch.no_grad(), whole([p], engine, modifier_rank=0):
            p.copy_(value)
        if p not in engine.masters:
            continue
        if engine.plain:
            engine.masters[p].data.copy_(value)
        else:
            _set_float32(p, value.to(engine.device, torch.float32), engine)
        for moment in MOMENTS if steps else ():
            saved = _find(optimizer, f"{moment}.{name}").to(engine.device)
            if engine.plain:
                engine.optimizer.state[engine.masters[p]][moment] = saved.clone()
            else:
                _set_float32(p, saved, engine, moment)
        if engine.plain and steps:
            engine.optimizer.state[engine.masters[p]]["step"] = torch.tensor(float(steps), device=engine.device)
    for name, buffer in buffers(engine).items():
        buffer.copy_(model.get(name, buffer))
    if not engine.plain:
        for state in engine.optimizer.state.values():
            state["step"].fill_(steps)
        if loss_scale(engine):
            vars(engine.deepspeed.optimizer.loss_scaler).update(scaler)


def _set_float32(p: torch.nn.Parameter, value: Tensor, engine: TrainingEngine, moment: str | None = None) -> None:
    """Set a parameter's master weights, or a moment, to a whole tensor where ZeRO partitions them.

    Under ZeRO 3 sets only this rank's padded part: DeepSpeed 0.19.8 cannot slice a tensor whose elements do not divide
    evenly, such as the bias of a value head.
    """
    from deepspeed import utils

    if engine.settings.zero_stage < 3:
        set_weights, set_moment = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
    else:
        set_weights, set_moment = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
        size = p.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = pad(value.flatten(), (0, size * engine.ranks.world_size - value.numel()))
        value = padded[size * engine.ranks.rank :][:size]
    if moment is None:
        set_weights(p, value)
    else:
        set_moment(p, value, moment)


def _find(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise DataError(f"the checkpoint has no tensor '{name}'; was it made with another model?")
    return tensors[name]
