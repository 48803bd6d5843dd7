"""What a privacy report is made of beside the ledgers: public facts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedsynth.privacy.disclosure import ACCOUNTED, PUBLIC, SIMULATION_ONLY, UNACCOUNTED
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.releases import ADD_REMOVE, RECORD, check_adjacency, check_delta
from fedsynth.privacy.report_schema import RunFacts

NAMELESS = RunFacts(id=None, date=None, responsible=None, purpose=None, sites={})
"""A run of which nothing is known but its report."""
ACCESS_STATUSES = (ACCOUNTED, PUBLIC, SIMULATION_ONLY, UNACCOUNTED)


class PrivateAccess(NamedTuple):
    """Something that touches private data.

    Attributes:
        what: it is.
        status: how it is covered, one of `ACCESS_STATUSES`.
        note: by what, or why not.
    """

    what: str
    status: str
    note: str


@dataclass(frozen=True)
class ReportContext:
    """Everything public that the report needs beside the ledgers.

    Attributes:
        method: its name.
        mechanism: its name.
        delta: δ.
        max_records: declared public bound on all records, None if undeclared.
        epsilon_cap: the cap, None without one.
        planned_rounds: of this run.
        rounds_done: how many of them have ended.
        public_items: item → its value, or why it is public.
        no_guarantee: reasons; if there is any, the report states no ε.
        deviations: lost clients, resumed rounds and the like.
        fresh_ledger: the run began with an empty ledger.
        no_ledger: why it may, as half a sentence ("digits is a published data set").
        randomness: where noise and masks came from.
        published: rows that set a paper's printed figure beside ours, all with the same keys.
        accesses: everything that touched private data.
        adjacency: one of `releases.ADJACENCIES`.
        unit: one of `releases.UNITS`.
        user_records: the bound on a user's records, None without one.
        test_only_randomness: noise or masks were injected; the verdict is then "not private".
        provenance: config hash, versions.
        noise_multiplier: the run's σ, of which each release's is a fixed multiple; None where there
            is no such thing.
        data_set: the data set's public specification, for what is rebuilt from it (`DatasetSpec` as
            a mapping).
        rows_before: client → rows that its ledger held when the run began; 0 where it is not named.
        abandoned: the run did not finish: the report was built afterwards, from what it left.
        shares: H of this run, where each client adds 1/√H of the noise that is charged, and a
            secure aggregation has to show the sums alone; 1: the noise is each client's own. The
            ledgers' rows say it of earlier runs, whose H counts as well.
        fewest: of fewer clients' uploads there was no sum, where this run's were added up so that
            its server saw sums alone; 0: nothing of that kind was executed.
        own_code: what of the user's own code computes on private data ("the model x"), beside the
            method.
        run: which run it is, and who answers for it.
        files: file of the run → its SHA-256.
        warnings: doubts of the run, such as about a model's rows; each becomes one of the
            verdict's warnings.

    Raises:
        PrivacySettingError: δ out of range, or an unknown access status.
    """

    method: str
    mechanism: str
    delta: float
    max_records: int | None
    epsilon_cap: float | None
    planned_rounds: int
    rounds_done: int
    public_items: Mapping[str, str]
    no_guarantee: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    fresh_ledger: bool = True
    no_ledger: str = ""
    randomness: str = "not stated"
    published: tuple[Mapping[str, str], ...] = ()
    accesses: tuple[PrivateAccess, ...] = ()
    adjacency: str = ADD_REMOVE
    unit: str = RECORD
    user_records: int | None = None
    test_only_randomness: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict)
    noise_multiplier: float | None = None
    data_set: Mapping[str, Any] = field(default_factory=dict)
    rows_before: Mapping[str, int] = field(default_factory=dict)
    abandoned: bool = False
    shares: int = 1
    fewest: int = 0
    own_code: tuple[str, ...] = ()
    run: RunFacts = NAMELESS
    files: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_delta(self.delta, self.max_records)
        check_adjacency(self.adjacency)
        for one in self.accesses:
            if one.status not in ACCESS_STATUSES:
                raise PrivacySettingError(
                    None,
                    "accesses",
                    f"must each have a status of {ACCESS_STATUSES}; {one.what!r} has "
                    f"{one.status!r}",
                )
