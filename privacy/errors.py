"""The errors of the privacy package, each with a one-line message."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def short_repr(value: object) -> str:
    """Represents a value in one short line, so that an error message can show it.

    The value may come from an untrusted file, so it may be very long or deeply nested.

    >>> short_repr("x" * 1000)[-5:], short_repr(10**5000)
    ("xxxx'", 'a number of more than 18 digits')
    """
    if isinstance(value, int) and abs(value) >= 2**63:  # Python prints at most 4,300 digits
        return "a number of more than 18 digits"
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # such a number, or deep nesting, within a list
        return f"a {type(value).__name__}"


def setting_name(section: str | None, key: str) -> str:
    """Returns the full name of a setting, such as "method.ipc", as error messages show it.

    Args:
        section: the section of the config file. None if the setting is an argument of a function
            or class.
        key: the name of the setting within the section.
    """
    if section is None:
        return key
    return f"{section}.{key}"


class NamedSettingError(Exception):
    """Base class of errors about one setting.

    The message begins with the setting's name.

    Args:
        section, key: the setting, as in `setting_name`.
        reason: the rest of the sentence, which begins with a verb.
        value: the value of the setting. If it is given, the message shows it after the name.
    """

    def __init__(self, section: str | None, key: str, reason: str, value: object = None) -> None:
        self.section = section
        self.key = key
        self.reason = reason
        self.value = value
        setting = setting_name(section, key)
        if value is not None:
            setting += f"={value}"
        super().__init__(f"{setting} {reason}")

    def of(self, section: str | None, key: str) -> NamedSettingError:
        """Returns a copy of this error that names another setting.

        Use it if the wrong value was copied from the other setting. The message then names the
        setting that the user wrote.
        """
        return type(self)(section, key, self.reason, self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.section, self.key, self.reason, self.value)


class PrivacyError(Exception):
    """Base class of errors about privacy.

    A setting, a request or a file would break a privacy guarantee, or would lead to a report with a
    wrong guarantee.
    """


class PrivacySettingError(NamedSettingError, PrivacyError):
    """Raised if a privacy parameter is out of range, such as a negative σ or a clip of 0.

    The arguments are section, key and reason, as for `SettingError`.
    """


class BudgetExceededError(PrivacyError):
    """Raised if a release would bring a client's ε above the cap. The release is not made.

    Args:
        reason: the message.
        spent: the client's name, its current ε, and its ε if the release were made. None if these
            are unknown.
    """

    def __init__(self, reason: str, spent: tuple[str, float, float] | None = None) -> None:
        super().__init__(reason)
        self.spent = spent


class UnaccountedReleaseError(PrivacyError):
    """Raised in a private run if an unprotected value would be sent to the server or shown.

    A value is unprotected if it depends on private data and no mechanism has added noise.
    """


class UnplannedReleaseError(PrivacyError):
    """Raised if a step of a method asks for a release that the step may not make.

    Either the method did not plan this release for the current exchange with the server, or the
    step has already made the release.
    """


class ForbiddenLayerError(PrivacyError):
    """Raised if DP-SGD cannot train the model, for example because it has batch norm.

    Batch norm mixes the examples of a batch, so clipping each example's gradient would not bound
    the influence of one example.
    """


class SigningError(PrivacyError):
    """Raised if a run folder cannot be signed or a key cannot be used."""


class LedgerError(PrivacyError):
    """Raised if a ledger cannot be read or written, or if it belongs to another data set."""


class RequestRefusedError(PrivacyError):
    """Raised if a private client refuses to answer a message from the server.

    For example, the message contains numbers that are not finite, has a norm above
    `max_request_norm`, or has tensors of the wrong shape.
    """
