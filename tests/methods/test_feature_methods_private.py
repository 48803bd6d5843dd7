"""FedFM, FedFM-Lite and FedGen with differential privacy, and what they do where clients or classes
are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method, charge_for
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.federation.server import Server
from fedsynth.methods.fedfm import COUNT_DEVIATIONS, AnchorState, FeatureSums, FedFM, FedFMLite
from fedsynth.methods.fedgen import DECAY, FedGen, ModelAndCounts
from fedsynth.methods.shared.class_sums import COUNTS, class_sums, sums_plans
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.plans import MAIN, PHASES, ReleaseBudget, charge_round
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.simulation.simulate import simulate
from tests.rounds import play

SPEC, CPU = dataset_spec("digits"), torch.device("cpu")
NET: Any = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
LABELS = np.arange(24) % 8  # nobody has the classes 8 and 9
LOCAL: dict[str, Any] = {"local_epochs": 1, "batch": 24, "lr": 0.1, "momentum": 0.0}


def data() -> ImageData:
    return from_arrays(
        np.random.default_rng(0).integers(0, 256, (24, 1, 8, 8)).astype(np.uint8), LABELS, SPEC
    )


def context(
    sigma: float | None = None,
    number: int = 1,
    active: tuple[int, ...] = (0, 1, 2),
    noise: Mapping[str, float] | None = None,
    **privacy: Any,
) -> RoundContext:
    private = {"noise_multiplier": sigma, "sample_rate": 1.0, **privacy}
    settings = None if sigma is None else PrivacySettings(**private)
    federation = {"clients": 3, "participants": active, "sizes": (24, 12, 12), "noise": noise or {}}
    return RoundContext(number, 0, CPU, SPEC, NET, 24.0, settings, **federation)


def group(charged: Sequence[ReleaseBudget[GaussianSumMechanism]]) -> PrivateClientView:
    return PrivateClientView([0], data(), [torch.arange(24)], charged)


def private(
    method: Method, ctx: RoundContext, ledger: Ledger | None = None, phase: str = MAIN
) -> PrivateClientView:
    guard = BudgetEnforcer(ledger or Ledger("0"), 1e-5, None)
    return group(charge_for(method, ctx, [0], [guard], [SecretGenerator()], phase))


def start() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in NET.state_dict().items()}


def test_without_noise_private_sums_are_the_exact_ones_and_rows_are_clipped() -> None:
    width: int = NET.embedding_size
    with torch.no_grad():
        each = NET.embed(ExactClientView([0], data(), [torch.arange(24)]).images(torch.arange(24)))
    for clip in (1e6, 0.5):
        plans = sums_plans(
            "sums", "features", "each", clip=clip, width=width, classes=10, noise=2.0, phase=MAIN
        )
        guard = BudgetEnforcer(Ledger("0"), 1e-5, None)
        clients = group([charge_round(plans, 1, 1e-12, guard, SecretGenerator())])
        actual = class_sums(clients, NET.embed, width, "sums", context(1e-12))
        rows = each * (clip / each.norm(dim=1, keepdim=True)).clamp_max(1)
        exact = torch.stack([rows[torch.tensor(c == LABELS)].sum(0) for c in range(10)])
        torch.testing.assert_close(
            torch.as_tensor(actual.sums).float(), exact, atol=1e-3, rtol=1e-3
        )
        counts = torch.as_tensor(actual.counts).float()
        torch.testing.assert_close(counts, torch.tensor([3.0] * 8 + [0.0] * 2), atol=1e-3, rtol=0)
        assert actual.noise_std == pytest.approx(2e-12)


@pytest.mark.parametrize("kind", [FedFM, FedFMLite])
def test_each_round_is_charged_as_itself(kind: type[FedFM]) -> None:
    ledger, server = Ledger("0"), Server(kind(**LOCAL), start())
    for number in (1, 2):
        ctx = context(1.0, number)
        charged = {phase: [private(server.method, ctx, ledger, phase)] for phase in PHASES}
        play(server, charged.__getitem__, {}, ctx)
    rows = sorted((row.round, row.quantity, row.noise_multiplier) for row in ledger.releases)
    each = {"class counts": 5.0, "class sums of features (anchors)": 5.0, "model update": 1.0}
    assert rows == [(number, *one) for number in (1, 2) for one in each.items()]


def test_anchors_exist_for_classes_clearly_above_the_noise() -> None:
    """The floor is four deviations of the sum of K clients' noise; below it there is no anchor, and
    a released one stays."""
    method, sigma, width = FedFM(anchor_noise=2.0), 3.0, NET.embedding_size
    only_first = [True] + [False] * 9
    noise = {COUNTS: 2.0 * sigma}
    nothing = FeatureSums(torch.zeros(10, width), torch.zeros(10))
    for k in (1, 9):
        floor = COUNT_DEVIATIONS * 2.0 * sigma * sqrt(k)
        counts = torch.zeros(10)
        counts[:3] = torch.tensor([floor * 1.01, floor * 0.99, -floor]) / k
        sent = {i: FeatureSums(torch.ones(10, width), counts) for i in range(k)}
        heard: Any = method.first_aggregate(AnchorState(start()), sent, context(sigma, noise=noise))
        assert heard.has_anchor.tolist() == only_first
        torch.testing.assert_close(heard.anchors[0], torch.full((width,), 1 / (floor * 1.01 / k)))
        later: Any = method.first_aggregate(heard, {0: nothing}, context(sigma, 2, noise=noise))
        assert later.has_anchor.tolist() == only_first
        assert torch.equal(later.anchors[0], heard.anchors[0])
    one = FeatureSums(torch.ones(10, width), torch.eye(10)[0])
    exact: Any = method.first_aggregate(AnchorState(start()), {0: one}, context())
    assert exact.has_anchor.tolist() == only_first


def test_private_training_has_the_methods_losses() -> None:
    """Catches: a loss or penalty that is left out with privacy on."""

    def moved(method: Any, state: Any, number: int = 1) -> Tensor:
        ctx = context(1e-9, number, clip=1e6)
        message = method.broadcast(state, ctx)
        ((upload, _),) = method.client_step(message, private(method, ctx), [{}], ctx)
        if isinstance(upload, ModelAndCounts):
            assert upload.counts.tolist() == [1.0] * 10  # and not the client's own
        return torch.cat([value.flatten() for value in upload.parameters.values()])

    anchors = torch.randn(10, NET.embedding_size, generator=torch.Generator().manual_seed(0))
    anchored = AnchorState(start(), anchors=anchors, has_anchor=torch.ones(10, dtype=torch.bool))
    light, heavy = (moved(FedFM(**LOCAL, weight=weight), anchored) for weight in (1e-9, 1.0))
    assert float((heavy - light).norm()) > 0.01
    trained = Server(FedGen(**LOCAL, generator_steps=2), start())
    play(trained, [ExactClientView([0], data(), [torch.arange(24)])], {}, context(active=(0,)))
    neither, alpha, beta = (
        moved(FedGen(**LOCAL, alpha=a, beta=b), trained.state, 2)
        for a, b in ((0.0, 0.0), (5.0, 0.0), (0.0, 5.0))
    )
    assert float((alpha - neither).norm()) > 0.01
    assert float((beta - neither).norm()) > 0.01


def test_unused_anchors_are_not_charged() -> None:
    run = {"run": {"method": "fedfm", "rounds": 1}, "method": {"weight": 0}}
    with pytest.raises(SettingError, match=r"method\.weight must be above 0"):
        simulate(resolve({**run, "privacy": {"epsilon": 8.0}}))


def test_fedgen_asks_for_classes_that_clients_have_had() -> None:
    """Round 1: clients 0 and 1 with classes 0–3; round 2: client 2 with 4–7."""
    low, high = torch.tensor(np.flatnonzero(LABELS < 4)), torch.tensor(np.flatnonzero(LABELS >= 4))
    method = FedGen(**LOCAL, generator_steps=2, generator_batch=16)
    server = Server(method, start())
    seen = []
    for number, (ids, parts) in enumerate([((0, 1), [low[:6], low[6:]]), ((2,), [high])], 1):
        play(server, [ExactClientView(ids, data(), parts)], {}, context(None, number, ids))
        now: Any = server.state
        seen.append(now.seen_classes.tolist())
    assert seen == [[True] * 4 + [False] * 6, [True] * 8 + [False] * 2]
    ctx = context(None, 3)
    task = method.task(0, method.broadcast(now, ctx), {}, ctx)
    assert task.loss is not None
    x, y = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([8, 3])
    each, plain = (
        task.loss(NET, x, y),
        torch.nn.functional.cross_entropy(NET(x), y, reduction="none"),
    )
    torch.testing.assert_close(each[0], plain[0])
    assert float((each[1] - plain[1]).detach().abs()) > 1e-3


def test_fedgens_generator_resumes_adam_at_a_decreasing_rate() -> None:
    """The first step of round 2."""
    method = FedGen(**LOCAL, generator_steps=20, generator_batch=16, generator_decay=0.0)
    one = FedGen(**LOCAL, generator_steps=1, generator_batch=16, generator_decay=0.0)
    clients = ExactClientView([0], data(), [torch.arange(24)])
    server = Server(method, start())
    ups = play(server, [clients], {}, context(active=(0,)))
    first: Any = server.state
    second: Any = one.server_step(first, ups, context(None, 2, (0,)))
    assert int(second.learner["adam.0.step"]) == 21
    step = (second.learner["generator.out.bias"] - first.learner["generator.out.bias"]).abs()
    mean, square = second.learner["adam.5.exp_avg"], second.learner["adam.5.exp_avg_sq"]
    expected = (
        3e-4 * DECAY * (mean / (1 - 0.9**21)).abs() / ((square / (1 - 0.999**21)).sqrt() + 1e-8)
    )
    torch.testing.assert_close(step, expected, atol=1e-7, rtol=1e-2)
