"""FedAF: rounds against plain torch, ablations, missing classes, bytes, and private releases."""

from __future__ import annotations

from dataclasses import replace
from math import gamma, pi
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData, denormalise, normalise
from fedsynth.federation.server import Server
from fedsynth.methods.fedaf import CondensedSet, FedAF, resampled
from fedsynth.models.flat import flatten
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.sets import SyntheticSet
from tests.digits import CPU, SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.rounds import play_round

LABELS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 0, 0, 1, 1])
PARTS = [torch.arange(8), torch.arange(8, 12)]  # client 1 lacks class 2; both lack 3 … 9
SERVER: dict[str, Any] = {"server_epochs": 2, "server_batch": 4, "server_lr": 0.05}
WEIGHTS = {"local_weight": 0.3, "global_weight": 0.7, "temperature": 2.0}
FAST = FedAF(ipc=2, iterations=3, image_lr=0.5, start_average=2, **SERVER, **WEIGHTS)


def data(device: torch.device = CPU) -> ImageData:
    return digits(LABELS, device=device)


def context(
    number: int = 1, privacy: PrivacySettings | None = None, device: torch.device = CPU, **more: Any
) -> RoundContext:
    return round_context(privacy, number, device=device, nominal=6.0, clients=2, **more)


def run_rounds(
    method: FedAF,
    count: int,
    groups: tuple[tuple[int, ...], ...] = ((0, 1),),
    device: torch.device = CPU,
) -> tuple[Any, list[Any]]:
    server = Server(method, context().architecture.to(device).state_dict())
    memories: dict[int, Any] = {}
    for number in range(1, count + 1):
        views = [ExactClientView(ids, data(device), [PARTS[k] for k in ids]) for ids in groups]
        uploads = play_round(server, views, memories, context(number, device=device))
    return server.state, [uploads[0], uploads[1]]


