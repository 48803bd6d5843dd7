"""FedKF: both aggregates with absent clients, the local step against plain torch, variants,
privacy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import normalise
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.fedkf import FedKF, TwoModels
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import make_generator
from tests.digits import CPU, SPEC, client_uploads, convnet, digits, private_clients, round_context

GENERATOR: dict[str, Any] = {"generator_batch": 5, "latent": 6, "generator_width": 4}
WEIGHTS = {"distillation": 0.7, "one_hot_weight": 0.3, "activation_weight": 0.2}
FAST = FedKF(
    local_epochs=2, batch=4, lr=0.1, generator_lr=1e-2, plain_rounds=0, **GENERATOR, **WEIGHTS
)


def context(number: int = 1, device: torch.device = CPU, **changes: Any) -> RoundContext:
    federation = {"clients": 3, "sizes": (10, 20, 30), **changes}
    return round_context(number=number, device=device, nominal=6.0, **federation)


def scalar(value: float, weight: float, device: torch.device = CPU) -> ModelParameters:
    return ModelParameters(
        {"w": torch.tensor([value], device=device), "count": torch.tensor(3, device=device)}, weight
    )


@pytest.mark.parametrize(
    ("method", "unseen"),
    [
        (FedKF(), 0.0),
        (FedAvg(final="oca"), 0.0),
        (FedKF(oca="all"), 30.0),
        (FedAvg(final="oca", oca="all"), 30.0),
    ],
)
def test_aggregates_with_absent_clients(
    method: TrainsLocally, unseen: float, device: torch.device
) -> None:
    """K = 3, n = (10, 20, 30), w⁰ = 1; client 0 is active once and client 2 in the last round."""
    state = AveragingState(scalar(1.0, 0.0, device).parameters)
    total = 30 + unseen

    def step(number: int, active: tuple[int, ...], *values: float) -> tuple[float, float]:
        nonlocal state
        uploads = {
            k: scalar(v, (10.0, 20.0, 30.0)[k], device) for k, v in zip(active, values, strict=True)
        }
        state = method.server_step(state, uploads, context(number, device, participants=active))  # type: ignore[assignment]
        variants = method.variants(state)
        assert torch.equal(variants["aca"]["w"], state.parameters["w"])
        assert torch.equal(method.final_parameters(state)["w"], variants["oca"]["w"])
        assert int(variants["oca"]["count"]) == 3
        return float(state.parameters["w"]), float(variants["oca"]["w"])

    assert step(1, (0, 1), 4.0, 7.0) == pytest.approx(
        ((10 * 4 + 20 * 7) / 30, (10 * 4 + 20 * 7 + unseen * 1) / total)
    )
    assert step(2, (1,), 2.0) == pytest.approx((2.0, (10 * 4 + 20 * 2 + unseen * 1) / total))
    assert step(3, (1,), 5.0) == pytest.approx((5.0, (10 * 4 + 20 * 5 + unseen * 1) / total))
    # client 2 joins with the largest share: both readings count all three
    assert step(4, (2,), 8.0) == pytest.approx((8.0, (10 * 4 + 20 * 5 + 30 * 8) / 60))


@pytest.mark.parametrize(
    ("oca", "sizes", "value"),
    [
        ("seen", (10, 20, 30), 4.0),
        ("seen", None, 4.0),
        ("all", None, (4 + 1 + 1) / 3),  # with privacy all clients have equal weights
    ],
)
def test_dropped_clients_count_as_unseen(oca: str, sizes: Any, value: float) -> None:
    initial = AveragingState(scalar(1.0, 0.0).parameters)
    uploads = {0: scalar(4.0, 10.0), 1: scalar(9.0, 0.0)}
    ctx = context(participants=(0, 1), sizes=sizes)
    state: Any = FedKF(oca=oca).server_step(initial, uploads, ctx)
    assert float(state.overall["w"]) == pytest.approx(value)
    assert state.seen.tolist() == [True, False, False]
    assert FedAvg().variants(FedAvg().server_step(initial, {0: scalar(4.0, 1.0)}, ctx)) == {}  # type: ignore[arg-type]


def clients(device: torch.device = CPU) -> ExactClientView:
    return ExactClientView([1], digits(np.arange(10) % 3, device=device), [torch.arange(10)])


def plain_step(
    method: FedKF, start: nn.Module, teacher: Any, rounds: int, device: torch.device
) -> Tensor:
    """Runs Algorithm 1's ClientUpdate in plain torch, with one generator over the rounds."""
    x, y = normalise(clients().data.images, SPEC), clients().data.labels
    generator = make_generator(SPEC, 0, latent=method.latent, width=method.generator_width)
    adam = torch.optim.Adam(generator.parameters(), method.generator_lr)
    batch = method.generator_batch

    def generate(z: Tensor) -> Tensor:
        return (generator(z) - SPEC.mean[0]) / SPEC.std[0]  # type: ignore[no-any-return]

    for number in range(1, rounds + 1):
        model = convnet()
        model.load_state_dict(start.state_dict())
        sgd = torch.optim.SGD(model.parameters(), method.lr)
        shuffle = torch_generator(0, "local training", number, 1)
        noise = torch_generator(0, "distillation noise", number, 1, device=device)
        for _ in range(method.local_epochs):
            for part in torch.randperm(10, generator=shuffle).split(method.batch):
                z = torch.randn(batch, method.latent, generator=noise, device=device).cpu()
                f = teacher.embed(generate(z))
                p = torch.softmax(teacher.classifier(f), 1)
                ie = -(p.mean(0) * p.mean(0).log()).sum() / np.log(10)
                oh = -p.gather(1, p.argmax(1, keepdim=True)).log().mean()
                loss_g = -ie + method.one_hot_weight * oh
                loss_g = loss_g - method.activation_weight * f.abs().mean(1).mean()
                if method.use_kl:
                    s, t = torch.log_softmax(model(generate(z)), 1), p.detach()
                    loss_g = loss_g - method.distillation * (t * (t.log() - s)).sum(1).mean()
                adam.zero_grad()
                loss_g.backward()
                adam.step()
                fake = generate(z).detach()
                t, s = torch.softmax(teacher(fake), 1).detach(), torch.log_softmax(model(fake), 1)
                kl = (t * (t.log() - s)).sum(1).mean()
                loss = nn.functional.cross_entropy(model(x[part]), y[part])
                sgd.zero_grad()
                (loss + method.distillation * kl).backward()
                sgd.step()
    return flatten(model)


