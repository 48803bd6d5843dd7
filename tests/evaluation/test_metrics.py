"""Metrics of generated images and of clients' splits (AMP, FM, WLP: FedKF's Table II), and
γ-inexactness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedsynth.evaluation.accuracy import inexactness, local_metrics
from fedsynth.evaluation.generated import average, describe, tally
from fedsynth.models.flat import flatten
from fedsynth.models.small import Linear


def _scores(labels: list[int], classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(labels), classes).float() * 3 - 1


def test_tally_and_facts_of_a_batch() -> None:
    counts = tally(_scores([0, 0, 0, 1, 1, 3], 4), torch.tensor([0, 1, 0, 1, 3, 2]))
    assert counts.tolist() == [[3, 2, 0, 1], [2, 1, 0, 0]]
    facts = describe(counts)
    entropy = -(0.5 * math.log(0.5) + math.log(1 / 3) / 3 + math.log(1 / 6) / 6)
    assert facts["agreement"] == 0.5
    assert facts["class_entropy"] == pytest.approx(entropy)
    assert facts["class_entropy_share"] == pytest.approx(entropy / math.log(4))
    assert facts["classes"] == 3


def test_uniform_predictions_have_no_class_entropy() -> None:
    """Nearly uniform predictions have a mean of entropy log C, but all images have one class."""
    scores = torch.full((16, 10), 0.1)
    scores[:, 4] += 1e-3
    assert describe(tally(scores))["class_entropy"] == 0.0


def test_collapsed_generators_are_not_pooled() -> None:
    facts = [describe(tally(_scores([c] * 4, 3))) for c in range(3)]
    assert "agreement" not in facts[0]
    assert (average(facts)["class_entropy"], average(facts)["classes"]) == (0.0, 1.0)
    assert average([]) == {}


def test_student_agreement_is_relative_to_the_teacher() -> None:
    """Student and teacher agree on three of four images; the target class is ignored."""
    eye = torch.eye(3)
    facts = describe(tally(eye[[0, 1, 2, 2]], torch.tensor([1, 1, 1, 1]), eye[[0, 1, 2, 0]]))
    assert (facts["student"], facts["agreement"]) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("percent", "amp", "fm", "wlp"),
    [((60, 70, 80), 0.7, 0.00667, 0.6), ((65, 65, 80), 0.7, 0.005, 0.65)],
)
def test_local_metrics_equal_fedkf_table_2(
    percent: tuple[int, ...], amp: float, fm: float, wlp: float
) -> None:
    metrics = local_metrics(percent, tested=[100] * 3, sizes=[1, 1, 1])
    assert metrics is not None
    assert metrics["amp"] == pytest.approx(amp)
    assert metrics["fm"] == pytest.approx(fm, abs=5e-6)
    assert metrics["wlp"] == wlp


def test_clients_without_test_records_are_excluded() -> None:
    metrics = local_metrics(right=[2, 0, 1], tested=[3, 0, 2], sizes=[10, 5, 30])
    assert metrics["client_accuracy"] == [pytest.approx(2 / 3), None, 0.5]
    assert metrics["amp"] == pytest.approx((2 / 3 * 10 + 0.5 * 30) / 40)
    assert metrics["fm"] == pytest.approx(np.var([2 / 3, 0.5]))
    assert metrics["wlp"] == 0.5
    assert local_metrics(right=[0], tested=[0], sizes=[10]) is None


def test_inexactness_equals_numpy(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 1, 2, 2)), rng.integers(0, 3, 7)
    model, start = Linear((1, 2, 2), 3).to(device), Linear((1, 2, 2), 3).to(device)
    images = torch.tensor(x, dtype=torch.float32, device=device)
    labels = torch.tensor(y, device=device)

    def gradient(net: Linear) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        parameters = (net.classifier.weight, net.classifier.bias)
        W, b = (p.detach().cpu().double().numpy() for p in parameters)
        z = x.reshape(7, 4) @ W.T + b
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(3)[y]
        flat_gradient = np.concatenate([(p.T @ x.reshape(7, 4) / 7).ravel(), p.mean(0)])
        return flat_gradient, np.concatenate([W.ravel(), b])

    (local_gradient, w), (global_gradient, w_t) = gradient(model), gradient(start)
    expected = np.linalg.norm(local_gradient + 0.3 * (w - w_t)) / np.linalg.norm(global_gradient)
    weights = flatten(model)
    actual = inexactness(model, start.state_dict(), images, labels, mu=0.3)
    assert actual == pytest.approx(expected, rel=1e-4)
    assert torch.equal(flatten(model), weights)
    assert inexactness(start, start.state_dict(), images, labels, mu=0.3) == 1
