"""Converts setting values to their declared types, and checks their ranges.

Settings are fields of dataclasses. The class attribute `section` names the settings' section in a
config file. Error messages name the section and the setting.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields
from numbers import Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fedsynth.errors import FedsynthError, SettingError, short_repr, unknown_name, unknown_value
from fedsynth.files import expand_home, load_toml
from fedsynth.privacy.settings import make_floats

T = TypeVar("T")

_TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
LARGEST = 2**63 - 1  # largest integer that TOML, NumPy and PyTorch can hold
MAX_PRINTED_BOUND = 10_000  # a range that ends here or later has only one bound worth printing
LARGEST_FLOAT = 3e38  # bound on other numbers: the largest that fp32 can hold
MAX_SECONDS = 10**8  # Longest duration, three years: system timers cannot hold the largest floats
_EXPECTED = {
    **{bool: "true or false", int: "a whole number", float: "a number", str: "text"},
    Path: "the path of a file or folder",
}


class Faults:
    """Collects errors about several settings, to report them together.

    The first error is raised. Its notes (`BaseException.__notes__`) contain the other messages.

    >>> faults = Faults()
    >>> for key in ("rounds", "clients"):
    ...     with faults.collected():
    ...         check_number("run", key, 0, 1, 10)
    >>> str(faults.errors[1])
    'run.clients must be between 1 and 10, got 0'
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collects an error raised in the `with` block."""
        try:
            yield
        except FedsynthError as error:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raises the first error, with notes on the others. Does nothing if there is no error."""
        if not self.errors:
            return
        first = self.errors[0]
        for error in self.errors[1:]:
            for text in (str(error), *getattr(error, "__notes__", ())):
                first.add_note(text)
        raise first


def section_of(settings: Any) -> str | None:
    """Returns the config-file section of a settings object or class.

    Returns None if config files do not contain its settings.
    """
    return getattr(settings, "section", None)


def in_range(default: float, low: float, high: float = math.inf) -> Any:
    """Declares a setting with a default value and a range, which `check_fields` enforces."""
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: str, *alternatives: str) -> Any:
    """Declares a setting with a list of allowed values, which `check_fields` enforces.

    The first value is the default.
    """
    return field(default=default, metadata={"choices": (default, *alternatives)})


def check_fields(settings: Any) -> None:
    """Checks a settings object's values against its `in_range` and `one_of` declarations.

    If a subclass overrides only a field's default value, the base class's range applies. Whole
    numbers in fields of type float become floats.

    Raises:
        SettingError: a value is outside its range.
        UnknownNameError: a value is not one of its choices.
    """
    declared: dict[str, Mapping[str, Any]] = {}
    for cls in reversed(type(settings).__mro__):
        for name, declaration in getattr(cls, "__dataclass_fields__", {}).items():
            if declaration.metadata:
                declared[name] = declaration.metadata
    integers = {f.name for f in fields(settings) if f.type in (int, "int")}
    section = section_of(settings)
    faults = Faults()
    for name, metadata in declared.items():
        value = getattr(settings, name)
        with faults.collected():
            if "range" in metadata:
                check_number(section, name, value, *metadata["range"], integer=name in integers)
            if "choices" in metadata:
                check_choice(section, name, value, metadata["choices"])
    faults.raise_all()
    make_floats(settings)


