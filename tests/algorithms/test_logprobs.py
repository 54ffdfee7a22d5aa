"""Log-probs and entropy in slices of the vocabulary: equal to the plain computation, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import InputError
from trinity_core.algorithms.logprobs import token_logprobs_and_entropy


def plain(hidden, weight, targets, temperature=1.0, bias=None):
    """All logits at once."""
    logits = hidden @ weight.t()
    logprobs = torch.log_softmax((logits if bias is None else logits + bias) / temperature, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def inputs(rows, width, vocabulary, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(vocabulary, (rows,), generator=generator)


@settings(max_examples=25)
@given(
    st.integers(1, 6), st.integers(1, 9), st.integers(1, 12), st.sampled_from([0.5, 1.0, 1.7]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_equal_to_the_plain_way(rows, vocabulary, chunk, temperature, biased, seed):
    hidden, weight, bias, targets = inputs(rows, 4, vocabulary, seed=seed)
    given_bias = bias if biased else None
    upstream = torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    results = []
    for logprobs, entropy in (
        plain(hidden, weight, targets, temperature, given_bias),
        token_logprobs_and_entropy(hidden, weight, targets, temperature, given_bias, chunk),
    ):
        leaves = (hidden, weight, bias) if biased else (hidden, weight)
        grads = torch.autograd.grad((logprobs * upstream[0] + entropy * upstream[1]).sum(), leaves)
        results.append((logprobs, entropy, *grads))
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(expected, got, atol=1e-10)


def test_float32_is_as_accurate_as_plain_computation():
    hidden, weight, _, targets = inputs(16, 32, 5000, torch.float32)
    scaled = (weight.detach() / 32**0.5).requires_grad_()
    logprobs, entropy = token_logprobs_and_entropy(hidden, scaled, targets, chunk=700)
    expected, expected_entropy = plain(hidden, scaled, targets)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    for got, wanted in zip(
        torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, scaled)),
        torch.autograd.grad(expected.sum() + expected_entropy.sum(), (hidden, scaled)),
        strict=True,
    ):
        assert torch.allclose(got, wanted, atol=1e-5)
    assert entropy.dtype == logprobs.dtype == torch.float32


def test_half_precision_has_float32_results_and_own_gradients():
    hidden, weight, _, targets = (t.detach() for t in inputs(6, 8, 50))
    half = [t.to(torch.bfloat16).requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = token_logprobs_and_entropy(*half, targets, chunk=16)
    expected, _ = plain(half[0].double(), half[1].double(), targets)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=0.05)
    (logprobs.sum() + entropy.sum()).backward()
    assert half[0].grad.dtype == half[1].grad.dtype == torch.bfloat16
    master = weight.float().requires_grad_()
    token_logprobs_and_entropy(half[0], master, targets, chunk=16)[0].sum().backward()
    assert master.grad.dtype == torch.float32


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [100, 333, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_bfloat16_logits_are_scaled_in_float32(temperature, chunk, biased):
    """Engines and the plain computation round the product to bfloat16 once, and divide it by the temperature in
    float32."""
    hidden, weight, bias, targets = (t.detach() for t in inputs(64, 32, 1000))
    half = [t.to(torch.bfloat16) for t in (hidden, weight, bias)]
    given_bias = half[2] if biased else None
    rounded = torch.nn.functional.linear(half[0], half[1], given_bias).double()
    expected = torch.log_softmax(rounded / temperature, -1)
    logprobs, entropy = token_logprobs_and_entropy(*half[:2], targets, temperature, given_bias, chunk)
    gaps = (logprobs.double() - expected.gather(1, targets[:, None])[:, 0]).abs()
    entropy_gaps = (entropy.double() + (expected.exp() * expected).sum(-1)).abs()
    assert gaps.median() < 1e-5
    assert gaps.mean() < 1e-4
    assert entropy_gaps.mean() < 1e-4


def test_large_logits_do_not_overflow():
    hidden, weight, _, targets = inputs(3, 4, 7, torch.float32)
    logprobs, entropy = token_logprobs_and_entropy(hidden * 1e4, weight, targets, chunk=2)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()
    assert (entropy >= -1e-6).all()
    assert (logprobs <= 0).all()


def test_rows_without_gradient_are_left_out():
    hidden, weight, _, targets = inputs(5, 3, 7)
    keep = torch.tensor([1.0, 0, 2.0, 0, 0], dtype=torch.float64)
    for way in (plain, token_logprobs_and_entropy):
        hidden.grad = weight.grad = None
        (way(hidden, weight, targets)[0] * keep).sum().backward()
        if way is plain:
            expected = hidden.grad, weight.grad
    assert torch.allclose(hidden.grad, expected[0])
    assert torch.allclose(weight.grad, expected[1])
    assert (hidden.grad[[1, 3, 4]] == 0).all()
    weight.grad = None
    (token_logprobs_and_entropy(hidden, weight, targets)[0] * 0).sum().backward()
    assert (weight.grad == 0).all()


def test_frozen_parts_and_no_rows():
    hidden, weight, _, targets = inputs(3, 4, 7)
    token_logprobs_and_entropy(hidden, weight.detach(), targets)[0].sum().backward()
    assert weight.grad is None
    with torch.no_grad():
        assert not token_logprobs_and_entropy(hidden, weight, targets)[0].requires_grad
    none, _ = token_logprobs_and_entropy(hidden[:0], weight, targets[:0])
    assert none.shape == (0,)
    none.sum().backward()
    _, entropy = token_logprobs_and_entropy(hidden, weight, targets, with_entropy=False)
    assert (entropy == 0).all()
    assert not entropy.requires_grad


def test_what_cannot_be_used_is_refused():
    hidden, weight, _, targets = inputs(3, 4, 7)
    with raising(InputError, key="targets"):
        token_logprobs_and_entropy(hidden, weight, targets[:2])
    with raising(InputError, key="temperature"):
        token_logprobs_and_entropy(hidden, weight, targets, temperature=0.0)
    for outside in (-1, 7):
        with raising(InputError, key="targets"):
            token_logprobs_and_entropy(hidden, weight, torch.tensor([0, outside, 1]))
