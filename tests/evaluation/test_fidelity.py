"""Tests of FID and KID against SciPy and NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from fedsynth import ModelSettings, fidelity_of_set, load_dataset, load_synthetic
from fedsynth.data.images import ImageData, normalise, to_stored
from fedsynth.data.shared_set import TENSORS, UNITS, write_hashes, write_set
from fedsynth.errors import DataError, SettingError, UnknownNameError
from fedsynth.evaluation.fidelity import fidelity
from fedsynth.features.pretrained import PretrainedNetwork
from fedsynth.models.registry import build_network


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    covariances = [np.cov(x, rowvar=False) for x in (a, b)]
    mixed = sqrtm(covariances[0] @ covariances[1]).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(sum(covariances) - 2 * mixed))


def kernel(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the unbiased estimate of the squared maximum mean discrepancy."""
    within = 0.0
    for x in (a, b):
        products = (x @ x.T / x.shape[1] + 1) ** 3
        within += (products.sum() - np.trace(products)) / (len(x) * (len(x) - 1))
    return float(within - 2 * ((a @ b.T / a.shape[1] + 1) ** 3).mean())


def test_distances_match_scipy_and_numpy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 5)), 0.5 + rng.normal(size=(40, 5)) * 2
    measured = fidelity(torch.tensor(a), torch.tensor(b))
    assert measured.fid == pytest.approx(frechet(a, b), rel=1e-6)
    assert measured.kid == pytest.approx(kernel(b, a), rel=1e-6)
    assert measured.kid_std == pytest.approx(0, abs=1e-9)  # each subset has all 40 images
    more = fidelity(torch.tensor(a), torch.tensor(rng.normal(size=(90, 5))))
    assert (more.subset_size, more.synthetic, more.real, more.features) == (40, 40, 90, 5)
    assert abs(more.kid) < kernel(b, a) / 10
    assert more.kid_std > 0
    with pytest.raises(DataError, match="at least two synthetic and two real images"):
        fidelity(torch.tensor(a[:1]), torch.tensor(b))
    with pytest.raises(DataError, match="not finite"):
        fidelity(torch.tensor(a) / 0, torch.tensor(b))


@pytest.fixture
def digits_set(tmp_path: Path) -> tuple[Path, ImageData]:
    """Returns a set whose images are 30 training digits outside [0, 1], and the test digits."""
    train, test = load_dataset("digits")
    images = train.images[:30].float() / 255 * 3 - 1
    write_set(tmp_path / TENSORS, images, train.labels[:30], train.spec, pixels=UNITS)
    write_hashes(tmp_path)
    return tmp_path, test


def test_sets_are_compared_as_stored_images(digits_set: tuple[Path, ImageData]) -> None:
    """Broken versions would compare unclipped values, or pixels that the network normalises."""
    folder, test = digits_set
    train, _ = load_dataset("digits")
    clipped = (train.images[:30].numpy() / 255 * 3 - 1).clip(0, 1).reshape(30, -1)
    rounded = np.rint(clipped * 255) / 255
    real = test.images.numpy().reshape(len(test.labels), -1) / 255
    assert fidelity_of_set(folder, test, "pixels").fid == pytest.approx(
        frechet(rounded, real), abs=0.05
    )
    model = build_network(ModelSettings(width=4, depth=1), test.spec, seed=0)
    with torch.no_grad():
        features = [
            model.embed(normalise(images, test.spec)).double()
            for images in (torch.tensor(rounded * 255).byte().view(30, 1, 8, 8), test.images)
        ]
    assert fidelity_of_set(folder, test, model) == fidelity(*features)


def test_unsuitable_networks_are_refused(digits_set: tuple[Path, ImageData]) -> None:
    folder, test = digits_set
    with pytest.raises(UnknownNameError, match="unknown feature map 'pixel'; did you mean pixels"):
        fidelity_of_set(folder, test, "pixel")
    with pytest.raises(SettingError, match="must have a function `embed`"):
        fidelity_of_set(folder, test, torch.nn.Flatten())


def test_networks_of_torchvision_get_images_at_their_size(
    digits_set: tuple[Path, ImageData], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, test = digits_set
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    pretrained = PretrainedNetwork(
        network, 12, (16, 16), False, (0.5,) * 3, (0.5,) * 3, "bilinear", ""
    )
    monkeypatch.setattr("fedsynth.simulation.fidelity.pretrained_network", lambda *_: pretrained)
    measured = fidelity_of_set(folder, test, "torchvision:resnet18")
    assert (measured.features, measured.real) == (12, len(test.labels))
    stored = to_stored(load_synthetic(folder).images, test.spec)
    pixels = [images.float() / 255 for images in (stored, test.images)]
    assert measured == fidelity(*map(pretrained.embed_pixels, pixels))
