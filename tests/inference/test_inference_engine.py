"""The engine compared with a plain transformers forward: its samples, their log-probs and its weights."""

from __future__ import annotations

import asyncio
import copy
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from inference.holding import held_midway
from raising import raising

from trinity_core.base.errors import InputError, TransientFault, TrinityError, WeightSyncError
from trinity_core.base.layout import JobLayout
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.rollout.inference.requests import Request, Sampling, WeightSource
from trinity_core.rollout.inference.settings import CPU_BLOCK_TOKENS

pytestmark = pytest.mark.slow

PROMPT = np.array([5, 9, 30, 7, 12, 41], dtype=np.int32)
SAMPLING = Sampling(max_tokens=12)


def requests(count: int, sampling: Sampling = SAMPLING, name: str = "r", seed: int = 0) -> list[Request]:
    return [Request(f"{name}/{i}", np.append(PROMPT, 50 + i % 4), sampling, seed + i) for i in range(count)]


def generate(engine, wanted: list[Request]):
    return asyncio.run(engine.generate(wanted)).unpack()


def trainer_logprobs(model, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log_softmax(logits / temperature) of the response's tokens, as in a trainer."""
    import torch

    sequence = torch.tensor(np.concatenate([prompt, tokens])[None].astype(np.int64))
    with torch.no_grad():
        logits = model(sequence).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits.float(), -1).gather(-1, sequence[0, len(prompt) :, None])[:, 0].numpy()


def publish(folder, version: int, model, error: float = 0.0):
    """Publish the weights of a transformers model with their weight check."""
    tokens = (3, 14, 15, 92, 65, 35)
    head, rest = np.array(tokens[:1]), np.array(tokens[1:])
    logprobs = trainer_logprobs(model, head, rest) + error
    folder.publish(version, model.state_dict().items(), WeightCheck(tokens, tuple(logprobs.tolist())))


def changed(model, seed: int):
    """The same architecture with other weights."""
    import torch

    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def other_model(tiny_model):
    return changed(tiny_model, seed=1)


@pytest.fixture
def restored_weights(tiny_engine, tiny_folder):
    yield
    asyncio.run(tiny_engine.load(WeightSource("folder", str(tiny_folder)), 0))


def test_cache_reset_makes_the_engine_recompute_prompts(tiny_engine, monkeypatch):
    prompt = np.arange(5, 5 + 3 * CPU_BLOCK_TOKENS + 1, dtype=np.int32)
    cached_tokens, place = [], tiny_engine._place

    def watched(output):
        if output.finished:
            cached_tokens.append(output.num_cached_tokens)
        place(output)

    monkeypatch.setattr(tiny_engine, "_place", watched)

    def logprobs(key: str) -> bytes:
        [sample] = generate(tiny_engine, [Request(key, prompt, SAMPLING, 0)])
        return sample.logprobs.tobytes()

    asyncio.run(tiny_engine.reset_prefix_cache())
    first = logprobs("reset/first")
    logprobs("reset/cached")
    asyncio.run(tiny_engine.reset_prefix_cache())
    assert logprobs("reset/again") == first
    assert cached_tokens == [0, 3 * CPU_BLOCK_TOKENS, 0]


def test_an_engine_that_slept_goes_on_as_before(tiny_engine):
    """On the CPU sleeping frees nothing, but using a sleeping engine is an error."""
    [before] = generate(tiny_engine, requests(1, name="before"))

    async def nap():
        await tiny_engine.sleep()
        for asked in (tiny_engine.generate(requests(1)), tiny_engine._load(WeightSource("folder", "x"), 0)):
            with pytest.raises(AssertionError, match="sleeps"):
                await asked
        await tiny_engine.wake()

    asyncio.run(nap())
    [after] = generate(tiny_engine, requests(1, name="after"))
    assert after.tokens.tolist() == before.tokens.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_match_the_trainers(tiny_engine, tiny_model, temperature):
    wanted = requests(8, Sampling(max_tokens=12, temperature=temperature))
    for request, sample in zip(wanted, generate(tiny_engine, wanted), strict=True):
        expected = trainer_logprobs(tiny_model, request.prompt, sample.tokens, temperature)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_restricted_requests_leave_other_samples_alone(tiny_engine):
    [alone] = generate(tiny_engine, requests(1, name="plain"))
    restricted = requests(3, replace(SAMPLING, top_k=2, min_tokens=3, temperature=0.5), name="restricted", seed=9)
    mixed, *_ = generate(tiny_engine, [*requests(1, name="plain"), *restricted])
    assert mixed.tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(mixed.logprobs, alone.logprobs, atol=1e-5)


