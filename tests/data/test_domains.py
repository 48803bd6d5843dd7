"""Data sets of several domains: the partition by domain, and accuracy by domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedsynth.config.resolve import resolve
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import partition
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import DataError, PartitionError
from fedsynth.simulation.simulate import simulate


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
    with pytest.raises(PartitionError, match="needs a data set with domains"):
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
