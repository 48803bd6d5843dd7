"""The figures of a privacy report, schema 4: every key and its type; no other key is allowed.

A report holds figures and names. Its sentences are in the templates (`report_pages`). A report
that may come from anybody is checked against these types before anything reads it; whether its
values are right is checked by `verify`.
"""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsynth.privacy.releases import ADD_REMOVE, RECORD, check_adjacency, check_delta

SCHEMA_VERSION = 4
MAX_SHOWN_FAULTS = 10
MAX_SHOWN_KEY = 80
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DataSet = dict[str, str | int | list[str] | list[float]]


class Part(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Returns the part as a JSON-able mapping."""
        return self.model_dump()


class Verdict(Part):
    """Attributes:
    formal: there is a guarantee; `build_report` decides.
    reasons: why there is none.
    warnings: doubts of the run itself; the pages add those that follow from the figures.
    """

    formal: bool = False
    reasons: list[str] = []
    warnings: list[str] = []


class AfterRound(Part):
    round: int
    worst: float
    median: float
    clients: dict[str, float]


class ReleaseKind(Part):
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
    """The ε of several units together; None: out of the accountant's reach."""

    units: int
    epsilon: float | None
    exact: bool


class Guarantee(Part):
    epsilon: float
    delta: float
    worst_client: str
    epsilon_by_client: dict[str, float]
    epsilon_by_round: list[AfterRound]
    epsilon_of_each_release_alone: list[ReleaseKind]
    epsilon_of_delta: list[CurvePoint]
    attack_success: list[Attack]
    best_guess_at_most: float
    groups: list[Group]


class Unit(Part):
    """Who is protected.

    Attributes:
        kind: one of `releases.UNITS`.
        person: what one person is called, such as "patient".
        user_records: the bound on a person's records at one client, None without one.
    """

    kind: str = RECORD
    person: str = "person"
    user_records: int | None = None


class Access(Part):
    """Something that touches private data, and how it is covered (`disclosure`)."""

    access: str
    status: Literal["accounted", "public", "simulation-only", "unaccounted"]
    note: str


class LedgerEntry(Part):
    """Rows of ledgers that differ only in round and client."""

    rounds: list[int] = Field(min_length=1)
    clients: list[str] = Field(min_length=1)
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
    shares: int


class LedgerStart(Part):
    """The number of rows in a ledger, and the chain hash over them (None: only in memory)."""

    rows: int = Field(ge=0)
    chain: str | None


class LedgerHead(LedgerStart):
    rows_before: int = Field(ge=0)


class Accountant(Part):
    """Which accountant, and the ε of Rényi DP as a cross-check (None: it gives no finite one)."""

    name: str
    library: str
    computation: str
    discretisation_interval: float | None
    rdp_epsilon: float | None = None


class Audit(Part):
    """The counts of a canary audit, and the bound that follows from them."""

    command: str
    method: str
    mechanism: str
    canaries: int = Field(ge=1, le=10**6)  # more would take hours, and memory to check
    guesses: int
    correct: int
    confidence: float
    delta: float
    epsilon_lower_bound: float


class Event(Part):
    """Something that did not go as planned.

    Attributes:
        kind: "resumed", "ended" (before the last round), "absent" (a client took no part), or
            "unstated" (a client has not stated its ledger since it was asked for a step).
        after: the rounds that had ended.
        client: whose budget ended the run, or who was absent or silent.
        rounds: in which a silent client was asked.
        epsilon, epsilon_next: of that client, at the end and after one more round.
        why: in the words of another party, which cannot be derived from figures.
    """

    kind: Literal["resumed", "ended", "absent", "unstated"]
    after: int | None = None
    client: str | None = None
    rounds: list[int] | None = None
    epsilon: float | None = None
    epsilon_next: float | None = None
    why: str | None = None

    @classmethod
    def ended(cls, after: int, spent: tuple[str, float, float] | None, reason: str) -> Event:
        """Returns the event that a refused release has ended the run.

        Args:
            after: the rounds that had ended.
            spent: the client, its ε now and after one more round; None: known only to it.
            reason: in its words.
        """
        if spent is None:
            return cls(kind="ended", after=after, why=reason)
        client, now, then = spent
        return cls(kind="ended", after=after, client=client, epsilon=now, epsilon_next=then)


class RunFacts(Part):
    """Which run a report is about; None where nobody stated it.

    Attributes:
        id: the run folder's name when the run began.
        date: on which it began, YYYY-MM-DD.
        responsible, purpose: as the settings state them.
        sites: client → its site, or its sites.
    """

    id: str | None = None
    date: str | None = None
    responsible: str | None = None
    purpose: str | None = None
    sites: dict[str, str] = {}


class ReportFacts(Part):
    """Everything public that a report states beside what follows from the ledgers.

    Attributes:
        method, mechanism: their names.
        delta: δ.
        max_records: the declared public bound on all records, None if undeclared.
        epsilon_cap: the cap, None without one.
        planned_rounds, rounds_done: of this run.
        public_items: item → its value, or why it is public.
        verdict: why nothing is guaranteed, and the run's own warnings.
        events: what did not go as planned.
        ledger_kept: the ledgers are kept over runs.
        randomness: where noise and masks came from.
        published: rows that compare a figure printed in a paper with ours.
        scope: everything that touched private data.
        adjacency: one of `releases.ADJACENCIES`.
        test_only_randomness: noise or masks were injected by a test; nothing is guaranteed then.
        provenance: hash of the settings, and versions.
        noise_multiplier: the run's σ, None where there is none.
        data_set: the data set's public specification.
        simulated: all clients were in one process; else each was where its data are.
        abandoned: the run did not finish; the report was built afterwards.
        shares: H of this run: each client adds 1/√H of the noise that is charged, and only sums
            over clients may be seen; 1: the noise is each client's own.
        min_clients: the server got no sum of fewer clients, where it saw only sums; else 0.
        own_code: the operator's own code that computes on private data, beside the method.
        run: which run it is, and who answers for it.
        files: file → its SHA-256.
        handed_over: the report belongs to a folder for others, and `files` are that folder's.
    """

    method: str
    mechanism: str
    delta: float
    max_records: int | None = None
    epsilon_cap: float | None = None
    planned_rounds: int
    rounds_done: int
    public_items: dict[str, str] = {}
    verdict: Verdict = Verdict()
    events: list[Event] = []
    ledger_kept: bool = False
    randomness: str = "not stated"
    published: list[dict[str, str]] = []
    scope: list[Access] = []
    adjacency: str = ADD_REMOVE
    unit: Unit = Unit()
    test_only_randomness: bool = False
    provenance: dict[str, str] = {}
    noise_multiplier: float | None = None
    data_set: DataSet = {}
    simulated: bool = True
    abandoned: bool = False
    shares: int = 1
    min_clients: int = 0
    own_code: list[str] = []
    run: RunFacts = RunFacts()
    files: dict[str, Sha256] = {}
    handed_over: bool = False

    def check(self) -> None:
        """Raises PrivacySettingError for a δ or an adjacency that is out of range."""
        check_delta(self.delta, self.max_records)
        check_adjacency(self.adjacency)


class Report(ReportFacts):
    """The whole report.

    Attributes:
        counted_shares: the largest H of all releases that are counted, earlier runs' included.
        audit: a canary audit of the settings, None without one.
    """

    schema_version: int
    guarantee: Guarantee | None
    ledger: list[LedgerEntry]
    ledger_heads: dict[str, LedgerHead]
    accountant: Accountant
    counted_shares: int
    audit: Audit | None


class Promise(Part):
    """What summary.json states about a run's privacy.

    Attributes:
        aggregation: where clients share noise: "executed", or "assumed, not executed".
    """

    guarantee: bool
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None
    mechanism: str
    aggregation: str | None = None


class Began(Part):
    """When a run began, and the name of its folder then (None: it leaves no folder)."""

    id: str | None
    date: str

    @classmethod
    def today(cls, folder: str | None) -> Began:
        """Returns the facts of a run that begins now."""
        return cls(id=folder, date=datetime.date.today().isoformat())


class Start(Part):
    """A run folder's privacy_start.json: what was public and fixed when the run began."""

    schema_version: int
    noise_multiplier: float | None
    data_set: DataSet
    test_images: Literal["public", "private", "none"]
    ledgers: dict[str, LedgerStart]
    run: Began
    simulated: bool
    warnings: list[str]


class Signature(Part):
    """A run folder's signature.json: base64 of key and signature, SHA-256 by file."""

    fedsynth_signature: int
    algorithm: str
    public_key: str
    files: dict[str, str]
    signature: str


def schema_problems(value: Any, shape: type[BaseModel] = Report) -> list[str]:
    """Returns missing and unknown keys and values of another type, a line each; none: code that
    reads the value can rely on its shape."""
    missing = []
    if isinstance(value, Mapping):
        missing = [f"{key} is missing" for key in shape.model_fields if key not in value]
    try:
        shape.model_validate(value)
    except ValidationError as error:
        return faults(error)
    return missing


def faults(error: ValidationError) -> list[str]:
    """Returns what is wrong with a value, a line each."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [_line(one["loc"], one["type"], one["msg"]) for one in found[:MAX_SHOWN_FAULTS]]
    hidden = len(found) - MAX_SHOWN_FAULTS
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def _line(where: Sequence[int | str], kind: str, message: str) -> str:
    path = ".".join(_short_key(str(part)) for part in where)
    words = {"missing": "is missing", "extra_forbidden": "is no key of a report"}
    return f"{path or 'it'} {words.get(kind, 'is wrong: ' + message)}"


def _short_key(name: str) -> str:
    """Returns a key, which may come from anybody, as an error's line shows it."""
    plain = name.isalnum() or name.isidentifier()
    return name if plain and len(name) <= MAX_SHOWN_KEY else reprlib.repr(name)
