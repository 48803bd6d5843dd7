"""Feature maps: inputs and outputs, constants, and maps of users."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.features import (
    FeatureMap,
    feature_map,
    feature_names,
    measured_map,
    register_features,
)
from fedsynth.features.feature_map import Shape
from fedsynth.features.public_statistics import IMAGES, constants, public_vectors
from fedsynth.features.random_images import random_images
from fedsynth.features.random_process import SMALLER
from fedsynth.seeding import torch_generator


def mean_map(shape: tuple[int, int, int], dimension: int = 1, **other: float) -> FeatureMap:
    constants = {"norm_bound": 1.0, "radius": 0.5, **other}
    return FeatureMap(
        name="own",
        image_shape=shape,
        dimension=dimension,
        source="a test",
        function=lambda x: x.mean(dim=(1, 2, 3))[:, None],
        **constants,
    )


PAIR, MIRRORED = "whitened-scattering+random-process", "mirrored-scattering+random-process"
GREY, COLOUR = (1, 8, 8), (3, 12, 12)
MAPS = [
    ("pixels", GREY),
    ("scattering", GREY),
    ("whitened-scattering", GREY),
    ("random-process", (1, 12, 20)),
    ("scattering+random-process", (1, 12, 20)),
    (PAIR, COLOUR),
    (MIRRORED, COLOUR),
]


@pytest.mark.parametrize(("name", "shape"), MAPS)
def test_vectors_are_independent_and_differentiable(name: str, shape: Shape) -> None:
    """Also checks byte images and a constant image, whose gradients are finite."""
    features, x = feature_map(name, shape), random_images(5, shape, torch_generator(1, "test"))
    x[2] = 0.0
    together = features(x)
    assert together.shape == (5, features.dimension)
    separate = torch.cat([features(image[None]) for image in x])
    torch.testing.assert_close(separate, together, rtol=1e-4, atol=1e-4)
    pixels = x.mul(255).round().to(torch.uint8)
    torch.testing.assert_close(features(pixels), features(pixels.float() / 255))
    x.requires_grad_()
    features(x).square().sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert x.grad.abs().max() > 0
    if name != "scattering+random-process":  # its function is a closure
        unpickled = pickle.loads(pickle.dumps(features))
        assert unpickled(x[:1].detach()).shape == (1, features.dimension)


@pytest.mark.parametrize(("name", "shape"), [MAPS[2], MAPS[6]])
def test_constants_come_from_public_images(name: str, shape: Shape) -> None:
    """Recomputing the constants from seeded images gives the stored digits, so no data is needed."""
    features = feature_map(name, shape)
    norm, radius = constants(public_vectors(features.function, shape))
    smaller = SMALLER if name in (PAIR, MIRRORED) else 1.0
    assert features.norm_bound == pytest.approx(smaller * norm, rel=0.02)
    assert features.radius == pytest.approx(smaller * radius, rel=0.02)
    assert "no data" in features.source or str(IMAGES) in features.source


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("scattering", (1, 7, 28), "at least 8×8"),
        (MIRRORED, GREY, "at least 12×12"),
        ("random-process", (2, 32, 32), "random processes"),
    ],
)
def test_unsupported_image_shapes_are_refused(name: str, shape: Shape, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        feature_map(name, shape)
    with pytest.raises(SettingError, match="image_shape"):
        mean_map(GREY)(torch.zeros(2, 1, 8, 9))


def test_registered_maps_are_found_by_name() -> None:
    register_features("own-test", mean_map)
    assert "own-test" in feature_names()
    assert feature_map("own-test", (3, 4, 4)).image_shape == (3, 4, 4)
    with pytest.raises(SettingError, match="pixels"):
        register_features("pixels", mean_map)
    with pytest.raises(UnknownNameError, match="pixels"):
        feature_map("pixel", GREY)


def mixing_function(x: Tensor) -> Tensor:
    return (x - x.mean(0)).mean(dim=(1, 2, 3))[:, None]


def array_function(x: Tensor) -> Any:
    return np.zeros((len(x), 1))


def batch_size_function(x: Tensor) -> Tensor:
    return x.mean(dim=(1, 2, 3))[:, None] / len(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda shape: torch.ones(3), "Tensor"),
        (lambda shape: mean_map(shape, dimension=2), "must return a tensor of shape"),
        (lambda shape: mean_map(shape, radius=0.0), "radius"),
        (lambda shape: mean_map(shape, norm_bound=float("inf")), "norm_bound"),
        (lambda shape: replace(mean_map(shape), function=array_function), "ndarray"),
        (lambda shape: mean_map((3, 8, 8)), r"\(3, 8, 8\)"),
        (
            lambda shape: replace(mean_map(shape), function=mixing_function),
            "mixes the examples of a batch",
        ),
        (lambda shape: replace(mean_map(shape), function=batch_size_function), "another size"),
    ],
)
def test_invalid_user_maps_are_rejected(build: Any, message: str) -> None:
    """Vectors must have the declared form and depend only on their image."""
    register_features("own-wrong", build)
    with pytest.raises(SettingError, match=message):
        feature_map("own-wrong", GREY)


def test_checks_of_maps_leave_the_global_generator() -> None:
    rng_state = torch.random.get_rng_state()
    register_features("own-alone", mean_map)
    images = torch.full((3, 1, 8, 8), 0.25)
    assert feature_map("own-alone", GREY)(images).tolist() == [[0.25]] * 3
    assert torch.equal(rng_state, torch.random.get_rng_state())


SHAPE = (3, 16, 16)


def test_measured_constants_are_medians_over_public_images() -> None:
    """Compares medians by sorting."""

    def patches(x_NCHW: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x_NCHW, 4).flatten(1)

    measured = measured_map("patches", SHAPE, patches)
    vectors = public_vectors(patches, SHAPE).double()
    for actual, distances in (
        (measured.norm_bound, vectors.norm(dim=1)),
        (measured.radius, (vectors - vectors.mean(dim=0)).norm(dim=1)),
    ):
        middle = distances.sort().values[(len(vectors) - 1) // 2]
        assert actual == pytest.approx(float(middle), rel=5e-3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "must return finite vectors"),
        (lambda x: torch.zeros(len(x), 4), "the same vector for half"),
        (lambda x: x.flatten(1) / 0, "must return finite vectors"),
    ],
)
def test_maps_without_distinct_vectors_are_refused(
    function: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        measured_map("odd", SHAPE, function)
