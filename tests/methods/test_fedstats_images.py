"""FedStats' images: a function of released state alone, kept with soft labels, worth training
on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsynth import (
    FedStats,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    export_run,
    load_dataset,
    load_synthetic,
    simulate,
)
from fedsynth.core.context import RoundContext
from fedsynth.data.images import denormalise
from fedsynth.errors import OutputError
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.methods.statistics.class_moments import target_norm
from fedsynth.methods.statistics.settings import FedStatsState, StatisticSums
from fedsynth.models.on_features import FeatureLinear
from fedsynth.models.registry import build_model
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.results.verification import verify_run
from fedsynth.synthesizer.condensation.student import StudentSettings, train_student
from tests.digits import SPEC
from tests.digits import context as some_context

SMALL = FedStats(features="pixels", ipc=2, image_steps=5)


def context(number: int = 1, rounds: int = 1, sigma: float | None = None) -> RoundContext:
    privacy = None if sigma is None else PrivacySettings(noise_multiplier=sigma)
    network = FeatureLinear(SMALL.map_of(SPEC), SPEC)
    return some_context(privacy, number, network=network, nominal=20.0, rounds=rounds)


def begun() -> FedStatsState:
    network = FeatureLinear(SMALL.map_of(SPEC), SPEC)
    return FedStatsState(network.state_dict())


@pytest.mark.parametrize("second", ["yes", "no"])
def test_class_means_are_those_of_the_sums(second: str) -> None:
    """Of classes that are equally frequent: their means about the common one, by NumPy."""
    z = 0.1 * np.random.default_rng(0).normal(size=(20, 64))
    labels = np.arange(20) % 10
    crossed = (np.eye(10)[labels] - 0.1).T @ z / target_norm(10)
    squares = np.array([z[:, i] @ z[:, j] * (1 if i == j else 2**0.5)
                        for i in range(64) for j in range(i, 64)])  # fmt: skip
    sums = crossed.ravel()
    if second == "yes":
        sums = 0.5**0.5 * np.concatenate([squares, sums])
    method = FedStats(features="pixels", ipc=1, image_steps=1, second_moments=second)
    upload = StatisticSums(torch.from_numpy(sums).float())
    state = method.at_end(method.server_step(begun(), {0: upload}, context()), context())
    means = np.stack([z[labels == c].mean(axis=0) for c in range(10)])
    assert state.class_means is not None
    np.testing.assert_allclose(state.class_means, means - means.mean(axis=0), atol=1e-5)


def test_images_are_made_after_the_last_round_from_only_the_server_state() -> None:
    """The same sums give the same images, without a client or its data; no images without ipc."""
    draws = torch.Generator().manual_seed(0)
    upload = {0: StatisticSums(torch.randn(10 * 64, generator=draws))}
    method = FedStats(features="pixels", ipc=2, image_steps=5, second_moments="no")
    last = [method.server_step(begun(), upload, context()) for _ in range(2)]
    made = [method.at_end(state, context()) for state in last]
    assert made[0].images is not None
    assert made[0].soft_labels is not None
    assert torch.equal(made[0].images, made[1].images)  # type: ignore[arg-type]
    assert made[0].images.shape == (20, 1, 8, 8)
    torch.testing.assert_close(made[0].soft_labels.sum(dim=1), torch.ones(20))
    first = method.server_step(begun(), upload, context(rounds=2))
    assert first.images is None
    assert method.synthetic(first, context()) is None
    without = FedStats(features="pixels", second_moments="no")
    assert without.server_step(begun(), upload, context()).class_means is None


def drawn_beside(ipc: int, drawn: int) -> torch.Tensor:
    """Pixels [classes, ipc + drawn, 64] in bytes; checks that labels and soft labels go with them."""
    draws = torch.Generator().manual_seed(0)
    upload = {0: StatisticSums(torch.randn(10 * 64, generator=draws))}
    method = FedStats(
        features="pixels", ipc=ipc, drawn_ipc=drawn, image_steps=5, second_moments="no"
    )
    state = method.at_end(method.server_step(begun(), upload, context()), context())
    actual = method.synthetic(state, context())
    assert actual is not None
    assert actual[1].tolist() == [c for c in range(10) for _ in range(ipc + drawn)]
    assert state.soft_labels is not None
    assert len(state.soft_labels) == len(actual[0])
    return denormalise(actual[0], SPEC).view(10, ipc + drawn, -1)


def test_drawn_images_accompany_optimised_ones() -> None:
    """After a class's moved images, which they leave as they are; all are different."""
    both = drawn_beside(ipc=2, drawn=3)
    assert torch.equal(both[:, :2], drawn_beside(ipc=2, drawn=0))
    assert len(both.flatten(0, 1).unique(dim=0)) == 50


