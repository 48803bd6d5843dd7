"""Kept features and what is kept of their embedding: equal to what is made anew, made once, and
never another embedding's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.core import feature_cache
from fedsynth.core.feature_cache import feature_table
from fedsynth.data.images import ImageData
from fedsynth.features import feature_map
from fedsynth.models.on_features import Embedding, Root
from tests.digits import SPEC, digits

PIXELS = replace(feature_map("pixels", SPEC.image_shape), blocks=((8, 8),))


def data(n: int = 700) -> ImageData:
    """More than one pass of the embedding."""
    return digits(np.arange(n) % 10)


def embedding(seed: int) -> Embedding:
    draws = torch.Generator().manual_seed(seed)
    root = Root(torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws))
    return Embedding(torch.rand(64, generator=draws), 3.0, (root,))


def by_hand(images: ImageData, embedding: Embedding) -> np.ndarray:
    """clip₁(A·(Φ − m)·B/R), with Φ an image's pixels less ½."""
    (root,) = embedding.roots
    phi = images.images[:, 0].double().numpy() / 255 - 0.5
    about = phi - embedding.centre.double().numpy().reshape(8, 8)
    turned = root.channels.double().numpy() @ about @ root.cells.double().numpy()
    z = turned.reshape(len(phi), 64) / embedding.radius
    actual: np.ndarray = z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
    return actual


@pytest.mark.parametrize("most", [feature_cache.MAX_BYTES, 1])
def test_z_is_that_of_the_embedding_that_was_asked_for(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: z of another centre, another T, features in z's place, or a cache that keeps the
    caller's tensors, which are equal to themselves after a change."""
    monkeypatch.setattr(feature_cache, "MAX_BYTES", most)
    images = data()
    records = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for seed in (0, 1, 0):
        asked = embedding(seed)
        asked_z = feature_table(images, PIXELS, records, asked)(records)
        np.testing.assert_allclose(asked_z, by_hand(images, asked)[records], atol=1e-5)
        plain = replace(asked, roots=())
        assert not torch.equal(feature_table(images, PIXELS, records, plain)(records), asked_z)
        asked.centre.add_(0.1)
        moved = feature_table(images, PIXELS, records, asked)(records)
        np.testing.assert_allclose(moved, by_hand(images, asked)[records], atol=1e-5)
        phi = feature_table(images, PIXELS, records)(records)
        assert torch.equal(phi, PIXELS(images.images[records]))


def test_each_records_features_and_z_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = data()
    mapped: list[int] = []
    embedded: list[int] = []

    def counted(x: Tensor) -> Tensor:
        mapped.append(len(x))
        return x.flatten(1)

    class Counted(Embedding):
        def __call__(self, features_Nd: Tensor) -> Tensor:
            embedded.append(len(features_Nd))
            return super().__call__(features_Nd)

    own = replace(PIXELS, name="own", function=counted)
    monkeypatch.setattr(feature_cache, "PASS", 1)
    monkeypatch.setattr(feature_cache, "EMBEDDING_PASS", 1)
    first = embedding(0)
    for start in (0, 300, 0):  # the message of each round has constants of its own, equal ones
        records = torch.arange(start, start + 400)
        same = Counted(first.centre.clone(), first.radius, first.roots)
        feature_table(images, own, records, same)(records)
    assert sum(mapped) == sum(embedded) == len(images)


def test_a_records_z_has_the_same_bits_whoever_else_is_embedded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And passes are of one length: no kernel's shape goes by how many records there are."""
    lengths: set[int] = set()
    call = Embedding.__call__
    monkeypatch.setattr(
        Embedding, "__call__", lambda self, phi: lengths.add(len(phi)) or call(self, phi)
    )
    full = data()
    everyone = torch.arange(len(full))
    together = feature_table(full, PIXELS, everyone, embedding(0))(everyone)
    for some in (torch.arange(1), torch.arange(3, 20), torch.arange(100, 700)):
        separate = feature_table(data(), PIXELS, some, embedding(0))(some)
        assert torch.equal(separate, together[some])
    assert lengths == {feature_cache.EMBEDDING_PASS}
