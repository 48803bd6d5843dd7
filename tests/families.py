"""One method of each family for tests of an engine; tests of the other methods are slow.

An engine treats the methods of a family equally: plain averages, memories of clients, personal
models, condensed sets, a first exchange, generators, distillation by the server, sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FAMILIES = (
    "fedavg", "scaffold", "solo", "feddm", "fedaf", "fedfm", "fedkf", "feddf", "fedstats",
)  # fmt: skip


def by_family(names: Iterable[str], quick: Iterable[str] = FAMILIES) -> list[Any]:
    """Returns the parameters of a test; all but the quick ones are marked as slow."""
    quick_names = set(quick)
    return [
        pytest.param(name, marks=[] if name in quick_names else pytest.mark.slow) for name in names
    ]