def test_greedy_takes_the_likeliest_token(tiny_engine, tiny_model):
    import torch

    [sample] = generate(tiny_engine, [Request("g", PROMPT, Sampling(max_tokens=5, temperature=0.0))])
    sequence = PROMPT.tolist()
    for token in sample.tokens:
        with torch.no_grad():
            assert int(tiny_model(torch.tensor([sequence])).logits[0, -1].argmax()) == token
        sequence.append(int(token))


def test_seeded_sample_is_independent_of_its_batch(tiny_engine):
    alone = generate(tiny_engine, requests(1, name="alone", seed=7))[0]
    among = generate(tiny_engine, [*requests(1, name="among", seed=7), *requests(9, name="others", seed=100)])[0]
    different = generate(tiny_engine, requests(1, name="different", seed=8))[0]
    assert alone.tokens.tolist() == among.tokens.tolist()
    assert alone.tokens.tolist() != different.tokens.tolist()


def test_seeded_sample_continues_alike_from_a_prefix(tiny_engine):
    [whole] = generate(tiny_engine, [Request("whole", PROMPT, SAMPLING, seed=5)])
    prompt = np.concatenate([PROMPT, whole.tokens[:4]])
    [rest] = generate(tiny_engine, [Request("rest", prompt, Sampling(max_tokens=8), seed=5)])
    assert rest.tokens.tolist() == whole.tokens[4:].tolist()


def test_unseeded_samples_differ(tiny_engine):
    wanted = [Request(f"unseeded/{i}", PROMPT, SAMPLING) for i in range(4)]
    seeded = Request("seeded", PROMPT, SAMPLING, seed=5)
    greedy = Request("greedy", PROMPT, replace(SAMPLING, temperature=0.0), seed=5)
    samples = [s.tokens.tolist() for s in generate(tiny_engine, [*wanted, seeded, greedy])]
    assert len({tuple(tokens) for tokens in samples}) == 6
    assert [s.tokens.tolist() for s in generate(tiny_engine, [seeded, greedy])] == samples[4:]


@pytest.mark.parametrize("top_k", [-1, 3])
def test_token_frequencies_match_the_model(tiny_engine, tiny_model, top_k):
    """Chi-square of first tokens over the most likely tokens and the rest; exceeds its limit once in 100,000 times."""
    import torch

    count = 4000
    wanted = Sampling(max_tokens=1, temperature=0.5, top_k=top_k)
    drawn = [
        int(s.tokens[0]) for s in generate(tiny_engine, [Request(f"d{i}", PROMPT, wanted, i) for i in range(count)])
    ]
    with torch.no_grad():
        chances = torch.softmax(tiny_model(torch.tensor([PROMPT.tolist()])).logits[0, -1] / 0.5, -1).double()
    likely = chances.topk(3).indices.tolist()
    if top_k > 0:
        assert set(drawn) == set(likely)
        chances = chances / chances[likely].sum()
    expected = np.array([*(float(chances[token]) for token in likely), max(1 - float(chances[likely].sum()), 0.0)])
    seen = np.array([drawn.count(token) for token in likely])
    seen = np.append(seen, count - seen.sum())
    cells = expected > 0
    chi_square = float((((seen - count * expected) ** 2)[cells] / (count * expected)[cells]).sum())
    assert chi_square < 26.0


def test_sample_ends_with_its_stop_token(tiny_engine):
    first = generate(tiny_engine, requests(1, name="free"))[0]
    stop = int(first.tokens[3])
    [sample] = generate(tiny_engine, requests(1, replace(SAMPLING, stop_token_ids=(stop,)), name="stopped"))
    where = first.tokens.tolist().index(stop)
    assert sample.tokens.tolist() == first.tokens[: where + 1].tolist()
    assert sample.reason == "stop"
    assert first.reason == "length"