@pytest.mark.parametrize(("kind", "use_kl"), [("oca", False), ("aca", True)])
def test_two_client_rounds_equal_plain_torch(kind: str, use_kl: bool, device: torch.device) -> None:
    method = replace(FAST, teacher=kind, use_kl=use_kl)
    start, other = convnet(seed=0), convnet(seed=5)
    parameters, overall = (
        {name: v.to(device) for name, v in net.state_dict().items()} for net in (start, other)
    )
    memory: Any = {}
    for number in (1, 2):
        ctx = context(number, device)
        message = method.broadcast(AveragingState(parameters, overall=overall), ctx)
        assert type(message) is TwoModels
        ((upload, memory),) = method.client_step(message, clients(device), [memory], ctx)
    model = convnet()
    model.load_state_dict({name: v.cpu() for name, v in upload.parameters.items()})  # type: ignore[attr-defined]
    expected = plain_step(method, start, other if kind == "oca" else start, 2, device)
    torch.testing.assert_close(flatten(model), expected, atol=2e-4, rtol=1e-3)


def test_fedkf_minus_halves_the_downlink() -> None:
    state = AveragingState({"w": torch.ones(4)}, overall={"w": torch.zeros(4)})
    two_models, single_model = (
        replace(FAST, teacher=kind).broadcast(state, context()) for kind in ("oca", "aca")
    )
    assert two_models.floats == 2 * single_model.floats == 8
    a, b = (
        client_uploads(method, context(), clients())[0].parameters
        for method in (
            replace(FAST, plain_rounds=1),
            FedAvg(local_epochs=2, batch=4, lr=0.1, momentum=0.0),
        )
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_private_generator_is_independent_of_the_data() -> None:
    """A round's row may have its facts because they are post-processing. The teacher is not the
    client's model in round 2."""
    memories: list[Any] = []
    ctx = context(2, privacy=PrivacySettings(noise_multiplier=1.0, sample_rate=0.5), sizes=None)
    state = AveragingState(convnet().state_dict(), overall=convnet(seed=5).state_dict())
    for size in (10, 4):
        group = private_clients(FAST, ctx, digits(np.arange(size) % 2))
        ((_, memory),) = FAST.client_step(FAST.broadcast(state, ctx), group, [{}], ctx)
        memories.append(memory)
    first, second = memories
    assert FAST.client_metrics(first, ctx) == FAST.client_metrics(second, ctx)
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
