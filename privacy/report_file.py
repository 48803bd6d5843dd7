"""Reads a privacy report, and other JSON files of a run folder, which may come from anybody."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import decode_json, read_text
from fedsynth.privacy.report_figures import SCHEMA_VERSION, schema_problems

HOSTILE = (
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    IndexError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What values that nobody foresaw may raise in code that is written for sound ones."""
SHORT = reprlib.Repr()
"""Shows a value of such a file in the text of a problem."""
SHORT.maxstring = SHORT.maxother = 120


def read_report(path: Path) -> dict[str, Any]:
    """The JSON report of a run folder, or from its own path; only its version is looked at.

    Raises:
        PrivacyError: there is none, or it is of another schema.
    """
    file = path / "privacy_report.json" if path.is_dir() else path
    report = read_json(file, "privacy report")
    version = report.get("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        raise PrivacyError(
            f"{file} has report schema {SHORT.repr(version)}, and this fedsynth reads "
            f"{SCHEMA_VERSION}"
        )
    return report


def sound_report(path: Path) -> dict[str, Any]:
    """A report whose shape is right, so that it can be rendered; whether what it says is true is
    another matter.

    Raises:
        PrivacyError: there is none, or it is damaged.
    """
    report = read_report(path)
    problems = schema_problems(report)
    if problems:
        raise PrivacyError(f"the report at {path} is damaged: {'; '.join(problems)}")
    return report


def read_json(file: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file that may come from anybody.

    Args:
        what: the file's kind, for errors.

    Raises:
        PrivacyError: it cannot be read, or is no such object.
    """
    try:
        text = read_text(file)
    except OSError as error:
        raise PrivacyError(f"cannot read a {what} at {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PrivacyError(f"{file} is not a {what}: it is not UTF-8") from None
    return parse_json(text, f"{file} is not a {what}")


def parse_json(text: str, complaint: str) -> dict[str, Any]:
    """A JSON object without NaN, infinities, a key twice, or half a character.

    Raises:
        PrivacyError: it is none; begins with `complaint`.
    """
    try:
        value = decode_json(text)
    except (ValueError, MemoryError) as error:
        raise PrivacyError(f"{complaint}: {error}") from None
    if not isinstance(value, dict):
        raise PrivacyError(f"{complaint}: it is no JSON object")
    return value
