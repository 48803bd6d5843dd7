"""Ledger rows, and functions that check an adjacency or a δ.

A row describes one release of a client. It states all numbers from which its ε is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedsynth.privacy.ranges import is_real as is_real
from fedsynth.privacy.ranges import require as require
from fedsynth.privacy.selection import Selection

# The definitions of neighbouring data sets.
#
# - add-remove: one unit is added or removed.
# - zero-out: one unit is replaced by a null record that contributes nothing. The number of a
#   client's units is then public. A release costs the same ε as with add-remove.
# - replace-one: one unit is replaced by any other unit. This doubles every sensitivity.
ADJACENCIES = ("add-remove", "zero-out", "replace-one")

ADD_REMOVE = "add-remove"
RECORD = "record"
USER = "user"
CLIENT = "client"
# The privacy units: one example, one user with all their examples, or one client with all its data.
# Neighbouring data sets differ in one unit.
UNITS = (RECORD, USER, CLIENT)

POISSON, FULL = SAMPLERS = ("poisson", "full")


@dataclass(frozen=True)
class Release:
    """One ledger row, which describes releases from a client's data.

    A row counts `steps` uses of one Gaussian mechanism, which may be subsampled. Each use may
    depend on the results of earlier ones (adaptive composition).

    Attributes:
        round: the number of the round, from 0.
        quantity: the name of the released quantity.
        mechanism: the name of the mechanism.
        clipped: a description of the vector that is clipped.
        noise_multiplier: σ, the standard deviation of the noise divided by `sensitivity`. With 0
            there is no noise, and ε is infinite.
        sensitivity: the bound on the L2 norm of one example's influence on the release (the clip).
        sample_rate: q, the public probability that a step includes an example. It is 1 with the
            sampler "full".
        sampler: "poisson" or "full". Batches of a fixed size are refused, because they have no
            valid accounting under add/remove adjacency.
        steps: the number of uses of the mechanism.
        dimension: the number of coordinates that each step releases.
        unaccounted: the reason why this release has no guarantee, which makes ε infinite. None if
            it has a guarantee.
        unit: the privacy unit, one of `UNITS`. `sensitivity` bounds the influence of one unit, and
            `sample_rate` is the probability that a step includes a unit.
        shares: the number H of clients that together add the charged noise under secure
            aggregation. Each adds noise with 1/√H of the standard deviation. With 1, the client
            adds all of the noise.
        selection: the private selection for which the row is charged. The other numbers are then
            those of one trial's score, and the selection has those of its runs. None for all other
            releases.

    Raises:
        PrivacySettingError: a value is out of range.
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
    selection: Selection | None = None

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
        require(explained, "unaccounted", "must be a non-empty text or None", reason)
        require(is_real(σ) and σ >= 0, "noise_multiplier", f"{finite} of at least 0", σ)
        require(is_real(clip) and clip > 0, "sensitivity", f"{finite} above 0", clip)
        require(is_real(q) and 0 < q <= 1, "sample_rate", "must be in (0, 1]", q)
        require(self.sampler in SAMPLERS, "sampler", samplers, self.sampler)
        require(self.sampler != FULL or q == 1, "sample_rate", full, q)
        single = self.selection is None or (q == 1 and self.steps == 1)
        require(single, "steps", "must be 1, of all data, for a score", (self.steps, q))

    def to_json(self) -> dict[str, Any]:
        """Returns the row as a JSON-serialisable dict. `from_json` is the inverse.

        A row that is not a selection's has no key `selection`, as in older ledgers.
        """
        row = {**asdict(self), "selection": self.selection and self.selection.to_json()}
        if row["selection"] is None:
            del row["selection"]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Release:
        """Creates a row from the dict that `to_json` returned.

        Raises:
            PrivacySettingError: a field is missing or unknown, or a value is out of range.
        """
        values = {"selection": None, **row}
        wrong = sorted(values.keys() ^ cls.__dataclass_fields__.keys())
        require(not wrong, "row", "must have no missing or unknown fields", wrong[:5])
        if values["selection"] is not None:
            values["selection"] = Selection.from_json(values["selection"])
        for key, value in row.items():
            if type(value) is str:  # a ledger's rows share strings, most of their memory
                values[key] = sys.intern(value)
        return cls(**values)


def check_adjacency(adjacency: str) -> None:
    """Checks that the adjacency is one of `ADJACENCIES`.

    Raises:
        PrivacySettingError: the adjacency is unknown.
    """
    rule = f"must be one of {', '.join(ADJACENCIES)}"
    require(adjacency in ADJACENCIES, "adjacency", rule, adjacency, "privacy")


def check_delta(delta: float, max_records: int | None) -> None:
    """Checks that δ is in (0, 1) and at most 1/max_records.

    A larger δ would allow a mechanism that publishes one of the records.

    Args:
        delta: δ.
        max_records: a public bound on the number of records of all clients. It must not be the
            true number, which is private. None skips the second check.

    Raises:
        PrivacySettingError: δ or `max_records` is out of range.
    """
    require(is_real(delta) and 0 < delta < 1, "delta", "must be in (0, 1)", delta, "privacy")
    if max_records is None:
        return
    valid = type(max_records) is int and max_records >= 1
    require(valid, "max_records", "must be a whole number of at least 1", max_records, "privacy")
    rule = f"must be at most 1 / privacy.max_records = {1 / max_records:.3g}"
    require(delta * max_records <= 1, "delta", rule, delta, "privacy")
