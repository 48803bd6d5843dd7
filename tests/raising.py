"""`raises`: a fault is told by its type and its code, so that messages can be improved freely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedsynth.errors import FedsynthError


@contextmanager
def raises(
    expected: type[FedsynthError] | tuple[type[FedsynthError], ...], code: str
) -> Iterator[pytest.ExceptionInfo[FedsynthError]]:
    """The block raises an error of the expected type with this code."""
    with pytest.raises(expected) as caught:
        yield caught
    assert caught.value.code == code, repr(caught.value)
