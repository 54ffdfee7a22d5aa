"""The kernels with which vLLM samples on GPUs (its model runner V2), on the CPU in Triton's interpreter.

No engine of these tests runs them: on the CPU vLLM has another model runner.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BEGINNING = """
import torch, triton, triton.language as tl, triton.language.extra.libdevice as libdevice
from vllm import triton_utils
vars(triton_utils).update(HAS_TRITON=True, triton=triton, tl=tl, tldevice=libdevice)  # it looks for a driver
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

torch.manual_seed(0)

def sampled(logits, seeds, places, temperature=1.0):
    rows, count = torch.arange(len(logits), dtype=torch.int32), len(logits)
    heat = torch.full((count,), temperature)
    return gumbel_sample(logits, rows, heat, torch.tensor(seeds), torch.tensor(places), True, False)
"""
CHECKS = {
    "log-probs": """
logits = 3 * torch.randn(3, 1500)
rows, heat = torch.arange(3, dtype=torch.int32), torch.tensor([0.5, 1.0, 2.0])
expected = torch.log_softmax(logits.double() / heat[:, None], -1)
apply_temperature(logits, rows, heat)
tokens = torch.tensor([[0], [1023], [1499]])
assert (compute_token_logprobs(logits, tokens) - expected.gather(1, tokens)).abs().max() < 1e-5
""",
    "a seed's token in any row and beside any others": """
logits = torch.randn(1, 1500).expand(6, -1).contiguous()
first = sampled(logits, [7, 8, 9, 7, 7, 10], [5, 5, 5, 6, 7, 5])
again = sampled(logits.flip(0), [10, 7, 7, 9, 8, 7], [5, 7, 6, 5, 5, 5]).flip(0)
assert first.tolist() == again.tolist() and len(set(first.tolist())) > 3
assert sampled(logits[:1], [7], [5]).item() == first[0]
assert sampled(logits, [7] * 6, [5] * 6, temperature=0.0).tolist() == [logits[0].argmax().item()] * 6
""",
    # Chi-square with 7 degrees of freedom exceeds 41 once in a million times.
    "frequencies": """
logits = torch.tensor([[0.0, 0.5, 1.0, 1.5, -0.5, 0.2, 0.9, -1.0]])
expected = torch.softmax(logits[0] / 0.7, -1) * 500
for seeds, places in (([3] * 500, range(500)), (range(500), [3] * 500)):
    drawn = sampled(logits.expand(500, -1).contiguous(), [*seeds], [*places], temperature=0.7)
    seen = torch.bincount(drawn, minlength=8)
    assert ((seen - expected) ** 2 / expected).sum() < 41.0, (seen, expected)
""",
}


def test_gpu_sampler() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", "\n".join([BEGINNING, *CHECKS.values()])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
