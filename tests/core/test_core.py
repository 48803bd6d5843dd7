"""Serialisation of messages, states, frames and contexts; the cache of features and embeddings."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import PrivacySettings, RoundContext, ServerState
from fedsynth.core import feature_cache
from fedsynth.core.capabilities import upload_types
from fedsynth.core.feature_cache import feature_table, keep_on_disk
from fedsynth.core.messages import LENGTH_BYTES, Message, ModelParameters, Packed, public, released
from fedsynth.data.images import ImageData, from_arrays, proxy_images
from fedsynth.deployment.frames import LONGEST_HEADER, EndFacts, Frame, RoundFacts
from fedsynth.errors import MessageError
from fedsynth.features import feature_map
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedfm import AnchorState
from fedsynth.models.on_features import Embedding
from fedsynth.models.registry import ModelSettings, build_model
from tests.digits import CPU, SPEC, convnet, digits
from tests.message_examples import message_types, random_message
from tests.raising import raises


def assert_same(a: Packed, b: Packed) -> None:
    assert type(a) is type(b)
    torch.testing.assert_close(dict(a.arrays()), dict(b.arrays()), rtol=0, atol=0)
    for field in fields(a):
        value, other_value = getattr(a, field.name), getattr(b, field.name)
        if isinstance(value, Mapping):
            assert list(value) == list(other_value)
        elif not isinstance(value, Tensor):
            assert value == other_value
    assert a.nbytes == b.nbytes


def test_declared_types_have_unique_names() -> None:
    """A type is identified by its name in the bytes. Initial states have the declared type."""
    types = message_types()
    assert len({kind.__name__ for kind in types}) == len(types)
    assert sum(issubclass(kind, ServerState) for kind in types) >= 10
    assert sum(issubclass(kind, Message) for kind in types) >= 17
    model = build_model(ModelSettings(width=4, depth=1, norm="batch"), (1, 8, 8), 10, 0)
    for cls in map(method_class, METHODS):
        assert {cls.request, cls.state, *upload_types(cls)} <= set(types)
        state = cls().initial_state(model.state_dict())
        assert type(state) is cls.state
        assert_same(state, cls.state.from_bytes(state.to_bytes()))


def test_states_move_between_devices() -> None:
    has_anchor = torch.ones(3, dtype=torch.bool)
    state = AnchorState({"w": torch.ones(2)}, anchors=torch.eye(3), has_anchor=has_anchor)
    moved = state.to("meta")
    assert {t.device.type for _, t in moved.arrays()} == {"meta"}
    assert_same(state.to("cpu"), state)
    assert Scored({}, score=0.5).to("meta").score == 0.5


@pytest.mark.parametrize("kind", message_types())
def test_messages_survive_serialisation(kind: type[Packed]) -> None:
    for seed in range(8):
        message = random_message(kind, random.Random(seed))
        assert_same(message, kind.from_bytes(message.to_bytes()))


def test_shared_tensors_are_serialised_separately() -> None:
    shared = torch.arange(6.0).view(2, 3)
    message = ModelParameters({"a": shared, "a.b": shared.T, "": shared[0]}, 1.0)
    received = ModelParameters.from_bytes(message.to_bytes())
    assert list(received.parameters) == ["a", "a.b", ""]
    received.parameters["a"].zero_()
    assert torch.equal(received.parameters["a.b"], shared.T)


@dataclass(frozen=True)
class Text(Message):
    text: Any = public("a test's")


def test_unsupported_field_values_are_rejected() -> None:
    for value in ("words", float("nan"), float("inf"), [torch.ones(1)]):
        with raises(MessageError, "message.value"):
            Text(value).to_bytes()


@dataclass(frozen=True)
class Scored(ServerState):
    """A state with a number that may be None, and one that may not."""

    score: float | None = None
    count: int = 0


GOOD = ModelParameters({"w": torch.ones(2)}, 3.0).to_bytes()
STATE = AnchorState(
    {"w": torch.ones(2)}, anchors=torch.eye(2), has_anchor=torch.ones(2, dtype=torch.bool)
).to_bytes()
SCORED = Scored({"w": torch.ones(2)}, score=0.5).to_bytes()


@dataclass(frozen=True)
class Forged(Message):
    """`ModelParameters` with a tensor as weight: steps rely on the declared types."""

    parameters: Mapping[str, Tensor] = released()
    weight: Tensor = released()


def edited(good: bytes = GOOD, shape: list[int] | None = None, **header: Any) -> bytes:
    """Changes the JSON header of `good`, or the shape of its `w` without numbers."""
    length = struct.unpack("<Q", good[:8])[0]
    outer = json.loads(good[8 : 8 + length])
    inner = {**json.loads(outer["__metadata__"]["header"]), **header}
    outer["__metadata__"]["header"] = json.dumps(inner)
    tensors = good[8 + length :]
    if shape is not None:
        outer["parameters.w"].update(shape=shape, data_offsets=[0, 0])
        tensors = b""
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tensors


FORGED = edited(Forged({}, torch.ones(1)).to_bytes(), type="ModelParameters")
INVALID, ENTRY = "not a valid fedsynth message", "contains the unknown entry"
W = {"parameters": ["w"]}
LENGTH = struct.unpack("<Q", STATE[:8])[0]
STATED = json.loads(json.loads(STATE[8 : 8 + LENGTH])["__metadata__"]["header"])["values"]
UNSEEN = {name: value for name, value in STATED.items() if name != "seen"}
FINITE = ("3", True, float("nan"), 2**64, 10**400)
MALFORMED = (
    (edited(shape=[0, 2**63]), INVALID),
    (edited(shape=[0, 2**64 - 1]), INVALID),
    (b"", INVALID),
    (GOOD[:20], INVALID),
    (b"\xff" * 64, INVALID),
    (struct.pack("<Q", 2**63) + b"{}", INVALID),
    (struct.pack("<Q", 20_000) + b"[" * 20_000, INVALID),
    (GOOD[:-1], INVALID),
    (edited(type="Words"), "expected a ModelParameters message, got 'Words'"),
    (edited(values=W), r"missing the field ModelParameters\.weight"),
    *((edited(values={**W, "weight": value}), r"a (finite )?number, got") for value in FINITE),
    (edited(parts=" " * 2**23), "the header has 8"),
    (edited(values={**W, "weight": 3, "more": 1}), "contains the unknown entry 'more'"),
    (edited(values=[3]), "values is invalid"),
    (edited(values={"parameters": [], "weight": 3}), r"contains the unknown entry 'parameters\.w'"),
    (edited(values={"parameters": ["w", "v"]}), "missing the tensor for key 'v'"),
    (edited(values={"parameters": ["w", "w"]}), "missing the tensor for key 'w'"),
    (edited(values={"parameters": ["w", ["w"]]}), "a key that is not text"),
    (edited(values={"parameters": [1]}), "a key that is not text"),
    (edited(values={"parameters": "w"}), r"a (finite )?number, got"),
    (edited(values={"weight": 3}), r"missing the field ModelParameters\.parameters"),
    (edited(fedsynth_message="1"), INVALID),
    (edited(values={**W, "weight": None}), "weight must have the type float, got NoneType"),
    (edited(values={**W, "weight": {"weight": 1}}), r"a (finite )?number, got"),
    (
        edited(values={"weight": 3, "parameters": 1}),
        r"parameters must have the type Mapping, got int",
    ),
    (edited(values={**W, "weight": []}), "weight must have the type float"),
    (FORGED, r"ModelParameters\.weight must have the type float, got Tensor"),
)
MALFORMED_STATES = (
    (AnchorState, edited(STATE, values=UNSEEN), r"missing the field AnchorState\.seen"),
    (AnchorState, edited(STATE, values={**STATED, "anchors": None}), ENTRY),
    (AnchorState, edited(STATE, values={**STATED, "has_anchor": 1}), ENTRY),
    (AnchorState, edited(STATE, values={**STATED, "more": None}), ENTRY),
    (Scored, edited(SCORED, values={**W, "score": "1", "count": 0}), r"a (finite )?number, got"),
    (
        Scored,
        edited(SCORED, values={**W, "score": None, "count": None}),
        "must have the type int, got NoneType",
    ),
    (ServerState, STATE, "expected a ServerState message, got 'AnchorState'"),
)


@pytest.mark.parametrize(
    ("kind", "sent", "match"),
    [*((ModelParameters, *case) for case in MALFORMED), *MALFORMED_STATES],
)
def test_malformed_messages_are_rejected(kind: type[Packed], sent: bytes, match: str) -> None:
    """Only optional fields may be None, once each, and instead of a value."""
    with pytest.raises(MessageError, match=match):
        kind.from_bytes(sent)


def test_equal_messages_have_equal_bytes() -> None:
    """A node recognises repeated requests by their bytes, also after reordering in safetensors."""
    message = ModelParameters({f"layer{k}": torch.ones(k + 1) for k in range(5)}, weight=2.0)
    (packed,) = {message.to_bytes() for _ in range(40)}
    assert (8 + int.from_bytes(packed[:8], "little")) % 8 == 0


def frame_bytes(header: bytes, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(LENGTH_BYTES, "little") + header + payload


def test_frames_survive_serialisation() -> None:
    """A broken version would truncate the payload, or read it as part of the header."""
    facts = {"é\n": [1, None, True, {"": "κ"}], "a": {}}
    header = json.dumps(["\0κ", facts]).encode()
    for payload in (b"", b"{}", bytes(range(256))):
        data = Frame("\0κ", facts, payload).to_bytes()
        assert data == frame_bytes(header, payload)
        assert Frame.from_bytes(data) == Frame("\0κ", facts, payload)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x01",
        frame_bytes(b"{}", length=3),
        frame_bytes(b"{}", length=2**63),
        *map(frame_bytes, (b"\xff", b"{}", b"[]", b'{"kind": 1, "facts": {}}')),
        *map(frame_bytes, (b'{"kind": "step", "facts": []}', b"[" * 100_000)),
    ],
)
def test_malformed_frames_are_rejected(sent: bytes) -> None:
    with raises(MessageError, "message.invalid"):
        Frame.from_bytes(sent)


def test_frames_are_short_and_finite() -> None:
    """Parsed JSON takes many times the memory of its text."""
    frame = json.dumps({"kind": "x" * LONGEST_HEADER, "facts": {}}).encode()
    with raises(MessageError, "message.invalid"):
        Frame.from_bytes(frame_bytes(frame))
    with pytest.raises(ValueError, match="JSON"):
        Frame("answer", {"accuracy": float("nan")}).to_bytes()


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, [1]])
def test_integers_are_strict(value: Any) -> None:
    """True and 1.0 are not accepted as 1."""
    with pytest.raises(MessageError, match=r"'end' is not valid: rounds is invalid: Input"):
        EndFacts.of(Frame("end", {"rounds": value}))
    with pytest.raises(
        MessageError, match=r"'step' is not valid: participants\.1 is invalid: Input"
    ):
        RoundFacts.of(Frame("step", {"round": 1, "participants": [0, value]}))
    assert EndFacts.of(Frame("end", {"rounds": 3, "other": value})).rounds == 3


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
        proxy=proxy_images(from_arrays(pixels, np.zeros(6, np.int64), colours), SPEC),
    )


def test_context_survives_pickling() -> None:
    """Networks, proxy images, privacy settings and notes reach another process."""
    context = full_context()
    assert [replace(context, participants=p).active for p in (None, ())] == [(0, 1, 2), ()]
    context.note("before")
    unpickled = pickle.loads(pickle.dumps(context))
    for field in fields(RoundContext):
        value, unpickled_value = getattr(context, field.name), getattr(unpickled, field.name)
        if field.name == "proxy":
            assert torch.equal(unpickled_value.images, value.images)
        elif field.name == "note":
            assert unpickled_value.__self__ == ["before"]
        elif field.name != "keeper" and "architecture" not in field.name:
            assert value == unpickled_value, field.name
    for k in range(3):
        network, unpickled_network = context.architecture_of(k), unpickled.architecture_of(k)
        assert type(network) is type(unpickled_network)
        weights = dict(network.state_dict()), dict(unpickled_network.state_dict())
        torch.testing.assert_close(*weights, rtol=0, atol=0)


PIXELS = replace(feature_map("pixels", SPEC.image_shape), blocks=((8, 8),))


def data(n: int = 700) -> ImageData:
    """Returns more images than one pass of the embedding takes."""
    return digits(np.arange(n) % 10)


def embedding(seed: int) -> Embedding:
    draws = torch.Generator().manual_seed(seed)
    root = torch.randn(8, 8, generator=draws), torch.randn(8, 8, generator=draws)
    return Embedding(torch.rand(64, generator=draws), 3.0, (root,))


def numpy_embedding(images: ImageData, embedding: Embedding) -> Any:
    """Computes clip₁(A·(Φ − m)·B/R), where Φ are an image's pixels less ½."""
    ((channels, cells),) = embedding.roots
    phi = images.images[:, 0].double().numpy() / 255 - 0.5
    about = phi - embedding.centre.double().numpy().reshape(8, 8)
    turned = channels.double().numpy() @ about @ cells.double().numpy()
    z = turned.reshape(len(phi), 64) / embedding.radius
    return z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))


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
    """Broken caches mix centres, transforms or features, or keep tensors of a caller."""
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
