"""A client's releases as ledger rows, and the terms of a guarantee: adjacency and δ."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedsynth.privacy.errors import PrivacySettingError, short_repr

ADJACENCIES = ("add-remove", "zero-out", "replace-one")
"""The definitions of neighbouring data sets: one unit is added or removed, replaced by a null
record that contributes nothing (the number of a client's units is then public), or replaced by any
other unit. Zero-out costs the same as add-remove; replace-one doubles every sensitivity."""
ADD_REMOVE = "add-remove"
RECORD = "record"
USER = "user"
UNITS = (RECORD, USER)
"""The unit that adjacency adds or removes: one example, or one user with all their examples."""
POISSON, FULL = SAMPLERS = ("poisson", "full")


@dataclass(frozen=True)
class Release:
    """One ledger row: `steps` adaptively composed uses of one (subsampled) Gaussian mechanism on a
    client's data.

    Attributes:
        round: the round, from 0.
        quantity: the name of the released quantity.
        mechanism: the mechanism's name.
        clipped: the description of the vector that is clipped.
        noise_multiplier: σ, the noise's standard deviation divided by `sensitivity`; 0 means no
            noise (ε infinite).
        sensitivity: L2 bound on one example's influence (the clip), in the units of the release.
        sample_rate: q, the public inclusion probability of each example in each step; 1 with the
            sampler "full".
        sampler: "poisson" | "full"; fixed-size batches have no valid accounting under add/remove
            and are refused.
        steps: number of uses.
        dimension: number of coordinates released at each step.
        unaccounted: the reason why this row has no guarantee, or None; a reason makes ε infinite.
        unit: one of `UNITS`: the unit whose influence `sensitivity` bounds and that `sample_rate`
            samples.
        shares: H: the charged noise is that of H clients together, each of which adds 1/√H of it;
            1: the client adds all of it.

    Raises:
        PrivacySettingError: a value outside its range.
    """

    round: int
    quantity: str
    mechanism: str
    clipped: str
    noise_multiplier: float
    sensitivity: float
    sample_rate: float
    sampler: str
    steps: int
    dimension: int
    unaccounted: str | None = None
    unit: str = RECORD
    shares: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("round", 0), ("steps", 1), ("dimension", 1), ("shares", 1)):
            value = getattr(self, name)
            valid = type(value) is int and value >= minimum
            require(valid, name, f"must be a whole number of at least {minimum}", value)
        for name in ("quantity", "mechanism", "clipped"):
            require(isinstance(getattr(self, name), str), name, "must be text", getattr(self, name))
        σ = self.noise_multiplier
        clip = self.sensitivity
        q = self.sample_rate
        reason = self.unaccounted
        finite = "must be a finite number"
        samplers = "must be 'poisson' or 'full' (batches of fixed size have no valid accounting)"
        full = "must be 1 with the sampler 'full', which uses all data"
        require(self.unit in UNITS, "unit", f"must be one of {', '.join(UNITS)}", self.unit)
        explained = reason is None or (isinstance(reason, str) and reason != "")
        require(explained, "unaccounted", "must be a reason or None", reason)
        require(is_real(σ) and σ >= 0, "noise_multiplier", f"{finite} of at least 0", σ)
        require(is_real(clip) and clip > 0, "sensitivity", f"(the clip) {finite} above 0", clip)
        require(is_real(q) and 0 < q <= 1, "sample_rate", "must be in (0, 1]", q)
        require(self.sampler in SAMPLERS, "sampler", samplers, self.sampler)
        require(self.sampler != FULL or q == 1, "sample_rate", full, q)

    def to_json(self) -> dict[str, Any]:
        """Returns the row as a flat, JSON-able dict; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Release:
        """Rebuilds a row. Raises PrivacySettingError on missing or unknown fields and on values out
        of range."""
        names = sorted(cls.__dataclass_fields__)
        require(sorted(row) == names, "row", f"must have exactly the fields {names}", sorted(row))
        values = dict(row)
        for key, value in row.items():
            if type(value) is str:  # a ledger's rows share strings, most of their memory
                values[key] = sys.intern(value)
        return cls(**values)


def is_real(value: object) -> bool:
    """Returns whether it is a number that a float can hold, and not a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def require(ok: bool, key: str, rule: str, value: object, section: str | None = None) -> None:
    """Refuses the value of `key` (in `section` of a config file, if any) unless `ok`."""
    if not ok:
        raise PrivacySettingError(section, key, f"{rule}, got {short_repr(value)}")


def check_adjacency(adjacency: str) -> None:
    """Refuses an adjacency that is not in `ADJACENCIES`."""
    rule = f"must be one of {', '.join(ADJACENCIES)}"
    require(adjacency in ADJACENCIES, "adjacency", rule, adjacency, "privacy")


def check_delta(delta: float, max_records: int | None) -> None:
    """Refuses a δ outside (0, 1) or above 1/max_records, which would allow publishing one record
    outright.

    `max_records` is a declared public bound on the federation's records, never the true number;
    None skips that check.
    """
    require(is_real(delta) and 0 < delta < 1, "delta", "must be in (0, 1)", delta, "privacy")
    if max_records is None:
        return
    valid = type(max_records) is int and max_records >= 1
    require(valid, "max_records", "must be a whole number of at least 1", max_records, "privacy")
    rule = f"must be at most 1 / privacy.max_records = {1 / max_records:.3g}"
    require(delta * max_records <= 1, "delta", rule, delta, "privacy")
