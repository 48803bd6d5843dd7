"""FedKF: both aggregates over rounds with absent clients, the local step against plain torch, its
variants, and privacy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.charging import charge_for
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import RoundContext, round_context
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import from_arrays, normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.fedkf import FedKF, TwoModels
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.generators import make_generator

SPEC, CPU = dataset_spec("digits"), torch.device("cpu")
FAST = FedKF(
    local_epochs=2,
    batch=4,
    lr=0.1,
    generator_batch=5,
    latent=6,
    generator_width=4,
    generator_lr=1e-2,
    plain_rounds=0,
    distillation=0.7,
    one_hot_weight=0.3,
    activation_weight=0.2,
)


def context(number: int = 1, device: torch.device = CPU, **changes: Any) -> RoundContext:
    architecture = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    return round_context(
        number,
        0,
        device,
        SPEC,
        architecture,
        6.0,
        **{"clients": 3, "sizes": (10, 20, 30), **changes},
    )


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
    """By hand, K = 3, n = (10, 20, 30), w⁰ = 1: client 2 is never active, client 0 once.

    Client 2's slot counts nothing (official code), or its 30 examples with w⁰ (Algorithm 1).
    """
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


def test_a_client_that_was_dropped_has_not_been_seen() -> None:
    state = AveragingState(scalar(1.0, 0.0).parameters)
    sent = {0: scalar(4.0, 10.0), 1: scalar(9.0, 0.0)}
    state = FedKF().server_step(state, sent, context(participants=(0, 1)))  # type: ignore[assignment]
    assert float(state.overall["w"]) == 4.0
    assert state.seen is not None
    assert state.seen.tolist() == [True, False, False]


@pytest.mark.parametrize(("oca", "value"), [("seen", (5 + 4) / 2), ("all", (5 + 1 + 4) / 3)])
def test_with_privacy_every_slot_counts_alike(oca: str, value: float) -> None:
    state = FedKF(oca=oca).server_step(
        AveragingState(scalar(1.0, 0.0).parameters),
        {0: scalar(5.0, 1.0), 2: scalar(4.0, 1.0)},
        context(participants=(0, 2), sizes=None),
    )
    assert float(state.overall["w"]) == pytest.approx(value)


def test_fedavg_without_the_cache_keeps_nothing() -> None:
    state = FedAvg().server_step(
        AveragingState(scalar(1.0, 0.0).parameters), {0: scalar(4.0, 1.0)}, context()
    )
    assert state == AveragingState(state.parameters)
    assert FedAvg().variants(state) == {}


def clients(device: torch.device = CPU) -> OpenClients:
    images = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8)).astype(np.uint8)
    return OpenClients(
        [1], from_arrays(images, np.arange(10) % 3, SPEC).to(device), [torch.arange(10)]
    )


def plain_step(
    method: FedKF, start: nn.Module, teacher: nn.Module, rounds: int, device: torch.device
) -> Tensor:
    """Algorithm 1's ClientUpdate in plain torch, the generator kept over the rounds."""
    x, y = normalise(clients().data.images, SPEC), clients().data.labels
    generator = make_generator(SPEC, 0, latent=method.latent, width=method.generator_width)
    adam = torch.optim.Adam(generator.parameters(), method.generator_lr)
    mean, std = SPEC.mean[0], SPEC.std[0]
    for number in range(1, rounds + 1):
        model = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
        model.load_state_dict(start.state_dict())
        sgd = torch.optim.SGD(model.parameters(), method.lr)
        shuffle = torch_generator(0, "local training", number, 1)
        noise = torch_generator(0, "distillation noise", number, 1, device=device)
        for _ in range(method.local_epochs):
            for part in torch.randperm(10, generator=shuffle).split(method.batch):
                z = torch.randn(
                    method.generator_batch, method.latent, generator=noise, device=device
                ).cpu()
                f = teacher.embed((generator(z) - mean) / std)  # type: ignore[operator]
                p = torch.softmax(teacher.classifier(f), 1)  # type: ignore[operator]
                ie = -(p.mean(0) * p.mean(0).log()).sum() / np.log(10)
                oh = -p.gather(1, p.argmax(1, keepdim=True)).log().mean()
                loss_g = (
                    -ie
                    + method.one_hot_weight * oh
                    + method.activation_weight * -f.abs().mean(1).mean()
                )
                if method.use_kl:
                    s = torch.log_softmax(model((generator(z) - mean) / std), 1)
                    t = p.detach()
                    loss_g = loss_g - method.distillation * (t * (t.log() - s)).sum(1).mean()
                adam.zero_grad()
                loss_g.backward()
                adam.step()
                fake = ((generator(z) - mean) / std).detach()
                t, s = torch.softmax(teacher(fake), 1).detach(), torch.log_softmax(model(fake), 1)
                kl = (t * (t.log() - s)).sum(1).mean()
                loss = (
                    nn.functional.cross_entropy(model(x[part]), y[part]) + method.distillation * kl
                )
                sgd.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                sgd.step()
    return flatten(model)


