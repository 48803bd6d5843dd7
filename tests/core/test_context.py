"""The context of a round: loading of networks, active clients and pickling."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fedsynth.core.context import RoundContext
from fedsynth.data.images import ProxyImages, from_arrays
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.settings import PrivacySettings
from tests.digits import CPU, SPEC, convnet, round_context

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
