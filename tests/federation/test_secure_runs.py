"""Runs over nodes whose server sees sums alone: what it holds, who may be lost, and that the result
is the simulation's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import resolve, simulate
from fedsynth.errors import SettingError
from fedsynth.federation.exchange.frames import Frame
from fedsynth.federation.nodes.bundles import pack, unpack
from fedsynth.federation.nodes.served import Served
from fedsynth.privacy import randomness
from fedsynth.privacy.ledger import read_ledger
from tests.federation.test_nodes import CLIENTS, Hand, Place, StoppedError, joined, place
from tests.federation.test_unchanged import RepeatableNoise
from tests.small import small_settings

pytest.importorskip("cryptography", reason="the secure extra is not installed")
__all__ = ["place"]
PRIVATE = {"noise_multiplier": 2.0}
METHODS = ["fedstats", "fedsum"]


def sections(method: str, clients: int = CLIENTS, **more: Any) -> dict[str, dict[str, Any]]:
    """Two rounds on the digits, with sums that the server alone does not see the parts of."""
    given = {**small_settings(method), "aggregation": "secure", **more.pop("method", {})}
    if method == "fedsum":
        given["networks"] = 2
    run = {"method": method, "rounds": 2, "device": "cpu", "evaluate_every": 2}
    return {
        "run": {**run, "quorum": 0.6, **more.pop("run", {})},
        "partition": {"clients": clients, "subset": 0.2, "alpha": 1.0},
        "model": {"width": 4, "depth": 2, "norm": "instance"},
        "method": given,
        **more,
    }


def injected(number: int) -> Callable[[], randomness.SecretGenerator]:
    """The noise that `simulated` gives the client with this number."""
    noise: Any = RepeatableNoise(number)
    return lambda: randomness.SecretGenerator(test_only=noise)


def simulated(given: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same run in one process, with noise that can be repeated."""
    made = itertools.count()
    clients = given["partition"]["clients"]
    with monkeypatch.context() as patch:
        fresh = lambda: RepeatableNoise(next(made) % clients)  # noqa: E731
        patch.setattr(randomness, "_fresh_generator", fresh)
        return simulate(resolve(given), quiet=True)


def close(served: Served, together: Any) -> None:
    """The models are the same, but for rounding: to 1e-5 of a tensor's largest number. (Open
    sums are rounded to 2^-32, which a ridge regression on few examples makes 2e-5 of a weight.)"""
    for name, value in together.model.state_dict().items():
        scale = max(1.0, float(value.abs().max())) if value.is_floating_point() else 1.0
        atol = 1e-5 * scale
        torch.testing.assert_close(served.parameters[name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_without_noise_the_result_is_the_simulations(place: Place, method: str) -> None:
    served = place.serve(sections(method))
    close(served, simulate(resolve(sections(method)), quiet=True))


@pytest.mark.parametrize("method", METHODS)
def test_with_injected_noise_the_result_is_the_simulations(
    place: Place, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections(method, privacy=PRIVATE)
    nodes = [place.node(k, secret=injected(k)) for k in range(CLIENTS)]
    served = place.serve(given, place.hand(*nodes))
    together = simulated(given, monkeypatch)
    close(served, together)
    assert served.metrics[-1]["epsilon"] == together.metrics[-1]["epsilon"]
