"""Named errors. Each message is one clear line: what was wrong and what would be right.

The command line prints that line and exits with code 2; the library raises it. Privacy errors live
with the mechanisms, in `fedsynth.privacy.errors`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from fedsynth.privacy.errors import NamedSettingError, setting_name, short_repr


class FedsynthError(Exception):
    """Base class of all errors that a user can cause; `str(error)` is one line."""


class UnknownNameError(FedsynthError):
    """Raised for an unknown name of a method, data set or model, or an unknown value of a setting.

    Args:
        text: the message, in one line. It names valid alternatives.
        section, key: the setting that has this value, or None if the name is not a setting's value.
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
        section: section of a config file ("run", "data", "partition", "model", "method",
            "privacy"); None for an argument of a function or class that config files lack.
        key: the setting's name in the section.
        reason: the rest of the sentence, which begins with the name of the setting.
        value: the setting's value, if the sentence is about this value.

    >>> str(SettingError("method", "ipc", "must be at least 1, got 0"))
    'method.ipc must be at least 1, got 0'
    """


class DataError(FedsynthError):
    """Images or labels that cannot be used: wrong shape or type, NaN, a class without examples."""


class DataFilesMissingError(DataError):
    """The data set's files were not found."""


class DataFilesCorruptError(DataError):
    """The data set's files exist but cannot be read in their declared format."""


class PartitionError(FedsynthError):
    """A partition that is impossible, such as one with more clients than examples."""


class DivergedError(FedsynthError):
    """An optimisation diverged to values that are not finite."""


class OutputError(FedsynthError):
    """The run folder cannot be written."""


class CheckpointError(FedsynthError):
    """Raised if a run cannot be resumed, because its checkpoint is damaged or belongs to a run with
    other settings or data."""


class MessageError(FedsynthError):
    """Raised if a message cannot be sent, or if received bytes are not the expected message."""


class UploadRejectedError(FedsynthError):
    """Raised for an upload that a client of the method may not send.

    Args:
        field: the invalid field of the message, or the invalid tensor in the message.
        reason: the rest of the sentence, which begins with the name of the field.
        diverged: whether an honest client could send such an upload after diverged training.
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
    """The requested device does not exist."""


class DeviceMemoryError(FedsynthError):
    """The device's memory is too small for one client's step."""


def unknown_name(
    kind: str, name: str, names: Iterable[str], section: str | None = None, key: str | None = None
) -> UnknownNameError:
    """Returns the error for a name that is not in `names`.

    Args:
        kind: the kind of thing that the name stands for, such as "data set".
        name: the unknown name.
        names: the valid names. The error suggests similar names. If there are none, it lists all.
        section, key: the setting whose value is this name.
    """
    hint = _did_you_mean(name, names) or f"; the known names are {', '.join(sorted(names))}"
    return UnknownNameError(f"unknown {kind} {short_repr(name)}{hint}", section, key)


def unknown_value(
    section: str | None, key: str, value: str, choices: Iterable[str], context: str = ""
) -> UnknownNameError:
    """Returns the error for a setting whose value is not in `choices`.

    Args:
        section, key: the setting.
        value: the value of the setting.
        choices: the valid values. The error suggests similar values. If there are none, it lists
            all.
        context: the case in which the choices are valid, such as " for convnet".
    """
    setting = setting_name(section, key)
    text = (
        f"{setting} must be one of {', '.join(sorted(choices))}, got {short_repr(value)}{context}"
    )
    if hint := _did_you_mean(value, choices):
        text = f"{setting} cannot be {short_repr(value)}{context}{hint}"
    return UnknownNameError(text, section, key)


def _did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Returns a question with similar names, or an empty string if no name is similar."""
    near = difflib.get_close_matches(str(value)[:100].lower(), sorted(choices), n=3, cutoff=0.5)
    if not near:
        return ""
    return f"; did you mean {' or '.join(near)}?"
