"""`trinity_core.lazy.torch` stands for torch wherever torch itself would do."""

from __future__ import annotations

import pickle

import torch

from trinity_core.lazy import torch as lazy


def test_lazy_torch_is_pickled_as_torch() -> None:
    assert pickle.loads(pickle.dumps(lazy)) is torch
