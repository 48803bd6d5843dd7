"""A record's hash is its own: the same anywhere, another for any other pixel, label or key."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from fedsynth.data.images import ImageData, record_digests
from fedsynth.data.load import load_dataset
from fedsynth.federation.run_data import Clients

KEY = bytes(range(32))
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load_dataset("digits")[0]


@pytest.mark.parametrize("device", DEVICES)
def test_digests_are_blake2b_of_pixels_and_label(digits: ImageData, device: str) -> None:
    positions = np.array([3, 0, 1437, 3])
    digests = record_digests(digits.to(device), positions, KEY, 20)
    assert digests.shape == (4, 20)
    for position, digest in zip(positions, digests, strict=True):
        label = int(digits.labels[position]).to_bytes(8, "little")
        record = digits.images[position].numpy().tobytes() + label
        by_hand = hashlib.blake2b(record, key=KEY, digest_size=20, person=b"fedsynth record")
        assert digest.tobytes() == by_hand.digest()


def test_a_digest_goes_with_its_record_and_not_with_its_place(digits: ImageData) -> None:
    """Also across the pieces in which records are copied."""
    order = np.random.default_rng(0).permutation(5000) % len(digits)
    many = ImageData(digits.images[order], digits.labels[order], digits.spec)
    here = record_digests(digits, np.arange(len(digits)), KEY)
    assert np.array_equal(record_digests(many, np.arange(5000), KEY), here[order])
    assert len(np.unique(here, axis=0)) == len(digits)  # no two of the digits are the same
    assert record_digests(digits, np.arange(0), KEY).shape == (0, 16)


def test_another_label_pixel_or_key_is_another_digest(digits: ImageData) -> None:
    images = digits.images[:1].repeat(3, 1, 1, 1)
    images[1, 0, 7, 7] ^= 1
    labels = digits.labels[:1].repeat(3)
    labels[2] = (labels[2] + 1) % 10
    data = ImageData(images, labels, digits.spec)
    digests = np.concatenate(
        [record_digests(data, np.arange(3), key) for key in (KEY, b"another key")]
    )
    assert len(np.unique(digests, axis=0)) == 6
    unlabelled = record_digests(data, np.arange(3), KEY, labels=False)
    assert np.array_equal(unlabelled[0], unlabelled[2])
    assert len(np.unique(unlabelled, axis=0)) == 2


def test_a_ledger_recognises_a_relabelled_image(digits: ImageData) -> None:
    """Two studies on the same images: what the first has spent stays with them."""
    anew = ImageData(digits.images, 9 - digits.labels, digits.spec)
    parts = [np.arange(5), np.arange(5, 9)]
    before = Clients(digits, parts).digests(KEY)
    assert [len(one) for one in before] == [5, 4]
    for one, other in zip(before, Clients(anew, parts).digests(KEY), strict=True):
        assert np.array_equal(one, other)
