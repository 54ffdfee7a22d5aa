"""Packed micro-batches: rows that share a prompt compute it once, and linear layers process no padding.

The tokens of a micro-batch form one row of S: each different prompt once, then all responses. Linear layers and norms
work on these S tokens. Only attention needs rectangles: it copies queries, keys and values into padded slots, lets each
prompt attend to itself and each response to its prompt and itself, and copies the result back. Where a kernel takes
sequences of any lengths (half precision on CUDA), there are no rectangles and no mask. The result is that of a padded
batch in which each row repeats its prompt, up to the order of floating-point sums.

Not covered: sliding windows, attention sinks and soft caps, which `find_fast_paths` in `policy.py` detects; and
dropout, which `load_causal_lm` removes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "trinity_packed"
"""The name under which `attention` is registered with transformers."""
NOT_COVERED = ("s_aux", "softcap", "position_bias")
"""Arguments of transformers' attention that `attention` does not apply; `s_aux` are sinks."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The micro-batch as G + b sequences for attention without padding: each prompt, then each row's response, whose
    keys are those of its prompt and its own. The queries are the S tokens in order."""

    queries: Tensor
    """int32 [G + b + 1]: start of each sequence's queries, and the end."""
    keys: Tensor
    """int32 [G + b + 1]: start of each sequence's keys, and the end."""
    key_tokens: Tensor
    """int64 [keys]: the token of each key."""
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch of b rows over G different prompts, laid out in one row of S tokens."""

    tokens: Tensor
    """int64 [1, S]: the prompts, then the responses."""
    positions: Tensor
    """int64 [1, S]: each token's position in its own sequence."""
    slots: Tensor
    """int64 [G * P + b * T]: the index of the token in each padded slot; 0 for padding."""
    home: Tensor
    """int64 [S]: each token's slot."""
    padding: Tensor
    """int64: the slots without a token."""
    prompt_shape: tuple[int, int]
    """(G, P)."""
    response_shape: tuple[int, int]
    """(b, T)."""
    prompt_of: Tensor
    """int64 [b]: index of the row's prompt, of G."""
    prompt_lengths: Tensor
    """int64 [b]: tokens of the row's prompt."""
    lengths: Lengths
    mask: Tensor | None = None
    """float [b, 1, T, P + T]: 0 where a response token may attend, -inf elsewhere. Padded queries see the prompt.

    None for attention by `lengths`. Built only for the pass that uses it, because it is large.
    """

    def masked(self, dtype: torch.dtype) -> Packed:
        """Return a copy with the attention mask in the model's `dtype`."""
        P, (b, T) = self.prompt_shape[1], self.response_shape
        device = self.tokens.device
        mask = torch.zeros(b, 1, T, P + T, dtype=dtype, device=device)
        absent = torch.arange(P, device=device) >= self.prompt_lengths[:, None]
        mask[..., :P].masked_fill_(absent[:, None, None], float("-inf"))
        mask[..., P:] = torch.full((T, T), float("-inf"), dtype=dtype, device=device).triu(1)
        return replace(self, mask=mask)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to each tensor in a dataclass and in the dataclasses nested in it."""
    if isinstance(value, Tensor):
        return change(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: each_tensor(getattr(value, field.name), change) for field in fields(value)})


def pack(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> tuple[Packed, np.ndarray, np.ndarray]:
    """Lay out b rows; equal prompts become one.

    Returns the layout and, as int64 [b, 2], the flat index of each row's last prompt token and of its first response
    token, so that response token t of row i is predicted at `last[i]` (t = 0) or `first[i] + t - 1`.
    """
    keys = [prompt.tobytes() for prompt in prompts]
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    prompt_of = np.array([index[key] for key in keys])
    unique: list[np.ndarray] = [np.empty(0)] * len(index)
    for key, prompt in zip(keys, prompts, strict=True):
        unique[index[key]] = prompt
    p = np.array([len(prompt) for prompt in unique])
    r = np.array([len(response) for response in responses])
    G, P, b, T = len(p), int(p.max()), len(r), int(r.max())
    real = np.concatenate([(np.arange(P) < p[:, None]).ravel(), (np.arange(T) < r[:, None]).ravel()])
    home = np.flatnonzero(real)
    slots = np.zeros(len(real), dtype=np.int64)
    slots[home] = np.arange(len(home))
    positions = np.concatenate(
        [np.broadcast_to(np.arange(P), (G, P)).ravel(), (p[prompt_of][:, None] + np.arange(T)).ravel()]
    )[home]
    ends = np.concatenate([p, r]).cumsum()
    packed = Packed(
        torch.from_numpy(np.concatenate([*unique, *responses]).astype(np.int64))[None],
        torch.from_numpy(positions)[None],
        torch.from_numpy(slots),
        torch.from_numpy(home),
        torch.from_numpy(np.flatnonzero(~real)),
        (G, P),
        (b, T),
        torch.from_numpy(prompt_of),
        torch.from_numpy(p[prompt_of]),
        _lengths(p, r, prompt_of),
    )
    return packed, ends[prompt_of] - 1, ends[G:] - r


def _lengths(p: np.ndarray, r: np.ndarray, prompt_of: np.ndarray) -> Lengths:
    ends = np.concatenate([p, r]).cumsum()
    tokens = np.split(np.arange(ends[-1]), ends[:-1])
    prompts, responses = tokens[: len(p)], tokens[len(p) :]
    keys = prompts + [part for i, row in zip(prompt_of, responses, strict=True) for part in (prompts[i], row)]
    key_lengths = np.concatenate([p, p[prompt_of] + r])
    begins, key_begins = (np.concatenate([[0], sums]).astype(np.int32) for sums in (ends, key_lengths.cumsum()))
    return Lengths(
        torch.from_numpy(begins), torch.from_numpy(key_begins), torch.from_numpy(np.concatenate(keys)),
        int(max(p.max(), r.max())), int(key_lengths.max()),
    )  # fmt: skip


class _Pad(torch.autograd.Function):
    """[S, ...] -> [slots, ...]: each token to its slot. Padding holds token 0 and passes no gradient to it.

    The gradient of plain indexing is a scattered addition, which costs about five times as much.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return x.index_select(0, packed.slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.packed.home), None


