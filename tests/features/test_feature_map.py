"""Feature maps, also of users; scattering, the dictionary and the random-process images."""

from __future__ import annotations

import importlib
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import affine_transform
from torch import Tensor

from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.features import FeatureMap, feature_map, measured_map, random_images, random_process
from fedsynth.features.deskewing import deskewed
from fedsynth.features.feature_map import Shape
from fedsynth.features.public_statistics import IMAGES, Whitening, constants, public_vectors
from fedsynth.features.registry import feature_names, register_features
from fedsynth.features.scattering import Scattering, sizes
from fedsynth.privacy.products import matrices_of
from fedsynth.seeding import torch_generator
from tests.raising import raises


def images(count: int, shape: Shape, seed: int = 1) -> Tensor:
    return random_images.random_images(count, shape, torch_generator(seed, "test"))


def means(x: Tensor) -> Tensor:
    return x.mean(dim=(1, 2, 3))[:, None]


def mean_map(shape: Shape, **values: Any) -> FeatureMap:
    constants = {"norm_bound": 1.0, "radius": 0.5, "source": "a test", "function": means}
    return FeatureMap("own", shape, **{"dimension": 1, **constants, **values})


PAIR, MIRRORED = "whitened-scattering+random-process", "mirrored-scattering+random-process"
DESKEWED = "deskewed-scattering+random-process"
GREY, LARGER, COLOUR = (1, 8, 8), (1, 14, 14), (3, 12, 12)
MAPS = [
    ("pixels", GREY),
    ("scattering", GREY),
    ("whitened-scattering", GREY),
    ("random-process", (1, 12, 20)),
    ("scattering+random-process", (1, 12, 20)),
    (PAIR, COLOUR),
    (MIRRORED, COLOUR),
    (DESKEWED, (1, 14, 20)),
]


@pytest.mark.parametrize(("name", "shape"), MAPS)
def test_vectors_are_independent_and_differentiable(name: str, shape: Shape) -> None:
    """Also checks byte images and a constant image, whose gradients are finite."""
    features, x = feature_map(name, shape), images(5, shape)
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


