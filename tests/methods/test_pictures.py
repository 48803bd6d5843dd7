"""Images that are rendered from the moments of thumbnails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.sums import Pool
from fedsynth.features.deskewing import shear_of
from fedsynth.features.scattering import low_pass
from fedsynth.methods.statistics import pictures
from fedsynth.methods.statistics.pictures import PixelMoments, rendered
from fedsynth.synthesizer.condensation.from_statistics import ReleasedStatistics, compute_part

SHAPE = (1, 16, 16)
CELLS = 14


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moments() -> PixelMoments:
    """Returns three classes: a symmetric disc, and two bars, left and right."""
    place = torch.arange(CELLS, dtype=torch.float64) - (CELLS - 1) / 2
    disc = ((place.view(-1, 1) ** 2 + place**2) < 16).double()
    inside = place.abs() < 6
    left = (inside.view(-1, 1) & inside & (place < -2)).double()
    means = torch.stack([disc, left, left.flip(-1)]).flatten(1)
    means = means / means.norm(dim=1, keepdim=True)
    roots = 0.02 * torch.randn(CELLS**2, 5, generator=generator(), dtype=torch.float64)
    return PixelMoments(means, roots, means.mean(dim=0))


def statistics(class_means: Tensor, weight: Tensor) -> ReleasedStatistics:
    compute = partial(map, partial(compute_part, lambda x: x.flatten(1)))
    return ReleasedStatistics(compute, weight, class_means)


@pytest.mark.parametrize("style", [pictures.sharpened_images, pictures.shaded_images])
def test_the_style_is_the_one_with_the_released_class_means(style: pictures.Style) -> None:
    means = style(moments(), 200, SHAPE, generator(1)).flatten(2).mean(dim=1)
    released = statistics(means - means.mean(dim=0), torch.zeros(3, 256))
    assert pictures._chosen_style(moments(), released, SHAPE, generator(2)) is style


def test_pictures_with_a_bright_border_stay_as_drawn() -> None:
    """Dark shapes on a bright background. The noisy mean of a rare class does not decide."""
    dark = moments()
    means = dark.means.max() - dark.means
    bright = replace(dark, means=means, overall=means.mean(dim=0))
    released = statistics(torch.zeros(3, 256), torch.zeros(3, 256))
    style = pictures._chosen_style(bright, released, SHAPE, generator())
    assert style is pictures.plain_images
    disc = rendered(bright, released, 50, SHAPE, generator())[0].mean(dim=(0, 1))
    assert disc[8, 8] < 0.3
    assert disc[[0, 0, -1, -1], [0, -1, 0, -1]].min() > 0.7
    noisy = replace(dark, means=torch.cat([dark.means[:2], 9 * bright.means[:1]]))
    assert pictures._chosen_style(noisy, released, SHAPE, generator()) is not style


def test_kept_images_follow_the_classifier() -> None:
    """The classifier gives dark images class 1, and bright images class 0."""
    brightness = torch.ones(1, 256) * torch.tensor([[0.03], [-0.03], [0.0]])
    class_means = torch.zeros(3, 256)

    def brightness_of(weight: Tensor) -> list[float]:
        x = rendered(moments(), statistics(class_means, weight), 100, SHAPE, generator(3))
        assert x.shape == (3, 100, *SHAPE)
        assert 0 <= float(x.min()) <= float(x.max()) <= 1
        assert len(x.flatten(0, 1).unique(dim=0)) == 300  # no image is kept twice
        return x.mean(dim=(1, 2, 3, 4)).tolist()

    plain, guided = brightness_of(0 * brightness), brightness_of(brightness)
    assert guided[0] > plain[0]
    assert guided[1] < plain[1]


def test_blurred_moments_equal_numpy() -> None:
    def blurred(values: np.ndarray, deviation: float) -> np.ndarray:
        place = np.arange(CELLS)
        kernel = np.exp(-((place[:, None] - place) ** 2) / (2 * deviation**2))
        kernel /= kernel.sum(axis=1, keepdims=True)
        return kernel @ values.reshape(CELLS, CELLS) @ kernel.T

    given = moments()
    smooth = given.smoothed(SHAPE)
    expected = [blurred(mean, pictures.MEAN_BLUR).ravel() for mean in given.means.numpy()]
    np.testing.assert_allclose(smooth.means, np.stack(expected), atol=1e-12)
    for root, actual in zip(given.roots.T.numpy(), smooth.roots.T, strict=True):
        blur = blurred(root, pictures.ROOT_BLUR).ravel()
        factor = min(pictures.REGAINED, np.linalg.norm(root) / np.linalg.norm(blur))
        np.testing.assert_allclose(actual, factor * blur, atol=1e-12)


def test_only_symmetric_classes_are_drawn_symmetrically() -> None:
    given = moments()
    drawn = given.drawn(50, SHAPE, pictures.VARIETY, generator(4))
    made = given.drawn(50, SHAPE, pictures.VARIETY, generator(4), symmetric=True)

    def asymmetry(x: Tensor) -> Tensor:
        return (x - x.flip(-1)).abs().mean(dim=(1, 2, 3, 4))

    assert torch.equal(made[1:], drawn[1:])
    assert float(asymmetry(made)[0]) < 0.6 * float(asymmetry(drawn)[0])


def test_deskewed_images_are_drawn_with_their_shear() -> None:
    """Bars that lean by 0.5 ± 0.1 columns a row are released upright, with their shear."""
    rows, columns = torch.arange(24) - 11.5, torch.arange(24) - 11.5
    shears = 0.5 + 0.1 * torch.randn(400, generator=generator())
    distance = columns - shears.view(-1, 1, 1) * rows.view(-1, 1)
    x = torch.sigmoid(3 * (2.5 - distance.abs())) * (rows.abs() < 8).view(-1, 1)
    x = x[:, None]
    u = low_pass((1, 24, 24), deskews=True)(x)
    assert float(u.norm(dim=1).max()) <= 1 + 1e-6
    torch.testing.assert_close(shear_of(x), shears, atol=0.02, rtol=0)
    pool = Pool(pictures.pixel_rows(u.double(), torch.zeros(400).long(), 1).sums(), 0.0, 400)
    released = PixelMoments.unpacked(pool, u.shape[1], 1)
    torch.testing.assert_close(released.means.shape, (1, 14 * 14 + 1))
    for style in (pictures.sharpened_images, pictures.shaded_images):
        drawn = shear_of(style(released, 400, (1, 24, 24), generator(1)).flatten(0, 1))
        assert drawn.mean() == pytest.approx(0.5, abs=0.05)
        assert 0.03 < float(drawn.std()) < 0.15


def test_shares_and_means_of_thousands_of_classes_are_exact() -> None:
    classes, width = 2000, 3
    labels = torch.cat([torch.zeros(2001), torch.arange(1, classes)]).long()
    u = F.normalize(torch.rand(len(labels), width - 1, generator=generator()))
    u = torch.cat(
        [u * (1 - pictures.CONSTANT**2) ** 0.5, torch.full((len(u), 1), pictures.CONSTANT)], dim=1
    )
    pool = Pool(pictures.pixel_rows(u.double(), labels, classes).sums(), 0.0, len(labels))
    shares = pictures.class_shares(pool, width, classes)
    expected = torch.bincount(labels) / len(labels)
    torch.testing.assert_close(shares.float(), expected)
    means = PixelMoments.unpacked(pool, width, classes).means
    torch.testing.assert_close(means.norm(dim=1)[1:].float(), torch.ones(classes - 1))


def test_shaded_image_of_one_pixel_is_finite() -> None:
    moments = PixelMoments(
        torch.ones(2, 1).double(), torch.zeros(1, 0).double(), torch.ones(1).double()
    )
    images = pictures.shaded_images(moments, 3, (1, 1, 1), generator())
    assert images.isfinite().all()
