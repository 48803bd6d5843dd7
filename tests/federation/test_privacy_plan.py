"""Tests of a private run's public plan and clients' budgets, and of the trial of its steps."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import FedAvg, FedStats, RoundContext, RunSettings, resolve, simulate
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import LedgerError, UnaccountedReleaseError, UnplannedReleaseError
from fedsynth.federation import position_leak_check
from fedsynth.federation.client_runtime import ClientBudget
from fedsynth.federation.context import public_context
from fedsynth.federation.position_leak_check import StepCheck
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.methods import feddm, fedfm, fpl
from fedsynth.models import on_features as feature_linear
from fedsynth.privacy import (
    BudgetExceededError,
    Ledger,
    Release,
    ReleasePlan,
    calibrate_noise_multiplier,
    epsilon,
)
from fedsynth.privacy.dpsgd import ExampleGradients
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import FIRST, MAIN, ReleaseBudget, UnaccountedNoise
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER
from fedsynth.privacy.row_products import two_sided
from fedsynth.results import active_run
from fedsynth.results.report_facts import headline, noise_warnings
from fedsynth.results.verification import verify_run
from fedsynth.synthesizer.condensation.matching import NetworkFeatures
from tests.digits import CPU, SPEC
from tests.quick_runs import by_family, quick_sections, quick_settings
from tests.raising import raises

SPENT = Release(1, "images", "m", "c", 8.0, 1.0, 1.0, "full", 4, 7)
LEAK = replace(SPENT, noise_multiplier=0.0, unaccounted="shown as it is")


def settings(method: str = "fedaf", clients: int = 3, **privacy: Any) -> RunSettings:
    steps = {"iterations": 2} if method in ("feddm", "fedaf") else {"local_epochs": 3, "batch": 64}
    more = {"run": {"rounds": 3}, "method": {**steps, **privacy.pop("own", {})}}
    more["privacy"] = privacy or {"noise_multiplier": 3.0}
    return resolve(quick_sections(method, partition={"clients": clients}, **more))


def context(run: RunSettings) -> RoundContext:
    return public_context(run, SPEC, CPU)


def histories_of(*rows: tuple[Release, ...]) -> list[History]:
    return [History(f"client-{k:03d}", releases) for k, releases in enumerate(rows)]


def plan_of(run: RunSettings, histories: list[History] | None = None) -> PrivacyPlan:
    return PrivacyPlan.make(run, context(run), histories or histories_of((), (), ()))


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


@pytest.mark.parametrize(("epochs", "batch", "size"), [(1, 16, 784), (10, 128, 3136)])
def test_steps_of_divisible_sizes_are_exact(epochs: int, batch: int, size: int) -> None:
    """Regression: 1 / (16 / 784) is above 49 in floating point, so that 50 steps were charged."""
    method = FedAvg(local_epochs=epochs, batch=batch)
    privacy = resolve({"privacy": {"noise_multiplier": 1.0}}).privacy
    at_size = replace(context(settings()), nominal_size=size)
    (plan,) = method.release_plans(privacy, at_size)
    assert plan.steps == epochs * size // batch


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
        (8.0, (LEAK,), UnaccountedReleaseError, "release.ledger"),
        (8.0, (replace(SPENT, unit=USER),), LedgerError, "ledger.unit"),
        (0.1, (replace(SPENT, unit=USER),) * 3, LedgerError, "ledger.unit"),
        (0.1, (SPENT,) * 3, BudgetExceededError, "budget.spent"),
        (epsilon([SPENT], 1e-5) * (1 + 1e-5), (SPENT,), BudgetExceededError, "budget.spent"),
    ],
)
def test_impossible_plans_are_rejected(budget: float, rows: Any, error: Any, message: str) -> None:
    with raises(error, message):
        plan_of(settings(epsilon=budget), histories_of((), rows, ()))


def test_leak_in_any_ledger_voids_guarantee() -> None:
    run = settings(noise_multiplier=1.0)
    plan = plan_of(run, histories_of((), (LEAK,), ()))
    assert plan.facts.guaranteed
    assert not plan.guaranteed(plan.histories)
    assert plan.guaranteed(histories_of((), (SPENT,), ()))
    unsettled = PrivacyPlan.checked(settings(epsilon=8.0), context(run))
    with raises(Exception, "privacy.noise_multiplier"):
        _ = unsettled.sigma


WRONG_PLANS: dict[str, Callable[[ReleasePlan], tuple[ReleasePlan, ...]]] = {
    "steps": lambda plan: (replace(plan, steps=plan.steps + 1),),
    "clip": lambda plan: (replace(plan, clip=2 * plan.clip),),
    "ratio": lambda plan: (replace(plan, relative_noise_multiplier=0.5),),
    "rate": lambda plan: (replace(plan, sample_rate=plan.sample_rate / 2),),
    "name": lambda plan: (replace(plan, name="another"),),
    "exchange": lambda plan: (replace(plan, exchange=FIRST),),
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


def test_budget_is_charged_per_exchange() -> None:
    plan = plan_of(settings(own={"knowledge_from": "first-exchange"}))
    ledger = Ledger("a")
    budget = ClientBudget(0, ledger, plan, SecretGenerator())
    other = ClientBudget(1, Ledger("b"), plan, SecretGenerator())
    budget.check(1)
    assert ledger.releases == ()
    first = budget.charge(context(plan.run), FIRST)
    images, *knowledge = plan.client_rows(0, context(plan.run))
    assert list(ledger.releases) == knowledge
    with raises(UnplannedReleaseError, "release.unplanned_name"):
        first.take("images")
    main = budget.charge(context(plan.run), MAIN)
    assert main.take("images").steps_left == 2
    assert list(ledger.releases) == [*knowledge, images]
    assert budget.ledger.history() == ledger.history()
    assert other.ledger.history().releases == ()


def test_unguaranteed_mechanisms_are_recorded_without_mechanism() -> None:
    plan = plan_of(settings("feddm", mechanism="paper", noise_multiplier=2.0))
    assert not plan.guaranteed(plan.histories)
    assert {row.unaccounted for row in plan.planned()} == {"FedDM's Algorithm 1 as printed"}
    ledger = Ledger("a")
    secret = SecretGenerator(test_only=np.random.default_rng(0))
    budget = ClientBudget(0, ledger, plan, secret)
    noise = budget.charge(context(plan.run), MAIN).take("images")
    assert isinstance(noise, UnaccountedNoise)
    assert (noise.noise_std, noise.secret) == (2.0 * plan.chief.clip, secret)
    assert [row.unaccounted for row in ledger.releases] == ["FedDM's Algorithm 1 as printed"]  # type: ignore[var-annotated]


@pytest.mark.parametrize("name", ["fedaf", "fedfm", "fedfm-lite", "feddm", "fedavg", "ccvr"])
def test_steps_take_all_charged_mechanisms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = create_autospec(ReleaseBudget.__init__, side_effect=ReleaseBudget.__init__)
    monkeypatch.setattr(ReleaseBudget, "__init__", spy)
    monkeypatch.setattr(
        active_run, "check_private_steps", lambda *args: StepCheck()
    )  # charges nothing
    method_settings = {"knowledge_from": "first-exchange"} if name == "fedaf" else {}
    privacy = {"mechanism": "features"} if name == "feddm" else {}
    run = settings(name, clients=2, own=method_settings, noise_multiplier=3.0, **privacy)
    simulate(replace(run, rounds=1))
    spy.assert_called()
    assert not any(call.args[0]._unused for call in spy.call_args_list)


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


@pytest.mark.parametrize("name", ["feddm", "fedavg"])
def test_every_method_warns_of_noise_above_signal(name: str) -> None:
    """At best, n of 3 clients add n/√C in each of T sums, and noise is added to D coordinates."""
    warned = []
    for budget in (0.3, 8.0):
        plan = plan_of(settings(name, epsilon=budget, nominal_size=60))
        row = plan.chief
        sums = row.sample_rate * 180 * (3 * row.steps / row.groups) ** 0.5
        expected = sums / (plan.sigma * (3 * row.dimension) ** 0.5)
        assert plan.signal_to_noise(row) == pytest.approx(expected)
        warned.append(any("warning: the noise" in line for line in headline(plan)))
        assert warned[-1] == (expected < 1) == bool(noise_warnings(plan))
    assert warned == [True, False]


MESSAGE = "position of an example"


def trial_settings(
    method: str, dataset: str = "digits", privacy: dict[str, Any] | None = None, **model: Any
) -> RunSettings:
    base = {
        "run": {"method": method, "rounds": 1 if method == "dense" else 2},
        "method": {} if method == "fedstats" else quick_settings(method),
        "model": model,
        "partition": {"clients": 2},
        "privacy": {"noise_multiplier": 1.0} if privacy is None else privacy,
    }
    return replace(resolve(base), dataset=dataset)


def warnings_of(run: RunSettings, device: torch.device = CPU) -> list[str]:
    return position_leak_check.check_private_steps(
        run, public_context(run, dataset_spec(run.dataset), device)
    ).warnings


def shifted_by_position(rows: Tensor) -> Tensor:
    """Imitates kernels that sum every other row in a different order."""
    shifted = rows.clone()
    shifted[1::2] *= 1 + 2**-20
    return shifted


def with_changed_bit(rows: Tensor) -> Tensor:
    rows[5:6] = torch.nextafter(rows[5:6], torch.full_like(rows[5:6], 9.0))
    return rows


def change_rows(owner: Any, name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(rows(*args, **kwargs)))


def shift_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "gradients":
        change_rows(ExampleGradients, "__call__", shifted_by_position, monkeypatch)
    if kind == "features":
        change_rows(NetworkFeatures, "real", shifted_by_position, monkeypatch)


def test_warnings_are_printed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shift_rows(monkeypatch, "gradients")
    result: Any = simulate(trial_settings("fedavg", name="linear"), output=tmp_path)
    assert capsys.readouterr().err.count(MESSAGE) == 1
    [warning] = result.privacy["verdict"]["warnings"]
    assert MESSAGE in warning
    monkeypatch.undo()  # on another machine
    assert verify_run(result.folder).problems == []
    start = json.loads((result.folder / "privacy_start.json").read_text())
    (result.folder / "privacy_start.json").write_text(json.dumps({**start, "warnings": []}))
    [problem] = verify_run(result.folder).problems
    assert problem.code == "verdict.warnings"


@pytest.mark.parametrize(
    "method",
    by_family(["feddm", "fedaf", "fedsum", "fedavg", "fedstats"], ("feddm", "fedavg", "fedstats")),
)
def test_trials_compute_client_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken version would try the plain forward pass, but condensation sums features of
    channels-last passes, training sums gradients, and FedStats neither. Mechanisms without a
    guarantee cause no warning."""
    paper = {"noise_multiplier": 1.0, "mechanism": "paper"}
    computed = {"fedavg": "gradients", "fedstats": "factors"}.get(method, "features")
    for kind in ("gradients", "features", "nothing"):
        with monkeypatch.context() as patch:
            shift_rows(patch, kind)
            warnings = warnings_of(trial_settings(method, width=8, depth=2))
            assert len(warnings) == (kind == computed), kind
            assert method != "feddm" or not warnings_of(trial_settings(method, privacy=paper))


