"""Compiled layers: the same log-probs and gradients, one compilation for all micro-batches, by default on GPUs."""

import pytest
import torch
from batches import make_batch
from packed_outcomes import outcome

from trinity_core.base.errors import TrinityError
from trinity_core.config import LoraConfig
from trinity_core.training.engine import compile_layers, decoder_layers, uncompiled
from trinity_core.training.lora import add_adapter
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import FastPaths, load_causal_lm


@pytest.fixture(scope="module")
def lm(tiny_model):
    return load_causal_lm(str(tiny_model), torch.float64)


@pytest.mark.slow
def test_compiling_changes_nothing(lm, monkeypatch):
    """Batches of two shapes, one after another. What torch captures of a layer, forward and backward, is run as it is:
    a C++ compiler would take minutes. Its own code on a GPU: `benchmarks/gpu.py`."""
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda lm, **how: compile_(lm, **how, backend="aot_eager"))
    batches = [make_batch(4), make_batch(5)]
    micros = [build_micro(rows, range(8), max(e.response_length for e in rows)) for rows in batches]
    truth = [outcome(lm, FastPaths(True, True), micro, "trinity_packed") for micro in micros]
    compiled = load_causal_lm(lm.name_or_path, torch.float64)
    compile_layers(compiled, True, True, torch.device("cpu"))
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in lm.named_parameters()]
    for micro, (logprobs, gradients) in zip(micros, truth, strict=True):
        compiled_logprobs, own = outcome(compiled, FastPaths(True, True), micro, "trinity_packed")
        torch.testing.assert_close(compiled_logprobs, logprobs, atol=1e-5, rtol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("adapter", [False, True])
def test_layers_compile_once_and_not_when_uncompiled(lm, adapter):
    """Whatever the lengths of the rows and their number."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, paths = CompileCounter(), FastPaths(True, True)
    compiled = load_causal_lm(lm.name_or_path, torch.float64)
    compilations = 1
    if adapter:
        compilations += 1  # the first layer's input has no gradient: the embeddings are frozen
        add_adapter(compiled, LoraConfig(lora_rank=4), lm.name_or_path, 0, dropout=False)
    layers = decoder_layers(compiled)
    assert len(layers) == compiled.config.num_hidden_layers
    for layer in layers:
        layer.compile(dynamic=True, backend=counter)
    for seed, count in ((6, 8), (7, 8), (8, 16), (9, 7)):
        rows = make_batch(seed)
        micro = build_micro(rows, range(count), max(e.response_length for e in rows))
        outcome(compiled, paths, micro, "trinity_packed")
        assert counter.frame_count == compilations
    alone = build_micro(rows, [0], rows[0].response_length)
    with uncompiled():
        outcome(compiled, paths, alone, "trinity_packed")
    assert counter.frame_count == compilations


@pytest.mark.parametrize(
    ("wanted", "packing", "device", "compiles"),
    [
        (None, True, "cuda", True),
        (None, False, "cuda", False),
        (None, True, "cpu", False),
        (False, True, "cuda", False),
    ],
)
def test_layers_compile_by_default_on_gpus(tiny_model, wanted, packing, device, compiles):
    fresh = load_causal_lm(str(tiny_model), torch.float32)
    compile_layers(fresh, wanted, packing, torch.device(device))
    assert {layer._compiled_call_impl is not None for layer in decoder_layers(fresh)} == {compiles}


def test_compiling_needs_a_compiler(lm, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TrinityError):
        compile_layers(lm, True, True, torch.device("cpu"))
