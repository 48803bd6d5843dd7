"""Named errors of the privacy package; each carries one clear line."""

from __future__ import annotations

from fedsynth.privacy.wording import NamedSettingError


class PrivacyError(Exception):
    """Base: a setting, request or file that would break, or misstate, a privacy guarantee."""


class PrivacySettingError(NamedSettingError, PrivacyError):
    """A privacy parameter outside its range (negative σ, δ outside (0, 1), clip 0, …).

    It takes section, key and reason, as `SettingError` does.
    """


class BudgetExceededError(PrivacyError):
    """A release was refused because, with it, ε would exceed the cap."""


class UnaccountedReleaseError(PrivacyError):
    """Something that no mechanism protects was asked to leave the client while differential privacy
    is on.
    """


class UnplannedReleaseError(PrivacyError):
    """A step asked for a release that its method does not plan, plans for the other exchange, or
    was given before.
    """


class ForbiddenLayerError(PrivacyError):
    """The model has a layer that mixes examples (batch norm), which per-example clipping cannot
    bound.
    """


class SigningError(PrivacyError):
    """A run cannot be signed, or a key cannot be used."""


class LedgerError(PrivacyError):
    """The ledger cannot be read or written, or belongs to another data set."""


class RequestRefusedError(PrivacyError):
    """A server's message that a private client does not answer: not finite, or beyond the declared
    norm.
    """