@pytest.mark.parametrize(
    ("method", "rounds"), [("fedavg", [1]), ("fedstats", [1, 2]), ("ccvr", [1, 4])]
)
def test_trials_cover_each_kind_of_round(method: str, rounds: list[int]) -> None:
    """CCVR sums features in the last round. A broken version would try the first two rounds."""
    plan = plan_of(replace(trial_settings(method, width=4, depth=2), rounds=4))
    trials = position_leak_check._trials(plan, context(plan.run), [[0]])
    assert [trial.context.round for trial in trials] == rounds


@pytest.mark.parametrize(
    ("method", "module", "name"),
    [
        ("fpl", fpl, "prototype_losses"),
        ("fedfm", fedfm, "anchor_losses"),
        ("fedfm-lite", fedfm, "anchor_losses"),
    ],
)
def test_trials_cover_losses_of_later_rounds(
    method: str, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the first round has no prototypes or anchors, so their losses were not tried."""

    def shifted(losses: Any) -> Any:
        pair = isinstance(losses, tuple)
        return tuple(map(shifted_by_position, losses)) if pair else shifted_by_position(losses)

    change_rows(module, name, shifted, monkeypatch)
    assert len(warnings_of(trial_settings(method, width=8, depth=2))) == 1


@pytest.mark.parametrize("model", [{}, {"features": "pixels"}], ids=["rows", "products"])
def test_single_bit_differences_are_detected(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers vectors, and the factors of FedStats and of linear models."""
    run = trial_settings("fedavg", name="linear", **model)
    assert not warnings_of(run)
    change_rows(ExampleGradients, "__call__", with_changed_bit, monkeypatch)
    assert len(warnings_of(run)) == 1


@pytest.mark.parametrize("dataset", by_family(("digits", "mnist", "cifar10"), ("digits",)))
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedstats", {}),
        ("fedavg", {"features": "whitened-scattering", "name": "linear"}),
        ("fedavg", {"name": "linear"}),
        ("fedavg", {"name": "convnet", "width": 8}),
    ],
)
def test_common_models_cause_no_warning(
    method: str, model: dict[str, Any], dataset: str, device: torch.device
) -> None:
    """Regression: the plain forward pass of models on features was tried, whose width is no
    multiple of 16, and each run had a warning."""
    assert not warnings_of(trial_settings(method, dataset, **model), device)