def plain_rounds(method: FedAF, count: int) -> tuple[Tensor, list[Tensor]]:
    """Computes the rounds equation by equation: (w, pixels of each client)."""
    x, y = normalise(data().images, SPEC), torch.tensor(LABELS)
    C = [[0, 1, 2], [0, 1]]
    model, images, V = context().architecture, {}, None
    for number in range(1, count + 1):
        ctx, net = context(number), model
        with torch.no_grad():
            z = net(x)
        # Eq. 5
        v = [{c: z[part][y[part] == c].mean(0) for c in C[k]} for k, part in enumerate(PARTS)]
        # Eq. 8
        average = {
            c: torch.stack([v[k][c] for k in (0, 1) if c in v[k]]).mean(0) for c in (0, 1, 2)
        }
        if method.knowledge_from == "first-phase":
            V = average
        pixels = []
        for k, part in enumerate(PARTS):
            if k not in images:
                generator = torch_generator(0, "averaged start images", k)
                starts = []
                for c in C[k]:
                    x_c = x[part[y[part] == c]]
                    drawn = x_c[torch.randint(len(x_c), (4,), generator=generator)]
                    starts.append(drawn.view(2, 2, 1, 8, 8).mean(1))
                images[k] = torch.stack(starts)
            S, velocity = images[k].clone(), torch.zeros_like(images[k])
            draws = resampled(net, method.gamma, ctx)
            for _ in range(method.iterations):
                w: Any = next(draws)
                leaf = S.clone().requires_grad_()
                loss = torch.zeros(())
                for i, c in enumerate(C[k]):
                    h, real = w.embed(leaf[i]), w.embed(x[part[y[part] == c]])
                    loss = loss + (h.mean(0) - real.mean(0)).square().sum()  # Eq. 4
                    if V is not None:
                        u = w.classifier(h).mean(0)
                        factor = gamma(10 / 2) / gamma(11 / 2) / pi**0.5
                        loss = loss + method.local_weight * factor * (u - V[c]).norm()  # Eq. 10
                (gradient,) = torch.autograd.grad(loss, leaf)
                velocity = method.image_momentum * velocity + gradient
                S = S - method.image_lr * velocity
            images[k] = S
            pixels.append(denormalise(S.flatten(0, 1), SPEC))
        V = average
        soft = [{c: torch.softmax(v[k][c] / method.temperature, 0) for c in C[k]} for k in (0, 1)]
        # Eq. 12
        R = {
            c: torch.stack([soft[k][c] for k in (0, 1) if c in soft[k]]).mean(0) for c in (0, 1, 2)
        }
        union = normalise(torch.cat(pixels), SPEC)
        labels = torch.cat([torch.tensor(C[k]).repeat_interleave(2) for k in (0, 1)])
        model = context().architecture
        model.load_state_dict(net.state_dict())
        optimiser = torch.optim.SGD(model.parameters(), method.server_lr, method.server_momentum)
        shuffle = torch_generator(0, "server training", number)
        for _ in range(method.server_epochs):
            order = torch.randperm(len(labels), generator=shuffle).split(method.server_batch)
            for part in order:
                logits, truth = model(union[part]), labels[part]
                loss = nn.functional.cross_entropy(logits, truth)
                if method.server_matching != "minibatch":
                    logits, truth = model(union), labels
                present = truth.unique().tolist()
                share = 1 if method.matching_reduction == "sum" else 1 / len(present)
                for c in present:
                    t = torch.softmax(logits[truth == c].mean(0) / method.temperature, 0)  # Eq. 13
                    kl = (R[c] * (R[c] / t).log()).sum() + (t * (t / R[c]).log()).sum()
                    loss = loss + method.global_weight * share * kl / 2  # Eqs. 14, 15
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        model.requires_grad_(True)
    return flatten(model), pixels


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gamma": 0.0},
        {"knowledge_from": "first-phase"},
        {"server_matching": "union"},
        {"matching_reduction": "sum"},
    ],
)
def test_two_rounds_equal_plain_torch(change: dict[str, float], device: torch.device) -> None:
    method = replace(FAST, **change)  # type: ignore[arg-type]
    state, uploads = run_rounds(method, 2, device=device)
    expected, pixels = plain_rounds(method, 2)
    for upload, theirs in zip(uploads, pixels, strict=True):
        assert upload.images.dtype == torch.uint8
        # rounding to a pixel may fall either way
        assert (upload.images.cpu().int() - theirs.int()).abs().max() <= 1
    model = context().architecture
    model.load_state_dict(dict(state.parameters))
    torch.testing.assert_close(flatten(model), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("server_matching", ["minibatch", "union"])
def test_server_step_with_batch_norm_equals_plain_torch(server_matching: str) -> None:
    """Takes one step on 12 images, in training mode."""
    method = replace(FAST, server_batch=12, server_epochs=1, server_matching=server_matching)
    ctx = context(network=convnet("batch"))
    images, labels = normalise(data().images, SPEC), torch.tensor(LABELS)
    soft = torch.softmax(torch.arange(100.0).view(10, 10).sin(), 1)
    model, plain = (ctx.load(ctx.architecture.state_dict()) for _ in range(2))
    has_labels = torch.arange(10) != 1
    method._train_server(model, {0: SyntheticSet(images, labels)}, soft, has_labels, ctx)
    logits = plain.train()(images)
    loss = nn.functional.cross_entropy(logits, labels)
    for c in (0, 2):  # class 1 has no soft label, the others no image
        t = torch.softmax(logits[labels == c].mean(0) / method.temperature, 0)
        kl = (soft[c] * (soft[c] / t).log()).sum() + (t * (t / soft[c]).log()).sum()
        loss = loss + method.global_weight / 2 * kl / 2
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(plain.parameters(), method.server_lr).step()
    torch.testing.assert_close(flatten(model), flatten(plain), atol=1e-5, rtol=1e-4)


def test_missing_classes_leave_the_averaged_logits() -> None:
    """Bytes follow App. C: pixels as uint8, V and R as float32, plus labels and flags."""
    state, (first, second) = run_rounds(FAST, 1)
    assert [present.tolist() for present in (first.present, second.present, state.has_logits)] == [
        [c < class_count for c in range(10)] for class_count in (3, 2, 3)
    ]
    torch.testing.assert_close(state.logits[2], first.logits[2])  # client 1's row is not in it
    torch.testing.assert_close(state.logits[0], (first.logits[0] + second.logits[0]) / 2)
    assert first.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert first.nbytes == 6 * 64 + 6 * 8 + 2 * 10 * 10 * 4 + 10


def test_resampling_interpolates_and_repeats() -> None:
    model, rng_state = convnet(seed=1), torch.get_rng_state()

    def draws(gamma: float, **options: Any) -> list[Tensor]:
        networks = resampled(model, gamma, context(), **options)
        return [flatten(next(networks)) for _ in range(4)]

    fresh, mixed, center = draws(0.0), draws(0.9), flatten(model)
    assert not torch.equal(fresh[0], fresh[1])
    for f, m in zip(fresh, mixed, strict=True):
        torch.testing.assert_close(m, 0.9 * center + 0.1 * f)
    assert torch.equal(draws(1.0)[3], center)
    assert torch.equal(draws(0.5, period=2)[3], draws(0.5)[1])
    assert torch.equal(rng_state, torch.get_rng_state())


def test_logits_of_absent_clients_persist() -> None:
    """Round 1 has only client 0, round 2 only client 1, who lacks class 2."""
    for method in (FAST, replace(FAST, knowledge_from="first-phase")):
        server = Server(method, context().architecture.state_dict())
        rows = []
        for number, k in ((1, 0), (2, 1)):
            clients = ExactClientView([k], data(), [PARTS[k]])
            play_round(server, [clients], {}, replace(context(number), participants=(k,)))
            state: Any = server.state
            rows.append((state.has_logits.nonzero().flatten().tolist(), state.logits[2].clone()))
        assert rows[0][0] == rows[1][0] == [0, 1, 2]
        assert torch.equal(rows[0][1], rows[1][1])


def private_upload(sigma: float) -> tuple[CondensedSet, list[Any]]:
    ctx, ledger = context(privacy=PrivacySettings(noise_multiplier=sigma)), Ledger("0")
    (upload,) = client_uploads(FAST, ctx, private_clients(FAST, ctx, data(), ledgers=[ledger]))
    return upload, list(ledger.releases)


def test_private_clients_charge_every_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[int] = []
    original = GaussianSumMechanism.release
    monkeypatch.setattr(
        GaussianSumMechanism, "release", lambda self: released.append(1) or original(self)
    )
    upload, rows = private_upload(2.0)
    assert sorted((r.quantity, r.steps, r.sensitivity, r.noise_multiplier) for r in rows) == [
        ("class counts", 1, 1.0, 10.0),
        ("class sums of logits (V and R)", 1, 5.0, 10.0),
        ("synthetic images", 3, 0.25 * 16**0.5, 2.0),
    ]
    assert len(released) == 3 + 1 + 1
    # every class, also missing ones
    assert upload.labels.tolist() == [c for c in range(10) for _ in range(2)]
    # R is computed from the released V
    torch.testing.assert_close(upload.soft, torch.softmax(upload.logits / 2.0, dim=1))
    normed = context(network=convnet("batch"))
    with pytest.raises(ForbiddenLayerError):
        FAST.release_plans(PrivacySettings(noise_multiplier=1.0), normed)


def test_noiseless_private_logits_are_class_means() -> None:
    """Counts of 5, 6 and 1 reach the floor of 1, so V is the mean; missing classes are marked."""
    upload, _ = private_upload(1e-9)
    with torch.no_grad():
        z = convnet()(normalise(data().images, SPEC))
    for c in range(3):
        expected = z[torch.tensor(c == LABELS)].mean(0)
        torch.testing.assert_close(upload.logits[c], expected, atol=1e-5, rtol=1e-4)
    assert upload.present.tolist() == [True] * 3 + [False] * 7
