"""Splits each sequence over several ranks with DeepSpeed's Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

Each rank runs norms, linear layers and the head on its part of a micro-batch's tokens. For attention, the ranks of a
group exchange parts so that each has all tokens of its share of the heads. Log-probs are gathered at the end: all ranks
of the group compute the same loss, and each the gradient of its own tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trinity_core.base.errors import TrinityError
from trinity_core.training.distributed import Ranks, SequenceGroup, start_deepspeed
from trinity_core.training.micro import Micro
from trinity_core.training.packing import ATTENTION, Packed, attention

KEY = "trainer.ulysses_sequence_parallel_size"


def split_sequences(ranks: Ranks, size: int) -> Ranks:
    """Group adjacent ranks in groups of `size` that share sequences. Collective.

    Raises TrinityError if `size` does not divide the number of ranks.
    """
    if size == 1:
        return ranks
    if ranks.world_size % size:
        raise TrinityError(f"{KEY} is {size}, which does not divide the {ranks.world_size} trainer worker(s)", key=KEY)
    start_deepspeed(ranks)
    sharing = [range(first, first + size) for first in range(0, ranks.world_size, size)]
    alike = [range(rank, ranks.world_size, size) for rank in range(size)]
    groups = {tuple(members): torch.distributed.new_group(list(members)) for members in [*sharing, *alike]}
    my_groups = [groups[tuple(members)] for kind in (sharing, alike) for members in kind if ranks.rank in members]
    return replace(ranks, sequence=SequenceGroup(ranks.rank % size, size, my_groups[0]), data_group=my_groups[1])


def install(lm: Any, sequence: SequenceGroup) -> None:
    """Make the model exchange tokens for heads around its attention.

    Raises TrinityError if its heads cannot be divided evenly, or its rows cannot be packed.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AttentionInterface

    config = lm.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    other = TrinityError(
        f"{KEY}: the attention of {lm.config.model_type} is not one that can be split over workers; leave it out",
        key=KEY,
    )
    if lm.config._attn_implementation != ATTENTION or hasattr(config, "v_head_dim"):
        raise other
    if heads % sequence.size or (kv_heads % sequence.size and sequence.size % kv_heads):
        raise TrinityError(
            f"{KEY} is {sequence.size}, but {lm.config.model_type} has {heads} heads of queries and {kv_heads} of "
            "keys: they cannot be shared out evenly. Choose a divisor of both, or a multiple of the latter",
            key=KEY,
        )
    channels = getattr(config, "head_dim", None) or config.hidden_size // heads
    exchange = UlyssesSPAttentionHF(
        attn=_padded_attention, batch_size=1, attn_head_count=heads, attn_head_size=channels, kv_head_count=kv_heads,
        num_hidden_layers=config.num_hidden_layers, process_group=sequence.group, seq_length_is_variable=True,
    )  # fmt: skip

    def exchanged(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
    ) -> Any:
        if query.shape[1::2] != (heads, channels) or {key.shape[1::2], value.shape[1::2]} != {(kv_heads, channels)}:
            raise other  # DeepSpeed exchanges heads of one number and size: not DiffLlama's, Laguna's
        return exchange(module, query, key, value, mask, **{"position_ids": more["packed"].positions, **more})

    name = f"{ATTENTION}_{sequence.size}_{heads}_{kv_heads}_{channels}"
    AttentionInterface.register(name, exchanged)
    lm.set_attn_implementation(name)


def _padded_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, packed: Packed,
    **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`attention` without the padding that gives all ranks the same number of tokens."""
    tokens, length = len(packed.home), query.shape[2]
    query, key, value = (x[:, :, :tokens] for x in (query, key, value))
    out, _ = attention(module, query, key, value, attention_mask, packed=packed, **more)
    return pad(out, (0, 0, 0, 0, 0, length - tokens)), None


def share_of(micro: Micro, sequence: SequenceGroup) -> tuple[Micro, Tensor]:
    """Return the micro-batch with this rank's part of the tokens, and int64 [k]: which of its K loss-carrying tokens
    this part predicts."""
    packed = micro.inputs
    assert isinstance(packed, Packed)
    tokens = packed.tokens.shape[1]
    length = -(-tokens // sequence.size)
    first = sequence.rank * length

    def part(x: Tensor) -> Tensor:
        return pad(x, (0, length * sequence.size - tokens))[:, first : first + length]

    indices = ((micro.source >= first) & (micro.source < first + length)).nonzero()[:, 0]
    temperature = micro.temperature[indices] if isinstance(micro.temperature, Tensor) else micro.temperature
    inputs = replace(packed, tokens=part(packed.tokens), positions=part(packed.positions))
    source, targets = micro.source[indices] - first, micro.targets[indices]
    return replace(micro, inputs=inputs, source=source, targets=targets, temperature=temperature), indices


def whole(values: Tensor, indices: Tensor, count: int, sequence: SequenceGroup) -> Tensor:
    """[k] of this rank -> [K] of the group. Backward passes each rank the gradient of its own values. Collective."""
    result: Tensor = _Whole.apply(values, indices, count, sequence.group)
    return result


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(indices)
        result = values.new_zeros(count).index_copy_(0, indices, values)
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None
