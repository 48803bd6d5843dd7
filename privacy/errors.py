"""The errors of the privacy package, each with a one-line message."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def short_repr(value: object) -> str:
    """Returns a short, one-line representation of an untrusted value for error messages.

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
    """Returns the name of a setting in texts and for `--set`: "method.ipc".

    Args:
        section: of a config file; None for an argument of a function or class.
        key: its name in the section.
    """
    if section is None:
        return key
    return f"{section}.{key}"


class NamedSettingError(Exception):
    """Base class of errors about one setting; the message begins with the setting's name.

    Args:
        section, key: the setting, as in `setting_name`.
        reason: the rest of the sentence.
        value: the setting's value, if the message is about it.
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
        """Returns the same error for another setting, from which the value came."""
        return type(self)(section, key, self.reason, self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.section, self.key, self.reason, self.value)


class PrivacyError(Exception):
    """Base class: a setting, request or file would break or misstate a privacy guarantee."""


class PrivacySettingError(NamedSettingError, PrivacyError):
    """A privacy parameter outside its range (negative σ, δ outside (0, 1), clip 0, …).

    It takes section, key and reason, like `SettingError`.
    """


class BudgetExceededError(PrivacyError):
    """A release was refused because, with it, ε would exceed the cap.

    Args:
        reason: the message.
        spent: the client, its ε now, and its ε with the release; None if unknown.
    """

    def __init__(self, reason: str, spent: tuple[str, float, float] | None = None) -> None:
        super().__init__(reason)
        self.spent = spent


class UnaccountedReleaseError(PrivacyError):
    """With differential privacy on, a value that no mechanism protects was about to leave a client
    or to be shown."""


class UnplannedReleaseError(PrivacyError):
    """A step asked for a release that its method did not plan, planned for the other exchange, or
    already took."""


class ForbiddenLayerError(PrivacyError):
    """The model has a layer that mixes examples (batch norm), which per-example clipping cannot
    bound."""


class SigningError(PrivacyError):
    """A run cannot be signed, or a key cannot be used."""


class LedgerError(PrivacyError):
    """The ledger cannot be read or written, or belongs to another data set."""


class RequestRefusedError(PrivacyError):
    """A server's message that a private client does not answer: not finite, or above the declared
    norm."""