@pytest.mark.parametrize(("name", "shape"), [MAPS[2], MAPS[6], MAPS[7]])
def test_constants_come_from_public_images(name: str, shape: Shape) -> None:
    """Seeded images give the stored digits again, so no data is needed."""
    features = feature_map(name, shape)
    norm, radius = constants(public_vectors(features.function, shape))
    smaller = random_process.SMALLER if name in (PAIR, MIRRORED, DESKEWED) else 1.0
    assert features.norm_bound == pytest.approx(smaller * norm, rel=0.02)
    assert features.radius == pytest.approx(smaller * radius, rel=0.02)
    assert "no data" in features.source or str(IMAGES) in features.source


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 17, 30)])
def test_deskewing_equals_shears_by_scipy(shape: Shape) -> None:
    """Random images, a leaning stroke, and images whose rows or pixels have no variance."""
    x = images(6, shape).double()
    x[1] = 0.0
    for row in range(4, 14):
        x[1, :, row, 8 + row // 2] = 1.0
    x[2] = 0.0
    x[3] = 0.0
    x[3, :, 5] = 0.7
    sheared = deskewed(x)
    rows, columns = np.mgrid[: shape[1], : shape[2]]
    for image, actual in zip(x.numpy(), sheared.numpy(), strict=True):
        weights = image.mean(axis=0) / max(image.mean(axis=0).sum(), 1e-300)
        y, x_mean = (weights * rows).sum(), (weights * columns).sum()
        mixed = (weights * (rows - y) * (columns - x_mean)).sum()
        shear = np.clip(mixed / max((weights * (rows - y) ** 2).sum(), 1), -1, 1)
        turn = np.array([[1, 0], [shear, 1]])
        centre = np.array([y, x_mean])
        for plane, found in zip(image, actual, strict=True):
            offset = centre - turn @ centre
            wanted = affine_transform(plane, turn, offset, order=1, mode="grid-constant")
            assert np.allclose(found, wanted, atol=1e-6)
    assert torch.equal(sheared[2:4], x[2:4])
    assert sheared[1].sum(dim=1).max() > 2 * x[1].sum(dim=1).max()  # the stroke stands upright


def test_registered_maps_are_found_by_name() -> None:
    rng_state = torch.random.get_rng_state()
    register_features("own-test", mean_map)
    assert "own-test" in feature_names()
    assert feature_map("own-test", (3, 4, 4)).image_shape == (3, 4, 4)
    assert feature_map("own-test", GREY)(torch.full((3, *GREY), 0.25)).tolist() == [[0.25]] * 3
    assert torch.equal(rng_state, torch.random.get_rng_state())  # also after the check of the map
    with raises(SettingError, "name"):
        register_features("pixels", mean_map)
    with raises(UnknownNameError, "method.features"):
        feature_map("pixel", GREY)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda shape: torch.ones(3), "Tensor"),
        (lambda shape: mean_map(shape, dimension=2), "must return a tensor of shape"),
        (lambda shape: mean_map(shape, radius=0.0), "radius"),
        (lambda shape: mean_map(shape, norm_bound=float("inf")), "norm_bound"),
        (lambda shape: mean_map(shape, function=lambda x: np.zeros((len(x), 1))), "ndarray"),
        (lambda shape: mean_map((3, 8, 8)), r"\(3, 8, 8\)"),
        (lambda shape: mean_map(shape, function=lambda x: means(x - x.mean(0))), "mixes the exam"),
        (lambda shape: mean_map(shape, function=lambda x: means(x) / len(x)), "another size"),
        (lambda shape: mean_map(shape)(torch.zeros(2, 1, 8, 9)), "image_shape"),
        (lambda shape: measured_map("odd", shape, lambda x: x), "must return finite vectors"),
        (lambda shape: measured_map("odd", shape, lambda x: x[:, 0, 0] * 0), "the same vector for"),
        (lambda shape: measured_map("odd", shape, lambda x: x.flatten(1) / 0), "finite vectors"),
        (lambda shape: feature_map("scattering", (1, 7, 28)), "at least 8×8"),
        (lambda shape: feature_map(MIRRORED, shape), "at least 12×12"),
        (lambda shape: feature_map("random-process", (2, 32, 32)), "only grey or colour"),
    ],
)
def test_unusable_maps_and_shapes_are_refused(build: Any, message: str) -> None:
    """Vectors must have the declared form and depend only on their image."""
    register_features("own-wrong", build)
    with pytest.raises(SettingError, match=message):
        feature_map("own-wrong", GREY)


