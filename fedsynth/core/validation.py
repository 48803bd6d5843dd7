"""Settings as people give them: converted to their fields' types, and checked against their ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from fedsynth.errors import SettingError, unknown_name


def _whole(value: Any) -> int:
    """Whole numbers and text of them, exactly; 3.0 is one too, True is not."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def check_ranges(settings: Any, **ranges: tuple[float, float]) -> None:
    """Refuses a setting outside its closed range [least, most], not a number, or not whole where its field is an int.

    Raises:
        SettingError: names the setting, its range and what was given.
    """
    whole = {f.name for f in fields(settings) if f.type in (int, "int")}
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        if name in whole and type(value) is not int:
            raise SettingError(f"{name} must be a whole number, got {value!r}")
        if not least <= value <= most:
            allowed = (
                f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
            )
            raise SettingError(f"{name} must be {allowed}, got {value}")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuses an option value that does not exist, with the near matches."""
    if value not in known:
        raise unknown_name(name, value, known)


def check_embedding(method: str, model: nn.Module) -> None:
    """Refuses a network without `embed` and a linear `classifier`, which together make its logits."""
    if not (hasattr(model, "embed") and isinstance(getattr(model, "classifier", None), nn.Linear)):
        raise SettingError(
            f"{method} looks at embeddings and logits: the network needs `embed` and a linear `classifier`"
        )


def convert(name: str, value: Any, kind: type) -> Any:
    """`value` as `kind` (bool, int, float or str), or a SettingError that names the setting."""
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}[
                str(value).lower()
            ]
        converted = _whole(value) if kind is int else kind(value)
        if kind is float and not math.isfinite(converted):
            raise SettingError(f"{name} must be a finite number, got {value!r}")
        return converted
    except (ValueError, KeyError, OverflowError, TypeError):
        raise SettingError(f"{name} must be of type {kind.__name__}, got {value!r}") from None
