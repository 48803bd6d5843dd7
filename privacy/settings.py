"""The privacy settings of a run. All settings are public and fixed before any data are read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from fedsynth.errors import PrivacySettingError
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.releases import (
    ADD_REMOVE,
    RECORD,
    USER,
    check_adjacency,
    check_delta,
    require,
)

NO_LEDGER = "none: this data set is public"
# The allowed range of each setting. Within these ranges, no sum, square or quotient overflows.
RANGES = {
    "noise_multiplier": (1e-15, 1e9),
    "epsilon": (1e-15, 1e15),
    "clip": (1e-12, 1e12),
    "sample_rate": (1e-9, 1),
    "nominal_size": (1e-3, 1e15),
    "max_records": (1, 1e15),
    "user_records": (1, 1e15),
    "max_request_norm": (1e-15, 1e300),
}


def ledger_setting(value: Path | str) -> Path | str:
    """Checks the setting `privacy.ledger` and makes the path of a folder absolute.

    Returns `NO_LEDGER` unchanged. An empty `Path` is the current folder.

    Raises:
        PrivacySettingError: the text is empty, resembles `NO_LEDGER` but differs from it, or names
            the home of a user who does not exist.
    """
    text = str(value).strip()
    if text == NO_LEDGER:
        return NO_LEDGER
    try:
        text.encode()  # it must be valid in the run folder's config.toml
        folder = Path(value).expanduser().absolute()
    except (UnicodeEncodeError, RuntimeError) as error:
        raise PrivacySettingError("privacy", "ledger", f"is not a valid folder: {error}") from None
    valid = text.casefold().split(":")[0] not in ("none", "") and "\0" not in text
    _require(valid, "ledger", f"must be a folder, or exactly {NO_LEDGER!r}", text)
    return folder


def make_floats(settings: Any) -> None:
    """Converts a dataclass's float fields to float, so that 1 and 1.0 are stored alike."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        is_float_field = item.type is float or str(item.type).startswith("float")
        if is_float_field and is_number and type(value) is not float:
            with suppress(OverflowError):  # too large: the check of the range refuses it
                object.__setattr__(settings, item.name, float(value))


def needs_a_budget() -> PrivacySettingError:
    """Returns the error for settings with neither a noise multiplier nor a budget."""
    return PrivacySettingError(
        "privacy",
        "noise_multiplier",
        "or privacy.epsilon must be set for differential privacy. Set one of them",
    )


_require = partial(require, section="privacy")


