"""Models on fixed feature maps: what they compute, what they train on, and whose features are
kept."""

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
    """clip₁(φ/R) of `pixels` in NumPy."""
    features = PIXELS(images.images).double().numpy() / PIXELS.radius
    found: np.ndarray = features / np.maximum(1, np.linalg.norm(features, axis=1, keepdims=True))
    return found


def network(name: str = "linear", **other: Any) -> OnFeatures:
    made = build_network(ModelSettings(name, features="pixels", **other), SPEC, 3)
    assert isinstance(made, OnFeatures)
    return made


def test_images_and_vectors_have_the_same_logits_by_hand() -> None:
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
        by_hand = hidden @ last.weight.double().numpy().T + last.bias.double().numpy()
        np.testing.assert_allclose(small(x).numpy(), by_hand, atol=1e-4)
    right = (z @ w.T).argmax(axis=1) == images.labels.numpy()
    found = correct(linear, images, among=torch.tensor([3, 5]))
    assert found.tolist() == right[[3, 5]].tolist()


def test_local_training_is_softmax_regression_on_the_vectors() -> None:
    """One full-batch step of one client, by NumPy; a client hands out vectors in place of
    images."""
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
    found = result.model.state_dict()["classifier.weight"].double().numpy()
    np.testing.assert_allclose(found, w - 2.0 * r.T @ z / len(y), atol=1e-5)
    clients = ExactClientView([0], images, [torch.arange(40)], network=start)
    np.testing.assert_allclose(clients.images(torch.tensor([4])), z[4:5], atol=1e-6)


def test_maps_of_one_name_and_constants_do_not_share_vectors() -> None:
    """A cache that goes by name and dimension gives the second map the first one's vectors."""
    images, some = data(), torch.arange(4)
    for by in (0.5, 0.25):
        own = replace(PIXELS, name="own-shifted", function=lambda x, by=by: x.flatten(1) - by)
        register_features("own-shifted", lambda shape, own=own: own)  # type: ignore[misc]
        found = feature_map("own-shifted", SPEC.image_shape)
        expected = images.images[:4].flatten(1) / 255 - by
        torch.testing.assert_close(feature_table(images, found, some)(some), expected)


TRAINS = {
    name
    for name in METHODS
    if issubclass(method_class(name), TrainsLocally) and not method_class(name).features_refusal
}


LEARNED = ("moon", "fedgen", "fedfm", "fedfm-lite")
"""Of a linear model they say that its embedding is not learned."""


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
def test_methods_that_train_models_do_so_on_features_and_others_refuse(method: str) -> None:
    train, test = load_dataset("digits")
    few = train.subset(np.arange(200)), test.subset(np.arange(50))
    if method not in TRAINS:
        with pytest.raises(SettingError, match=r"model\.features"):
            settings_of(method)
        return
    name = "mlp" if method in LEARNED else "linear"
    if method in LEARNED:
        with pytest.raises(SettingError, match=r"model\.name must be mlp"):
            simulate(settings_of(method), data=few)
    assert simulate(settings_of(method, name=name), data=few).accuracy is not None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "convnet", "features": "pixels"}, "linear or mlp"),
        ({"features": "whitened-scatering"}, "whitened-scattering"),
        ({"name": "mlp", "features": "pixels", "projection": 8}, "projection"),
    ],
)
def test_settings_of_features_that_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((SettingError, UnknownNameError), match=says):
        ModelSettings(**settings)
