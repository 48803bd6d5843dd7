"""Why a secure sum is not made."""

from __future__ import annotations

from fedsynth.errors import FedsynthError


class SecureSumError(FedsynthError):
    """A party's message is not what the protocol asks for, or too few parties are left."""


class MissingLibraryError(FedsynthError):
    """The `secure` extra is not installed."""


def require_cryptography() -> None:
    """Says which extra is missing, if `cryptography` is not installed.

    Raises:
        MissingLibraryError: it is not.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise MissingLibraryError(
            "secure sums need the cryptography package: pip install 'fedsynth[secure]'"
        ) from None
