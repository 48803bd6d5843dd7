"""Models on fixed feature maps: logits, training, cached features and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import FedAvg, ModelSettings, PartitionSettings, RunSettings, resolve, simulate
from fedsynth.core.client import ExactClientView
from fedsynth.core.feature_cache import feature_table
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.load import load_dataset
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.evaluation.accuracy import correct
from fedsynth.features import feature_map, register_features
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.on_features import OnFeatures
from fedsynth.models.registry import build_network
from tests.digits import SPEC, digits
from tests.families import by_family
from tests.quick_settings import quick_settings

PIXELS = feature_map("pixels", SPEC.image_shape)


def data() -> ImageData:
    return digits(np.arange(40) % 10)


def z_of(images: ImageData) -> np.ndarray:
    """Computes clip₁(φ/R) of `pixels` in NumPy."""
    features = PIXELS(images.images).double().numpy() / PIXELS.radius
    z: np.ndarray = features / np.maximum(1, np.linalg.norm(features, axis=1, keepdims=True))
    return z


def network(name: str = "linear", **other: Any) -> OnFeatures:
    model = build_network(ModelSettings(name, features="pixels", **other), SPEC, 3)
    assert isinstance(model, OnFeatures)
    return model


def test_images_and_vectors_have_equal_logits() -> None:
    images = data()
    z = z_of(images)
    assert (np.linalg.norm(z, axis=1) <= 1 + 1e-6).all()
    linear = network()
    w = linear.classifier.weight.detach().double().numpy()
    x = normalise(images.images, SPEC)
    vectors = torch.tensor(z, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(linear(x).numpy(), z @ w.T, atol=1e-5)
        np.testing.assert_allclose(linear(vectors).numpy(), z @ w.T, atol=1e-6)
        small: Any = network("mlp", width=7)
        first, last = small.hidden, small.classifier
        hidden = np.maximum(
            0, 8 * z @ first.weight.double().numpy().T + first.bias.double().numpy()
        )
        expected = hidden @ last.weight.double().numpy().T + last.bias.double().numpy()
        np.testing.assert_allclose(small(x).numpy(), expected, atol=1e-4)
    is_correct = (z @ w.T).argmax(axis=1) == images.labels.numpy()
    actual = correct(linear, images, among=torch.tensor([3, 5]))
    assert actual.tolist() == is_correct[[3, 5]].tolist()


def test_local_training_is_softmax_regression() -> None:
    """Compares one full-batch step with NumPy; clients provide vectors instead of images."""
    images = data()
    method = FedAvg(local_epochs=1, batch=100, lr=2.0, momentum=0.0)
    parts = PartitionSettings(clients=1, alpha=100.0, min_size=1)
    model = ModelSettings(features="pixels")
    settings = RunSettings(method, rounds=1, model=model, partition=parts)
    result = simulate(settings, data=(images, None))
    start: Any = build_network(settings.model, SPEC, settings.seed)
    w = start.classifier.weight.detach().double().numpy()
    z, y = z_of(images), images.labels.numpy()
    p = np.exp(z @ w.T)
    r = p / p.sum(axis=1, keepdims=True) - np.eye(10)[y]
    actual = result.model.state_dict()["classifier.weight"].double().numpy()
    np.testing.assert_allclose(actual, w - 2.0 * r.T @ z / len(y), atol=1e-5)
    clients = ExactClientView([0], images, [torch.arange(40)], network=start)
    np.testing.assert_allclose(clients.images(torch.tensor([4])), z[4:5], atol=1e-6)


def test_maps_of_equal_names_do_not_share_vectors() -> None:
    """A cache by name and dimension would give the second map the first map's vectors."""
    images, records = data(), torch.arange(4)
    for shift in (0.5, 0.25):
        shifted = replace(
            PIXELS, name="own-shifted", function=lambda x, shift=shift: x.flatten(1) - shift
        )
        register_features("own-shifted", lambda shape, shifted=shifted: shifted)  # type: ignore[misc]
        registered = feature_map("own-shifted", SPEC.image_shape)
        expected = images.images[:4].flatten(1) / 255 - shift
        torch.testing.assert_close(feature_table(images, registered, records)(records), expected)


SUPPORTED = {
    name
    for name in METHODS
    if issubclass(method_class(name), TrainsLocally) and not method_class(name).features_refusal
}


NEED_LEARNED_EMBEDDING = ("moon", "fedgen", "fedfm", "fedfm-lite")
"""These methods refuse a linear model, since its embedding is not learned."""


def settings_of(method: str, **model: Any) -> RunSettings:
    return resolve(
        {
            "run": {"method": method, "rounds": 1},
            "partition": {"local_test": 0.2 if method == "solo" else 0.0, "clients": 2},
            "method": quick_settings(method),
            "model": {"features": "pixels", **model},
        }
    )


@pytest.mark.parametrize("method", by_family(METHODS, ("fedavg", "moon", "feddm")))
def test_methods_train_on_features_or_refuse_them(method: str) -> None:
    train, test = load_dataset("digits")
    few = train.subset(np.arange(200)), test.subset(np.arange(50))
    if method not in SUPPORTED:
        with pytest.raises(SettingError, match=r"model\.features"):
            settings_of(method)
        return
    name = "mlp" if method in NEED_LEARNED_EMBEDDING else "linear"
    if method in NEED_LEARNED_EMBEDDING:
        with pytest.raises(SettingError, match=r"model\.name must be 'mlp'"):
            simulate(settings_of(method), data=few)
    assert simulate(settings_of(method, name=name), data=few).accuracy is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "convnet", "features": "pixels"}, "'linear' or 'mlp'"),
        ({"features": "whitened-scatering"}, "whitened-scattering"),
        ({"name": "mlp", "features": "pixels", "projection": 8}, "projection"),
    ],
)
def test_invalid_feature_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((SettingError, UnknownNameError), match=message):
        ModelSettings(**settings)
