"""What is set about privacy; everything in here is public and fixed before any data are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.releases import ADD_REMOVE, RECORD, UNITS, USER, check_adjacency

NO_LEDGER = "none: this data set is public"


def ledger_setting(given: Path | str) -> Path | str:
    """A folder as an absolute path, or `NO_LEDGER` as it is.

    Raises:
        PrivacySettingError: words that are nearly `NO_LEDGER`, nothing at all (as text: an empty
            `Path` is the current folder), or the home of a user who does not exist.
    """
    words = str(given).strip()
    if words == NO_LEDGER:
        return NO_LEDGER
    if words.casefold().split(":")[0] in ("none", ""):
        hint = "" if words else " (a variable that is not set?)"
        raise PrivacySettingError(
            f"--dp-ledger must be a folder, or exactly {NO_LEDGER!r}; got {words!r}{hint}"
        )
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as error:
        raise PrivacySettingError(f"--dp-ledger {words!r} names no folder: {error}") from None


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy of one run, for one example (or one user) of one client.

    Args:
        noise_multiplier: σ of each release, relative to the clip. None: found from `epsilon` for the planned run.
        epsilon: the budget of each client; with `noise_multiplier` a hard cap, alone the target that σ is found for.
        mechanism: None takes the method's default. For methods that condense: "residual", "gradient", "features", or
            "paper" (FedDM as printed: no guarantee). For methods that train models: "dp-sgd".
        clip: L2 bound of one example's contribution; None takes the method's default, a public constant.
        delta: δ, a constant; at most 1 / `max_records`.
        max_records: a public upper bound on the number of records of all clients together; None takes the data set's published size.
        sample_rate: q of Poisson sampling; None takes the rate at which a step's expected batch is the method's batch, from
            public sizes alone.
        nominal_size: the public number of records that a client is supposed to have, for divisors; None takes the data set's
            published size over the number of clients.
        unit: "record": one example is protected. "user": one user with all records of theirs at a client; needs data that say whose each
            record is, a partition by user, and `nominal_size`. All sizes then count users: a step samples users, and each contributes the
            mean of their records' vectors, clipped as one.
        user_records: with unit "user", at most so many records of each user take part, chosen by a public keyed hash; None: all.
        adjacency: "add-remove" one example; "zero-out" (the same cost, and the number of a client's examples public); "replace-one" (every
            sensitivity doubled).
        four_sums: each noise value from four Gaussians, against one known floating-point attack (`SecretGenerator`): a mitigation, no proof.
        max_request_norm: L2 norm of a server's message above which clients do not answer it (messages with numbers that are not finite are
            refused in any case); None bounds nothing.
        ledger: folder of the clients' ledgers, kept over runs. None starts afresh, which only
            published data sets allow; on your own data say `NO_LEDGER` ("none: this data set is
            public") where that is so.
    """

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
    ledger: str | Path | None = (
        None  # text first: what a config file says stays as it is, also nothing
    )

    def __post_init__(self) -> None:
        if self.ledger is not None:
            object.__setattr__(self, "ledger", ledger_setting(self.ledger))
        check_adjacency(self.adjacency)
        if self.noise_multiplier is None and self.epsilon is None:
            raise PrivacySettingError(
                "differential privacy needs a noise multiplier (--dp-sigma) or a budget (--dp-epsilon)"
            )
        for name, value in (
            ("--dp-sigma", self.noise_multiplier),
            ("--dp-epsilon", self.epsilon),
            ("--dp-clip", self.clip),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise PrivacySettingError(f"{name} must be a positive number, got {value}")
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise PrivacySettingError(f"--dp-sample-rate must be in (0, 1], got {self.sample_rate}")
        if self.nominal_size is not None and not self.nominal_size > 0:
            raise PrivacySettingError(
                f"--dp-nominal-size must be positive, got {self.nominal_size}"
            )
        self._check_unit()
        if self.max_request_norm is not None and not self.max_request_norm > 0:
            raise PrivacySettingError(
                f"max_request_norm must be positive, got {self.max_request_norm}"
            )
        if self.mechanism == "paper" and (
            self.epsilon is not None or self.noise_multiplier is None
        ):
            raise PrivacySettingError(
                "--dp-mechanism paper gives no differential privacy guarantee, so it has no ε: give --dp-sigma alone"
            )

    def _check_unit(self) -> None:
        if self.unit not in UNITS:
            raise PrivacySettingError(
                f"--dp-unit must be one of {', '.join(UNITS)}, got {self.unit!r}"
            )
        if self.unit == USER and self.nominal_size is None:
            raise PrivacySettingError(
                "--dp-unit user needs --dp-nominal-size: the public number of users that a client is supposed to have"
            )
        if self.user_records is not None and (self.unit != USER or self.user_records < 1):
            raise PrivacySettingError(
                "user_records bounds a user's records: a whole number of at least 1, with --dp-unit user"
            )
        if self.unit == USER and self.mechanism == "paper":
            raise PrivacySettingError("--dp-mechanism paper protects nobody: no record and no user")

    @property
    def ledger_folder(self) -> Path | None:
        """The folder of ledgers that are kept over runs, if there is one."""
        return self.ledger if isinstance(self.ledger, Path) else None
