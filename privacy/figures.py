"""How figures and texts of a report are printed: never smaller than computed, and on one line."""

from __future__ import annotations

import math


def up(value: float, digits: int = 4) -> str:
    """`value` rounded up to `digits` significant digits: what is printed is never smaller than what
    was computed."""
    if value <= 0:
        return "0"
    if math.isinf(value):
        return "∞"
    value = max(value, 1e-290)  # below, the scale is infinite
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    # an exact decimal such as 10.99 must not be pushed up by its own rounding error
    rounded = math.ceil(value * scale * (1 - 1e-12)) / scale
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:.{digits}g}"


def printable(text: str) -> str:
    """`text` on one line, without characters that steer a terminal or a page: a report may come
    from anybody."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
