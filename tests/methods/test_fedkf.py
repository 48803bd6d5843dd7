"""FedKF: both aggregates over rounds with absent clients, the local step against plain torch, its
variants, and privacy."""

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
from fedsynth.data.images import ImageData, normalise
from fedsynth.errors import SettingError
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.fedkf import FedKF, TwoModels
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import make_generator
from tests.digits import CPU, SPEC, charged, convnet, digits, sent
from tests.digits import context as some_context

GENERATOR: dict[str, Any] = {"generator_batch": 5, "latent": 6, "generator_width": 4}
WEIGHTS = {"distillation": 0.7, "one_hot_weight": 0.3, "activation_weight": 0.2}
FAST = FedKF(
    local_epochs=2, batch=4, lr=0.1, generator_lr=1e-2, plain_rounds=0, **GENERATOR, **WEIGHTS
)


def context(number: int = 1, device: torch.device = CPU, **changes: Any) -> RoundContext:
    federation = {"clients": 3, "sizes": (10, 20, 30), **changes}
    return some_context(number=number, device=device, nominal=6.0, **federation)


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
def test_both_aggregates_over_rounds_with_absent_clients(
    method: TrainsLocally, unseen: float, device: torch.device
) -> None:
    """By hand, K = 3, n = (10, 20, 30), w⁰ = 1: client 2 is never active, client 0 once."""
    state = AveragingState(scalar(1.0, 0.0, device).parameters)
    every = 30 + unseen

    def after(number: int, active: tuple[int, ...], *values: float) -> tuple[float, float]:
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

    assert after(1, (0, 1), 4.0, 7.0) == pytest.approx(
        ((10 * 4 + 20 * 7) / 30, (10 * 4 + 20 * 7 + unseen * 1) / every)
    )
    assert after(2, (1,), 2.0) == pytest.approx((2.0, (10 * 4 + 20 * 2 + unseen * 1) / every))
    assert after(3, (1,), 5.0) == pytest.approx((5.0, (10 * 4 + 20 * 5 + unseen * 1) / every))
    # client 2 at last, with the largest share: all three count in either reading
    assert after(4, (2,), 8.0) == pytest.approx((8.0, (10 * 4 + 20 * 5 + 30 * 8) / 60))


@pytest.mark.parametrize(("oca", "value"), [("seen", (5 + 4) / 2), ("all", (5 + 1 + 4) / 3)])
def test_with_privacy_every_slot_counts_alike(oca: str, value: float) -> None:
    before = AveragingState(scalar(1.0, 0.0).parameters)
    uploads = {0: scalar(5.0, 1.0), 2: scalar(4.0, 1.0)}
    round_context = context(participants=(0, 2), sizes=None)
    state: Any = FedKF(oca=oca).server_step(before, uploads, round_context)
    assert float(state.overall["w"]) == pytest.approx(value)


def test_what_the_cache_has_not_seen_and_fedavg_without_it() -> None:
    """A client that was dropped has not been seen."""
    before = AveragingState(scalar(1.0, 0.0).parameters)
    sent = {0: scalar(4.0, 10.0), 1: scalar(9.0, 0.0)}
    state: Any = FedKF().server_step(before, sent, context(participants=(0, 1)))
    assert float(state.overall["w"]) == 4.0
    assert state.seen.tolist() == [True, False, False]
    plain: Any = FedAvg().server_step(before, {0: scalar(4.0, 1.0)}, context())
    assert plain == AveragingState(plain.parameters)
    assert FedAvg().variants(plain) == {}


def clients(device: torch.device = CPU) -> ExactClientView:
    return ExactClientView([1], digits(np.arange(10) % 3, device=device), [torch.arange(10)])


def plain_step(
    method: FedKF, start: nn.Module, teacher: Any, rounds: int, device: torch.device
) -> Tensor:
    """Algorithm 1's ClientUpdate in plain torch, the generator kept over the rounds."""
    x, y = normalise(clients().data.images, SPEC), clients().data.labels
    generator = make_generator(SPEC, 0, latent=method.latent, width=method.generator_width)
    adam = torch.optim.Adam(generator.parameters(), method.generator_lr)
    batch = method.generator_batch

    def made(z: Tensor) -> Tensor:
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
                f = teacher.embed(made(z))
                p = torch.softmax(teacher.classifier(f), 1)
                ie = -(p.mean(0) * p.mean(0).log()).sum() / np.log(10)
                oh = -p.gather(1, p.argmax(1, keepdim=True)).log().mean()
                loss_g = -ie + method.one_hot_weight * oh
                loss_g = loss_g - method.activation_weight * f.abs().mean(1).mean()
                if method.use_kl:
                    s, t = torch.log_softmax(model(made(z)), 1), p.detach()
                    loss_g = loss_g - method.distillation * (t * (t.log() - s)).sum(1).mean()
                adam.zero_grad()
                loss_g.backward()
                adam.step()
                fake = made(z).detach()
                t, s = torch.softmax(teacher(fake), 1).detach(), torch.log_softmax(model(fake), 1)
                kl = (t * (t.log() - s)).sum(1).mean()
                loss = nn.functional.cross_entropy(model(x[part]), y[part])
                sgd.zero_grad()
                (loss + method.distillation * kl).backward()
                sgd.step()
    return flatten(model)