@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_an_exported_set_states_the_attackers_of_its_epsilon(
    aggregation: str, tmp_path: Path
) -> None:
    """Catches: an ε of noise that clients share, on its own."""
    method = replace(SMALL, aggregation=aggregation)
    settings = RunSettings(method, rounds=1, privacy=PrivacySettings(epsilon=8.0))
    run = simulate(settings, output=tmp_path, quiet=True)
    assert verify_run(str(run.folder)).problems == []
    text = (export_run(str(run.folder), tmp_path / "share") / "README.md").read_text()
    shared = "because clients shared noise: assumed, not executed." in text
    assert shared is (aggregation == "secure")
    assert "**Differential privacy: ε = " in text


def test_a_run_that_ends_on_its_budget_makes_images_of_what_it_has(tmp_path: Path) -> None:
    """They cost nothing beyond what was released, and can be handed over."""
    privacy = PrivacySettings(noise_multiplier=3.0, epsilon=1.2)
    run = simulate(RunSettings(SMALL, rounds=6, privacy=privacy), output=tmp_path, quiet=True)
    assert 1 <= len(run.metrics) < 6
    assert verify_run(str(run.folder)).problems == []
    share = export_run(str(run.folder), tmp_path / "share")
    actual = load_synthetic(share)
    assert len(actual.labels) == 20
    assert actual.soft_labels is not None
    text = (share / "README.md").read_text()
    assert "classifier, which was not trained on them" in text
    assert "A model that was trained on them" not in text
    settings = RunSettings(FedStats(), rounds=1, privacy=PrivacySettings(epsilon=8.0))
    none = simulate(settings, output=tmp_path, quiet=True)
    with pytest.raises(OutputError, match="has no synthetic images"):
        export_run(str(none.folder), tmp_path / "other")


@pytest.mark.slow
def test_a_student_learns_only_from_the_exported_images(tmp_path: Path) -> None:
    """Scattering, no privacy: above what start images are worth, which is about 0.2."""
    method = FedStats(ipc=5, image_steps=40)
    run = simulate(RunSettings(method, rounds=2), output=tmp_path, quiet=True)
    assert run.folder is not None
    actual = load_synthetic(export_run(run.folder, tmp_path / "share", unprotected=True))
    assert actual.labels.tolist() == [c for c in range(10) for _ in range(5)]
    assert actual.soft_labels is not None
    assert actual.clients is None  # one maker, the server
    torch.testing.assert_close(actual.soft_labels.sum(dim=1), torch.ones(50))
    assert float((actual.soft_labels.argmax(dim=1) == actual.labels).float().mean()) > 0.9
    student = build_model(ModelSettings(width=16, depth=2), SPEC.image_shape, 10, seed=0)
    settings = StudentSettings(steps=300, views=5)
    train_student(student, actual.normalised(), actual.soft_labels, settings, teacher=run.model)
    assert accuracy(student, load_dataset("digits")[1]) > 0.4


# ------------------------------------------------------------------------------- signal to noise


@pytest.mark.parametrize(("second", "aggregation"), [("no", "own"), ("yes", "secure")])
def test_signal_to_noise_is_that_of_a_simulation(second: str, aggregation: str) -> None:
    """Orthogonal classes of equal examples, written out, summed over four clients who each add
    noise."""
    method = FedStats(features="pixels", second_moments=second, aggregation=aggregation)
    privacy = PrivacySettings(noise_multiplier=3.0)
    network = FeatureLinear(method.map_of(SPEC), SPEC)
    ctx = some_context(privacy, network=network, nominal=50.0, rounds=3, clients=4)
    plans = {plan.name: plan for plan in method.release_plans(privacy, ctx)}
    z, e = np.eye(64)[:10], np.eye(10) - 0.1  # an example of each class
    crossed = np.einsum("nc,nd->ncd", e / target_norm(10), z).reshape(10, -1)
    i, j = np.triu_indices(64)
    squares = np.einsum("nd,ne->nde", z, z)[:, i, j] * np.where(i == j, 1, 2**0.5)
    both = 0.5**0.5 * np.concatenate([squares, crossed], axis=1)
    cases = {
        "moments": both if second == "yes" else crossed,
        "step": -method.step_clip * crossed,
        "centre": np.tile(plans["centre"].clip * np.eye(64)[0], (10, 1)),
    }
    draws = np.random.default_rng(0)
    for name, rows in cases.items():
        plan: ReleasePlan = plans[name]
        signal = np.linalg.norm(20 * rows.sum(axis=0))  # 200 examples
        deviation = 3.0 * plan.relative_noise_multiplier * plan.clip / plan.shares**0.5
        noise = draws.normal(0, deviation, (50, 4, rows.shape[1])).sum(axis=1)
        expected = signal / np.sqrt(np.square(noise).sum(axis=1).mean())
        assert plan.signal_to_noise(3.0, 200, 4) == pytest.approx(expected, rel=0.03)
