"""The public plan of a private run, and each client's own budget under it."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedsynth import FedAvg, FedStats, RoundContext, RunSettings, resolve, simulate
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.client_runtime import ClientBudget
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.privacy import (
    BudgetExceededError,
    Ledger,
    Release,
    ReleasePlan,
    calibrate_noise_multiplier,
    epsilon,
)
from fedsynth.privacy.errors import LedgerError, UnaccountedReleaseError, UnplannedReleaseError
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import FIRST, MAIN, ReleaseBudget, UnaccountedNoise
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER
from fedsynth.results.report_facts import headline
from fedsynth.simulation import run as simulated_run

SPEC, CPU = dataset_spec("digits"), torch.device("cpu")
SPENT = Release(1, "images", "m", "c", 8.0, 1.0, 1.0, "full", 4, 7)
LEAK = replace(SPENT, noise_multiplier=0.0, unaccounted="shown as it is")


def settings(method: str = "fedaf", clients: int = 3, **privacy: Any) -> RunSettings:
    steps = {"iterations": 2} if method in ("feddm", "fedaf") else {"local_epochs": 3, "batch": 64}
    given = {
        "run": {"method": method, "rounds": 3, "device": "cpu"},
        "partition": {"clients": clients},
        "model": {"width": 4, "depth": 2},
        "method": {**steps, **privacy.pop("own", {})},
        "privacy": privacy or {"noise_multiplier": 3.0},
    }
    return resolve(given)


def context(run: RunSettings) -> RoundContext:
    return public_context(run, SPEC, CPU)


def joining(*rows: tuple[Release, ...]) -> list[History]:
    return [History(f"client-{k:03d}", own) for k, own in enumerate(rows)]


def plan_of(run: RunSettings, histories: list[History] | None = None) -> PrivacyPlan:
    return PrivacyPlan.make(run, context(run), histories or joining((), (), ()))


# --------------------------------------------------------------------------------------- the plan


def test_a_plan_follows_from_bytes_that_clients_send() -> None:
    """Histories as JSON, and the plan as bytes: no ledger is opened on either side."""
    run = settings(epsilon=8.0)
    held = joining((SPENT,), (SPENT, SPENT), ())
    sent = [History.from_json(json.loads(json.dumps(one.to_json()))) for one in held]
    assert sent == held
    plan = plan_of(run, sent)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.planned() == plan.planned()
    assert 7.9 < again.planned_epsilon() <= 8.0


def test_sigma_is_the_one_that_the_client_with_most_behind_it_needs() -> None:
    """By hand: a calibration on its rows and those of three rounds."""
    run = settings(epsilon=8.0)
    plan = plan_of(run, joining((), (SPENT,) * 5, (SPENT,)))
    own = run.method.release_plans(plan.privacy, context(run))

    def rows(sigma: float) -> list[Release]:
        future = [one.release(number, sigma) for number in (1, 2, 3) for one in own]
        return [SPENT] * 5 + future

    assert plan.sigma == pytest.approx(calibrate_noise_multiplier(8.0, 1e-5, rows), rel=1e-9)
    assert plan.planned_epsilon() == pytest.approx(epsilon(rows(plan.sigma), 1e-5))
    assert plan.planned_epsilon() > plan_of(run).planned_epsilon_by_round()[2]


def test_the_noises_deviation_is_public_by_name() -> None:
    """σ𝒞 of each release, with its own multiple of σ; FedAF's counts have five times σ, and clip
    1."""
    plan = plan_of(settings(own={"logit_clip": 2.0, "knowledge_noise": 5.0}))
    chief = plan.chief
    assert chief.name == "images"
    assert plan.noise == pytest.approx(
        {"images": 3.0 * chief.clip, "logit sums": 3.0 * 5 * 2.0, "class counts": 15.0}
    )
    told = plan.in_context(context(plan.run))
    assert told.noise == plan.noise
    assert told.privacy == plan.privacy


def test_what_a_plan_is_of_is_refused_before_anything_is_opened() -> None:
    run = settings(noise_multiplier=1.0)
    with pytest.raises(UnaccountedReleaseError, match="cannot be guaranteed"):
        plan_of(settings(epsilon=8.0), joining((), (LEAK,), ()))
    with pytest.raises(LedgerError, match="protect a user"):
        plan_of(run, joining((), (replace(SPENT, unit=USER),), ()))
    with pytest.raises(BudgetExceededError, match="exhausted"):
        plan_of(settings(epsilon=0.1), joining((SPENT,) * 3, (), ()))
    held = epsilon([SPENT], 1e-5)
    nearly = settings(epsilon=held * (1 + 1e-5))
    with pytest.raises(BudgetExceededError, match="is exhausted"):
        plan_of(nearly, joining((SPENT,), (), ()))
    unsettled = PrivacyPlan.checked(settings(epsilon=8.0), context(run))
    with pytest.raises(Exception, match="before the clients have joined"):
        _ = unsettled.sigma


def test_a_leak_in_any_ledger_ends_the_claim() -> None:
    plan = plan_of(settings(noise_multiplier=1.0), joining((), (LEAK,), ()))
    assert plan.facts.guaranteed
    assert not plan.guaranteed(plan.histories)
    assert plan.guaranteed(joining((), (SPENT,), ()))
    paper = plan_of(settings("feddm", mechanism="paper", noise_multiplier=1.0))
    assert not paper.guaranteed(paper.histories)
    assert {row.unaccounted for row in paper.planned()} == {"FedDM's Algorithm 1 as printed"}


# ------------------------------------------------------------------------- what differs by client


@dataclass(frozen=True)
class Generous(FedAvg):
    """A method that plans other things for a client than it said."""

    name: ClassVar[str] = "generous"
    wrong: str = "steps"

    def client_plans(
        self, plans: tuple[ReleasePlan, ...], client: int, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        (plan,) = plans
        wrong = {
            "steps": (replace(plan, steps=plan.steps + 1),),
            "clip": (replace(plan, clip=2 * plan.clip),),
            "ratio": (replace(plan, relative_noise_multiplier=0.5),),
            "rate": (replace(plan, sample_rate=plan.sample_rate / 2),),
            "name": (replace(plan, name="another"),),
            "phase": (replace(plan, phase=FIRST),),
            "more": (plan, replace(plan, name="another")),
            "none": (),
        }
        return wrong[self.wrong]


@pytest.mark.parametrize(
    "wrong", ["steps", "clip", "ratio", "rate", "name", "phase", "more", "none"]
)
def test_a_client_may_be_planned_fewer_steps_and_nothing_more(wrong: str) -> None:
    """Else the headline's ε would be no bound, or a client's row no release of the plan."""
    run = replace(settings("fedavg"), method=Generous(local_epochs=1, batch=64, wrong=wrong))
    plan = plan_of(run)
    with pytest.raises(UnplannedReleaseError, match="generous"):
        plan.client_rows(0, context(run))


def test_stragglers_and_own_networks_have_rows_of_their_own() -> None:
    late = settings("fedprox", own={"stragglers": 0.7})
    plan, first = plan_of(late), context(late)
    passes = late.method.straggler_epochs(first)  # type: ignore[attr-defined]
    assert len(passes) == 2
    for client in range(3):
        (row,) = plan.client_rows(client, first)
        expected = np.ceil(passes.get(client, 3) / plan.chief.sample_rate)
        assert (row.steps, row.dimension) == (expected, plan.chief.dimension)
    mixed = resolve(
        {
            "run": {"method": "dense", "rounds": 1},
            "partition": {"clients": 3},
            "model": {"width": 4, "clients": "convnet,linear"},
            "privacy": {"noise_multiplier": 3.0},
        }
    )
    widths = [plan_of(mixed).client_rows(k, context(mixed))[0].dimension for k in range(3)]
    networks = context(mixed).client_architectures or ()
    assert widths == [sum(p.numel() for p in one.parameters()) for one in networks]
    assert widths[0] == widths[2] != widths[1]


# -------------------------------------------------------------------------------- a client's budget


def test_a_budget_charges_an_exchange_when_it_comes() -> None:
    plan = plan_of(settings(own={"knowledge_from": "first-phase"}))
    ledger = Ledger("a")
    budget, other = (ClientBudget(k, one, plan) for k, one in enumerate((ledger, Ledger("b"))))
    assert budget.secret is not other.secret
    budget.check(1)
    assert ledger.releases == ()
    first = budget.charge(context(plan.run), FIRST)
    images, *knowledge = plan.client_rows(0, context(plan.run))
    assert list(ledger.releases) == knowledge
    with pytest.raises(UnplannedReleaseError, match="The first exchange"):
        first.take("images")
    main = budget.charge(context(plan.run), MAIN)
    assert main.take("images").steps_left == 2
    assert list(ledger.releases) == [*knowledge, images]
    assert budget.ledger.history() == ledger.history()
    assert other.ledger.history().releases == ()


def test_a_mechanism_without_guarantee_is_recorded_and_gives_no_series() -> None:
    plan = plan_of(settings("feddm", mechanism="paper", noise_multiplier=2.0))
    ledger = Ledger("a")
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    budget = ClientBudget(0, ledger, plan, secret)
    noise = budget.charge(context(plan.run), MAIN).take("images")
    assert isinstance(noise, UnaccountedNoise)
    assert (noise.noise_std, noise.secret) == (2.0 * plan.chief.clip, secret)
    assert [row.unaccounted for row in ledger.releases] == ["FedDM's Algorithm 1 as printed"]  # type: ignore[var-annotated]


# ------------------------------------------------------------------- methods that would spend more


@pytest.mark.parametrize("name", ["fedaf", "fedfm", "fedfm-lite", "feddm", "fedavg"])
def test_a_step_takes_every_series_that_is_charged_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ReleaseBudget[Any]] = []
    init = ReleaseBudget.__init__

    def spy(self: ReleaseBudget[Any], *args: Any) -> None:
        init(self, *args)
        given.append(self)

    monkeypatch.setattr(ReleaseBudget, "__init__", spy)
    monkeypatch.setattr(simulated_run, "check_private_steps", lambda *args: [])  # charges nothing
    own = {"knowledge_from": "first-phase"} if name == "fedaf" else {}
    privacy = {"mechanism": "features"} if name == "feddm" else {}
    run = settings(name, clients=2, own=own, noise_multiplier=3.0, **privacy)
    simulate(replace(run, rounds=1))
    assert given
    assert all(not one._unused for one in given)


def test_a_headline_warns_of_noise_that_is_larger_than_the_signal() -> None:
    """FedStats' plan states how large its sums can be; with σ = 50 noise is larger."""

    def warnings(sigma: float) -> list[str]:
        method = FedStats(features="pixels")
        run = replace(settings("fedavg", noise_multiplier=sigma), method=method, rounds=1)
        return [line for line in map(str, headline(plan_of(run))) if "warning: the noise" in line]

    assert warnings(0.5) == []
    (line,) = warnings(50.0)
    # at best 3 clients' n records a class orthogonal: n/√C, beside noise of 64·10 coordinates
    n = float(context(settings()).nominal_size) * 3
    share = (1 - FedStats().centre_share) ** 0.5
    assert f"S/N = {n * 10**-0.5 / (50.0 / share * (3 * 640) ** 0.5):.2g}" in line
