"""A reproduced number beside the published one: within, above or below.

Within is |m − p| ≤ 2·√(s_m² + s_p²), m and p the means, s_m and s_p the standard deviations of
runs: whether a run of ours and one of theirs may come from one spread. The deviations are those of
runs and not of means: authors and we draw other partitions and start points, of which a few seeds
say little. A deviation that is not known (a paper that prints none, a single seed here) is taken to
be the other's; without either there is a difference, and no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WITHIN, ABOVE, BELOW, NONE = "within", "above", "below", "no verdict"
FACTOR = 2.0


@dataclass(frozen=True)
class Compared:
    """A published number and what came out here.

    Args:
        published: the number; None: the paper has a figure and prints none.
        published_std: its standard deviation; None: not known.
        values: of each seed.
    """

    published: float | None
    published_std: float | None
    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Of the seeds; None without any."""
        return statistics.mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation over seeds; None: fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def verdict(self) -> str:
        """`WITHIN`, `ABOVE`, `BELOW` or `NONE`; above and below say which number is larger, not
        which is better."""
        return verdict(self.published, self.published_std, self.values)


def verdict(published: float | None, published_std: float | None, values: Sequence[float]) -> str:
    """See the module.

    >>> verdict(70.0, 0.3, [69.6, 70.2]), verdict(70.0, 0.3, [60.1, 60.3])
    ('within', 'below')
    >>> verdict(70.0, None, [71.0])  # one seed, and no published deviation
    'no verdict'
    """
    own = statistics.stdev(values) if len(values) > 1 else None
    known = [std for std in (published_std, own) if std is not None]
    if published is None or not values or not known:
        return NONE
    theirs = known[0] if published_std is None else published_std
    ours = known[-1] if own is None else own
    apart = statistics.mean(values) - published
    if abs(apart) <= FACTOR * math.hypot(theirs, ours):
        return WITHIN
    return ABOVE if apart > 0 else BELOW
