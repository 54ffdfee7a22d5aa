"""Sampling in a CPU engine: token t of a sequence depends only on its seed, t and its logits.

vLLM gives each seeded request a generator and draws from them one by one, which takes a tenth of a small model's step;
and the state of a generator is lost with its engine. Here a counter produces the noise of all rows at once: SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") at position t of the stream of each
request's seed. A request repeated on another engine gets the same noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's step."""

GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0, as in vLLM."""


def mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, uint64 [N] -> uint64 [N]: each input bit changes half of the output bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def noise_seeds(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64 [N] seeds and positions -> uint64 [N]: number `place` of the stream that starts at the mixed seed."""
    return mix(mix(seeds) + (places + np.uint64(1)) * GOLDEN)


class SeededChoice(nn.Module):
    """Replaces vLLM's choice among the tokens that top-k and top-p keep."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """float32 [N, V] logits -> int64 [N] tokens and their distribution, float32 [N, V] log-probs.

        A row without a generator has no seed; its noise comes from torch's global generator.
        """
        logits = apply_top_k_top_p(logits, k, p)
        count = len(logits)
        seeds = torch.randint(0, 2**63 - 1, (count,)).numpy().astype(np.uint64)
        for i, generator in generators.items():
            seeds[i] = generator.initial_seed()
        places = self._runner.input_batch.num_tokens_no_spec[:count].astype(np.uint64)
        noise = torch.from_numpy(noise_seeds(seeds, places).view(np.int64))
        return torch.ops._C.fused_gumbel_argmax(logits, noise), logits.log_softmax(-1)


class SeededSampler(Sampler):
    """vLLM's sampler with `SeededChoice`. Its log-probs are those of the whole vocabulary, and it computes no ranks.

    top-k, top-p and a minimum length restrict the choice of tokens, and penalties change it, but the reported log-prob
    is log_softmax(logits / temperature), which is what the trainer computes.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.sampler.logprobs_mode)
        self.topk_topp_sampler = SeededChoice(runner)  # type: ignore[assignment]

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any) -> SamplerOutput:
        """float32 [N, V] logits -> N tokens and their log-probs; see vLLM's `Sampler.forward`."""
        count = sampling_metadata.max_num_logprobs
        if count is None or not _restricted(sampling_metadata):
            return super().forward(logits, sampling_metadata, *args, **options)
        whole = _logprobs(logits, sampling_metadata)  # before vLLM masks the logits in place
        output = super().forward(logits, sampling_metadata, *args, **options)
        sampled = output.sampled_token_ids[:, 0].long()
        return replace(output, logprobs_tensors=self.gather_logprobs(whole, count, sampled))

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """As in vLLM, except that ranks stay 0 if only the sampled tokens' log-probs are wanted."""
        if num_logprobs:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        sampled = token_ids.unsqueeze(-1)
        return LogprobsTensors(sampled.to(torch.int32), logprobs.gather(-1, sampled), torch.zeros_like(token_ids))


def _restricted(metadata: SamplingMetadata) -> bool:
    """True if any row may not choose from the whole vocabulary, or has a penalty."""
    if metadata.top_k is not None or metadata.top_p is not None or not metadata.no_penalties:
        return True
    processors = metadata.logitsprocs.non_argmax_invariant
    return any(processor.min_toks for processor in processors if isinstance(processor, MinTokensLogitsProcessor))


def _logprobs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """float32 [N, V] log_softmax(logits / temperature); greedy rows at temperature 1."""
    logits = logits.float()
    if metadata.temperature is not None:
        logits = logits / torch.where(metadata.temperature < GREEDY_BELOW, 1.0, metadata.temperature).unsqueeze(-1)
    return logits.log_softmax(-1)