def test_fedstats_is_tried_with_server_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of the initial weights only would miss errors, since products with T = I are exact."""

    def shifted(first: Tensor, rows: Tensor, second: Tensor) -> Tensor:
        product = two_sided(first, rows, second)
        return product if torch.equal(first, torch.eye(len(first))) else with_changed_bit(product)

    monkeypatch.setattr(feature_linear, "two_sided", shifted)
    assert len(warnings_of(trial_settings("fedstats", "mnist"))) == 1


def test_kinds_of_networks_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken version would ignore the networks of clients."""
    run = trial_settings("dense", "mnist", name="linear", clients="lenet5,mlp")
    names: list[str] = []
    original = ExampleGradients.__call__

    def gradients(self: ExampleGradients, *args: Any) -> Tensor:
        name = type(self._model).__name__
        names.append(name)
        rows = original(self, *args)
        return shifted_by_position(rows) if name == "Mlp" else rows

    monkeypatch.setattr(ExampleGradients, "__call__", gradients)
    assert len(warnings_of(run)) == 1
    assert names.count("LeNet5") == names.count("Mlp") > 0
    assert "Linear" not in names


def test_failures_after_the_last_release_are_ignored_and_others_cause_warnings_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken versions compute steps without a release, or lose findings if these steps fail."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory\nin a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(feddm.sets, "split_uploads", fails)
        shift_rows(patch, "features")
        privacy = {"noise_multiplier": 1.0, "mechanism": "features"}
        [warning] = warnings_of(trial_settings("feddm", privacy=privacy))
        assert MESSAGE in warning
    monkeypatch.setattr(position_leak_check, "_trials", fails)
    report: Any = simulate(trial_settings("fedavg", width=8, depth=2)).privacy
    assert "out of memory" in capsys.readouterr().err
    [warning] = report["verdict"]["warnings"]
    assert "out of memory" in warning


def test_trial_size_is_limited_by_step_and_memory() -> None:
    def records(**model: Any) -> int:
        run = trial_settings("fedavg", "cifar10", **model)
        run = replace(run, method=replace(run.method, batch=256))  # type: ignore[call-arg]
        context = public_context(run, dataset_spec("cifar10"), CPU)
        return position_leak_check.records_of_step(PrivacyPlan.checked(run, context).plans, context)

    assert records(name="linear") > 128  # a pass of DP-SGD, and into the next one
    resnet_records = records(name="resnet18", norm="group")  # 11 million numbers each
    assert position_leak_check.MIN_RECORDS <= resnet_records <= 12
