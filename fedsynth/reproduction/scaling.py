"""A cell with a part of its work, to see that it runs: never a result.

Scaled by s in (0, 1): rounds, and every length of a method (settings that count epochs, steps or
iterations), are s times as many, at least 1 and 2, and what begins in a later round begins s times
as early; s of each class's examples are used, but not fewer than 50 a client on average, of the
published size; the fewest examples of a client, and of a class that is condensed, shrink alike.
Networks, batches, rates, images per class, clients and the test set stay as they are. So s = 0.05
is some hundredth to ten-thousandth of the work, as rounds, epochs and data multiply.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.federation.terms.settings import RunSettings

EXAMPLES = 50
"""Of a client, on average, that scaling leaves."""
LENGTHS = ("epochs", "steps", "iterations")


def scaled(settings: RunSettings, scale: float | None) -> dict[str, dict[str, Any]]:
    """Sections of settings that differ from the run's; none for None.

    Args:
        settings: of the whole run.
        scale: s.

    Raises:
        SettingError: s is not in (0, 1).
    """
    if scale is None:
        return {}
    if not 0 < scale < 1:
        raise SettingError(None, "scale", f"must be above 0 and below 1, got {scale}")
    partition = settings.partition
    spec = dataset_spec(settings.dataset)
    least = min(1.0, EXAMPLES * partition.clients / spec.train_size)
    return {
        "run": {"rounds": _part(settings.rounds, scale, 1)},
        "partition": {
            "subset": min(partition.subset, max(scale * partition.subset, least)),
            "min_size": _part(partition.min_size, scale, 1),
        },
        "method": _shorter(settings, scale),
    }


def _shorter(settings: RunSettings, scale: float) -> dict[str, int]:
    method = settings.method
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    least = {name: 2 for name in values if name.rpartition("_")[2] in LENGTHS}
    least.update(min_examples=1, start_round=1)
    return {
        name: _part(values[name], scale, fewest)
        for name, fewest in least.items()
        if type(values.get(name)) is int
    }


def _part(number: int, scale: float, least: int) -> int:
    return min(number, max(least, round(scale * number)))


def scale_words(scale: float | None) -> str:
    """What every line of a scaled run's output begins with; empty for a whole run."""
    return "" if scale is None else f"SCALED to {scale:g}: "


NO_RESULT = "a part of the work, to see that it runs: no result of the published setting"
"""What a scaled run is."""
