"""The figures of a privacy report, schema 4: every key and its type; no other key is allowed.

A report holds figures and names. Its sentences are in the templates (`report_pages`). An untrusted
report is checked against these types before it is used; `verify` checks its values.
"""

from __future__ import annotations

import datetime
import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsynth.privacy.releases import ADD_REMOVE, RECORD

SCHEMA_VERSION = 4
MAX_SHOWN_FAULTS = 10
MAX_SHOWN_KEY = 80
_REASONS = {"missing": "is missing", "extra_forbidden": "is not a key of a report"}
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}$")]
Share = Annotated[float, Field(gt=0, lt=1)]
DataSet = dict[str, str | int | list[str] | list[float]]


class Part(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Returns the part as a JSON-able mapping."""
        return self.model_dump()


class Verdict(Part):
    """Attributes:
    formal: whether there is a guarantee; `build_report` decides.
    reasons: the reasons why there is none.
    warnings: the run's own warnings; the pages add those that follow from the figures.
    """

    formal: bool = False
    reasons: list[str] = []
    warnings: list[str] = []


class AfterRound(Part):
    round: int
    worst: float


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
    """The ε of several units together; None: beyond the accountant's accuracy."""

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
    """The privacy unit.

    Attributes:
        kind: one of `releases.UNITS`.
        person: the term for one person, such as "patient".
        user_records: the bound on a person's records at one client, or None.
    """

    kind: str = RECORD
    person: str = "person"
    user_records: int | None = None


class Access(Part):
    """An access to private data, and its status (`disclosure`)."""

    access: str
    status: Literal["accounted", "public", "simulation-only", "unaccounted"]
    note: str


class LedgerEntry(Part):
    """Ledger rows that differ only in round and client."""

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
    """The accountant, and the ε of Rényi DP as a cross-check (None: it is not finite)."""

    name: str
    library: str
    computation: str
    discretisation_interval: float | None
    rdp_epsilon: float | None = None


class Audit(Part):
    """The counts of a canary audit, and the bound that follows from them."""

    command: str = Field(pattern=r"^fedsynth privacy audit( [^\x00-\x1f\x7f]{0,2000})?$")
    method: str
    mechanism: str
    canaries: int = Field(ge=1, le=10**6)  # checking more would take hours
    guesses: int
    correct: int
    confidence: Share
    delta: Share
    epsilon_lower_bound: float


class Event(Part):
    """A deviation from the plan.

    Attributes:
        kind: "resumed", "ended" (before the last round), "absent" (a client did not participate),
            or "unstated" (a client has not stated its ledger since it was asked for a step).
        rounds_done: the number of finished rounds.
        client: the client whose budget ended the run, or that was absent or silent.
        rounds: the rounds in which a silent client was asked.
        epsilon, epsilon_next: that client's ε at the end, and after one more round.
        why: the reason as another party stated it, which cannot be derived from figures.
    """

    kind: Literal["resumed", "ended", "absent", "unstated"]
    rounds_done: int | None = None
    client: str | None = None
    rounds: list[int] | None = None
    epsilon: float | None = None
    epsilon_next: float | None = None
    why: str | None = None

    @classmethod
    def ended(cls, rounds_done: int, spent: tuple[str, float, float] | None, reason: str) -> Event:
        """Returns the event of a run that a refused release has ended.

        Args:
            rounds_done: the number of finished rounds.
            spent: the client, its current ε, and its ε after one more round; None: known only to
                the client.
            reason: the client's reason.
        """
        if spent is None:
            return cls(kind="ended", rounds_done=rounds_done, why=reason)
        figures = dict(zip(("client", "epsilon", "epsilon_next"), spent, strict=True))
        return cls(kind="ended", rounds_done=rounds_done).model_copy(update=figures)


class RunFacts(Part):
    """The run that a report is about; None for facts that were not stated.

    Attributes:
        id: the run folder's name when the run began.
        date: the date on which it began, YYYY-MM-DD.
        responsible, purpose: as the settings state them.
        sites: client → its site or sites.
    """

    id: str | None = None
    date: str | None = None
    responsible: str | None = None
    purpose: str | None = None
    sites: dict[str, str] = {}


class ReportFacts(Part):
    """The public facts in a report that do not follow from the ledgers.

    Attributes:
        method, mechanism: their names.
        delta: δ.
        max_records: the declared public bound on all records, None if undeclared.
        epsilon_cap: the cap, or None.
        planned_rounds, rounds_done: of this run.
        public_items: item → its value, or the reason why it is public.
        verdict: the reasons why there is no guarantee, and the run's own warnings.
        events: deviations from the plan.
        ledger_kept: whether the ledgers are kept across runs.
        randomness: the source of noise and masks.
        published: comparisons of figures printed in papers with ours.
        scope: all accesses to private data.
        adjacency: one of `releases.ADJACENCIES`.
        test_only_randomness: whether a test injected noise or masks; there is no guarantee then.
        provenance: the hash of the settings, and versions.
        noise_multiplier: the run's σ, or None.
        simulated: whether all clients ran in one process; otherwise each ran where its data are.
        abandoned: whether the run did not finish, and the report was built afterwards.
        shares: H of this run: each client adds 1/√H of the charged noise, and only sums over
            clients may be seen; 1: each client adds all of it.
        min_clients: the smallest number of clients in a sum that the server received, if it saw
            only sums; otherwise 0.
        own_code: the operator's custom code, other than the method, that computes on private data.
        run: the run, and who is responsible for it.
        files: file → its SHA-256.
        exported: whether the report belongs to an exported folder, whose files `files` then
            lists.
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
    provenance: dict[str, Version] = {}
    noise_multiplier: float | None = None
    simulated: bool = True
    abandoned: bool = False
    shares: int = 1
    min_clients: int = 0
    own_code: list[str] = []
    run: RunFacts = RunFacts()
    files: dict[str, Sha256] = {}
    exported: bool = False


class Report(ReportFacts):
    """The whole report.

    Attributes:
        counted_shares: the largest H of all counted releases, including those of earlier runs.
        audit: a canary audit of the settings, or None.
    """

    schema_version: int
    guarantee: Guarantee | None
    ledger: list[LedgerEntry]
    ledger_heads: dict[str, LedgerHead]
    accountant: Accountant
    counted_shares: int
    audit: Audit | None


class Promise(Part):
    """The privacy section of summary.json.

    Attributes:
        aggregation: if clients share noise: "executed", or "assumed, not executed".
    """

    guarantee: bool
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None
    mechanism: str
    aggregation: str | None = None


class RunStart(Part):
    """The start date of a run, and the name of its folder then (None: no folder)."""

    id: str | None
    date: str

    @classmethod
    def today(cls, folder: str | None) -> RunStart:
        """Returns the facts of a run that starts now."""
        return cls(id=folder, date=datetime.date.today().isoformat())


class Start(Part):
    """A run folder's privacy_start.json: the public facts that were fixed when the run began."""

    schema_version: Literal[4]
    noise_multiplier: float | None
    data_set: DataSet
    test_images: Literal["public", "private", "none"]
    ledgers: dict[str, LedgerStart]
    run: RunStart
    simulated: bool
    warnings: list[str]


class Resumptions(Part):
    """A run folder's resumed.json: the rounds after which the run was resumed."""

    after_rounds: list[Annotated[int, Field(ge=0)]]


class Owner(Part):
    """The owner.json of an owner's report: the client index, and the number of rounds after which
    the run ended."""

    client: int = Field(ge=0)
    rounds: int = Field(ge=0)


class Signature(Part):
    """A run folder's signature.json: key and signature in base64, and the SHA-256 of each file."""

    fedsynth_signature: Literal[1]
    algorithm: Literal["Ed25519"]
    public_key: str
    files: dict[str, str]
    signature: str


def schema_problems(value: Any, shape: type[BaseModel] = Report) -> list[str]:
    """Returns missing and unknown keys and values of the wrong type, one line each; if empty, code
    that reads the value can rely on its shape."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        return faults(error)
    return [f"{key} is missing" for key in shape.model_fields if key not in value]


def faults(error: ValidationError) -> list[str]:
    """Returns the faults of an invalid value, one line each."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for fault in errors[:MAX_SHOWN_FAULTS]:
        path = ".".join(short_key(str(part)) for part in fault["loc"]) or "it"
        lines.append(f"{path} {_REASONS.get(fault['type'], 'is wrong: ' + fault['msg'])}")
    if len(errors) > MAX_SHOWN_FAULTS:
        lines.append(f"and {len(errors) - MAX_SHOWN_FAULTS} more")
    return lines


def short_key(name: str) -> str:
    """Returns an untrusted key as error messages show it."""
    if len(name) <= MAX_SHOWN_KEY and name.isprintable():
        return name
    return reprlib.repr(name)
