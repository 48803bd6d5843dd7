"""Reads and writes the config.toml of a run, which has sections of plain values.

The files that are read are untrusted input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.privacy.files import load_toml

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
        raise ConfigFileError(f"cannot read the config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigFileError(f"{path} is not valid TOML: {error}") from None
    for name, values in sections.items():
        if not isinstance(values, dict):
            raise ConfigFileError(f"{path}: {name!r} must be in a section such as [run]")
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
