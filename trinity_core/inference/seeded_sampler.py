"""How a CPU engine chooses tokens: token t of a sequence depends on its seed, on t and on its logits, on nothing else.

vLLM gives each seeded request a generator and draws from them one by one, at a tenth of the time of a small model's
step; and a generator has a state, which is lost with the engine. Here the noise of all rows comes at once from a
counter: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") at place t of the
stream of each request's seed. A request that is asked again of another engine goes through the same noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's step."""


def mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, uint64 [N] -> uint64 [N]: each bit of the input changes half of the output's."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def noise_seeds(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64 [N] seeds and places -> uint64 [N]: number `place` of the stream that starts at the mixed seed."""
    return mix(mix(seeds) + (places + np.uint64(1)) * GOLDEN)


class SeededChoice(nn.Module):
    """Takes the place of vLLM's choice among the tokens that top-k and top-p leave."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """float32 [N, V] logits -> int64 [N] tokens and their distribution, float32 [N, V] log-probs.

        A row without a generator has no seed; its noise is vLLM's.
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
    """vLLM's sampler with `SeededChoice`, and without the ranks of the tokens that it chose: nobody asks for them."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.sampler.logprobs_mode)
        self.topk_topp_sampler = SeededChoice(runner)  # type: ignore[assignment]

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """As vLLM's; where only the tokens themselves are asked for, their ranks are left at 0."""
        if num_logprobs:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        chosen = token_ids.unsqueeze(-1)
        return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(-1, chosen), torch.zeros_like(token_ids))
