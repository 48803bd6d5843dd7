"""Named errors. Each carries one clear line that says what was wrong and what would be right.

The command line prints that line and exits with code 2; the library raises it. Privacy errors live with the mechanisms, in
`fedsynth.privacy.errors`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedsynthError(Exception):
    """Base of everything that a user can get wrong; `str(error)` is one line."""


class UnknownNameError(FedsynthError):
    """A method, data set, model or option value that does not exist."""


class SettingError(FedsynthError):
    """A setting outside its range, or two settings that contradict each other."""


class DataError(FedsynthError):
    """Images or labels that cannot be used: wrong shape or type, NaN, a class nobody has."""


class DataFilesMissingError(DataError):
    """The data set's files are not where they were looked for."""


class DataFilesCorruptError(DataError):
    """The data set's files are there but cannot be read as what they claim to be."""


class PartitionError(FedsynthError):
    """A partition that cannot be made: more clients than examples, say."""


class DivergedError(FedsynthError):
    """An optimisation left the finite numbers."""


class OutputError(FedsynthError):
    """The run folder cannot be written."""


class MessageError(FedsynthError):
    """A message that cannot be sent, or bytes that are not the message that was expected."""


class DeviceError(FedsynthError):
    """The device that was asked for is not there."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not in `known`, with the near matches (or, without any, all of them)."""
    names = sorted(known)
    near = difflib.get_close_matches(given.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return UnknownNameError(f"unknown {kind} {given!r}; {hint}")
