"""Tests of the public plan of a private run, and of the budgets of its clients."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from tests.quick_runs import quick_sections

SPEC, CPU = dataset_spec("digits"), torch.device("cpu")
SPENT = Release(1, "images", "m", "c", 8.0, 1.0, 1.0, "full", 4, 7)
LEAK = replace(SPENT, noise_multiplier=0.0, unaccounted="shown as it is")


def settings(method: str = "fedaf", clients: int = 3, **privacy: Any) -> RunSettings:
    steps = {"iterations": 2} if method in ("feddm", "fedaf") else {"local_epochs": 3, "batch": 64}
    base = {
        "run": {"method": method, "rounds": 3, "device": "cpu"},
        "partition": {"clients": clients},
        "model": {"width": 4, "depth": 2},
        "method": {**steps, **privacy.pop("own", {})},
        "privacy": privacy or {"noise_multiplier": 3.0},
    }
    return resolve(base)


def context(run: RunSettings) -> RoundContext:
    return public_context(run, SPEC, CPU)


def histories_of(*rows: tuple[Release, ...]) -> list[History]:
    return [History(f"client-{k:03d}", releases) for k, releases in enumerate(rows)]


def plan_of(run: RunSettings, histories: list[History] | None = None) -> PrivacyPlan:
    return PrivacyPlan.make(run, context(run), histories or histories_of((), (), ()))


# --------------------------------------------------------------------------------------- the plan


def test_sigma_fits_client_with_most_charges() -> None:
    """The reference is a calibration on its rows and those of three rounds. Histories are sent as
    JSON and the plan as bytes, without opening a ledger."""
    run = settings(epsilon=8.0)
    histories = histories_of((), (SPENT,) * 5, (SPENT,))
    sent = [History.from_json(json.loads(json.dumps(history.to_json()))) for history in histories]
    assert sent == histories
    plan = plan_of(run, sent)
    restored = pickle.loads(pickle.dumps(plan))
    assert restored == plan
    assert restored.planned() == plan.planned()
    plans = run.method.release_plans(plan.privacy, context(run))

    def rows(sigma: float) -> list[Release]:
        future = [p.release(number, sigma) for number in (1, 2, 3) for p in plans]
        return [SPENT] * 5 + future

    assert plan.sigma == pytest.approx(calibrate_noise_multiplier(8.0, 1e-5, rows), rel=1e-9)
    assert plan.planned_epsilon() == pytest.approx(epsilon(rows(plan.sigma), 1e-5))
    assert 8.0 >= plan.planned_epsilon() > plan_of(run).planned_epsilon(2)


def test_noise_deviations_are_public_by_name() -> None:
    """Each release has a multiple of σ𝒞; FedAF's counts have 5σ and clip 1."""
    plan = plan_of(settings(own={"logit_clip": 2.0, "knowledge_noise": 5.0}))
    chief = plan.chief
    assert chief.name == "images"
    assert plan.noise == pytest.approx(
        {"images": 3.0 * chief.clip, "logit sums": 3.0 * 5 * 2.0, "class counts": 15.0}
    )
    planned_context = plan.in_context(context(plan.run))
    assert planned_context.noise == plan.noise
    assert planned_context.privacy == plan.privacy


