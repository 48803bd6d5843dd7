"""The privacy settings, all of which are public and fixed before any data are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import ClassVar

from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.releases import (
    ADD_REMOVE,
    RECORD,
    UNITS,
    USER,
    check_adjacency,
    check_delta,
    require,
)

NO_LEDGER = "none: this data set is public"
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
"""The ranges of useful values, within which sums, squares and quotients stay finite."""


def ledger_setting(value: Path | str) -> Path | str:
    """Returns a folder as an absolute path, or `NO_LEDGER` unchanged.

    Raises:
        PrivacySettingError: a text that resembles `NO_LEDGER`, an empty text (an empty `Path` is
            the current folder), or the home of a user who does not exist.
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


def needs_a_budget() -> PrivacySettingError:
    """Returns the error for settings with neither a noise multiplier nor a budget."""
    return PrivacySettingError(
        "privacy",
        "noise_multiplier",
        "or a budget, privacy.epsilon, must be set for differential privacy",
    )


_require = partial(require, section="privacy")


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy of one run, for one example (or one user) of one client.

    Args:
        noise_multiplier: noise multiplier σ of each release, relative to the clip. None: calibrated
            to `epsilon` for the planned run.
        epsilon: budget ε of each client. With a noise multiplier it is a hard cap; without one, σ
            is calibrated to it.
        mechanism: one of the method's (`fedsynth methods show NAME` lists them; default: the first).
            "paper" is FedDM as published, without a guarantee.
        clip: L2 bound of one example's contribution; default: the method's, a public constant.
        delta: δ, a constant (default 1e-5), at most 1 / `max_records`.
        max_records: public upper bound on the records of all clients together; default: the data
            set's published size.
        sample_rate: public rate q of Poisson sampling, in (0, 1]. None: the rate at which a step's
            expected batch is the method's batch, from public sizes only.
        nominal_size: public number of records (or users) that a client is supposed to have, for
            divisors. None: the data set's published size divided by the number of clients.
        unit: the privacy unit: "record" (one example) or "user" (all examples of a person at a
            client). "user" needs data with the user of each record, a partition by user, and
            `nominal_size`. All sizes then count users: a step samples users, and each contributes
            the clipped mean of their records' vectors.
        user_records: with unit "user", the maximum number of records of each user that take part,
            chosen by a public keyed hash; None: all.
        adjacency: "add-remove" (default), "zero-out" or "replace-one". "zero-out" has the same cost
            as "add-remove" and makes the number of a client's examples public; "replace-one"
            doubles every sensitivity.
        four_sums: compute each noise value from four Gaussians, which mitigates (without proof) a
            known floating-point attack (`SecretGenerator`).
        max_request_norm: L2 norm of a server's message above which clients do not answer it
            (messages with non-finite numbers are always refused); None: no bound.
        ledger: folder of the clients' ledgers, kept across runs; default: each run is accounted for
            separately. Only published data sets allow that; with other data that are public, set
            `NO_LEDGER` ("none: this data set is public").

    Raises:
        PrivacySettingError: neither noise nor budget, or a value outside its range.

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
    unit: str = RECORD
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
        _require(self.unit in UNITS, "unit", f"must be one of {', '.join(UNITS)}", self.unit)
        if self.unit == USER and self.nominal_size is None:
            reason = "needs privacy.nominal_size: the public, nominal number of users of a client"
            raise PrivacySettingError("privacy", "unit", reason, value=USER)
        valid = self.user_records is None or self.unit == USER
        _require(valid, "user_records", f"needs privacy.unit={USER}", self.user_records)

    def _check_without_guarantee(self, mechanism: str) -> None:
        reason = ""
        if self.unit == USER:
            reason = "protects neither records nor users"
        elif self.epsilon is not None:
            reason = (
                "has no differential privacy guarantee, so it has no ε: set only "
                "privacy.noise_multiplier"
            )
        if reason:
            raise PrivacySettingError("privacy", "mechanism", reason, value=mechanism)

    @property
    def ledger_folder(self) -> Path | None:
        """The folder of ledgers that are kept across runs, or None."""
        return self.ledger if isinstance(self.ledger, Path) else None
