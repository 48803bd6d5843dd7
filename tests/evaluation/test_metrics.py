"""What is measured of generated images, of clients' own splits (AMP, FM and WLP: FedKF's worked
example, Table II), and γ-inexactness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedsynth.evaluation.accuracy import inexactness, local_metrics
from fedsynth.evaluation.generated import average, describe, tally
from fedsynth.models.flat import flatten
from fedsynth.models.small import Linear


def _scores(given: list[int], classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(given), classes).float() * 3 - 1


def test_facts_of_a_batch_by_hand() -> None:
    made = tally(_scores([0, 0, 0, 1, 1, 3], 4), torch.tensor([0, 1, 0, 1, 3, 2]))
    assert made.tolist() == [[3, 2, 0, 1], [2, 1, 0, 0]]
    facts = describe(made)
    entropy = -(0.5 * math.log(0.5) + math.log(1 / 3) / 3 + math.log(1 / 6) / 6)
    assert facts["agreement"] == 0.5
    assert facts["class_entropy"] == pytest.approx(entropy)
    assert facts["class_entropy_share"] == pytest.approx(entropy / math.log(4))
    assert facts["classes"] == 3


def test_undecided_images_are_not_diverse() -> None:
    """Every image's prediction is nearly uniform: the mean prediction's entropy is log C, but all
    images are the same class."""
    scores = torch.full((16, 10), 0.1)
    scores[:, 4] += 1e-3
    assert describe(tally(scores))["class_entropy"] == 0.0


def test_collapsed_generators_are_not_pooled() -> None:
    each = [describe(tally(_scores([c] * 4, 3))) for c in range(3)]
    assert "agreement" not in each[0]
    assert (average(each)["class_entropy"], average(each)["classes"]) == (0.0, 1.0)
    assert average([]) == {}


def test_the_student_s_share_is_of_the_teacher_s_answers() -> None:
    """Four images, three on which both say the same; what was asked does not matter."""
    eye = torch.eye(3)
    found = describe(tally(eye[[0, 1, 2, 2]], torch.tensor([1, 1, 1, 1]), eye[[0, 1, 2, 0]]))
    assert (found["student"], found["agreement"]) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("percent", "amp", "fm", "wlp"),
    [((60, 70, 80), 0.7, 0.00667, 0.6), ((65, 65, 80), 0.7, 0.005, 0.65)],
)
def test_table_2_of_fedkf(percent: tuple[int, ...], amp: float, fm: float, wlp: float) -> None:
    found = local_metrics(percent, tested=[100] * 3, sizes=[1, 1, 1])
    assert found is not None
    assert found["amp"] == pytest.approx(amp)
    assert found["fm"] == pytest.approx(fm, abs=5e-6)
    assert found["wlp"] == wlp


def test_clients_without_test_records_do_not_count() -> None:
    found = local_metrics(right=[2, 0, 1], tested=[3, 0, 2], sizes=[10, 5, 30])
    assert found["client_accuracy"] == [pytest.approx(2 / 3), None, 0.5]
    assert found["amp"] == pytest.approx((2 / 3 * 10 + 0.5 * 30) / 40)
    assert found["fm"] == pytest.approx(np.var([2 / 3, 0.5]))
    assert found["wlp"] == 0.5
    assert local_metrics(right=[0], tested=[0], sizes=[10]) is None


def test_gamma_equals_numpy_and_leaves_the_model(device: torch.device) -> None:
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
        moved = np.concatenate([(p.T @ x.reshape(7, 4) / 7).ravel(), p.mean(0)])
        return moved, np.concatenate([W.ravel(), b])

    (after, w), (before, w_t) = gradient(model), gradient(start)
    expected = np.linalg.norm(after + 0.3 * (w - w_t)) / np.linalg.norm(before)
    kept = flatten(model)
    actual = inexactness(model, start.state_dict(), images, labels, mu=0.3)
    assert actual == pytest.approx(expected, rel=1e-4)
    assert torch.equal(flatten(model), kept)
    assert inexactness(start, start.state_dict(), images, labels, mu=0.3) == 1