@pytest.mark.parametrize(
    ("budget", "rows", "error", "message"),
    [
        (8.0, (LEAK,), UnaccountedReleaseError, "cannot be guaranteed"),
        (8.0, (replace(SPENT, unit=USER),), LedgerError, r"charged with privacy\.unit=user"),
        (0.1, (SPENT,) * 3, BudgetExceededError, "is exhausted"),
        (epsilon([SPENT], 1e-5) * (1 + 1e-5), (SPENT,), BudgetExceededError, "is exhausted"),
    ],
)
def test_impossible_plans_are_rejected(
    budget: float, rows: tuple[Release, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_of(settings(epsilon=budget), histories_of((), rows, ()))


def test_leak_in_any_ledger_voids_guarantee() -> None:
    run = settings(noise_multiplier=1.0)
    plan = plan_of(run, histories_of((), (LEAK,), ()))
    assert plan.facts.guaranteed
    assert not plan.guaranteed(plan.histories)
    assert plan.guaranteed(histories_of((), (SPENT,), ()))
    paper = plan_of(settings("feddm", mechanism="paper", noise_multiplier=1.0))
    assert not paper.guaranteed(paper.histories)
    assert {row.unaccounted for row in paper.planned()} == {"FedDM's Algorithm 1 as printed"}
    unsettled = PrivacyPlan.checked(settings(epsilon=8.0), context(run))
    with pytest.raises(Exception, match="until all clients join"):
        _ = unsettled.sigma


# -------------------------------------------------------------------------------- plans of clients


WRONG_PLANS: dict[str, Callable[[ReleasePlan], tuple[ReleasePlan, ...]]] = {
    "steps": lambda plan: (replace(plan, steps=plan.steps + 1),),
    "clip": lambda plan: (replace(plan, clip=2 * plan.clip),),
    "ratio": lambda plan: (replace(plan, relative_noise_multiplier=0.5),),
    "rate": lambda plan: (replace(plan, sample_rate=plan.sample_rate / 2),),
    "name": lambda plan: (replace(plan, name="another"),),
    "phase": lambda plan: (replace(plan, phase=FIRST),),
    "more": lambda plan: (plan, replace(plan, name="another")),
    "none": lambda plan: (),
}


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_client_plans_may_only_reduce_steps(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the headline's ε would be no bound, or a client's row no planned release."""
    run = settings("fedavg")
    monkeypatch.setattr(FedAvg, "client_plans", lambda self, plans, *_: WRONG_PLANS[wrong](*plans))
    with pytest.raises(UnplannedReleaseError, match="fedavg"):
        plan_of(run).client_rows(0, context(run))


def test_stragglers_and_client_networks_have_separate_rows() -> None:
    straggling = settings("fedprox", own={"stragglers": 0.7})
    plan, first = plan_of(straggling), context(straggling)
    passes = straggling.method.straggler_epochs(first)  # type: ignore[attr-defined]
    assert len(passes) == 2
    for client in range(3):
        (row,) = plan.client_rows(client, first)
        expected = np.ceil(passes.get(client, 3) / plan.chief.sample_rate)
        assert (row.steps, row.dimension) == (expected, plan.chief.dimension)
    privacy = {"noise_multiplier": 3.0}
    model = {"clients": "convnet,linear"}
    mixed = resolve(quick_sections("dense", run={"rounds": 1}, model=model, privacy=privacy))
    widths = [plan_of(mixed).client_rows(k, context(mixed))[0].dimension for k in range(3)]
    networks = context(mixed).client_architectures or ()
    assert widths == [sum(p.numel() for p in network.parameters()) for network in networks]
    assert widths[0] == widths[2] != widths[1]


# -------------------------------------------------------------------------------- a client's budget


def test_budget_is_charged_per_exchange() -> None:
    plan = plan_of(settings(own={"knowledge_from": "first-phase"}))
    ledger = Ledger("a")
    budget, other = (ClientBudget(k, book, plan) for k, book in enumerate((ledger, Ledger("b"))))
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


def test_unguaranteed_mechanisms_are_recorded_without_series() -> None:
    plan = plan_of(settings("feddm", mechanism="paper", noise_multiplier=2.0))
    ledger = Ledger("a")
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    budget = ClientBudget(0, ledger, plan, secret)
    noise = budget.charge(context(plan.run), MAIN).take("images")
    assert isinstance(noise, UnaccountedNoise)
    assert (noise.noise_std, noise.secret) == (2.0 * plan.chief.clip, secret)
    assert [row.unaccounted for row in ledger.releases] == ["FedDM's Algorithm 1 as printed"]  # type: ignore[var-annotated]


# ---------------------------------------------------------------------------------- use of budgets


@pytest.mark.parametrize("name", ["fedaf", "fedfm", "fedfm-lite", "feddm", "fedavg"])
def test_steps_take_all_charged_series(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[ReleaseBudget[Any]] = []
    original_init = ReleaseBudget.__init__

    def spy(self: ReleaseBudget[Any], *args: Any) -> None:
        original_init(self, *args)
        budgets.append(self)

    monkeypatch.setattr(ReleaseBudget, "__init__", spy)
    monkeypatch.setattr(simulated_run, "check_private_steps", lambda *args: [])  # charges nothing
    method_settings = {"knowledge_from": "first-phase"} if name == "fedaf" else {}
    privacy = {"mechanism": "features"} if name == "feddm" else {}
    run = settings(name, clients=2, own=method_settings, noise_multiplier=3.0, **privacy)
    simulate(replace(run, rounds=1))
    assert budgets
    assert all(not budget._unused for budget in budgets)


def test_headline_warns_of_noise_above_signal() -> None:
    """FedStats' plan states a bound of its sums; with σ = 50 the noise is larger."""

    def warnings(sigma: float) -> list[str]:
        method = FedStats(features="pixels")
        run = replace(settings("fedavg", noise_multiplier=sigma), method=method, rounds=1)
        return [line for line in map(str, headline(plan_of(run))) if "warning: the noise" in line]

    assert warnings(0.5) == []
    (line,) = warnings(50.0)
    # at best n records of 3 clients with orthogonal classes, n/√C, and noise of 64·10 coordinates
    n = float(context(settings()).nominal_size) * 3
    share = (1 - FedStats().centre_share) ** 0.5
    assert f"S/N = {n * 10**-0.5 / (50.0 / share * (3 * 640) ** 0.5):.2g}" in line
