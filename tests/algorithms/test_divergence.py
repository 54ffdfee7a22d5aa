"""Divergences from a teacher in slices of the vocabulary, against all probabilities at once in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import InputError
from trinity_core.algorithms.divergence import divergence_from_teacher
from trinity_core.algorithms.logprobs import Head


def plain(logits, teacher_logits, beta):
    """arXiv 2306.13649, eq. 1; its limits at 0 and 1, divided by beta and 1 - beta, are the KLs."""
    q, p = logits.softmax(-1), teacher_logits.softmax(-1)

    def kl(one, other):
        return (one * (one.log() - other.log())).sum(-1)

    m = beta * p + (1 - beta) * q
    return {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))


def drawn(seed, rows, vocabulary, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = Head(draw(vocabulary, 4).requires_grad_(), draw(vocabulary).requires_grad_())
    return draw(rows, 4).requires_grad_(), head, draw(rows, 3), Head(draw(vocabulary, 3)), draw(rows)


@settings(max_examples=40)
@given(
    st.integers(1, 6), st.integers(2, 9), st.integers(1, 12), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_equal_to_the_formula(rows, vocabulary, chunk, beta, by_row, seed):
    hidden, head, teacher_hidden, teacher_head, upstream = drawn(seed, rows, vocabulary)
    temperature = torch.linspace(0.5, 2, rows, dtype=torch.float64) if by_row else 0.7
    scale = temperature[:, None] if by_row else temperature
    teacher_logits = teacher_hidden @ teacher_head.weight.t()
    expected = plain((hidden @ head.weight.t() + head.bias) / scale, teacher_logits / scale, beta)
    got = divergence_from_teacher(hidden, head, teacher_hidden, teacher_head, beta, temperature, chunk)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    leaves = (hidden, *head)
    for one, other in zip(*(torch.autograd.grad((d * upstream).sum(), leaves) for d in (expected, got)), strict=True):
        torch.testing.assert_close(other, one, atol=1e-10, rtol=0)


def test_by_hand():
    """p = (1/2, 1/2), q = (3/4, 1/4): KL(p || q) = log(4/3) / 2, KL(q || p) = 3/4 log 3 - log 2."""
    logits, teacher = torch.tensor([[3.0, 1.0]]).double().log(), torch.zeros(1, 2).double()
    eye = Head(torch.eye(2).double())
    forward, reverse = (divergence_from_teacher(logits, eye, teacher, eye, beta) for beta in (0.0, 1.0))
    assert float(forward) == pytest.approx(0.14384103622589045) and float(reverse) == pytest.approx(0.13081203594113697)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_policy_does_not_diverge_from_itself(beta):
    hidden, head, *_ = drawn(0, 5, 7, torch.bfloat16)
    value = divergence_from_teacher(hidden, head, hidden.detach(), head, beta)
    assert value.dtype == torch.float32 and float(value.detach().abs().max()) < 1e-6
    value.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and float(hidden.grad.abs().max()) < 1e-5


def test_what_cannot_be_compared_is_refused():
    hidden, head, teacher_hidden, teacher_head, _ = drawn(0, 3, 5)
    with raising(InputError, key="teacher_hidden"):
        divergence_from_teacher(hidden, head, teacher_hidden[:2], teacher_head, 0.0)
    with raising(InputError, key="teacher_hidden"):
        divergence_from_teacher(hidden, head, teacher_hidden, Head(teacher_head.weight[:4]), 0.0)