@pytest.mark.parametrize(("kind", "use_kl"), [("oca", False), ("aca", True)])
def test_two_rounds_of_a_client_equal_plain_torch(
    kind: str, use_kl: bool, device: torch.device
) -> None:
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


def test_fedkf_minus_halves_the_downlink_and_plain_rounds_are_fedavg() -> None:
    state = AveragingState({"w": torch.ones(4)}, overall={"w": torch.zeros(4)})
    both, one = (replace(FAST, teacher=kind).broadcast(state, context()) for kind in ("oca", "aca"))
    assert both.floats == 2 * one.floats == 8
    ctx = context()
    message = FAST.broadcast(AveragingState(ctx.architecture.state_dict()), ctx)
    plain = replace(FAST, plain_rounds=1)
    ((a, memory),) = plain.client_step(message, clients(), [{"kept": torch.ones(1)}], ctx)
    (b,) = sent(FedAvg(local_epochs=2, batch=4, lr=0.1, momentum=0.0), ctx, clients())
    assert all(torch.equal(a.parameters[n], b.parameters[n]) for n in a.parameters)  # type: ignore[attr-defined]
    assert "kept" in memory
    with pytest.raises(SettingError, match="embed"):
        FedKF().check_model(nn.Linear(3, 3))


def test_equal_steps_are_those_of_a_client_of_mean_size() -> None:
    """n = (4, 10, 16), batches of 4: ⌊10/4⌋ = 2 steps a pass for each, where their own data make 1,
    3 and 4. Steps may end within a pass."""
    parts = [torch.arange(4), torch.arange(4, 14), torch.arange(14, 30)]
    group = ExactClientView([0, 1, 2], digits(np.arange(30) % 3), parts)
    ctx = context(sizes=(4, 10, 16))

    def trained(**settings: Any) -> list[Tensor]:
        method = FedAvg(lr=0.1, momentum=0.0, batch=4, **settings)
        uploads = sent(method, ctx, group)
        return [torch.cat([v.flatten() for v in u.parameters.values()]) for u in uploads]

    equal, six = trained(local_epochs=3, equal_steps=True), trained(local_steps=6)
    own, five = trained(local_epochs=2), trained(local_steps=5)
    for k in range(3):
        assert torch.equal(equal[k], six[k])
        assert not torch.equal(five[k], six[k])
        assert torch.equal(own[k], six[k]) == (k == 1)  # of ten examples
    late = FedAvg(local_epochs=3, equal_steps=True, batch=4, stragglers=1.0)
    passes = late.straggler_epochs(ctx)
    assert [late._sgd(passes[k], ctx).steps for k in range(3)] == [2 * passes[k] for k in range(3)]
    with pytest.raises(SettingError, match=r"equal_steps .* Set method\.local_steps=0"):
        FedAvg(equal_steps=True, local_steps=3)


def test_the_facts_of_a_round_are_the_generators_averaged_over_its_clients() -> None:
    """Two clients' generators that collapse to a class each have no entropy, though two classes are
    made."""
    counts = torch.zeros(1, 10, dtype=torch.int64)
    one, two, even = counts.clone(), counts.clone(), counts + 3
    one[0, 4], two[0, 7] = 256, 256

    def facts(*tallies: Tensor) -> Any:
        method, ctx = FedKF(), context()
        memories: list[Any] = [*({"tally": t} for t in tallies), {}]
        return method.aggregate_metrics([method.client_metrics(memory, ctx) for memory in memories])

    collapsed, half = facts(one, two)["generator"], facts(one, even)["generator"]
    assert collapsed["class_entropy_share"] == 0
    assert collapsed["classes"] == 1
    assert half["class_entropy_share"] == pytest.approx(0.5)
    assert facts() == {}


def private_step(method: FedKF, data: ImageData, **privacy: Any) -> tuple[Any, Any]:
    """Upload and memory of one private client in round 2, with another teacher than its model."""
    ctx = context(2, privacy=PrivacySettings(**privacy), sizes=None)
    state = AveragingState(convnet().state_dict(), overall=convnet(seed=5).state_dict())
    group = charged(method, ctx, data)
    ((upload, memory),) = method.client_step(method.broadcast(state, ctx), group, [{}], ctx)
    return upload, memory


def test_with_privacy_the_distillation_term_is_there() -> None:
    """Catches: a penalty that private training drops."""
    uploads = []
    for gamma in (0.0, 5.0):
        method = replace(FAST, distillation=gamma)
        exact = {"noise_multiplier": 1e-9, "clip": 1e6, "sample_rate": 1.0}
        upload, memory = private_step(method, clients().data, **exact)
        uploads.append(torch.cat([v.flatten() for v in upload.parameters.values()]))
        assert ("generator.start.weight" in memory) == (gamma > 0)
    assert float((uploads[0] - uploads[1]).norm()) > 0.1


def test_with_privacy_the_generator_and_its_facts_are_the_same_whatever_the_data_are() -> None:
    """What lets a round's row have them: post-processing."""
    (_, one), (_, two) = (
        private_step(FAST, digits(np.arange(size) % 2), noise_multiplier=1.0, sample_rate=0.5)
        for size in (10, 4)
    )
    assert FAST.client_metrics(one, context(2)) == FAST.client_metrics(two, context(2))
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