def test_measured_constants_are_medians_over_public_images() -> None:
    """Compares medians by sorting."""

    def patches(x_NCHW: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x_NCHW, 4).flatten(1)

    measured = measured_map("patches", COLOUR, patches)
    vectors = public_vectors(patches, COLOUR).double()
    for actual, distances in (
        (measured.norm_bound, vectors.norm(dim=1)),
        (measured.radius, (vectors - vectors.mean(dim=0)).norm(dim=1)),
    ):
        middle = distances.sort().values[(len(vectors) - 1) // 2]
        assert actual == pytest.approx(float(middle), rel=5e-3)


# ------------------------------------------------------------------------------ scattering

# kymatio 0.3.0's Scattering2D(J=2, (16, 20)) of `waves()`: channel -> values at (0, 0), (2, 3), (3, 4)
KYMATIO = {
    0: (0.683185, 0.508932, 0.511984),
    1: (0.043483, 0.065723, 0.096386),
    4: (0.059764, 0.018296, 0.010356),
    9: (0.012205, 0.04982, 0.069065),
    13: (0.032006, 0.00258, 0.013215),
    17: (0.001428, 0.002761, 0.005142),
    30: (0.002007, 0.003435, 0.005508),
    55: (0.001168, 0.000917, 0.00251),
    80: (0.001753, 0.001104, 0.005368),
}


def waves() -> Tensor:
    """Returns an image [1, 16, 20] with several frequencies and directions."""
    row, column = np.arange(16)[:, None], np.arange(20)[None]
    pixels = 0.5 + 0.3 * np.sin(0.9 * row + 0.04 * column**2) + 0.2 * np.cos(1.7 * column)
    return torch.from_numpy(pixels.astype(np.float32))[None]


def test_scattering_equals_kymatio() -> None:
    coefficients = Scattering((16, 20))(waves())[0]
    assert coefficients.shape == (81, 4, 5)
    for channel, values in KYMATIO.items():
        actual = [float(coefficients[channel, i, j]) for i, j in ((0, 0), (2, 3), (3, 4))]
        assert actual == pytest.approx(values, abs=3e-5)


def test_derivatives_agree_with_finite_differences_and_between_vmap_and_single_images() -> None:
    transform = Scattering((8, 8)).double()
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(2, 8, 8, generator=draws, dtype=torch.float64)
    assert torch.autograd.gradcheck(transform, images.clone().requires_grad_(True))

    def size(image: Tensor) -> Tensor:
        return transform(image[None]).square().sum()

    mapped = torch.func.vmap(torch.func.grad(size))(images)
    separate = torch.stack([torch.func.grad(size)(image) for image in images])
    torch.testing.assert_close(mapped, separate)
    black = torch.zeros(8, 8, dtype=torch.float64)
    assert bool(torch.isfinite(torch.func.grad(size)(black)).all())


@pytest.mark.parametrize("num_channels", [None, 2])
def test_whitening_directions_are_white_and_sorted(num_channels: int | None) -> None:
    """Compares NumPy's covariances of all channels or the main ones, the largest first."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 8.0, 2.0, 4.0])[:, None]
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator)).Q
    samples = scale * torch.randn(4000, 4, 3, generator=generator)
    vectors = (rotation @ samples).flatten(1) + 5.0
    white = Whitening.of(lambda x: x, vectors, cells=3, floor=0.0, num_channels=num_channels)
    whitened = white.applied(vectors).unflatten(1, (num_channels or 4, 3)).numpy()
    between = np.einsum("nas,nbs->ab", whitened, whitened) / whitened.shape[0] / 3
    np.testing.assert_allclose(between / between[0, 0], np.eye(num_channels or 4), atol=0.05)
    if num_channels:
        first = white.channels[0].numpy()
        assert abs(first @ rotation[:, 1].numpy()) > 0.99 * np.linalg.norm(first)
        assert np.linalg.norm(white.channels[1]) > 1.5 * np.linalg.norm(first)
        negated = Whitening.of(lambda x: x, -vectors, cells=3, floor=0.0, num_channels=num_channels)
        torch.testing.assert_close(negated.channels, white.channels)


def test_mirrored_images_have_equal_vectors() -> None:
    """The vector is the mean of the pair map's vectors, which differ."""
    x = images(6, COLOUR)
    mirrored, pair = feature_map(MIRRORED, COLOUR), feature_map(PAIR, COLOUR)
    a, b = pair(x), pair(x.flip(-1))
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(-1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mirrored(x), (a + b) / 2, rtol=1e-4, atol=1e-4)
    assert float((a - b).norm(dim=1).min()) > 0.1 * pair.radius


def test_feature_kinds_have_balanced_scales() -> None:
    """The median distances of public images from their mean have the ratio DICTIONARY."""
    vectors = public_vectors(feature_map(PAIR, LARGER).function, LARGER)
    channels, cells = sizes(LARGER)
    size = math.ceil(random_process.CHANNEL_SHARE * channels) * cells
    scattering, dictionary = (vectors - vectors.mean(dim=0)).tensor_split([size], dim=1)
    ratio = dictionary.norm(dim=1).median() / scattering.norm(dim=1).median()
    assert float(ratio) == pytest.approx(random_process.DICTIONARY, rel=0.02)


def test_blocks_are_matrices_of_channels_by_cells() -> None:
    """Broken versions have cells before channels, or blocks in another order."""
    features = feature_map(PAIR, LARGER)
    assert sum(a * s for a, s in features.blocks) == features.dimension
    assert [cells for _, cells in features.blocks] == [9, 9]
    x = images(1, LARGER)
    corner = x.clone()
    corner[..., -4:, -4:] = 1 - corner[..., -4:, -4:]  # the last cell's and few other cells' pixels
    change = (features(corner) - features(x)).abs()[0]
    for block in matrices_of(change[None], features.blocks):
        by_cell = block[0].mean(dim=0)
        assert int(by_cell.argmax()) == 8
        assert float(by_cell[8]) > 3 * float(by_cell[0])


# --------------------------------------------------------- random-process images and dictionary
@pytest.mark.parametrize("shape", [(3, 20, 48), (5, 9, 8), (1, 4, 4)], ids=str)
def test_pixels_are_between_0_and_1_for_any_shape(shape: Shape) -> None:
    x = images(6, shape)
    assert x.shape == (6, *shape)
    assert 0 <= x.min() < x.max() <= 1
    assert images(0, shape).shape == (0, *shape)


def test_shapes_have_area_of_their_kind() -> None:
    """Areas by hand: an ellipse of π, a square of 1.6², and a triangle of height 1.7 and base 2."""
    side = torch.linspace(-1.5, 1.5, 601)
    for kind, area in ((0.1, math.pi), (0.5, 1.6**2), (0.9, 1.7)):
        inside = random_images._shape(side[:, None], side[None], torch.tensor(kind))
        assert inside.double().mean() * 9 == pytest.approx(area, rel=0.02)


@pytest.mark.parametrize("process", ["dead_leaves", "random_generators", "spectral_noise"])
def test_neighbouring_pixels_are_correlated(process: str) -> None:
    """White noise has no correlation; photographs have 0.9 or more."""
    x = getattr(random_images, process)(60, 32, 32, torch_generator(0, "test"))
    x = x - x.mean(dim=(2, 3), keepdim=True)
    adjacent = (x[..., 1:] * x[..., :-1]).mean() / x.square().mean()
    distant = (x[..., 12:] * x[..., :-12]).mean() / x.square().mean()
    assert adjacent > 0.6
    assert distant < adjacent - 0.2


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZE = 3 * random_process.PATCH**2


def numpy_features(x: np.ndarray, mean: np.ndarray, atoms: np.ndarray) -> np.ndarray:
    """Computes the features of one image [3, H, W] patch by patch."""
    rows, columns = x.shape[1] - random_process.PATCH + 1, x.shape[2] - random_process.PATCH + 1
    z = np.zeros((rows, columns, atoms.shape[1]))
    for i in range(rows):
        for j in range(columns):
            p = x[:, i : i + random_process.PATCH, j : j + random_process.PATCH].ravel()
            p = (p - p.mean()) / np.sqrt(p.var() + random_process.CONTRAST)
            z[i, j] = (p - mean) @ atoms
    halves = []
    for sign in (1, -1):
        r = np.maximum(sign * z - random_process.THRESHOLD, 0)
        height, width = (rows + 1) // 2, (columns + 1) // 2
        starts = [(0, (n - s) // 2, n - s) for n, s in ((rows, height), (columns, width))]
        windows = [r[a : a + height, b : b + width] for a in starts[0] for b in starts[1]]
        halves.append(np.stack([cells.mean((0, 1)) for cells in windows], axis=1).ravel())
    return np.concatenate(halves)


def test_dictionary_features_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    mean, atoms = rng.normal(0, 0.1, SIZE), rng.normal(0, 0.3, (SIZE, 5))
    dictionary = random_process.Dictionary(torch.tensor(mean), torch.tensor(atoms))
    x = images(3, (3, 16, 13)).double()
    expected = np.stack([numpy_features(image.numpy(), mean, atoms) for image in x])
    np.testing.assert_allclose(dictionary(x).numpy(), expected, atol=1e-6)


def test_dictionary_depends_only_on_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    training: Any = importlib.import_module("library.dictionary")
    rng_state = torch.random.get_rng_state()
    recipe = {"images": 32, "patches": 2000, "atoms": 12, "rounds": 4}
    first, second = (training.learn_dictionary(**recipe) for _ in range(2))
    assert torch.equal(first.atoms, second.atoms)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(rng_state, torch.random.get_rng_state())
    reseeded = training.learn_dictionary(**recipe, seed=1)
    assert not torch.equal(first.atoms, reseeded.atoms)
    assert first.atoms.shape == (SIZE, 12)
    assert random_process.shipped().atoms.shape == (SIZE, 96)
