"""The shape of a privacy report of schema 3: every key, and the type of what stands under it;
nothing else may be there.

Reports are made of these types (`fedsynth.privacy.report`), and a stranger's is checked against
them before anything looks inside. What its values are is `verify`'s business.
"""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SHOWN = 10  # of a report's faults
LONGEST = 80  # of a key that is shown as it is


DataSet = dict[str, str | int | list[str] | list[float]]


class Part(BaseModel):
    """A part of a report: a value that is `None` by default is missing where it says nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping, without what was left out."""
        return self.model_dump(exclude_unset=True)


class Verdict(Part):
    text: str
    formal: bool
    reasons: list[str]
    assumptions: list[str]
    warnings: list[str]


class Spread(Part):
    number: int
    epsilon_min: float
    epsilon_median: float
    epsilon_max: float


class WorstAfterRound(Part):
    round: int
    epsilon: float


class AfterRound(Part):
    round: int
    worst: float
    median: float
    clients: dict[str, float]


class KindAlone(Part):
    quantity: str
    mechanism: str
    epsilon: float


class CurvePoint(Part):
    delta: float
    epsilon: float


class Attack(Part):
    false_positive_rate: float
    true_positive_rate_at_most: float


class Group(Part):
    units: int
    epsilon: float | None
    note: str


class Guarantee(Part):
    epsilon: float
    delta: float
    worst_client: str
    clients: Spread
    epsilon_by_client: dict[str, float]
    epsilon_by_round_worst_client: list[WorstAfterRound]
    epsilon_by_round: list[AfterRound]
    epsilon_of_each_release_alone: list[KindAlone]
    epsilon_of_delta: list[CurvePoint]
    attack_success: list[Attack]
    best_guess_at_most: float
    groups: list[Group]


class Unit(Part):
    """Who is protected; `one` and `several` name the unit."""

    one: str
    several: str
    protects: str
    does_not_protect: str
    records_per_user: str | None = None  # missing, where there is no guarantee
    group_privacy: str | None = None  # the same


OF_EARLIER = "none in this run"
"""What `secure_aggregation` begins with where only releases of earlier runs had shared noise."""


class TrustModel(Part):
    trusted: str
    adversary: str
    secure_aggregation: str
    client_sampling: str
    federation: str | None = None  # missing, where there is no guarantee


class NotCovered(Part):
    tuning_and_selection: str
    public_data_and_pretraining: str
    timing: str
    drop_outs: str
    simulation: str


class Access(Part):
    access: str
    status: str
    note: str


class LedgerEntry(Part):
    """Rows of a ledger that differ in round and client alone."""

    rounds: list[int]
    clients: list[str]
    quantity: str
    mechanism: str
    clipped: str
    noise_multiplier: float
    sensitivity: float
    sample_rate: float
    sampler: str
    steps: int
    dimension: int
    unaccounted: str | None
    unit: str
    noise_standard_deviation: float


class LedgerStart(Part):
    """Where a client's ledger stood: its rows, and the chain hash over them (None: only in
    memory)."""

    rows: int = Field(ge=0)
    chain: str | None


class LedgerHead(LedgerStart):
    rows_before: int = Field(ge=0)


class CrossCheck(Part):
    name: str
    epsilon: float | None
    note: str


class Accountant(Part):
    name: str
    library: str
    computation: str
    discretisation_interval: float | None
    neighbouring_relation: str
    cross_check: CrossCheck | None = None  # missing, where there is no guarantee


class Budget(Part):
    epsilon_cap: float | None
    epsilon_spent: float
    epsilon_left: float | None
    planned_rounds: int
    rounds_done: int
    at_the_end: str
    note: str


class Audit(Part):
    """A canary audit: counts, and the bound that follows from them."""

    text: str
    command: str
    method: str
    mechanism: str
    canaries: int = Field(ge=1, le=10**6)  # more would take hours, and memory to check
    guesses: int
    correct: int
    confidence: float
    delta: float
    epsilon_lower_bound: float


class RunFacts(Part):
    """Which run a report is of; texts that nobody gave are None.

    Attributes:
        id: the run folder's name when the run began.
        date: on which it began, YYYY-MM-DD.
        responsible, purpose: as the settings say.
        sites: client → the name of the site.
    """

    id: str | None
    date: str | None
    responsible: str | None
    purpose: str | None
    sites: dict[str, str]


class Report(Part):
    schema_version: int
    verdict: Verdict
    method: str
    mechanism: str
    noise_multiplier: float | None
    guarantee: Guarantee | None
    unit: Unit
    adjacency: str
    max_records: int | None
    data_set: DataSet
    trust_model: TrustModel
    public_items: dict[str, str]
    scope: list[Access]
    ledger: list[LedgerEntry]
    ledger_kept: bool
    ledger_heads: dict[str, LedgerHead]
    accountant: Accountant
    budget: Budget | None
    published: list[dict[str, str]]
    randomness: str
    deviations: list[str]
    not_covered: NotCovered
    audit: str | Audit
    provenance: dict[str, str]
    run: RunFacts
    files: dict[str, str]  # file → SHA-256


class Promise(Part):
    """What summary.json says of a run's privacy."""

    guarantee: bool
    epsilon: float | None = None  # missing, where there is no guarantee
    delta: float | None = None  # the same
    noise_multiplier: float | None
    mechanism: str
    aggregation: str | None = None  # where clients share noise: "executed", or assumed


class Began(Part):
    """When a run began, and what its folder was called then."""

    id: str | None
    date: str

    @classmethod
    def today(cls, folder: str | None) -> Began:
        """Of a run that begins now; None: it leaves no folder."""
        return cls(id=folder, date=datetime.date.today().isoformat())


class Start(Part):
    """A run folder's privacy_start.json; `warnings` are the run's, for the report."""

    schema_version: int
    noise_multiplier: float | None
    data_set: DataSet
    test_images: Literal["public", "private", "none"]
    ledgers: dict[str, LedgerStart]
    run: Began
    warnings: list[str]


class Signature(Part):
    """A run folder's signature.json: base64 of key and signature, SHA-256 by file."""

    fedsynth_signature: int
    algorithm: str
    public_key: str
    files: dict[str, str]
    signature: str


def schema_problems(value: Any, shape: type[BaseModel] = Report) -> list[str]:
    """Keys that are missing or unknown and values of another type, a line each; none: whatever
    reads it can rely on its shape."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        return faults(error)
    return []


def faults(error: ValidationError) -> list[str]:
    """What is wrong with a value, a line each."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [_line(one["loc"], one["type"], one["msg"]) for one in found[:SHOWN]]
    return [*lines, f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else lines


def _line(where: Sequence[int | str], kind: str, message: str) -> str:
    path = ".".join(_shown(str(part)) for part in where)
    words = {"missing": "is missing", "extra_forbidden": "is no key of a report"}
    return f"{path or 'it'} {words.get(kind, 'is wrong: ' + message)}"


def _shown(name: str) -> str:
    """A key, which may come from anybody, on the line that names it."""
    plain = name.isalnum() or name.isidentifier()
    return name if plain and len(name) <= LONGEST else reprlib.repr(name)
