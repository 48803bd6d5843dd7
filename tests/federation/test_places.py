"""The warning where rows depend on their place on this machine, to whoever runs and to each owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsynth import simulate
from fedsynth.federation.terms import places
from fedsynth.federation.terms.settings import resolve
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.dpsgd import example_gradients
from fedsynth.rows_alone import moves_with_place
from tests.small import small_settings

WORDS = "depend on its place"
CPU = torch.device("cpu")


def notes(method: str, private: bool, capsys: pytest.CaptureFixture[str]) -> str:
    given: dict[str, Any] = {
        "run": {"method": method, "rounds": 1},
        "method": small_settings(method),
        "model": {"width": 8, "depth": 2},
        "partition": {"clients": 2},
    }
    simulate(resolve({**given, "privacy": {"noise_multiplier": 1.0}} if private else given))
    return capsys.readouterr().err


def by_place(images: Tensor) -> Tensor:
    """A network's logits on a machine whose kernels take every other row in another order."""
    found = images.flatten(1)[:, :3].clone()
    found[1::2] *= 1 + 2**-20
    return found


@pytest.mark.parametrize(("private", "warned"), [(True, 1), (False, 0)])
def test_a_private_run_is_warned_of_and_an_open_one_has_nothing_to_lose(
    private: bool,
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert notes("fedavg", private, capsys).count(WORDS) == 0
    monkeypatch.setattr(places, "example_gradients", lambda network, x, y: by_place(x))
    assert notes("fedavg", private, capsys).count(WORDS) == warned


def test_gradients_are_tried_where_dp_sgd_is_the_mechanism(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images are condensed through forward passes: another method's gradients are not its own."""
    monkeypatch.setattr(places, "example_gradients", lambda network, x, y: by_place(x))
    assert WORDS not in notes("feddm", True, capsys)


@pytest.mark.parametrize("name", ["linear", "convnet"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_even_sides_and_widths_of_eight_are_safe_here(name: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = (1, 28, 28)
    network = build_model(ModelSettings(name=name, width=8, depth=2), shape, 10, 0).to(device)

    def gradients(images: Tensor) -> Tensor:
        return example_gradients(network, images, torch.zeros(len(images)).long().to(device))

    for function in (network, gradients):
        assert not moves_with_place(function, shape, torch.device(device), 32)


def test_a_difference_of_the_last_bit_is_seen() -> None:
    assert moves_with_place(by_place, (1, 4, 4), CPU, 8)
    assert not moves_with_place(lambda x: by_place(x)[:, :1] * 0, (1, 4, 4), CPU, 8)
