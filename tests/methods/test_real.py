"""REAL sends what FedDM starts from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsynth.core.client import OpenClients
from fedsynth.core.context import round_context
from fedsynth.core.state import ServerState
from fedsynth.data.images import ImageData, from_arrays, normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.methods.feddm import FedDM
from fedsynth.methods.real import Real
from fedsynth.models.registry import ModelSettings, build_model

SPEC = dataset_spec("digits")


def data(n: int = 60) -> ImageData:
    rng = np.random.default_rng(0)
    return from_arrays(
        rng.integers(0, 256, (n, 1, 8, 8)).astype(np.uint8), rng.integers(0, 10, n), SPEC
    )


def test_real_and_feddm_start_from_the_same_images() -> None:
    architecture = build_model(ModelSettings(width=4, depth=1), SPEC.image_shape, 10, 0)
    context = round_context(1, 3, torch.device("cpu"), SPEC, architecture, 15.0)
    state = ServerState(architecture.state_dict())
    clients = OpenClients([0, 1], data(), [torch.arange(30), torch.arange(30, 60)])
    sent = []
    for method in (
        Real(ipc=3, min_examples=2),
        FedDM(ipc=3, min_examples=2, iterations=1, image_lr=0.0),
    ):
        sent.append(
            [
                dict(u.arrays())
                for u, _ in method.client_step(
                    method.broadcast(state, context), clients, [{}, {}], context
                )
            ]
        )
    for real, feddm in zip(*sent, strict=True):
        assert torch.equal(real["images"], feddm["images"])
        assert torch.equal(real["labels"], feddm["labels"])


@pytest.mark.parametrize("resample", [False, True])
def test_real_sends_the_clients_own_images(resample: bool) -> None:
    images = data(60)
    architecture = build_model(ModelSettings(width=4, depth=1), SPEC.image_shape, 10, 0)
    state = ServerState(architecture.state_dict())
    method, clients = (
        Real(ipc=2, min_examples=2, resample=resample),
        OpenClients([0], images, [torch.arange(60)]),
    )
    sent = []
    for round in (1, 2):
        context = round_context(round, 0, torch.device("cpu"), SPEC, architecture, 15.0)
        ((upload, _),) = method.client_step(
            method.broadcast(state, context), clients, [{}], context
        )
        arrays = dict(upload.arrays())
        own = normalise(images.images, SPEC).flatten(1)
        match = (arrays["images"].flatten(1)[:, None] == own[None]).all(dim=2)
        assert match.any(dim=1).all()
        assert torch.equal(images.labels[match.int().argmax(dim=1)], arrays["labels"])
        sent.append(arrays["images"])
    assert torch.equal(sent[0], sent[1]) != resample