class _Unpad(torch.autograd.Function):
    """[slots, ...] -> [S, ...]: the inverse of `_Pad`; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return x.index_select(0, packed.home)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        packed: Packed = ctx.packed
        return grads[0].index_select(0, packed.slots).index_fill_(0, packed.padding, 0.0), None


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, repeat_heads: bool
) -> Tensor:
    """Attention under a mask, [b, heads, T, D], with fewer heads of keys and values than of queries.

    `repeat_heads` copies keys and values to all query heads: with a mask, CUDA's memory-efficient kernels do not
    support grouped heads.
    """
    if repeat_heads and (shared := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    grouped = key.shape[1] != query.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def attention_by_length(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scaling: float | None) -> Tensor:
    """Causal attention of sequences of any length with a CUDA kernel. A sequence's last query sees all its keys.

    Query [S, heads, D], key and value [S, key heads, D] -> [S, heads, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query, key.index_select(0, lengths.key_tokens), value.index_select(0, lengths.key_tokens), lengths.queries,
        lengths.keys, lengths.longest_queries, lengths.longest_keys, scale=scaling, window_size=(-1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )  # fmt: skip
    return cast("Tensor", out)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: query [1, heads, S, D], key [1, key heads, S, D], value [1, key heads, S, E] -> [1,
    S, heads, E]. E differs from D in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Raises ValueError for a mask of the model's own and for `NOT_COVERED`: `find_fast_paths` then pads rows.
    """
    if attention_mask is not None or any(more.get(name) is not None for name in NOT_COVERED):
        raise ValueError("attention of packed rows has neither masks of a model's own, nor sinks or soft caps")
    if packed is None:  # rows padded on the right: causal attention never sees the padding
        grouped = key.shape[1] != query.shape[1]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None
    if packed.mask is None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = attention_by_length(q, k, v, packed.lengths, scaling)
        return out[None], None
    (G, P), (b, T) = packed.prompt_shape, packed.response_shape
    heads, E = query.shape[1], value.shape[-1]

    def padded(x: Tensor) -> tuple[Tensor, Tensor]:
        moved = cast("Tensor", _Pad.apply(x[0].transpose(0, 1), packed))
        prompt, response = moved.split([G * P, b * T])
        shape = moved.shape[1:]
        return prompt.view(G, P, *shape).transpose(1, 2), response.view(b, T, *shape).transpose(1, 2)

    (q_p, q_r), (k_p, k_r), (v_p, v_r) = padded(query), padded(key), padded(value)
    grouped = key.shape[1] != heads
    out_p = scaled_dot_product_attention(q_p, k_p, v_p, is_causal=True, scale=scaling, enable_gqa=grouped)
    k = torch.cat([k_p.index_select(0, packed.prompt_of), k_r], dim=2)
    v = torch.cat([v_p.index_select(0, packed.prompt_of), v_r], dim=2)
    out_r = masked_attention(q_r, k, v, packed.mask, scaling, repeat_heads=query.is_cuda)
    out = torch.cat([out_p.transpose(1, 2).reshape(-1, heads, E), out_r.transpose(1, 2).reshape(-1, heads, E)])
    return cast("Tensor", _Unpad.apply(out, packed))[None], None
