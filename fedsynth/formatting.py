"""Formats figures and texts for privacy reports.

Figures are rounded up, never down, and texts are escaped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

EPSILON_DIGITS = 3
BANDS: tuple[tuple[float, str, str], ...] = (
    (1.0, "ε up to 1", "strong"),
    (10.0, "ε above 1, up to 10", "reasonable"),
    (math.inf, "ε above 10", "weak, or none"),
)
MAX_ODDS = 1e6
_MARKDOWN = re.compile(r"[\\`*<>|&~\[\]]|(?<![^\W_])_|_(?![^\W_])")
_BLOCK_START = re.compile(r"^(?:(\d+)(?=[.)](?:\s|$))|(?=[-+=#]+(?:\s|$)))")


def format_epsilon(value: float) -> str:
    """Formats ε with three significant digits, rounded up. Every printed ε has this format.

    >>> format_epsilon(8.941), format_epsilon(8.0), format_epsilon(0.0)
    ('8.95', '8', '0')
    """
    return format_rounded_up(value, EPSILON_DIGITS)


def format_rounded_up(value: float, digits: int) -> str:
    """Formats a value with `digits` significant digits, rounded up."""
    if value <= 0:
        return "0"
    if math.isinf(value):
        return "∞"
    value = max(value, 1e-290)  # below, the scale is infinite
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    # an exact decimal such as 10.99 must not be pushed up by its own rounding error
    rounded = math.ceil(value * scale * (1 - 1e-12)) / scale
    if 10 ** (digits - 1) <= rounded < 1e9:
        return f"{rounded:,.0f}"
    return f"{rounded:.{digits}g}"


def format_odds(epsilon: float) -> str:
    """Computes e^ε and formats it with three significant digits, rounded up.

    >>> format_odds(1.0), format_odds(8.0), format_odds(20.0)
    ('2.72', '2,990', 'more than 1,000,000')
    """
    if epsilon > math.log(MAX_ODDS):
        return f"more than {MAX_ODDS:,.0f}"
    return format_rounded_up(math.exp(epsilon), 3)


def format_percent(share: float) -> str:
    """Formats a fraction as a percentage with two decimals, rounded up.

    A fraction below 1 is never printed as 100.
    """
    percent = 100 * share
    rounded = math.ceil(percent * 100 * (1 - 1e-12)) / 100
    return "99.99…" if rounded >= 100 > percent else f"{rounded:.2f}"


def format_rounds(rounds: Sequence[int]) -> str:
    """Formats a list of rounds as ranges, such as '0–2, 5'.

    Repeated rounds are listed again at the end.

    >>> format_rounds([0, 1, 2, 5, 5])
    '0–2, 5; charged more than once: 5'
    """
    counts = Counter(rounds)
    parts = []
    start = 0
    for number in sorted(counts):
        if number - 1 not in counts:
            start = number
        if number + 1 not in counts:
            parts.append(f"{start}–{number}" if start < number else f"{number}")
    text = ", ".join(parts)
    repeated = [str(number) for number in sorted(counts) if counts[number] > 1]
    if repeated:
        text += f"; charged more than once: {', '.join(repeated)}"
    return text


def band(epsilon: float) -> str:
    """Rates a guarantee with the given ε in words, such as 'strong'.

    >>> band(0.5), band(8.0), band(30.0)
    ('strong', 'reasonable', 'weak, or none')
    """
    return next(label for limit, _, label in BANDS if epsilon <= limit)


def printable(text: str) -> str:
    """Converts a text to one printable line."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def as_markdown(value: Any) -> Any:
    """Escapes all texts in a report for Markdown. Reports are untrusted input.

    Each text also becomes one line without unprintable characters.
    """
    if isinstance(value, str):
        text = _MARKDOWN.sub(lambda match: "\\" + match[0], printable(value))
        return _BLOCK_START.sub(r"\1\\", text)
    if isinstance(value, Mapping):
        return {as_markdown(key): as_markdown(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(as_markdown, value))
    return value
