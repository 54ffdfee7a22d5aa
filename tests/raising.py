"""Expect an error by its class and by its key, whatever its words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trinity_core.base.errors import TrinityError


@contextmanager
def raising(kind: type[TrinityError], key: str) -> Iterator[pytest.ExceptionInfo[TrinityError]]:
    """The block raises an error of this kind about this configuration key, argument, column or tensor."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.key == key, caught.value
