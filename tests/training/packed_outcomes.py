"""Small random models of other families, log-probs and gradients of a micro-batch, and attention by lengths as its CUDA
kernel computes it."""

import torch
from batches import VOCABULARY
from torch.nn.functional import scaled_dot_product_attention

from trinity_core.training.policy import Policy

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


def save_random(kind, folder, **settings):
    """Save a model of this kind with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **settings)).save_pretrained(folder)


def assert_as_alone(grid, rows, lm):
    """Each row of `grid` has the log-probs that the model itself computes for that row alone."""
    with torch.no_grad():
        for values, e in zip(grid, rows, strict=False):
            tokens, start = torch.tensor(e.tokens).long(), e.prompt_length
            logprobs = lm(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1).gather(-1, tokens[start:, None])[:, 0]
            expected = torch.zeros_like(values)
            expected[: len(logprobs)] = logprobs.float() * torch.tensor(e.action_mask)
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


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
