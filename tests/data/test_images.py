"""Images and vectors: `from_arrays`, normalisation, runs on vectors, users and their bounded
records, hashes of records, and pictures of images and counts."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision.utils import make_grid

from fedsynth import DatasetSpec, ImageData, export_run, from_arrays, load_synthetic
from fedsynth.config.resolve import resolve
from fedsynth.data.images import denormalise, normalise, record_digests, require_all_classes
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import bounded, check_one_client_each, hold_out
from fedsynth.data.picture import GREY, by_class, image_grid_png, partition_png, partition_table
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, PartitionError, SettingError
from fedsynth.federation.run_data import Clients
from fedsynth.simulation.simulate import simulate
from tests.digits import digits
from tests.quick_runs import quick_settings, verified
from tests.raising import raises

DIGITS, CIFAR = dataset_spec("digits"), dataset_spec("cifar10")
RNG = np.random.default_rng(0)
DIMENSION = 12
KEY = bytes(range(32))
VECTORS = DatasetSpec(
    **{"name": "vectors", "channels": 1, "height": 1, "width": DIMENSION, "classes": 3},
    **{"train_size": 600, "test_size": 90, "source": "drawn by a test", "bounds": (-4.0, 4.0)},
    **{"mean": (0.5,), "std": (0.25,), "class_names": ("a", "b", "c")},
)
TWENTY = digits(np.arange(20) % 10)


def test_from_arrays_rounds_floats_to_nearest_level() -> None:
    levels = torch.arange(256, dtype=torch.float64).view(4, 1, 8, 8)
    for nudge in (-0.4, 0.0, 0.4):
        x = ((levels + nudge) / 255).clamp(0, 1)
        assert torch.equal(from_arrays(x, np.zeros(4, int), DIGITS).images, levels.byte())


def test_values_are_scaled_and_clipped_to_bounds() -> None:
    vectors = np.array([[-4.0, 0.0, 4.0, 9.0, -9.0, 1.0, *[0.0] * 6]])
    data = from_arrays(vectors, [0], VECTORS)
    assert data.images.dtype == torch.float32
    assert data.images.shape == (1, 1, 1, DIMENSION)
    assert data.images.flatten()[:6].tolist() == [0.0, 0.5, 1.0, 1.0, 0.0, 0.625]
    inputs = normalise(data.images, VECTORS)
    assert inputs.flatten()[:3].tolist() == [-2.0, 0.0, 2.0]
    torch.testing.assert_close(denormalise(inputs, VECTORS), data.images)
    vectors = np.arange(24).reshape(2, DIMENSION) % 4
    expected = from_arrays(vectors, [0, 1], VECTORS).images
    assert torch.equal(from_arrays(vectors.astype(np.float64), [0, 1], VECTORS).images, expected)
    pairs = TensorDataset(torch.tensor(vectors), torch.tensor([0, 1]))
    assert torch.equal(from_arrays(pairs, spec=VECTORS).images, expected)


def floats(value: float) -> npt.NDArray[np.float32]:
    x = np.zeros((3, 8, 8), np.float32)
    x[1, 2, 3:5] = value
    return x


VALID = np.zeros((3, 8, 8), np.uint8)
LABELS = np.array([0, 1, 2])
INVALID_ARRAYS: list[tuple[Any, Any, str]] = [
    (floats(np.nan), LABELS, "2 of 192 values .* NaN or infinite"),
    (floats(-np.inf), LABELS, "2 of 192 values .* NaN or infinite"),
    (floats(1.5), LABELS, r"2 of 192 .* outside \[0, 1\]"),
    (VALID.astype(np.int64), LABELS, "must be uint8 or .*, got int64"),
    (VALID[:, :7], LABELS, r"\[1, 8, 8\], got \[3, 7, 8\]"),
    (VALID[0], LABELS, r"got \[8, 8\]"),
    (VALID[..., None, None], LABELS, r"got \[3, 8, 8, 1, 1\]"),
    (VALID, LABELS[:2], r"labels .* shape \[3\], got \[2\]"),
    (VALID, np.array([0, 1, 10]), r"1 labels .* outside \[0, 10\), such as 10"),
    (VALID, np.array([0, -1, 1]), "such as -1"),
    (VALID, np.array([0, 1, 2**64 - 1], np.uint64), "labels .* are outside"),
    (VALID, LABELS.astype(float), "labels .* integers, got float64"),
    (VALID, np.array([True, False, True]), "labels .* integers, got bool"),
    (VALID, LABELS[:, None], r"labels .* shape \[3\], got \[3, 1\]"),
    (VALID[:0], LABELS[:0], "contains no examples"),
    (np.array([["a"]]), LABELS, "a NumPy array or a tensor of numbers"),
    ([[1, 2], [3]], LABELS, "a NumPy array or a tensor of numbers"),
    (VALID[:1], ["a"], r"labels of digits must be among 0, 1, .*, got 'a'"),
]
INVALID_INDICES = [
    (np.zeros((6, 1), int), " must have the shape"),
    (np.zeros(6), " must be integers, got float64"),
    (np.zeros(6, bool), " must be integers, got bool"),
    (np.array([0, 1, 2, -3, 4, 5]), " are outside .* such as -3"),
    (np.full(6, 2**64 - 1, np.uint64), " are outside"),
    (np.array([], int), "contains no examples|groups .* shape"),
]
# If they were joined, one record's type would change the stored pixels of another.
TYPES = [(np.array([[0, 1]], np.uint8), 0), (np.array([[0.5, 1]], np.float32), 1)]
UNSCALED = torch.full((1, 1, 1, DIMENSION), 1.5)
SCANS = replace(DIGITS, name="scans", domains=("A", "B"))
SIX = np.zeros((6, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        *((partial(from_arrays, x, y, DIGITS), message) for x, y, message in INVALID_ARRAYS),
        *(
            (partial(from_arrays, SIX, np.arange(6), DIGITS, groups=indices), message)
            for indices, message in INVALID_INDICES
        ),
        *((partial(TWENTY.subset, ids), message) for ids, message in INVALID_INDICES),
        (partial(TWENTY.subset, [20]), r"indices .* outside \[0, 20\).* such as 20"),
        *(
            (partial(from_arrays, SIX, np.arange(6), SCANS, domains), r"domains .* (outside|must)")
            for domains in (np.full(6, 3), np.zeros(6), np.zeros(2, np.int64), np.zeros(6, complex))
        ),
        *(
            (partial(from_arrays, pairs, spec=VECTORS), r"\(array, label\) pairs")
            for pairs in ([], [1, 2], [(np.zeros(3), 0), (np.zeros(4), 1)])
        ),
        (partial(from_arrays, TYPES, spec=replace(VECTORS, width=2)), "different types"),
        (partial(from_arrays, np.full((1, DIMENSION), np.nan), [0], VECTORS), "NaN"),
        (partial(ImageData, UNSCALED, torch.zeros(1, dtype=torch.int64), VECTORS), "from_arrays"),
    ],
)
def test_invalid_arrays_raise_one_line_errors(build: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_subsets_keep_domains_and_groups() -> None:
    images = RNG.integers(0, 256, (6, 8, 8), dtype=np.uint8)
    users = np.array([7, 7, 0, 3000, 0, 7], np.int32)
    sites = np.arange(6, dtype=np.uint64) % 2
    data = from_arrays(images, np.arange(6), SCANS, sites, groups=users)
    part = data.to("cpu").subset(torch.tensor([3, 0, 3], dtype=torch.int32))
    assert part.labels.tolist() == [3, 0, 3]
    assert part.class_counts().tolist() == [1, 0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert torch.equal(part.images[0], data.images[3])
    assert [origin.tolist() for origin in part.origins()] == [[1, 0, 1], [3000, 7, 3000]]
    assert TWENTY.domains is None


def test_classes_without_examples_are_named() -> None:
    require_all_classes(TWENTY)
    with raises(DataError, "data.absent_classes"):
        require_all_classes(TWENTY.subset(np.flatnonzero(TWENTY.labels != 4)))


@pytest.mark.parametrize("spec", [DIGITS, CIFAR, dataset_spec("svhn")], ids=lambda spec: spec.name)
def test_denormalise_inverts_normalise_at_every_level(spec: Any) -> None:
    square = replace(spec, height=16, width=16)
    level = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, spec.channels, 16, 16)
    x = normalise(level, square)
    assert torch.equal(denormalise(x, square), level)
    mean, std = torch.tensor(spec.mean).view(1, -1, 1, 1), torch.tensor(spec.std).view(1, -1, 1, 1)
    torch.testing.assert_close(x, (level / 255 - mean) / std)


def test_normalise_keeps_its_input() -> None:
    original = TWENTY.images.clone()
    for value, level in ((100.0, 255), (-100.0, 0)):
        assert denormalise(torch.full((1, 1, 8, 8), value), DIGITS).unique().tolist() == [level]
    assert normalise(TWENTY.images, DIGITS).dtype == torch.float32
    assert torch.equal(TWENTY.images, original)
    spec = replace(DIGITS, mean=(0.123,))  # its constants are not those of a test before
    with torch.inference_mode():
        normalise(original, spec)
    weight = torch.ones(1, 1, 8, 8, requires_grad=True)
    (normalise(original, spec) * weight).sum().backward()
    assert weight.grad is not None


# ------------------------------------------------------------------------------------------ vectors


def draw(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors [N, 12] of three classes and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(number) % 3
    vectors = rng.normal(size=(number, DIMENSION))
    vectors[np.arange(number), labels] += 2
    return vectors, labels


def run(name: str, output: Path | None = None, **privacy: Any) -> Any:
    sections = {
        "run": {"method": name, "rounds": 1, "device": "cpu"},
        "partition": {"clients": 3},
        "model": {} if name == "fedstats" else {"name": "mlp", "width": 16},
        "method": quick_settings(name),
        "privacy": privacy,
    }
    data = from_arrays(*draw(600, 0), VECTORS), from_arrays(*draw(90, 1), VECTORS)
    return simulate(resolve(sections), data=data, test="public", output=output, quiet=True)


@pytest.mark.parametrize("name", ["fedaf", "fedkf", "fedstats"])
def test_methods_of_each_family_run_on_vectors(name: str) -> None:
    assert run(name).accuracy >= (0.7 if name == "fedstats" else 0.0)


def test_private_vectors_are_released_in_original_units(tmp_path: Path) -> None:
    folder = verified(run("feddm", tmp_path / "runs", epsilon=8.0, ledger=tmp_path / "ledgers"))
    assert not list(folder.rglob("synthetic*.png"))
    synthetic = load_synthetic(export_run(folder, tmp_path / "share"))
    assert synthetic.spec.bounds == VECTORS.bounds
    torch.testing.assert_close(synthetic.values(), 8 * synthetic.images - 4)
    data = from_arrays(*draw(300, 0), VECTORS)
    with raises(SettingError, "model.name"):
        simulate(resolve({"run": {"method": "fedavg"}}), data=(data, None))


# ---------------------------------------------------------------------------- users and records


def people(users: np.ndarray) -> ImageData:
    labels = np.random.default_rng(0).integers(0, 10, len(users))
    return replace(digits(labels), groups=torch.from_numpy(users))


def test_bounded_keeps_at_most_m_records_per_user() -> None:
    data = people(np.repeat([3, 0, 8], [10, 2, 5]))
    selected = bounded(np.arange(17), data, 4, 0)
    assert data.groups[selected].bincount().tolist() == [2, 0, 0, 4, 0, 0, 0, 0, 4]
    assert bounded(np.arange(17), data, 10, 0).tolist() == list(range(17))
    assert bounded(np.arange(17), data, 4, 1).tolist() != selected.tolist()
    assert bounded(np.arange(0), data, 4, 0).tolist() == []
    with raises(DataError, "data.users"):
        bounded(np.arange(3), ImageData(data.images, data.labels, DIGITS), 1, 0)
    check_one_client_each([np.arange(10), np.arange(10, 17)], data)
    with raises(PartitionError, "partition.users"):
        check_one_client_each([np.array([0]), np.array([1, 2, 3])], data)


def test_bounded_is_independent_of_other_users() -> None:
    """Removing another user and reordering the records keep the selection."""
    users = np.repeat([0, 1, 2], [30, 20, 30])
    data = people(users)
    selected = set(bounded(np.arange(80), data, 5, 0).tolist())
    rest = np.flatnonzero(users != 1)[::-1].copy()
    reduced = rest[bounded(np.arange(60), data.subset(rest), 5, 0)]
    assert set(reduced.tolist()) == {i for i in selected if users[i] != 1}


def test_local_splits_are_disjoint_with_given_share() -> None:
    """Equal records are in one split, also from several files. A label is part of its record."""
    data = people(np.zeros(3000, np.int64))
    parts = [np.arange(2000), np.array([2001]), np.array([], np.int64), np.arange(2100, 3000)]
    training, testing = hold_out(parts, 0.2, 0, data)
    for part, a, b in zip(parts, training, testing, strict=True):
        assert sorted([*a, *b]) == part.tolist()
    assert 330 < len(testing[0]) < 470
    assert hold_out(parts, 0.2, 1, data)[1][0].tolist() != testing[0].tolist()
    labelled = replace(data, labels=(data.labels + 1) % 10)
    assert hold_out(parts, 0.2, 0, labelled)[1][0].tolist() != testing[0].tolist()
    twice = data.subset(np.concatenate([np.arange(200)[::-1], np.arange(200)]))
    files = torch.arange(400).view(-1, 1).view(torch.uint8)
    for side in hold_out([np.arange(400)], 0.3, 0, replace(twice, record_bytes=files)):
        assert len(side[0]) > 0
        assert set((399 - side[0]).tolist()) == set(side[0].tolist())


@pytest.mark.parametrize("by_user", [False, True])
def test_removing_record_or_user_keeps_other_splits(by_user: bool) -> None:
    """Later records are renumbered; users are numbered by sorted names (users.csv, LEAF)."""
    users = np.repeat(np.arange(100), 3) if by_user else np.zeros(300, np.int64)
    data = people(users)
    (training,), (testing,) = hold_out([np.arange(300)], 0.3, 0, data, by_user=by_user)
    assert 0.15 < len(testing) / 300 < 0.45
    assert not by_user or not set(users[training]) & set(users[testing])
    for removed in (0, 50, 99):
        drop = np.flatnonzero(users == removed) if by_user else np.array([removed])
        rest = np.delete(np.arange(300), drop)[::-1].copy()
        renumbered = replace(data, groups=data.groups - (data.groups > removed).long()).subset(rest)
        (train,), _ = hold_out([np.arange(len(rest))], 0.3, 0, renumbered, by_user=by_user)
        assert set(rest[train].tolist()) == set(training.tolist()) - set(drop.tolist())
    assert hold_out([np.arange(0)], 0.3, 0, data, by_user=by_user)[0][0].tolist() == []


def test_digests_are_blake2b_of_record_and_label(device: torch.device) -> None:
    """Vectors are hashed as float32 in their units, without negative zeros, so that a ledger
    recognises them under other bounds."""
    train, _ = load_dataset("digits")
    repeated = np.random.default_rng(0).permutation(5000) % len(train)
    vectors, labels = draw(3, 0)
    vectors[0, 3] = -0.0
    single = vectors.astype(np.float32)
    cases = [(train, repeated, train.images.numpy()), (train, repeated[:0], single)]
    for x, bounds in ((vectors, (-4.0, 4.0)), (single, (0.0, 4.001))):
        data = from_arrays(x, labels, replace(VECTORS, bounds=bounds))
        cases.append((data.subset([2, 0, 1]), np.array([1, 0]), single[[2, 0]] + 0.0))
    for (data, positions, records), with_labels in itertools.product(cases, (True, False)):
        digests = record_digests(data.to(device), positions, KEY, 20, labels=with_labels)
        assert digests.shape == (len(positions), 20)
        for position, digest in zip(positions, digests, strict=True):
            label = int(data.labels[position]).to_bytes(8, "little")
            record = records[position].tobytes() + with_labels * label
            by_hand = hashlib.blake2b(record, key=KEY, digest_size=20, person=b"fedsynth record")
            assert digest.tobytes() == by_hand.digest()


@pytest.mark.parametrize("missing", [None, np.nan, "", " ", pandas.NA])
def test_missing_names_are_refused(missing: Any) -> None:
    """Regression: all records without a patient were one user named "None" or "nan"."""
    numbers = [torch.tensor(0), np.int64(1), True]
    assert from_arrays(np.zeros((3, 2)), numbers, bounds=(0, 1)).spec.class_names == ("0", "1")
    names = ["a", "b", missing]
    for values in (names, np.array(names, object), pandas.Series(names)):
        for role in ("labels", "groups", "domains"):
            with raises(DataError, "data.missing_name"):
                from_arrays(np.zeros((3, 2)), **{"labels": [0, 1, 1], role: values}, bounds=(0, 1))


def test_client_digests_ignore_labels() -> None:
    """A second study on the same images continues their spent budget."""
    relabelled = replace(TWENTY, labels=9 - TWENTY.labels)
    parts = [np.arange(5), np.arange(5, 9)]
    digests = Clients(TWENTY, parts).digests(KEY)
    assert [first.shape for first in digests] == [(5, 16), (4, 16)]
    for first, second in zip(digests, Clients(relabelled, parts).digests(KEY), strict=True):
        assert np.array_equal(first, second)


# ---------------------------------------------------------------------------------------- pictures


def test_small_partition_table_is_complete() -> None:
    assert partition_table([[5, 0, 120], [0, 7, 0]]).splitlines() == [
        "client  examples    0    1    2",
        "     0       125    5    ·  120",
        "     1         7    ·    7    ·",
        "2 clients, 132 examples: 7 – 66 – 125 and 1 – 1.5 – 2 classes each (minimum – median – "
        "maximum)",
    ]


@pytest.mark.parametrize(("clients", "classes"), [(100, 10), (10, 100), (1, 1), (500, 26)])
def test_large_tables_and_pictures_are_bounded(clients: int, classes: int, tmp_path: Path) -> None:
    counts = RNG.integers(0, 500, (clients, classes))
    lines = partition_table(counts).splitlines()
    assert len(lines) <= 43
    assert max(map(len, lines)) <= 160
    assert ("… 60 more" in lines) == (clients == 100)
    partition_png(counts, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.format == "PNG"
        assert max(picture.size) <= 2100


def test_pictures_are_shaded_by_count_and_labelled(tmp_path: Path) -> None:
    partition_png([[0, 1_000_000], [250_000, 0]], tmp_path / "p.png")
    pixels = np.asarray(Image.open(tmp_path / "p.png").convert("RGB"))
    # the cells begin at (12, 40) and are 26 wide
    assert pixels[40 + 1, [13, 39]].tolist() == [[255, 255, 255], [8, 48, 107]]
    halfway = [132, 152, 181]  # sqrt(1/4) = 1/2
    assert pixels[40 + 27, [13, 39]].tolist() == [halfway, [255, 255, 255]]
    image_grid_png(torch.zeros(2, 1, 8, 8).byte(), tmp_path / "g.png", 1, ("ill", "healthy"))
    pixels = np.asarray(Image.open(tmp_path / "g.png"))
    margin = pixels.shape[1] - 50
    for row in range(2):  # letters before each row, and the image behind them
        assert pixels[49 * row : 49 * (row + 1), :margin].min() < 100
        assert pixels[49 * row + 24, margin + 24].max() == 0


@pytest.mark.parametrize(("shape", "columns"), [((7, 1), 3), ((6, 3), 3), ((2, 3), 5)])
def test_image_grid_equals_torchvision(shape: Any, columns: int, tmp_path: Path) -> None:
    x = torch.arange(3000 * np.prod(shape)).byte().view(*shape, 50, 60)
    image_grid_png(x, tmp_path / "g.png", columns)
    expected = make_grid(x, nrow=columns, padding=1, pad_value=GREY).permute(1, 2, 0)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "g.png")), expected)


def test_image_grid_is_ordered_by_class() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    rows, names = by_class(images, torch.tensor([2, 0, 2, 2, 0]), ("a", "b", "c"), columns=3)
    assert names == ["a", "c"]
    assert rows.flatten().tolist() == [1, 4, 200, 0, 2, 3]
