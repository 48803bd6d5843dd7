"""ImageData, `from_arrays` and the way to normalised numbers and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedsynth.data.images import ImageData, denormalise, from_arrays, normalise, require_all_classes
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError

DIGITS, CIFAR = dataset_spec("digits"), dataset_spec("cifar10")
RNG = np.random.default_rng(0)


def some_digits(n: int = 20) -> ImageData:
    images = RNG.integers(0, 256, (n, 8, 8), dtype=np.uint8)
    return from_arrays(images, np.arange(n) % 10, DIGITS)


@pytest.mark.parametrize("label_type", [np.uint8, np.int16, np.int32, np.int64, np.uint64])
def test_from_arrays_takes_numpy_and_torch(label_type: npt.DTypeLike) -> None:
    grey = RNG.integers(0, 256, (5, 8, 8), dtype=np.uint8)
    labels = np.array([0, 9, 3, 3, 1])
    data = from_arrays(grey, labels.astype(label_type), DIGITS)
    assert data.images.dtype == torch.uint8
    assert data.labels.dtype == torch.int64
    assert np.array_equal(data.images[:, 0].numpy(), grey)
    assert np.array_equal(data.labels.numpy(), labels)
    same = from_arrays(torch.from_numpy(grey).unsqueeze(1), torch.from_numpy(labels).int(), DIGITS)
    assert torch.equal(data.images, same.images)


def test_from_arrays_rounds_floating_point_to_the_nearest_level() -> None:
    levels = torch.arange(256, dtype=torch.float64).view(4, 1, 8, 8)
    for nudge in (-0.4, 0.0, 0.4):
        x = ((levels + nudge) / 255).clamp(0, 1)
        assert torch.equal(
            from_arrays(x, torch.zeros(4, dtype=torch.int64), DIGITS).images, levels.to(torch.uint8)
        )


def floats(value: float) -> npt.NDArray[np.float32]:
    x = np.zeros((3, 8, 8), np.float32)
    x[1, 2, 3:5] = value
    return x


OK = np.zeros((3, 8, 8), np.uint8)
THREE = np.array([0, 1, 2])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (floats(np.nan), THREE, r"2 of 192 pixel values are NaN or infinite"),
        (floats(-np.inf), THREE, r"2 of 192 pixel values are NaN or infinite"),
        (floats(1.5), THREE, r"must be in \[0, 1\], but 2 of 192 values are not"),
        (OK.astype(np.int64), THREE, r"must be uint8 \(from_arrays also accepts"),
        (OK[:, :7], THREE, r"must have shape \[N, 1, 8, 8\], .* got \[3, 1, 7, 8\]"),
        (OK[0], THREE, r"got \[8, 8\]"),
        (OK[..., None], THREE, r"channels first, got \[3, 8, 8, 1\]"),
        (OK, THREE[:2], r"labels must have shape \[3\], got \[2\]"),
        (OK, np.array([0, 1, 10]), r"labels must be in \[0, 10\), but 1 are not, such as 10"),
        (OK, np.array([0, -1, 1]), "such as -1"),
        (OK, np.array([0, 1, 2**64 - 1], np.uint64), "labels must be in"),
        (OK, THREE.astype(float), "labels must be integers, got float64"),
        (OK, np.array([True, False, True]), "labels must be integers, got bool"),
        (OK, THREE[:, None], r"labels must have shape \[3\], got \[3, 1\]"),
        (OK[:0], THREE[:0], "at least one example"),
        (np.array([["a"]]), THREE, "must be a NumPy array or a tensor of numbers"),
        ([[1, 2], [3]], THREE, "must be a NumPy array or a tensor of numbers"),
    ],
)
def test_what_cannot_be_used_gets_one_clear_line(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        from_arrays(images, labels, DIGITS)
    assert str(caught.value).startswith("digits")
    assert "\n" not in str(caught.value)


def test_subset_and_counts() -> None:
    data = some_digits(20)
    part = data.subset(np.array([3, 3, 17]))
    assert len(part) == 3
    assert part.labels.tolist() == [3, 3, 7]
    assert torch.equal(part.images[2], data.images[17])
    assert part.class_counts().tolist() == [0, 0, 0, 2, 0, 0, 0, 1, 0, 0]
    assert torch.equal(data.subset(torch.tensor([4], dtype=torch.int32)).images, data.images[4:5])
    assert torch.equal(data.to("cpu").images, data.images)


def test_groups_travel_with_the_examples() -> None:
    images = RNG.integers(0, 256, (6, 8, 8), dtype=np.uint8)
    data = from_arrays(
        images, np.arange(6), DIGITS, groups=np.array([7, 7, 0, 3000, 0, 7], np.int32)
    )
    for kept in (data.to("cpu"), data.subset(np.arange(6))):
        assert kept.groups is not None
        assert kept.groups.dtype == torch.int64
        assert kept.groups.tolist() == [7, 7, 0, 3000, 0, 7]
    assert data.subset(np.array([3, 0, 3])).groups.tolist() == [3000, 7, 3000]  # type: ignore[union-attr]
    assert data.domains is None
    domains, groups = data.origins()
    assert domains is None
    assert groups is not None
    assert groups.tolist() == [7, 7, 0, 3000, 0, 7]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.zeros(5, int), r"groups must have shape \[6\], got \[5\]"),
        (np.zeros(6), "groups must be integers, got float64"),
        (np.zeros(6, bool), "groups must be integers, got bool"),
        (np.array([0, 1, 2, -3, 4, 5]), "groups must be in .* such as -3"),
        (np.full(6, 2**64 - 1, np.uint64), "groups must be in"),
        (np.array(["a"] * 6), "groups must be a NumPy array or a tensor of numbers"),
    ],
)
def test_groups_that_are_none(groups: npt.NDArray[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(np.zeros((6, 8, 8), np.uint8), np.arange(6), DIGITS, groups=groups)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.array([0, 20]), r"must be in \[0, 20\).* such as 20"),
        (np.array([-1]), r"must be in \[0, 20"),
        (np.array([0.0]), "indices must be integers, got float64"),
        (np.ones(20, bool), "indices must be integers, got bool"),
        (np.array([[1]]), "indices must have shape"),
        (np.array([], int), "at least one example"),
    ],
)
def test_subsets_that_cannot_be(indices: npt.NDArray[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        some_digits(20).subset(indices)


def test_a_class_without_examples_is_named() -> None:
    data = some_digits(20)
    require_all_classes(data)
    with pytest.raises(DataError, match=r"an example of each class, but has none of 4$"):
        require_all_classes(data.subset(torch.tensor([i for i in range(20) if i % 10 != 4])))
    with pytest.raises(DataError, match=r"none of 1, 2, 3, 4, 5 and other classes$"):
        require_all_classes(data.subset(torch.tensor([0])))


@pytest.mark.parametrize("spec", [DIGITS, CIFAR, dataset_spec("svhn")], ids=lambda one: one.name)
def test_denormalise_inverts_normalise_at_every_level(spec: Any) -> None:
    square = dataclasses.replace(spec, height=16, width=16)
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, spec.channels, 16, 16)
    x = normalise(every, square)
    assert torch.equal(denormalise(x, square), every)
    mean, std = torch.tensor(spec.mean).view(1, -1, 1, 1), torch.tensor(spec.std).view(1, -1, 1, 1)
    torch.testing.assert_close(x, (every / 255 - mean) / std)


def test_normalise_does_not_touch_its_input_and_gives_the_type_asked_for() -> None:
    data = some_digits()
    before = data.images.clone()
    assert denormalise(torch.full((1, 1, 8, 8), 100.0), DIGITS).unique().tolist() == [255]
    assert denormalise(torch.full((1, 1, 8, 8), -100.0), DIGITS).unique().tolist() == [0]
    x = normalise(data.images, DIGITS, torch.bfloat16)
    assert x.dtype == torch.bfloat16
    assert torch.equal(data.images, before)
    torch.testing.assert_close(x, normalise(data.images, DIGITS).bfloat16())


def test_constants_made_in_inference_mode_serve_training_later() -> None:
    spec = dataclasses.replace(DIGITS, mean=(0.123,))
    with torch.inference_mode():
        normalise(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), spec)
    weight = torch.ones(1, 1, 8, 8, requires_grad=True)
    (normalise(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), spec) * weight).sum().backward()
    assert weight.grad is not None
