"""Validation of settings: converts values to their fields' types and checks their ranges.

The attribute `section` of a settings class is the section of the config file. Error messages name
the section and the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from numbers import Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

from fedsynth.errors import FedsynthError, SettingError, unknown_name, unknown_value
from fedsynth.privacy.errors import short_repr
from fedsynth.privacy.files import load_toml

T = TypeVar("T")

_TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
LARGEST = 2**63 - 1  # largest integer that TOML, NumPy and PyTorch can hold
MAX_PRINTED_BOUND = 10_000  # a range that ends here or later has only one bound worth printing
LARGEST_FLOAT = 3e38  # bound on other numbers: the largest that fp32 can hold
MAX_SECONDS = 10**8  # Longest duration, three years: system timers cannot hold the largest floats
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def section_of(settings: Any) -> str | None:
    """Returns the config file section of a settings object or class, or None without a section."""
    return getattr(settings, "section", None)


def in_range(default: float, low: float, high: float = math.inf) -> Any:
    """Declares a field of settings with a default and a closed range. `check_fields` checks it."""
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: str, *alternatives: str) -> Any:
    """Declares a field of settings with choices, the first being the default. `check_fields` checks
    it."""
    return field(default=default, metadata={"choices": (default, *alternatives)})


def check_fields(settings: Any) -> None:
    """Refuses values outside the ranges and choices that `in_range` and `one_of` declare.

    A subclass that overrides only a default inherits the range of its base class.

    Raises:
        SettingError: a value is outside its range.
        UnknownNameError: a value is not one of its choices.
    """
    declared: dict[str, Mapping[str, Any]] = {}
    for cls in reversed(type(settings).__mro__):
        for name, declaration in getattr(cls, "__dataclass_fields__", {}).items():
            if declaration.metadata:
                declared[name] = declaration.metadata
    for name, metadata in declared.items():
        if "range" in metadata:
            check_ranges(settings, **{name: metadata["range"]})
        if "choices" in metadata:
            check_choices(settings, **{name: metadata["choices"]})


def check_ranges(settings: Any, **ranges: tuple[float, float]) -> None:
    """Raises an error if a setting is not a number, or is outside its closed range.

    Fields of type int must be whole numbers.

    Args:
        settings: a dataclass.
        ranges: the smallest and the largest value for each field.

    Raises:
        SettingError: a value is not valid. The message names the setting and its range.
    """
    integers = {f.name for f in fields(settings) if f.type in (int, "int")}
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        check_number(section_of(settings), name, value, low, high, integer=name in integers)


def check_number(
    section: str | None, key: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
    """Raises an error if a value is not a number, or is outside a closed range.

    Args:
        section, key: the setting, see `SettingError`.
        value: the value of the setting.
        low, high: the range. It ends at the latest at `LARGEST` for whole numbers, and at
            `LARGEST_FLOAT` for other numbers.
        integer: whether the value must be a whole number.

    Raises:
        SettingError: the value is not valid. The message names the setting and its range.
    """
    if integer and type(value) is not int:
        raise SettingError(section, key, f"must be a whole number, got {short_repr(value)}")
    numeric = isinstance(value, Real) and not isinstance(value, bool)
    if not numeric:
        raise SettingError(section, key, f"must be a number, got {short_repr(value)}")
    if not -math.inf < value < math.inf:  # a whole number may be too large for `isfinite`
        raise SettingError(section, key, f"must be a finite number, got {short_repr(value)}")
    high = min(high, {True: LARGEST, False: LARGEST_FLOAT}[integer])
    if low <= value <= high:
        return
    allowed = f"between {low:g} and {high:g}"
    if high >= MAX_PRINTED_BOUND and value < low:
        allowed = f"at least {low:g}"
    elif high >= MAX_PRINTED_BOUND:
        allowed = f"at most {high:g}"
    raise SettingError(section, key, f"must be {allowed}, got {short_repr(value)}")


def check_choices(settings: Any, **choices: Sequence[str]) -> None:
    """Refuses a setting whose value is not among its choices.

    Args:
        settings: a dataclass.
        choices: field: its possible values.

    Raises:
        UnknownNameError: names the setting and the near matches.
    """
    for name, allowed in choices.items():
        check_choice(section_of(settings), name, getattr(settings, name), allowed)


def check_choice(section: str | None, key: str, value: str, allowed: Sequence[str]) -> None:
    """Refuses a value that is not among the known ones, with the near matches.

    Args:
        section, key: the setting, see `SettingError`.
        value: what was given.
        allowed: the possible values.

    Raises:
        UnknownNameError: names the setting and the near matches.
    """
    if value not in allowed:
        raise unknown_value(section, key, value, allowed)


def check_embedding(method: str, model: nn.Module) -> None:
    """Raises an error if a network has no `embed` or no linear `classifier`.

    Raises:
        SettingError: the network lacks one of them.
    """
    if not (hasattr(model, "embed") and isinstance(getattr(model, "classifier", None), nn.Linear)):
        reason = (
            f"must be a network with `embed` and a linear `classifier`, because {method} uses "
            "embeddings. A custom model needs embed(x), which returns [N, embedding_size], and "
            "classifier = nn.Linear(embedding_size, classes)"
        )
        raise SettingError("model", "name", reason)


def from_mapping(cls: type[T], values: Mapping[str, Any], of: str = "") -> T:
    """Returns an instance of a settings dataclass from names and values read from TOML or text.

    Args:
        cls: a dataclass whose fields are bool, int, float or str, or one of these or None.
        values: field: value; omitted fields have their defaults.
        of: owner of the settings in the error for an unknown one; default: the section.

    Raises:
        UnknownNameError: no such setting (with the near matches).
        SettingError: a value of the wrong type or outside its range.
    """
    section = section_of(cls)
    return cls(**converted(section, values, field_types(cls), of or str(section)))


def field_types(cls: Any) -> dict[str, type]:
    """Returns the type of each field of a dataclass. For `X | None` and `X | Y`, this is X."""
    try:
        hints = get_type_hints(cls)
    except NameError:  # an annotation is only for type checkers: use the types of the defaults
        hints = {}
    return {f.name: _first_type(hints.get(f.name, type(f.default))) for f in fields(cls)}


def _first_type(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        hint = get_args(hint)[0]
    return hint


def converted(
    section: str | None,
    values: Mapping[str, Any],
    types: Mapping[str, type],
    of: str,
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """Converts `values` to their `types`.

    The errors are those of `from_mapping`. The error for an unknown name also suggests the names in
    `also`, which are known settings that were already removed from `values`.
    """
    result = {}
    for key, value in values.items():
        if key not in types:
            raise unknown_name(f"setting of {of}", key, [*also, *types], section, key)
        result[key] = convert(section, key, value, types[key])
    return result


def convert(section: str | None, key: str, value: Any, kind: type) -> Any:
    """Converts `value` to `kind`, which is bool, int, float or str.

    Raises:
        SettingError: the value cannot be converted, is not finite, or is larger than `LARGEST` (for
            int) or `LARGEST_FLOAT` (for float).
    """
    try:
        if kind is bool:
            return _TRUTH[str(value).lower()]
        if not isinstance(value, (bool, int, float, str, PathLike)):
            raise TypeError
        if isinstance(value, str) and kind is not str and not value.isascii():
            raise ValueError  # Python would accept the digits of any script
        if kind is int and isinstance(value, bool):
            raise ValueError
        converted = kind(value)
        if kind is int and isinstance(value, float) and converted != value:
            raise ValueError  # 3.0 is accepted, 3.5 is not
    except (ValueError, KeyError, OverflowError, TypeError):
        expected = _EXPECTED.get(kind, f"of type {kind.__name__}")
        raise SettingError(section, key, f"must be {expected}, got {short_repr(value)}") from None
    limit = {int: LARGEST, float: LARGEST_FLOAT}.get(kind)
    if limit is not None and not abs(converted) <= limit:  # also true for NaN
        raise SettingError(
            section, key, f"must be a finite number up to ±{limit:g}, got {short_repr(value)}"
        )
    return converted


Sections = dict[str, dict[str, Any]]


class ConfigFileError(FedsynthError):
    """A config file that cannot be read, or has values outside all sections."""


def read_sections(path: Path) -> Sections:
    """Returns the sections of a TOML file, without checking their values.

    Raises:
        ConfigFileError: the file cannot be read, is not a regular file, or is not TOML with
            sections.
    """
    try:
        sections = load_toml(path)
    except OSError as error:
        raise ConfigFileError(f"cannot read the config file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigFileError(f"{path} is not valid TOML: {error}") from None
    for name, values in sections.items():
        if not isinstance(values, dict):
            raise ConfigFileError(f"{name!r} in {path} must be in a section such as [run]")
    return sections


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats sections of strings, numbers and booleans as TOML.

    `tomllib` reads the same values from the text.
    """
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        for key, value in values.items():
            if isinstance(value, bool):
                text = str(value).lower()
            elif isinstance(value, str):
                text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            else:
                text = repr(value)
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)
