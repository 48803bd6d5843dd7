"""Data sets of several domains, on files that the test writes; the partition by domain; accuracy by
domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsynth.config.resolve import resolve
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import partition
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import DataError, DataFilesCorruptError, PartitionError
from fedsynth.simulation.simulate import simulate

OFFICE, DOMAINNET = dataset_spec("office-caltech-10"), dataset_spec("domainnet-10")


def write(path: Path, level: int, size: tuple[int, int] = (64, 64)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, 0, 255 - level)).save(path)


@pytest.fixture
def office(tmp_path: Path) -> Path:
    """Six images a class and domain; webcam's are larger, and its backpacks are in the folder that
    other releases have."""
    for number, domain in enumerate(OFFICE.domains):
        for label, name in enumerate(OFFICE.class_names):
            folder = "back_pack" if (domain, name) == ("webcam", "backpack") else name
            for i in range(6):
                where = tmp_path / "office_caltech_10" / domain / folder / f"frame_{i:04}.png"
                write(where, 50 * number + 5 * label, (100, 80) if domain == "webcam" else (64, 64))
    return tmp_path


def test_office_caltech_every_fifth_image_tests(office: Path) -> None:
    train, test = load_dataset("office-caltech-10", office)
    assert (len(train), len(test)) == (4 * 10 * 5, 4 * 10)
    assert train.domains is not None
    assert torch.bincount(train.domains).tolist() == [50, 50, 50, 50]
    level = 50 * train.domains + 5 * train.labels
    # also the resized ones, which have one colour
    assert torch.equal(train.images[:, 0, 7, 9].long(), level)
    assert torch.equal(train.images[:, 2, 0, 0].long(), 255 - level)


@pytest.fixture
def domainnet(tmp_path: Path) -> Path:
    """Official lists: two of the ten classes and one other; JPEG files."""
    for number, domain in enumerate(DOMAINNET.domains):
        for split in ("train", "test"):
            lines = []
            for name, label in (("zebra", 344), ("bird", 23), ("axe", 12)):
                file = f"{domain}/{name}/{domain}_{label + 1:03}_{'01' if split == 'train' else '02'}.jpg"
                write(tmp_path / "domainnet" / file, 40 * number, (130, 90))
                lines.append(f"{file} {label}")
            (tmp_path / "domainnet" / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_domainnet_by_its_official_lists(domainnet: Path) -> None:
    train, test = load_dataset("domainnet-10", domainnet)
    assert train.labels.tolist() == [9, 0] * 6
    assert train.domains is not None
    assert train.domains.tolist() == [d for d in range(6) for _ in range(2)]
    assert tuple(test.images.shape) == (12, 3, 64, 64)
    assert (train.images[:, 0].float().mean((1, 2)) - 40 * train.domains).abs().max() < 3  # JPEG


@pytest.mark.parametrize(
    "line",
    [
        "clipart/bird",
        "sketch/bird/x.jpg 3",
        "clipart/../x.jpg 3",
        "clipart/bird/x.jpg three",
        "clipart/bird/x.jpg 3²",
        "clipart/bird/x.jpg ٣",
    ],
)
def test_a_list_that_is_none(domainnet: Path, line: str) -> None:
    (domainnet / "domainnet" / "clipart_train.txt").write_text(line + "\n")
    with pytest.raises(
        DataFilesCorruptError,
        match=r"clipart_train.txt, line 1: expected 'clipart/CLASS/FILE NUMBER'",
    ):
        load_dataset("domainnet-10", domainnet)


def test_the_partition_by_domain() -> None:
    domains = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3])
    labels = np.zeros(9, np.int64)
    parts = partition(labels, PartitionSettings(kind="domain", clients=3), 1, domains)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    six = partition(labels, PartitionSettings(kind="domain", clients=6), 1, domains)
    assert [sorted(set(domains[part])) for part in six] == [[0], [1], [3]] * 2
    assert sorted(np.concatenate(six).tolist()) == list(range(9))
    assert [len(part) for part in six] == [2, 1, 2, 1, 1, 2]
    with pytest.raises(PartitionError, match="multiple of 3"):
        partition(labels, PartitionSettings(kind="domain", clients=4), 1, domains)
    with pytest.raises(PartitionError, match="does not say which domain"):
        partition(labels, PartitionSettings(kind="domain", clients=3), 1)


SPEC = replace(
    dataset_spec("digits"), name="scans", domains=("hospital A", "hospital B", "hospital C")
)


def scans(spec: DatasetSpec = SPEC) -> ImageData:
    train, _ = load_dataset("digits")
    return from_arrays(train.images[:300], train.labels[:300], spec, np.arange(300) % 2)


def test_domains_travel_with_the_examples() -> None:
    data = scans()
    assert data.domains is not None
    assert data.to("cpu").subset([3, 0]).domains.tolist() == [1, 0]  # type: ignore[arg-type,union-attr]
    assert from_arrays(data.images, data.labels, SPEC, np.ones(300, np.uint64)).domains is not None
    for bad in (np.full(300, 3), np.zeros(300), np.zeros(2, np.int64), np.zeros(300, complex)):
        with pytest.raises(DataError, match="domains must"):
            from_arrays(data.images, data.labels, SPEC, bad)


def test_a_federation_of_domains_reports_each() -> None:
    fast = {"ipc": 2, "iterations": 2, "server_epochs": 2}
    sections = {
        "run": {"rounds": 1},
        "partition": {"kind": "domain", "clients": 2},
        "model": {"width": 4, "depth": 2},
    }
    result = simulate(resolve({**sections, "method": fast}), data=(scans(), scans()))
    row = result.metrics[0]
    assert set(row["domain_accuracy"]) == {"hospital A", "hospital B"}
    assert (
        row["domain_average"]
        == pytest.approx(sum(row["domain_accuracy"].values()) / 2)
        == result.summary["domain_average"]
    )
    assert row["test_accuracy"] == pytest.approx(row["domain_average"])  # of one size