def test_min_tokens_counts_the_end_token(tiny_engine):
    free = generate(tiny_engine, requests(1, name="free3"))[0]
    stop = int(free.tokens[2])
    first = free.tokens.tolist().index(stop)
    wanted = replace(SAMPLING, stop_token_ids=(stop,), min_tokens=first + 1)
    [sample] = generate(tiny_engine, requests(1, wanted, name="exact"))
    assert sample.tokens.tolist() == free.tokens[: first + 1].tolist()


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_loaded_weights_pass_the_weight_check(
    tiny_engine, tiny_folder, other_model, tmp_path, method, restored_weights
):
    folder = open_versions(method, tmp_path)
    publish(folder, 3, other_model)
    done = asyncio.run(tiny_engine.load(WeightSource(method, str(tmp_path)), 3))
    assert done.version == 3
    assert done.gap is not None
    assert done.gap < 1e-4
    wanted = requests(4, name=f"new-{method}")
    for request, sample in zip(wanted, generate(tiny_engine, wanted), strict=True):
        expected = trainer_logprobs(other_model, request.prompt, sample.tokens)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
        assert sample.versions.tolist() == [3] * len(sample.tokens)
    folder.remove()


def test_wrong_weights_fail_the_weight_check(tiny_engine, other_model, tmp_path, restored_weights):
    publish(open_versions("checkpoint", tmp_path), 1, other_model, error=0.01)
    with pytest.raises(WeightSyncError):
        asyncio.run(tiny_engine.load(WeightSource("checkpoint", str(tmp_path)), 1))


def test_converted_checkpoint_uses_the_published_weight_check(
    tiny_engine, tiny_model, other_model, tmp_path, restored_weights
):
    publish(open_versions("checkpoint", tmp_path), 1, other_model)
    source = WeightSource("folder", str(JobLayout(tmp_path).huggingface(1)))
    tiny_model.save_pretrained(source.path)
    with pytest.raises(WeightSyncError):
        asyncio.run(tiny_engine.load(source, 1))
    other_model.save_pretrained(source.path)
    assert asyncio.run(tiny_engine.load(source, 1)).gap < 1e-4


def test_missing_version_leaves_the_engine_unchanged(tiny_engine, tmp_path):
    before = generate(tiny_engine, requests(1, name="before"))[0]
    with pytest.raises(TransientFault):
        asyncio.run(tiny_engine.load(WeightSource("checkpoint", str(tmp_path)), 5))
    assert generate(tiny_engine, requests(1, name="after"))[0].tokens.tolist() == before.tokens.tolist()


def test_aborted_request_returns_no_tokens(tiny_engine):
    async def give_up():
        long = requests(2, Sampling(max_tokens=200, min_tokens=200), name="long")
        with held_midway(tiny_engine, 20, once=True) as midway:
            running = asyncio.create_task(tiny_engine.generate(long))
            await asyncio.to_thread(midway.wait, 60)
            await tiny_engine.abort(["long/1"])
            return (await running).unpack()

    kept, given_up = asyncio.run(give_up())
    assert (len(kept.tokens), kept.reason) == (200, "length")
    assert (len(given_up.tokens), given_up.reason) == (0, "abort")


def test_a_sequence_too_long_to_score_is_refused_alone(tiny_engine):
    most = tiny_engine.settings.max_model_len - 1
    with raising(InputError, key="model.max_model_len"):
        asyncio.run(tiny_engine.score([7] * (most + 1)))
    for refused in ([], [10**9, 7]):
        with pytest.raises(TrinityError):
            asyncio.run(tiny_engine.score(refused))
    assert len(asyncio.run(tiny_engine.score([7] * most))) == most - 1


def test_vllm_looks_for_its_kernels_beside_proxies(tiny_engine, monkeypatch):
    """A plugin may import Flask, whose `request` raises on any attribute outside of a request."""
    from vllm.triton_utils.dispatcher import _rebind_kernels

    class Proxy:
        @property
        def __dict__(self):
            raise RuntimeError("outside of a request")

    module = ModuleType("proxies")
    module.request = Proxy()
    monkeypatch.setitem(sys.modules, "proxies", module)
    _rebind_kernels([])


def test_no_process_is_started_to_inspect_a_model(tiny_engine, monkeypatch):
    """Also of an architecture of which vLLM has nothing in its cache yet."""
    from vllm.model_executor.models import registry

    model = registry.ModelRegistry.models["GPT2LMHeadModel"]
    monkeypatch.setattr(type(model), "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(type(model), "_save_modelinfo_to_cache", lambda *_: None)
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    assert model.inspect_model_cls().is_text_generation_model


def test_oversized_prompt_is_refused_alone(tiny_engine):
    with pytest.raises(TrinityError):
        generate(tiny_engine, [Request("huge", np.ones(400, np.int32), SAMPLING, 1)])
    assert len(generate(tiny_engine, requests(1, name="fits"))[0].tokens) == 12
