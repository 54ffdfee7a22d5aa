"""Log-probs and gradients of a micro-batch, and attention by lengths as its CUDA kernel computes it."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from trinity_core.training.policy import Policy


def outcome(lm, fast_paths, micro, attention):
    lm.set_attn_implementation(attention)
    lm.zero_grad()
    logprobs, entropy = Policy(lm, fast_paths)(micro.to(torch.device("cpu")), 0.7, True)
    weights = torch.linspace(-1, 1, len(logprobs))
    ((logprobs * weights).sum() + 0.1 * entropy.sum()).backward()
    return micro.grid(logprobs.detach()), {name: p.grad.clone() for name, p in lm.named_parameters() if p.requires_grad}


def attend_by_length(query, key, value, queries, keys, longest, longest_keys, *, scale, window_size, enable_gqa):
    """The CUDA kernel's computation, one sequence after the other, with an explicit mask."""
    assert window_size == (-1, 0) and longest == queries.diff().max() and longest_keys == keys.diff().max()
    sequences = []
    for begin, end, first, last in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        seen = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
        parts = [x[a:b].transpose(0, 1) for x, a, b in ((query, begin, end), (key, first, last), (value, first, last))]
        sequences.append(scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(sequences, 1).transpose(0, 1)
