"""The noise of the seeded sampler."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow

SPLITMIX_1234567 = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
"""The first numbers of SplitMix64 from the seed 1234567, as published by other implementations."""


def test_noise_counter_is_splitmix64():
    from trinity_core.rollout.inference.seeded_sampler import GOLDEN, mix

    states = np.uint64(1234567) + np.arange(1, 5, dtype=np.uint64) * GOLDEN
    assert mix(states).tolist() == SPLITMIX_1234567


def test_neighbouring_seeds_and_positions_are_independent():
    """Chi-square of pairs of choices among 8 equal tokens, 63 degrees of freedom: above 130 once in a million times."""
    from types import SimpleNamespace

    import torch
    from vllm.platforms import current_platform

    from trinity_core.rollout.inference.seeded_sampler import SeededChoice

    current_platform.import_kernels()
    seeds, places, tokens = 500, 41, 8
    rows = SimpleNamespace(num_tokens_no_spec=np.tile(np.arange(places), seeds))
    choose = SeededChoice(SimpleNamespace(input_batch=rows))
    generators = {i: torch.Generator().manual_seed(i // places) for i in range(seeds * places)}
    chosen, logprobs = choose(torch.zeros(seeds * places, tokens), generators, None, None)
    assert torch.allclose(logprobs, torch.tensor(-np.log(tokens)).float())
    grid = chosen.numpy().reshape(seeds, places)
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        seen = np.bincount(first.ravel() * tokens + second.ravel(), minlength=tokens**2)
        expected = first.size / tokens**2
        assert ((seen - expected) ** 2 / expected).sum() < 130.0


def test_gpu_engines_need_no_flashinfer_to_sample(monkeypatch):
    """vLLM's sampler of GPUs would import it for a kernel that gives no log-probs."""
    import sys

    from vllm.envs import disable_envs_cache
    from vllm.v1.sample.ops import topk_topp_sampler

    from trinity_core.rollout.inference.settings import EngineSettings

    monkeypatch.setattr(topk_topp_sampler.current_platform, "is_cuda", lambda: True)
    for name in ("flashinfer", "vllm.v1.attention.backends.flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    disable_envs_cache()  # an engine of this process has read them
    with pytest.raises(ImportError):
        topk_topp_sampler.flashinfer_sampler_supported()
    for name, value in EngineSettings("model", 100, on_gpu=True).environment().items():
        monkeypatch.setenv(name, value)
    assert not topk_topp_sampler.flashinfer_sampler_supported()
