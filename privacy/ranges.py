"""Functions that check values in privacy settings and ledger rows."""

from __future__ import annotations

import math

from fedsynth.errors import PrivacySettingError, short_repr


def is_real(value: object) -> bool:
    """Returns True for finite floats and integers, and False for bools and all other values."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def require(ok: bool, key: str, rule: str, value: object, section: str | None = None) -> None:
    """Raises an error about a setting unless `ok` is True.

    Args:
        ok: the result of the check.
        key: the name of the setting or argument.
        rule: the rest of the message, which begins with a verb, such as "must be above 0".
        value: the wrong value, which the message shows.
        section: the section of the config file. None if `key` is an argument.

    Raises:
        PrivacySettingError: `ok` is False.
    """
    if not ok:
        raise PrivacySettingError(section, key, f"{rule}, got {short_repr(value)}")
