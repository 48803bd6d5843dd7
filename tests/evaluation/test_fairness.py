"""AMP, FM and WLP: FedKF's worked example (Table II), and clients without a test split."""

from __future__ import annotations

import numpy as np
import pytest

from fedsynth.evaluation.accuracy import local_metrics


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
