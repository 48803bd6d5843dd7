"""What tests of methods share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedsynth.models import convnet as frozen


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that torch.compile is asked for, and does not compile.

    Passes hold two images of digits at a ConvNet's width of 4: with ipc 2 all are whole ones.
    """
    names: list[str] = []

    def spy(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", spy)
    monkeypatch.setattr("fedsynth.synthesizer.condensation.matching.CPU_BYTES", 2 * 4 * 8 * 8 * 4)
    # a cache of the test's own: what it keeps is not compiled
    monkeypatch.setattr(frozen, "_parts", functools.cache(frozen._parts.__wrapped__))
    return names