@pytest.mark.parametrize(("kind", "use_kl"), [("oca", False), ("aca", False), ("oca", True)])
def test_two_rounds_of_a_client_equal_plain_torch(
    kind: str, use_kl: bool, device: torch.device
) -> None:
    method = replace(FAST, teacher=kind, use_kl=use_kl)
    start, other = (
        build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, seed) for seed in (0, 5)
    )
    overall = {name: v.to(device) for name, v in other.state_dict().items()}
    state = AveragingState(
        {name: v.to(device) for name, v in start.state_dict().items()}, overall=overall
    )
    memory: Any = {}
    for number in (1, 2):
        ctx = context(number, device)
        message = method.broadcast(state, ctx)
        ((upload, memory),) = method.client_step(message, clients(device), [memory], ctx)
    model = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    model.load_state_dict({name: v.cpu() for name, v in upload.parameters.items()})  # type: ignore[attr-defined]
    expected = plain_step(method, start, other if kind == "oca" else start, 2, device)
    torch.testing.assert_close(flatten(model), expected, atol=2e-4, rtol=1e-3)


def test_fedkf_minus_halves_the_downlink_and_plain_rounds_are_fedavg() -> None:
    state = AveragingState({"w": torch.ones(4)}, overall={"w": torch.zeros(4)})
    both, one = (
        FAST.broadcast(state, context()),
        replace(FAST, teacher="aca").broadcast(state, context()),
    )
    assert both.floats == 2 * one.floats == 8
    ctx = context()
    message = FAST.broadcast(AveragingState(ctx.architecture.state_dict()), ctx)
    plain, average = (
        replace(FAST, plain_rounds=1),
        FedAvg(local_epochs=2, batch=4, lr=0.1, momentum=0.0),
    )
    ((a, memory),) = plain.client_step(message, clients(), [{"kept": torch.ones(1)}], ctx)
    ((b, _),) = average.client_step(
        average.broadcast(AveragingState(ctx.architecture.state_dict()), ctx), clients(), [{}], ctx
    )
    assert all(torch.equal(a.parameters[n], b.parameters[n]) for n in a.parameters)  # type: ignore[attr-defined]
    assert "kept" in memory


def test_equal_steps_are_those_of_a_client_of_mean_size() -> None:
    """n = (4, 10, 16), batches of 4: ⌊10/4⌋ = 2 steps a pass for each, where their own data make 1,
    3 and 4."""
    images = np.random.default_rng(0).integers(0, 256, (30, 1, 8, 8)).astype(np.uint8)
    parts = [torch.arange(4), torch.arange(4, 14), torch.arange(14, 30)]
    group = OpenClients([0, 1, 2], from_arrays(images, np.arange(30) % 3, SPEC), parts)
    ctx = context(sizes=(4, 10, 16))
    message = FedAvg().broadcast(AveragingState(ctx.architecture.state_dict()), ctx)

    def trained(**settings: Any) -> list[Tensor]:
        method = FedAvg(lr=0.1, momentum=0.0, batch=4, **settings)
        made = method.client_step(message, group, [{}] * 3, ctx)
        return [torch.cat([v.flatten() for v in u.parameters.values()]) for u, _ in made]  # type: ignore[attr-defined]

    equal = trained(local_epochs=3, equal_steps=True)
    for a, b in zip(equal, trained(local_steps=6), strict=True):
        assert torch.equal(a, b)
    own = trained(local_epochs=3)
    assert not any(torch.equal(a, b) for a, b in zip(equal, own, strict=True))
    late = FedAvg(local_epochs=3, equal_steps=True, batch=4, stragglers=1.0)
    passes = late.late(ctx)
    steps = [late._sgd(passes[k], ctx).steps for k in range(3)]
    assert steps == [2 * passes[k] for k in range(3)]
    with pytest.raises(SettingError, match=r"equal_steps needs method\.local_steps=0"):
        FedAvg(equal_steps=True, local_steps=3)


def test_local_steps_may_end_within_a_pass() -> None:
    """Ten examples in batches of four are three steps a pass; five steps are a pass and two
    batches."""
    ctx = context()
    message = FedAvg().broadcast(AveragingState(ctx.architecture.state_dict()), ctx)
    runs = [
        FedAvg(lr=0.1, momentum=0.0, batch=4, **steps).client_step(message, clients(), [{}], ctx)[
            0
        ][0]
        for steps in ({"local_epochs": 2}, {"local_steps": 6}, {"local_steps": 5})
    ]
    flat = [torch.cat([v.flatten() for v in run.parameters.values()]) for run in runs]  # type: ignore[attr-defined]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


