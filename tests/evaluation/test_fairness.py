"""AMP, FM and WLP: FedKF's worked example (Table II), and a model on clients' own splits."""

from __future__ import annotations

import numpy as np
import pytest

from fedsynth.evaluation.fairness import (
    average_model_performance,
    fairness_metric,
    first_to_reach,
    local_metrics,
    worst_local_performance,
)


@pytest.mark.parametrize(
    ("accuracies", "amp", "fm", "wlp"),
    [
        ([0.6, 0.7, 0.8], 0.7, 0.00667, 0.6),
        ([0.65, 0.65, 0.8], 0.7, 0.005, 0.65),
    ],
)
def test_table_2_of_fedkf(accuracies: list[float], amp: float, fm: float, wlp: float) -> None:
    assert average_model_performance(accuracies, [1, 1, 1]) == pytest.approx(amp)
    assert fairness_metric(accuracies) == pytest.approx(fm, abs=5e-6)
    assert worst_local_performance(accuracies) == wlp


def test_local_metrics_by_hand() -> None:
    """Client 1 has no test split: it counts nowhere."""
    found = local_metrics(right=[2, 0, 1], tested=[3, 0, 2], sizes=[10, 5, 30])
    assert found["client_accuracy"] == [pytest.approx(2 / 3), None, 0.5]
    assert found["amp"] == pytest.approx((2 / 3 * 10 + 0.5 * 30) / 40)
    assert found["fm"] == pytest.approx(np.var([2 / 3, 0.5]))
    assert found["wlp"] == 0.5


def test_first_to_reach() -> None:
    rows = [
        {"round": r, "seconds": 2.0, "test_accuracy": a, "local": {"amp": a / 2}}
        for r, a in ((1, 0.2), (2, 0.6), (3, 0.5))
    ]
    assert first_to_reach(0.5, rows) == {"round": 2, "seconds": 4.0}
    assert first_to_reach(0.3, rows, "local.amp") == {"round": 2, "seconds": 4.0}
    assert first_to_reach(0.7, rows) is None
    assert first_to_reach(0.1, rows, "models.oca.local.amp") is None