def check_number(
    section: str | None, key: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
    """Checks that a setting's value is a number within a range, limits included.

    Args:
        section, key: the setting, see `SettingError`.
        value: the value of the setting.
        low, high: the smallest and largest allowed value. Values above `LARGEST` (whole numbers) or
            `LARGEST_FLOAT` (other numbers) are never allowed.
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


def check_choice(section: str | None, key: str, value: str, allowed: Sequence[str]) -> None:
    """Checks that a setting's value is one of the allowed values.

    Args:
        section, key: the setting, see `SettingError`.
        value: the value of the setting.
        allowed: the values that the setting may have.

    Raises:
        UnknownNameError: the value is not allowed. The message suggests similar values.
    """
    if value not in allowed:
        raise unknown_value(section, key, value, allowed)


def from_mapping(cls: type[T], values: Mapping[str, Any], of: str = "") -> T:
    """Creates a settings object from values read from TOML or given as text.

    The values are converted to the settings' types.

    Args:
        cls: the settings dataclass. Each field's type is bool, int, float or str, or one of them or
            None.
        values: the values by name. A setting without a value gets its default value.
        of: what the settings belong to, named in the error about an unknown setting. By default,
            the section.

    Raises:
        UnknownNameError: no setting has one of the names. The message suggests similar names.
        SettingError: a value has the wrong type or is outside its range.
    """
    section = section_of(cls)
    return cls(**converted(section, values, field_types(cls), of or str(section)))


def field_types(cls: Any) -> dict[str, type]:
    """Returns a dataclass's field types. For the types `X | None` and `X | Y`, the result is X."""
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
    """Converts setting values to the types in `types`.

    Raises the errors of `from_mapping`. For an unknown name, the error also suggests `also`, the
    setting names that the caller has removed from `values`.
    """
    result = {}
    faults = Faults()
    for key, value in values.items():
        with faults.collected():
            if key not in types:
                raise unknown_name(f"setting of {of}", key, [*also, *types], section, key)
            result[key] = convert(section, key, value, types[key])
    faults.raise_all()
    return result


def convert(section: str | None, key: str, value: Any, kind: type) -> Any:
    """Converts a setting's value to bool, int, float, str or Path.

    A leading `~` in a path is replaced by the home folder.

    Raises:
        SettingError: the value cannot be converted, is not finite, or is larger than `LARGEST` (for
            int) or `LARGEST_FLOAT` (for float).
    """
    try:
        if kind is bool:
            return _TRUTH[str(value).lower()]
        if kind is Path:
            return _path(value)
        accepted = (str, PathLike) if kind is str else (bool, int, float, str, PathLike)
        if not isinstance(value, accepted):
            raise TypeError
        if isinstance(value, str) and kind is not str and not value.isascii():
            raise ValueError  # Python would accept the digits of any script
        if kind is int and isinstance(value, bool):
            raise ValueError
        converted = kind(value)
        if kind is int and isinstance(value, float) and converted != value:
            raise ValueError  # 3.0 is accepted, 3.5 is not
    except (ValueError, KeyError, OverflowError, TypeError, FileNotFoundError):
        expected = _EXPECTED.get(kind, f"of type {kind.__name__}")
        raise SettingError(section, key, f"must be {expected}, got {short_repr(value)}") from None
    limit = {int: LARGEST, float: LARGEST_FLOAT}.get(kind)
    if limit is not None and not abs(converted) <= limit:  # also true for NaN
        raise SettingError(
            section, key, f"must be a finite number up to ±{limit:g}, got {short_repr(value)}"
        )
    return converted


def _path(value: Any) -> Path:
    """Converts a setting's text to a path.

    Raises:
        TypeError, ValueError: the value is not the path of a file.
        FileNotFoundError: the path starts with `~` and an unknown user.
    """
    text = os.fspath(value)
    text.encode()  # as for the run folder's config.toml
    if not text or "\0" in text:
        raise ValueError
    return expand_home(text)


Sections = dict[str, dict[str, Any]]


class ConfigFileError(FedsynthError, code="files.config"):
    """Raised for a config file that cannot be read or has values outside of sections."""


def read_sections(path: Path) -> Sections:
    """Reads a TOML file's sections, without checking their values.

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
            raise ConfigFileError(
                f"{name!r} in {path} is outside of all sections. Move it under a heading such as "
                "[run]"
            )
    return sections


def flattened(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the settings of all sections, with keys such as "run.rounds".

    >>> flattened({"run": {"rounds": 2}, "model": {"width": 32}})
    {'run.rounds': 2, 'model.width': 32}
    """
    settings = {}
    for section, values in sections.items():
        for key, value in values.items():
            settings[f"{section}.{key}"] = value
    return settings


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats settings as TOML text. `tomllib` reads the same values from the text.

    Values are strings, numbers and booleans.
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
