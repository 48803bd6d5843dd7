"""One method of each family for an engine's matrix; the others are slow tests.

A family is what an engine treats alike: plain averages, a memory at clients, models that stay there,
condensed sets, a first exchange, generators, distillation by the server, sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FAMILIES = (
    "fedavg", "scaffold", "solo", "feddm", "fedaf", "fedfm", "fedkf", "feddf", "fedstats",
)  # fmt: skip


def by_family(names: Iterable[str], quick: Iterable[str] = FAMILIES) -> list[Any]:
    """Parameters of a test, those that are not quick marked as slow."""
    some = set(quick)
    return [pytest.param(name, marks=[] if name in some else pytest.mark.slow) for name in names]