@dataclass(frozen=True)
class PrivacySettings:
    """One run's differential privacy settings.

    The guarantee protects one example (or one user) of one client.

    Args:
        noise_multiplier: the noise multiplier σ of each release, which is the standard deviation
            of the noise divided by the clip. None chooses the smallest σ for which the planned run
            stays within `epsilon`.
        epsilon: the budget ε of each client. If `noise_multiplier` is given, too, a release that
            would exceed the budget is refused.
        mechanism: the name of one of the method's mechanisms, which `fedsynth methods show NAME`
            lists. The default is the first of them. "paper" is FedDM as published and has no
            guarantee.
        clip: the bound on the L2 norm of one example's contribution. The default is a public
            constant of the method.
        delta: the constant δ, at most 1 / `max_records`.
        max_records: a public upper bound on the number of records of all clients together. The
            default is the published size of the data set.
        sample_rate: the public rate q of Poisson sampling, in (0, 1]. None chooses the rate at
            which a step draws, on average, as many records as the method's batch size. It is
            computed from public sizes only.
        nominal_size: a public number of records (or users) that a client is supposed to have, from
            which divisors are computed. The default is the published size of the data set divided
            by the number of clients.
        unit: the privacy unit, which is "record" (one example) or "user" (all examples of a person
            at a client). "user" needs data with the user of each record, a partition by user, and
            `nominal_size`. All sizes then count users. A step samples users, and each sampled user
            contributes the clipped mean of their records' vectors. None means "record", and is
            refused for your own data if their specification states a number of users.
        user_records: the maximum number of records of each user that take part, for unit "user".
            They are chosen by a hash with a public seed. None uses all records.
        adjacency: "add-remove" (default), "zero-out" or "replace-one". "zero-out" costs as much as
            "add-remove", but makes the number of a client's examples public. "replace-one" doubles
            every sensitivity.
        four_sums: compute each noise value from four Gaussian values. This hinders a known attack
            on floating-point noise, although there is no proof that it prevents the attack (see
            `SecretGenerator`).
        max_request_norm: the largest L2 norm of a server's message that clients answer. None means
            that there is no bound. Messages with numbers that are not finite are always refused.
        ledger: the folder that keeps the clients' ledgers across runs. By default, each run is
            accounted for separately, which is allowed only for published data sets. If your own
            data are public, set `NO_LEDGER` ("none: this data set is public").

    Raises:
        PrivacySettingError: neither `noise_multiplier` nor `epsilon` is set, or a value is out of
            range.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> budget, linear = PrivacySettings(epsilon=8.0), ModelSettings("linear")
    >>> report = simulate(RunSettings(FedAvg(), rounds=2, model=linear, privacy=budget)).privacy
    >>> 7.9 < report["guarantee"]["epsilon"] <= 8, report["noise_multiplier"] > 0.5
    (True, True)
    """

    section: ClassVar[str] = "privacy"  # of a config file

    noise_multiplier: float | None = None
    epsilon: float | None = None
    mechanism: str | None = None
    clip: float | None = None
    delta: float = 1e-5
    max_records: int | None = None
    sample_rate: float | None = None
    nominal_size: float | None = None
    unit: str | None = None
    user_records: int | None = None
    adjacency: str = ADD_REMOVE
    four_sums: bool = False
    max_request_norm: float | None = None
    ledger: str | Path | None = None  # text first: keeps a config file's ""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            valid = value is None or (number and low <= value <= high)
            _require(valid, name, f"must be a number from {low:g} to {high:g}", value)
        make_floats(self)
        if self.ledger is not None:
            object.__setattr__(self, "ledger", ledger_setting(self.ledger))
        check_adjacency(self.adjacency)
        check_delta(self.delta, self.max_records)
        if self.noise_multiplier is None and self.epsilon is None:
            raise needs_a_budget()
        self._check_unit()
        if self.mechanism is not None and not mechanism_facts(self.mechanism).guaranteed:
            self._check_without_guarantee(self.mechanism)

    def _check_unit(self) -> None:
        is_unit = self.unit in (None, RECORD, USER)  # only a guard protects whole clients
        _require(is_unit, "unit", f"must be one of {RECORD}, {USER}", self.unit)
        if self.unit == USER and self.nominal_size is None:
            reason = (
                "is set, but the number of users is not declared. Set privacy.nominal_size to a "
                "client's approximate number of users"
            )
            raise PrivacySettingError("privacy", "unit", reason, value=USER)
        valid = self.user_records is None or self.unit == USER
        _require(valid, "user_records", f"requires privacy.unit={USER}", self.user_records)

    def _check_without_guarantee(self, mechanism: str) -> None:
        reason = ""
        if self.unit == USER:
            reason = (
                "has no privacy guarantee, so it cannot be used with privacy.unit=user. Use "
                "another mechanism"
            )
        elif self.epsilon is not None:
            reason = (
                "has no privacy guarantee, so it cannot be used with privacy.epsilon. Set "
                "privacy.noise_multiplier instead"
            )
        if reason:
            raise PrivacySettingError("privacy", "mechanism", reason, value=mechanism)

    @property
    def ledger_folder(self) -> Path | None:
        """The folder that keeps the ledgers across runs, or None."""
        return self.ledger if isinstance(self.ledger, Path) else None
