"""The errors of the privacy package, each with a one-line message."""

from __future__ import annotations

from fedsynth.errors import FedsynthError, SettingError


class PrivacyError(FedsynthError, code="privacy.refused"):
    """Base class of errors about privacy.

    A setting, a request or a file would break a privacy guarantee, or would lead to a report with a
    wrong guarantee.
    """


class PrivacySettingError(SettingError, PrivacyError):
    """Raised if a privacy parameter is out of range, such as a negative σ or a clip of 0.

    The arguments are section, key and reason, as for `SettingError`.
    """


class BudgetExceededError(PrivacyError, code="budget.exceeded"):
    """Raised if a release would bring a client's ε above the cap. The release is not made.

    Args:
        reason: the message.
        spent: the client's name, its current ε, and its ε if the release were made. None if these
            are unknown.
    """

    def __init__(self, reason: str, spent: tuple[str, float, float] | None = None) -> None:
        super().__init__(reason)
        self.spent = spent


class UnaccountedReleaseError(PrivacyError, code="release.unaccounted"):
    """Raised in a private run if an unprotected value would be sent to the server or shown.

    A value is unprotected if it depends on private data and no mechanism has added noise.
    """


class UnplannedReleaseError(PrivacyError, code="release.unplanned"):
    """Raised if a step of a method asks for a release that the step may not make.

    Either the method did not plan this release for the current exchange with the server, or the
    step has already made the release.
    """


class ForbiddenLayerError(PrivacyError, code="model.layer"):
    """Raised if DP-SGD cannot train the model, for example because it has batch norm.

    Batch norm mixes the examples of a batch, so clipping each example's gradient would not bound
    the influence of one example.
    """


class SigningError(PrivacyError, code="signing.key"):
    """Raised if a run folder cannot be signed or a key cannot be used."""


class LedgerError(PrivacyError, code="ledger.unusable"):
    """Raised if a ledger cannot be read or written, or if it belongs to another data set."""


class RequestRefusedError(PrivacyError, code="request.refused"):
    """Raised if a private client refuses to answer a message from the server.

    For example, the message contains numbers that are not finite, has a norm above
    `max_request_norm`, or has tensors of the wrong shape.
    """
