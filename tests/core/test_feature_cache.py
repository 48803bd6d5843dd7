"""The cache of features and embeddings: equal to fresh values, computed once, keyed by embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.core import feature_cache
from fedsynth.core.feature_cache import feature_table, keep_on_disk
from fedsynth.data.images import ImageData
from fedsynth.features import feature_map
from fedsynth.models.on_features import Embedding, Root
from tests.digits import SPEC, digits

PIXELS = replace(feature_map("pixels", SPEC.image_shape), blocks=((8, 8),))


def data(n: int = 700) -> ImageData:
    """Returns more images than one pass of the embedding takes."""
    return digits(np.arange(n) % 10)


def embedding(seed: int) -> Embedding:
    draws = torch.Generator().manual_seed(seed)
    root = Root(torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws))
    return Embedding(torch.rand(64, generator=draws), 3.0, (root,))


def numpy_embedding(images: ImageData, embedding: Embedding) -> np.ndarray:
    """Computes clip₁(A·(Φ − m)·B/R), where Φ are an image's pixels less ½."""
    (root,) = embedding.roots
    phi = images.images[:, 0].double().numpy() / 255 - 0.5
    about = phi - embedding.centre.double().numpy().reshape(8, 8)
    turned = root.channels.double().numpy() @ about @ root.cells.double().numpy()
    z = turned.reshape(len(phi), 64) / embedding.radius
    actual: np.ndarray = z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
    return actual


@pytest.mark.parametrize("max_bytes", [feature_cache.MAX_BYTES, 1])
def test_cached_vectors_match_their_embedding(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken cache would return z of another centre or transform, or features instead of z, or
    keep the caller's tensors, which may change."""
    monkeypatch.setattr(feature_cache, "MAX_BYTES", max_bytes)
    images = data()
    records = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for seed in (0, 1, 0):
        requested = embedding(seed)
        requested_z = feature_table(images, PIXELS, records, requested)(records)
        np.testing.assert_allclose(
            requested_z, numpy_embedding(images, requested)[records], atol=1e-5
        )
        plain = replace(requested, roots=())
        assert not torch.equal(feature_table(images, PIXELS, records, plain)(records), requested_z)
        requested.centre.add_(0.1)
        updated_z = feature_table(images, PIXELS, records, requested)(records)
        np.testing.assert_allclose(
            updated_z, numpy_embedding(images, requested)[records], atol=1e-5
        )
        phi = feature_table(images, PIXELS, records)(records)
        assert torch.equal(phi, PIXELS(images.images[records]))


def test_features_and_embeddings_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = data()
    mapped: list[int] = []
    embedded: list[int] = []

    def counting(x: Tensor) -> Tensor:
        mapped.append(len(x))
        return x.flatten(1)

    class Counted(Embedding):
        def __call__(self, features_Nd: Tensor) -> Tensor:
            embedded.append(len(features_Nd))
            return super().__call__(features_Nd)

    counting_map = replace(PIXELS, name="own", function=counting)
    monkeypatch.setattr(feature_cache, "PASS", 1)
    monkeypatch.setattr(feature_cache, "EMBEDDING_PASS", 1)
    first = embedding(0)
    for start in (0, 300, 0):  # messages have equal but separate constants
        records = torch.arange(start, start + 400)
        equal_embedding = Counted(first.centre.clone(), first.radius, first.roots)
        feature_table(images, counting_map, records, equal_embedding)(records)
    assert sum(mapped) == sum(embedded) == len(images)


def test_embedding_bits_are_independent_of_other_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes have one length, so that no kernel's shape depends on the number of records."""
    lengths: set[int] = set()
    call = Embedding.__call__
    monkeypatch.setattr(
        Embedding, "__call__", lambda self, phi: lengths.add(len(phi)) or call(self, phi)
    )
    full = data()
    all_records = torch.arange(len(full))
    together = feature_table(full, PIXELS, all_records, embedding(0))(all_records)
    for records in (torch.arange(1), torch.arange(3, 20), torch.arange(100, 700)):
        separate = feature_table(data(), PIXELS, records, embedding(0))(records)
        assert torch.equal(separate, together[records])
    assert lengths == {feature_cache.EMBEDDING_PASS}


def test_vectors_on_disk_are_read_instead_of_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, records = data(), data(), torch.arange(1, 700, 2)
    keep_on_disk(tmp_path / "cache", first, PIXELS, records)
    monkeypatch.setattr(feature_cache, "_features", lambda *args: pytest.fail("computed again"))
    keep_on_disk(tmp_path / "cache", second, PIXELS, records)
    expected = feature_table(first, PIXELS, records)(records)
    assert torch.equal(feature_table(second, PIXELS, records)(records), expected)
    assert bool((expected.norm(dim=1) > 1).any())  # features are not scaled, as an encoder's are
