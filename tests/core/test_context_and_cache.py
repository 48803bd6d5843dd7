"""The context of a round: loading of networks, active clients and pickling. The cache of features and
embeddings: equal to fresh values, computed once, keyed by embedding."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsynth import PrivacySettings, RoundContext
from fedsynth.core import feature_cache
from fedsynth.core.feature_cache import feature_table, keep_on_disk
from fedsynth.data.images import ImageData, ProxyImages, from_arrays
from fedsynth.features import feature_map
from fedsynth.models.on_features import Embedding, Root
from fedsynth.models.registry import ModelSettings, build_model
from tests.digits import CPU, SPEC, convnet, digits, round_context

RESNET = build_model(ModelSettings("resnet8", width=4), SPEC.image_shape, 10, 2)


def full_context() -> RoundContext:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8)).astype(np.uint8)
    colours = replace(SPEC, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    privacy = PrivacySettings(noise_multiplier=2.0, max_request_norm=9.0)
    return RoundContext(
        *(3, 7, CPU, SPEC, convnet(), 12.5, privacy),
        participants=(0, 2),
        note=[].append,
        precision=torch.bfloat16,
        memory_bytes=123,
        compiled=True,
        clients=3,
        client_architectures=(convnet(seed=1), RESNET, convnet(seed=3)),
        noise={"model update": 0.5},
        sizes=(4, 5, 6),
        proxy=ProxyImages(from_arrays(pixels, np.zeros(6, np.int64), colours), SPEC),
    )


def test_context_survives_pickling() -> None:
    """Networks, proxy images, privacy settings and notes reach another process."""
    context = full_context()
    context.note("before")
    unpickled = pickle.loads(pickle.dumps(context))
    for field in fields(RoundContext):
        value, unpickled_value = getattr(context, field.name), getattr(unpickled, field.name)
        if field.name == "proxy":
            assert torch.equal(unpickled_value(torch.tensor([5, 0])), value(torch.tensor([5, 0])))
        elif field.name == "note":
            assert unpickled_value.__self__ == ["before"]
        elif field.name != "keeper" and "architecture" not in field.name:
            assert value == unpickled_value, field.name
    for k in range(3):
        network, unpickled_network = context.architecture_of(k), unpickled.architecture_of(k)
        assert type(network) is type(unpickled_network)
        weights = dict(network.state_dict()), dict(unpickled_network.state_dict())
        torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_load_copies_the_architecture_of_the_client() -> None:
    context = full_context()
    parameters = {n: torch.ones_like(v) for n, v in RESNET.state_dict().items()}
    loaded = context.load(parameters, 1)
    assert type(loaded) is type(context.architecture_of(1))
    assert all(torch.equal(v, parameters[n]) for n, v in loaded.state_dict().items())
    weights = context.architecture_of(1).state_dict()
    assert not any(torch.equal(weights[n], v) for n, v in parameters.items() if v.dim() > 1)
    with pytest.raises(RuntimeError):
        context.load(parameters)  # the server's architecture has no such parameters


def test_all_clients_are_active_by_default() -> None:
    context = round_context(clients=3)
    assert context.active == (0, 1, 2)
    assert replace(context, participants=()).active == ()


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


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    lengths: list[int] = []
    call = Embedding.__call__
    monkeypatch.setattr(Embedding, "__call__", lambda *a: lengths.append(len(a[1])) or call(*a))
    return lengths


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
        for change in (0.0, 0.1):
            requested.centre.add_(change)
            z = feature_table(images, PIXELS, records, requested)(records)
            expected = numpy_embedding(images, requested)[records]
            np.testing.assert_allclose(z, expected, atol=1e-5)
            plain = replace(requested, roots=())
            assert not torch.equal(feature_table(images, PIXELS, records, plain)(records), z)
        phi = feature_table(images, PIXELS, records)(records)
        assert torch.equal(phi, PIXELS(images.images[records]))


def test_features_and_embeddings_are_computed_once(
    embedded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, first = data(), embedding(0)
    mapped: list[int] = []
    counting = replace(PIXELS, function=lambda x: mapped.append(len(x)) or x.flatten(1))
    monkeypatch.setattr(feature_cache, "PASS", 1)
    monkeypatch.setattr(feature_cache, "EMBEDDING_PASS", 1)
    for start in (0, 300, 0):  # messages have equal but separate constants
        records = torch.arange(start, start + 400)
        equal_embedding = Embedding(first.centre.clone(), first.radius, first.roots)
        feature_table(images, counting, records, equal_embedding)(records)
    assert sum(mapped) == sum(embedded) == len(images)


def test_embedding_bits_are_independent_of_other_records(embedded: list[int]) -> None:
    """Passes have one length, so that no kernel's shape depends on the number of records."""
    full = data()
    all_records = torch.arange(len(full))
    together = feature_table(full, PIXELS, all_records, embedding(0))(all_records)
    for records in (torch.arange(1), torch.arange(3, 20), torch.arange(100, 700)):
        separate = feature_table(data(), PIXELS, records, embedding(0))(records)
        assert torch.equal(separate, together[records])
    assert set(embedded) == {feature_cache.EMBEDDING_PASS}


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
