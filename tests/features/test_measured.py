"""The constants of a user's own map, from public images alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features import measured_map
from fedsynth.features.public_statistics import public_vectors

SHAPE = (3, 16, 16)


def patches(x_NCHW: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(x_NCHW, 4).flatten(1)


def test_the_constants_are_medians_over_public_images() -> None:
    """An oracle with sort in place of median."""
    made = measured_map("patches", SHAPE, patches)
    vectors = public_vectors(patches, SHAPE).double()
    middle = (len(vectors) - 1) // 2
    norms = vectors.norm(dim=1).sort().values
    distances = (vectors - vectors.mean(dim=0)).norm(dim=1).sort().values
    assert made.dimension == 48
    assert made.norm_bound == pytest.approx(float(norms[middle]), rel=5e-3)
    assert made.radius == pytest.approx(float(distances[middle]), rel=5e-3)
    assert "no data" in made.source


def test_they_go_with_the_units_of_the_function_and_are_the_same_every_time() -> None:
    one, ten = (measured_map("p", SHAPE, lambda x, s=s: s * patches(x)) for s in (1.0, 10.0))
    again = measured_map("p", SHAPE, patches)
    assert (one.norm_bound, one.radius) == (again.norm_bound, again.radius)
    assert ten.radius == pytest.approx(10 * one.radius, rel=1e-2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: 3, "must make a tensor"),
        (lambda x: x, "one vector of each image"),
        (lambda x: torch.zeros(len(x), 4), "the same of half"),
        (lambda x: x.flatten(1) / 0, "not finite"),
    ],
)
def test_what_makes_no_vectors_is_refused(function: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        measured_map("odd", SHAPE, function)