@pytest.mark.parametrize("privacy", [{}, {"epsilon": 10.0}])
def test_it_runs_as_a_whole(privacy: dict[str, float]) -> None:
    sections = {
        "run": {"method": "fedkf", "rounds": 2, "participation": 0.6},
        "partition": {"local_test": 0.2},
    }
    fast = {"local_epochs": 3, "generator_width": 4, "generator_batch": 16}
    result = simulate(
        resolve(
            {**sections, "method": fast, "model": {"width": 16, "depth": 2}, "privacy": privacy}
        )
    )
    row = result.metrics[-1]
    assert set(row["models"]) == {"aca", "oca"}
    assert row["models"]["oca"]["test_accuracy"] == row["test_accuracy"] == result.accuracy
    assert row["models"]["aca"]["local"]["amp"] > 0
    assert "generator" not in result.metrics[0]  # the plain round
    facts = row["generator"]
    assert set(facts) == {"class_entropy", "class_entropy_share", "classes"}
    assert facts["class_entropy"] == pytest.approx(facts["class_entropy_share"] * np.log(10))
    assert result.summary["generator"] == facts
    if privacy:
        assert result.privacy is not None
        promise: Any = result.privacy["guarantee"]
        assert 9.9 < promise["epsilon"] <= 10


def test_the_facts_of_a_round_are_the_generators_averaged_over_its_clients() -> None:
    """Two clients' generators that collapse to a class each have no entropy, though two classes are
    made."""
    counts = torch.zeros(1, 10, dtype=torch.int64)
    one, two, even = counts.clone(), counts.clone(), counts + 3
    one[0, 4], two[0, 7] = 256, 256

    def facts(*tallies: Tensor) -> Any:
        method, ctx = FedKF(), context()
        memories: list[Any] = [*({"tally": t} for t in tallies), {}]
        return method.merge_facts([method.client_facts(memory, ctx) for memory in memories])

    collapsed, half = facts(one, two)["generator"], facts(one, even)["generator"]
    assert collapsed["class_entropy_share"] == 0
    assert collapsed["classes"] == 1
    assert half["class_entropy_share"] == pytest.approx(0.5)
    assert facts() == {}


def test_settings_are_the_papers_and_validated() -> None:
    m = FedKF()
    assert (
        m.local_epochs,
        m.batch,
        m.lr,
        m.distillation,
        m.one_hot_weight,
        m.activation_weight,
    ) == (10, 64, 0.01, 1.0, 0.1, 0.1)
    assert (m.generator_lr, m.teacher, m.final) == (1e-3, "oca", "oca")
    with pytest.raises(UnknownNameError, match="teacher"):
        FedKF(teacher="ocb")
    with pytest.raises(SettingError, match="generator_batch"):
        FedKF(generator_batch=1)
    with pytest.raises(SettingError, match="embed"):
        FedKF().check_model(nn.Linear(3, 3))
    assert type(FAST.broadcast(AveragingState({}), context())) is FAST.downlink is TwoModels


def test_with_privacy_the_distillation_term_is_there() -> None:
    """Catches: a penalty that private training drops. At σ → 0 without clipping, γ moves the
    private upload as it moves nothing else."""
    uploads = []
    for gamma in (0.0, 5.0):
        privacy = PrivacySettings(noise_multiplier=1e-9, clip=1e6, sample_rate=1.0)
        ctx = context(2, privacy=privacy, sizes=None)
        method = replace(FAST, distillation=gamma)
        charged = charge_for(
            method, ctx, [1], [Guard(Ledger("0"), 1e-5, None)], [SecretGenerator()]
        )
        private = PrivateClients([1], clients().data, [torch.arange(10)], charged)
        other = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 5)
        state = AveragingState(ctx.architecture.state_dict(), overall=other.state_dict())
        ((upload, memory),) = method.client_step(method.broadcast(state, ctx), private, [{}], ctx)
        uploads.append(torch.cat([v.flatten() for v in upload.parameters.values()]))  # type: ignore[attr-defined]
        assert ("generator.start.weight" in memory) == (gamma > 0)
    assert float((uploads[0] - uploads[1]).norm()) > 0.1


def test_with_privacy_the_generator_and_its_facts_are_the_same_whatever_the_data_are() -> None:
    """What lets a round's row have them: post-processing. Catches steps, or draws, that go by the
    client's data."""
    kept = []
    other = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 5)
    for size in (10, 4):
        privacy = PrivacySettings(noise_multiplier=1.0, clip=1.0, sample_rate=0.5)
        ctx = context(2, privacy=privacy, sizes=None)
        images = np.random.default_rng(size).integers(0, 256, (size, 1, 8, 8)).astype(np.uint8)
        charged = charge_for(FAST, ctx, [1], [Guard(Ledger("0"), 1e-5, None)], [SecretGenerator()])
        data = from_arrays(images, np.arange(size) % 2, SPEC)
        private = PrivateClients([1], data, [torch.arange(size)], charged)
        state = AveragingState(ctx.architecture.state_dict(), overall=other.state_dict())
        ((_, memory),) = FAST.client_step(FAST.broadcast(state, ctx), private, [{}], ctx)
        kept.append((memory, FAST.client_facts(memory, ctx)))
    (one, facts), (two, same) = kept
    assert facts == same
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
