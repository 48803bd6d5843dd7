"""Fixtures of the tests of methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedsynth.models import convnet as frozen


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of functions passed to torch.compile, which compiles nothing.

    Passes hold two images of digits at a ConvNet's width of 4, so with ipc 2 no pass is partial.
    """
    names: list[str] = []

    def spy(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", spy)
    monkeypatch.setattr("fedsynth.synthesizer.condensation.matching.CPU_BYTES", 2 * 4 * 8 * 8 * 4)
    # a separate cache: its functions are not compiled
    monkeypatch.setattr(frozen, "_parts", functools.cache(frozen._parts.__wrapped__))
    return names
