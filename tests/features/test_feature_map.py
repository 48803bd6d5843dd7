"""Feature maps: what they take and make, their constants, and maps of one's own."""

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


def own(shape: tuple[int, int, int], dimension: int = 1, **other: float) -> FeatureMap:
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
def test_each_image_s_vector_is_its_own_and_can_be_pulled_back(name: str, shape: Shape) -> None:
    """Whatever the batch is, as bytes too; gradients are finite, for a constant image too."""
    features, x = feature_map(name, shape), random_images(5, shape, torch_generator(1, "test"))
    x[2] = 0.0
    together = features(x)
    assert together.shape == (5, features.dimension)
    alone = torch.cat([features(one[None]) for one in x])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
    pixels = x.mul(255).round().to(torch.uint8)
    torch.testing.assert_close(features(pixels), features(pixels.float() / 255))
    x.requires_grad_()
    features(x).square().sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert x.grad.abs().max() > 0
    if name != "scattering+random-process":  # its function is a closure
        again = pickle.loads(pickle.dumps(features))
        assert again(x[:1].detach()).shape == (1, features.dimension)


@pytest.mark.parametrize(("name", "shape"), [MAPS[2], MAPS[6]])
def test_constants_are_those_of_images_from_a_seed(name: str, shape: Shape) -> None:
    """Nobody's data went in: the same numbers come out again, to the digits that are kept."""
    features = feature_map(name, shape)
    norm, radius = constants(public_vectors(features.function, shape))
    smaller = SMALLER if name in (PAIR, MIRRORED) else 1.0
    assert features.norm_bound == pytest.approx(smaller * norm, rel=0.02)
    assert features.radius == pytest.approx(smaller * radius, rel=0.02)
    assert "no data" in features.source or str(IMAGES) in features.source


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("scattering", (1, 7, 28), "at least 8×8"),
        (MIRRORED, GREY, "at least 12×12"),
        ("random-process", (2, 32, 32), "random processes"),
    ],
)
def test_images_that_a_map_cannot_take_are_refused(name: str, shape: Shape, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        feature_map(name, shape)
    with pytest.raises(SettingError, match="image_shape"):
        own(GREY)(torch.zeros(2, 1, 8, 9))


def test_own_maps_are_known_by_their_names() -> None:
    register_features("own-test", own)
    assert "own-test" in feature_names()
    assert feature_map("own-test", (3, 4, 4)).image_shape == (3, 4, 4)
    with pytest.raises(SettingError, match="pixels"):
        register_features("pixels", own)
    with pytest.raises(UnknownNameError, match="pixels"):
        feature_map("pixel", GREY)


def mixing(x: Tensor) -> Tensor:
    return (x - x.mean(0)).mean(dim=(1, 2, 3))[:, None]


def as_array(x: Tensor) -> Any:
    return np.zeros((len(x), 1))


def by_number(x: Tensor) -> Tensor:
    return x.mean(dim=(1, 2, 3))[:, None] / len(x)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda shape: torch.ones(3), "Tensor"),
        (lambda shape: own(shape, dimension=2), "must return a tensor of shape"),
        (lambda shape: own(shape, radius=0.0), "radius"),
        (lambda shape: own(shape, norm_bound=float("inf")), "norm_bound"),
        (lambda shape: replace(own(shape), function=as_array), "ndarray"),
        (lambda shape: own((3, 8, 8)), r"\(3, 8, 8\)"),
        (lambda shape: replace(own(shape), function=mixing), "mixes the examples of a batch"),
        (lambda shape: replace(own(shape), function=by_number), "another size"),
    ],
)
def test_an_own_map_is_looked_at_before_a_run_needs_it(build: Any, says: str) -> None:
    """What it makes of an image must have its declared form and depend on nothing else, before any
    ledger is charged."""
    register_features("own-wrong", build)
    with pytest.raises(SettingError, match=says):
        feature_map("own-wrong", GREY)


def test_looking_at_a_sound_map_leaves_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    register_features("own-alone", own)
    images = torch.full((3, 1, 8, 8), 0.25)
    assert feature_map("own-alone", GREY)(images).tolist() == [[0.25]] * 3
    assert torch.equal(before, torch.random.get_rng_state())


SHAPE = (3, 16, 16)


def test_the_constants_are_medians_over_public_images() -> None:
    """An oracle with sort in place of median."""

    def patches(x_NCHW: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x_NCHW, 4).flatten(1)

    made = measured_map("patches", SHAPE, patches)
    vectors = public_vectors(patches, SHAPE).double()
    for actual, distances in (
        (made.norm_bound, vectors.norm(dim=1)),
        (made.radius, (vectors - vectors.mean(dim=0)).norm(dim=1)),
    ):
        middle = distances.sort().values[(len(vectors) - 1) // 2]
        assert actual == pytest.approx(float(middle), rel=5e-3)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, "must return finite vectors"),
        (lambda x: torch.zeros(len(x), 4), "the same vector for half"),
        (lambda x: x.flatten(1) / 0, "must return finite vectors"),
    ],
)
def test_what_makes_no_vectors_is_refused(function: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        measured_map("odd", SHAPE, function)
