"""Named errors. Each carries one clear line that says what was wrong and what would be right.

The command line prints that line and exits with code 2; the library raises it. Privacy errors live
with the mechanisms, in `fedsynth.privacy.errors`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from fedsynth.privacy.errors import NamedSettingError, setting_name, shown


class FedsynthError(Exception):
    """Base of everything that a user can get wrong; `str(error)` is one line."""


class UnknownNameError(FedsynthError):
    """A method, data set, model or setting's value that does not exist.

    Args:
        text: one line, with what would be right.
        section, key: the setting that has this value, where it is one's.
    """

    def __init__(self, text: str, section: str | None = None, key: str | None = None) -> None:
        self.section = section
        self.key = key
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.section, self.key)


class SettingError(NamedSettingError, FedsynthError):
    """A setting outside its range, or two settings that contradict each other.

    Args:
        section: of a config file ("run", "data", "partition", "model", "method", "privacy"); None
            for an argument of a function or class that no config file has.
        key: the setting's name there.
        reason: the rest of the sentence that begins with the setting.
        value: the setting's value, where the sentence is about this value.

    >>> str(SettingError("method", "ipc", "must be at least 1, got 0"))
    'method.ipc must be at least 1, got 0'
    """


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


class CheckpointError(FedsynthError):
    """A run that cannot be resumed: its checkpoint is damaged, of other settings or other data."""


class MessageError(FedsynthError):
    """A message that cannot be sent, or bytes that are not the message that was expected."""


class UploadRejectedError(FedsynthError):
    """An upload that is not what its method's clients may send.

    Args:
        field: of the message, or the tensor in it.
        reason: the rest of the sentence that begins with the field.
        diverged: whether training that leaves the finite numbers looks like this, too.
    """

    def __init__(self, field: str, reason: str, *, diverged: bool = False) -> None:
        self.field = field
        self.reason = reason
        self.diverged = diverged
        super().__init__(f"{field:.200} {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rejected, (self.field, self.reason, self.diverged)


def _rejected(field: str, reason: str, diverged: bool) -> UploadRejectedError:
    return UploadRejectedError(field, reason, diverged=diverged)


class DeviceError(FedsynthError):
    """The device that was asked for is not there."""


class DeviceMemoryError(FedsynthError):
    """The device's memory does not hold one client's step."""


def unknown_name(
    kind: str, given: str, known: Iterable[str], section: str | None = None, key: str | None = None
) -> UnknownNameError:
    """The error for a name that is not in `known`.

    Args:
        kind: what it should be the name of.
        given: the name.
        known: the right ones: the near matches are offered, or without any all of them.
        section, key: the setting that is this name.
    """
    return UnknownNameError(f"unknown {kind} {shown(given)}; {_hint(given, known)}", section, key)


def unknown_value(
    section: str | None, key: str, given: str, known: Iterable[str], where: str = ""
) -> UnknownNameError:
    """The error for a setting whose value is not in `known`.

    Args:
        section, key: the setting.
        given: its value.
        known: the right ones: the near matches are offered, or without any all of them.
        where: more words on where that is so (" for convnet").
    """
    hint = _hint(given, known)
    text = f"{setting_name(section, key)} cannot be {shown(given)}{where}; {hint}"
    return UnknownNameError(text, section, key)


def _hint(given: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(str(given)[:100].lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
