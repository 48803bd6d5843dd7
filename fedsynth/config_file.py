"""A run's config.toml, its sections of plain values: written, and read from anybody."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.privacy.files import read_text

Sections = dict[str, dict[str, Any]]


class ConfigFileError(FedsynthError):
    """A config file that cannot be read, or has values outside every section."""


def read_sections(path: Path) -> Sections:
    """The sections of a TOML file; what they say is not looked at.

    Raises:
        ConfigFileError: it cannot be read, is no regular file, or is no TOML of sections.
    """
    try:
        read = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigFileError(f"cannot read the config {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigFileError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigFileError(f"{path} is not valid TOML: {error}") from None
    loose = [name for name, values in read.items() if not isinstance(values, dict)]
    if loose:
        raise ConfigFileError(f"{path}: {loose[0]!r} stands outside every section")
    if _largest(list(read.values())) >= 2**63:
        raise ConfigFileError(f"{path} is not valid TOML: a whole number of more than 64 bits")
    return read


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of strings, numbers and booleans as TOML; what `tomllib` reads back is equal."""
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


def _largest(values: list[Any]) -> int:
    """The largest absolute value of the whole numbers in nested lists and tables."""
    largest = 0
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
        elif isinstance(value, int):
            largest = max(largest, abs(value))
    return largest
