"""Metrics of generated images and of clients' splits (AMP, FM, WLP: FedKF's Table II)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedsynth.evaluation.accuracy import local_metrics
from fedsynth.evaluation.generated import average, describe, tally


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
