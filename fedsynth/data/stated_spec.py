"""A data set's specification out of JSON or TOML, which may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedsynth.data.registry import DatasetSpec

_TUPLES = ("mean", "std", "class_names", "domains")


def spec_from_json(stated: Mapping[str, Any]) -> DatasetSpec:
    """A specification out of JSON or TOML.

    Raises:
        KeyError, TypeError, ValueError, SettingError: it is none.
    """
    names = {one.name for one in fields(DatasetSpec)}
    unknown = sorted(set(stated) - names)
    if unknown:
        raise ValueError(f"a data set's specification has no {unknown[0]!r:.80}")
    values: dict[str, Any] = {k: tuple(v) if k in _TUPLES else v for k, v in stated.items()}
    for one in fields(DatasetSpec):
        if one.type == "int" and one.name in values and type(values[one.name]) is not int:
            raise TypeError(f"{one.name} must be a whole number")
    return DatasetSpec(**values)
