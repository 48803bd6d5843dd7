"""Methods that mix or shift the clients' images, against NumPy; degenerate settings; their messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedsynth as fs
from fedsynth.core.client import ExactClientView
from fedsynth.federation.server import Server
from fedsynth.methods.fedmix import Means
from fedsynth.privacy.plans import FIRST
from fedsynth.seeding import torch_generator
from tests.digits import CPU
from tests.methods import tiny_problem as tiny
from tests.methods.tiny_problem import ALL, FULL, LABELS, PARTS, SIZES, START, Array, X
from tests.rounds import play_round

ONE_HOT = np.eye(3)[LABELS]


def run_rounds(method: Any, device: torch.device, **settings: Any) -> Any:
    models, state, client_states = tiny.run_rounds(method, tiny.TwoLayers, device, **settings)
    return [tiny.flat(model) for model in models], state, client_states


@pytest.mark.parametrize(
    "method",
    [
        fs.FedSAM(**FULL, rho=0.0),
        fs.FedMix(**FULL, ratio=0.0),
        fs.FedMix(**FULL, ratio=0.0, mixing="naive"),
        fs.FedRobust(**FULL, ascent_lr=0.0),
        fs.FedRobust(**FULL, ascent_lr=0.0, shift="channels"),
    ],
    ids=str,
)
def test_degenerate_settings_equal_fedavg(method: Any, device: torch.device) -> None:
    expected, *_ = run_rounds(fs.FedAvg(**FULL), device)
    np.testing.assert_allclose(run_rounds(method, device)[0], expected, atol=1e-6)


@pytest.mark.parametrize("mixing", ["taylor", "naive"])
@pytest.mark.parametrize("active", [(ALL, ALL), ((0, 1), (1, 2))])
def test_fedmix_equals_numpy(mixing: str, active: Any, device: torch.device) -> None:
    """In the second case, client 2 sends its mean in round 2, and client 1 does not send it again."""
    share, w, expected = 0.3, START, []
    means = [(X[p].mean(axis=0), ONE_HOT[p].mean(axis=0)) for p in PARTS]
    for number, ids in enumerate(active, 1):
        sent = means if ids is ALL else means[: number + 1]
        local_models = []
        for k in ids:
            x, y, local = X[PARTS[k]], ONE_HOT[PARTS[k]], w
            draws = torch_generator(0, "drawn mean images", number, k)
            for _ in range(3):
                x_mean, y_mean = sent[int(torch.randint(len(sent), (), generator=draws))]

                def loss(
                    w: Array, x: Any = x, y: Any = y, a: Any = x_mean, b: Any = y_mean
                ) -> float:
                    mixed = (1 - share) * x + (share * a if mixing == "naive" else 0)
                    p = tiny.softmax(tiny.logits(w, tiny.embeddings(w, mixed)))
                    losses = -(np.log(p) * ((1 - share) * y + share * b)).sum(axis=1)
                    if mixing == "taylor":
                        jacobian = w[12:21].reshape(3, 3) @ w[:12].reshape(3, 4)
                        losses += share * (1 - share) * ((p - y) @ jacobian @ a)
                    return float(losses.mean())

                local = tiny.descend(local, loss, steps=1)
            local_models.append(local)
        w = np.average(local_models, axis=0, weights=[SIZES[k] for k in ids])
        expected.append(w)
    method = fs.FedMix(**FULL, ratio=share, mixing=mixing)
    for grouped in (True, False):
        models, *_ = run_rounds(method, device, active=active, grouped=grouped)
        np.testing.assert_allclose(models, expected, atol=5e-5)
    assert np.abs(expected[-1] - START).max() > 0.05


def test_fedmix_means_cover_all_examples(device: torch.device) -> None:
    """⌊n/2⌋ means of 2, 3 and 2 + 2 examples, which are the same in every round."""
    method = fs.FedMix(**FULL, averaged=2)
    _, state, _ = run_rounds(method, device)
    for k, sizes in enumerate(([2], [3], [2, 2])):
        weights = torch.tensor(sizes, dtype=torch.float64, device=device)
        for sent, rows in ((state.images, X), (state.labels, ONE_HOT)):
            total = weights @ sent[str(k)].double().flatten(1)
            np.testing.assert_allclose(total.cpu(), rows[PARTS[k]].sum(axis=0), atol=1e-5)
    context, two = tiny.context(1), torch.full((2, 3), 1 / 3)
    server = Server(method, tiny.TwoLayers().state_dict())
    for images, labels, field in (
        (2, two, "images"),
        (1, two, "labels"),
        (1, two[:1] * 2, "labels"),
    ):
        upload = Means(torch.zeros(images, 1, 2, 2), labels)
        rejected = server.check(FIRST, {0: upload}, context)[1]
        assert field in str(rejected[0])


def test_client_without_examples_sends_no_means() -> None:
    context = tiny.context(1, active=(0,))
    empty = ExactClientView((0,), tiny.clients(CPU).data, [torch.arange(0)])
    server = Server(fs.FedMix(**FULL), tiny.TwoLayers().state_dict())
    (upload,) = play_round(server, [empty], {}, context).values()
    assert upload.weight == 0
    assert server.request("main", context).images.shape == (0, 1, 2, 2)


@pytest.mark.parametrize("shift", ["full", "channels"])
def test_fedrobust_equals_numpy(shift: str, device: torch.device) -> None:
    """Client 0 continues its shift of round 1 in round 3."""
    width, active = (4 if shift == "full" else 1), (ALL, (1, 2), ALL)
    rate, weights = 0.3, (0.2, 0.7)
    zero = np.concatenate([np.eye(width).ravel(), np.zeros(width)])
    penalty = np.repeat(weights, (width**2, width))
    shifts, w, expected = [zero] * 3, START, []
    for ids in active:
        local_models = []
        for k in ids:
            x, y = X[PARTS[k]].reshape(-1, width, 4 // width), LABELS[PARTS[k]]

            def loss(values: Array, x: Any = x, y: Any = y) -> float:
                w, matrix, offset = np.split(values, (24, 24 + width**2))
                shifted = matrix.reshape(width, width) @ x + offset[:, None]
                return tiny.cross_entropy(w, shifted.reshape(-1, 4), y)

            both = np.concatenate([w, shifts[k]])
            for _ in range(3):
                gradient = (both - tiny.descend(both, loss, steps=1)) / 0.5
                ascent = gradient[24:] - 2 * penalty * (both[24:] - zero)
                both = both + np.concatenate([-0.5 * gradient[:24], rate * ascent])
            local_models.append(both[:24])
            shifts[k] = both[24:]
        w = np.average(local_models, axis=0, weights=[SIZES[k] for k in ids])
        expected.append(w)
    method = fs.FedRobust(
        **FULL, ascent_lr=rate, matrix_weight=weights[0], offset_weight=weights[1], shift=shift
    )
    models, _, states = run_rounds(method, device, active=active)
    np.testing.assert_allclose(models, expected, atol=1e-4)
    kept = [
        torch.cat([s["matrix"].flatten(), s["offset"]]).cpu() for _, s in sorted(states.items())
    ]
    np.testing.assert_allclose(np.stack(kept) + zero, shifts, atol=1e-4)  # kept is Λ_k − I
    assert np.abs(shifts[0] - zero).max() > 0.02
