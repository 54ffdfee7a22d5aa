"""The output layer's Triton kernels: compiled for several GPUs, and run in Triton's interpreter on the CPU, against
float64 and against the path in torch.

Each in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import os
import subprocess
import sys

import pytest

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trinity_core.algorithms import head_kernels

types, constants = {"targets": "*i64", "start": "i32", "size": "i32"}, {"with_entropy": True, "block": 4096}
for kernel in (head_kernels._reduce, head_kernels._differentiate):
    for logits in ("*bf16", "*fp32"):
        signature = {name: types.get(name, "*fp32") for name in kernel.arg_names} | {"logits": logits}
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        for capability in (80, 90):
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            assert made.asm["cubin"]
"""
INTERPRETED = """
import torch
from trinity_core.algorithms.logprobs import token_logprobs_and_entropy

def compare(rows, vocabulary, chunk, temperature, biased, with_entropy, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * vocabulary)
    shapes = (rows, 16), (vocabulary, 16), (vocabulary,)
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    if temperature is None:
        temperature = 0.5 + torch.rand(rows, generator=generator)
    upstream = torch.randn(2, rows, generator=generator)
    upstream[0, 1::3] = 0
    def outcome(leaves, way):
        bias = leaves[2] if biased else None
        logprobs, entropy = way(leaves[0], leaves[1], targets, temperature, bias)
        loss = (logprobs * upstream[0]).sum() + (entropy * upstream[1]).sum() * with_entropy
        return [logprobs.detach(), entropy.detach() * with_entropy, *torch.autograd.grad(loss, leaves[: 2 + biased])]
    def plain(hidden, weight, targets, temperature, bias):
        heat = temperature[:, None].double() if torch.is_tensor(temperature) else temperature
        logprobs = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias).double() / heat, -1)
        return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    def sliced(*given, kernels=False):
        return token_logprobs_and_entropy(*given, chunk, with_entropy, kernels)
    kernels = outcome(leaves, lambda *given: sliced(*given, kernels=True))
    exact = [t.detach().double().requires_grad_() for t in leaves] if dtype == torch.float32 else leaves
    assert kernels[0].dtype == torch.float32 and kernels[3].dtype == dtype
    for truth in (outcome(exact, plain), outcome(leaves, sliced)):
        for got, expected in zip(kernels, truth, strict=True):
            atol = 1e-5 if dtype == torch.float32 or got.dtype == torch.float32 else 0.02
            torch.testing.assert_close(got.double(), expected.double(), atol=atol, rtol=1e-5 if atol < 0.02 else 0.02)

compare(5, 300, 128, 1.0, False, True)
compare(5, 300, 128, None, True, True)
compare(7, 9001, None, None, False, False)  # three blocks of a slice, the last one not full
compare(7, 9001, 4500, 0.7, True, True)
compare(3, 1, None, None, True, True)
compare(2, 257, 256, 1.7, True, False)
compare(6, 1000, 384, None, True, True, torch.bfloat16)
compare(6, 1000, 384, 0.8, False, False, torch.bfloat16)
hidden = torch.randn(0, 4).requires_grad_()
none, _ = token_logprobs_and_entropy(hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.int64), kernels=True)
none.sum().backward()
assert none.shape == (0,) and hidden.grad.shape == (0, 4)
large = token_logprobs_and_entropy(1e4 * torch.randn(3, 4), torch.randn(9, 4), torch.tensor([0, 1, 8]), kernels=True)
assert all(part.isfinite().all() for part in large)

import dataclasses, numpy as np
from transformers import LlamaConfig, LlamaForCausalLM
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import FastPaths, Policy, sample
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
lm = LlamaForCausalLM(LlamaConfig(vocab_size=90, **sizes))
rows = [dataclasses.replace(row, temperature=heat) for row, heat in zip(sample(90), (0.5, None, 1.5, 1.0))]
micro = build_micro(rows, range(4), 8, packing=False)
for use in ("none", "loss"):
    outcomes = []
    for kernels in (False, True):
        lm.zero_grad()
        logprobs, entropy = Policy(lm, FastPaths(False, True, head_kernels=kernels))(micro, 0.8, use)
        (logprobs.sum() + 2 * entropy.sum()).backward()
        outcomes.append([logprobs.detach(), entropy.detach(), *(p.grad.clone() for p in lm.parameters())])
    for got, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.parametrize(
    ("code", "interpreted"),
    [pytest.param(COMPILED, "0", id="compiled for GPUs"), pytest.param(INTERPRETED, "1", id="interpreted")],
)
def test_kernels(code, interpreted, tmp_path):
    settings = {"TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
