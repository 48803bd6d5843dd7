"""A privacy report's data model (schema 4), with each key's type.

A report must have exactly the model's keys. It contains only figures and names. Its sentences are
in the templates of the pages (`fedsynth.privacy.report.pages`). An untrusted report is checked
against the types before it is used, and `fedsynth.privacy.report.verify` checks its values.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsynth.errors import faults
from fedsynth.privacy.releases import ADD_REMOVE, RECORD

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}$")]
Share = Annotated[float, Field(gt=0, lt=1)]
DataSet = dict[str, str | int | list[str] | list[int] | list[float]]


class Part(BaseModel):
    """Base class for report parts."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Returns the object as a JSON-serialisable dict."""
        return self.model_dump()


class Verdict(Part):
    """States whether the run has a privacy guarantee.

    Attributes:
        formal: True if there is a guarantee, as `build_report` has determined.
        reasons: the reasons why there is no guarantee.
        warnings: warnings of the run. The pages add warnings that depend on the figures.
    """

    formal: bool = False
    reasons: list[str] = []
    warnings: list[str] = []


class AfterRound(Part):
    """The largest ε among all clients after a round."""

    round: int
    worst: float


class ReleaseKind(Part):
    """The ε for one kind of release, as if the client made only that kind."""

    quantity: str
    mechanism: str
    epsilon: float


class CurvePoint(Part):
    """The largest ε among all clients for one δ."""

    delta: float
    epsilon: float


class Attack(Part):
    """The largest true-positive rate that a membership test can have at one false-positive rate."""

    false_positive_rate: float
    true_positive_rate_at_most: float


class Group(Part):
    """The ε of a group of several privacy units of one client.

    `epsilon` is None if the accountant is not accurate enough to compute it.
    """

    units: int
    epsilon: float | None
    exact: bool


class Guarantee(Part):
    """The figures of a run's privacy guarantee, as `build.guarantee` computes them."""

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
    """The privacy unit of a run.

    Attributes:
        kind: the unit, one of `releases.UNITS`.
        person: the word for a person in the data, such as "patient".
        user_records: the maximum number of a person's records at one client that take part. None
            if there is no maximum.
    """

    kind: str = RECORD
    person: str = "person"
    user_records: int | None = None


class Access(Part):
    """One use of private data in the run.

    Attributes:
        access: a description of the use.
        status: the privacy label of the use, as in `fedsynth.privacy.disclosure`.
        note: an explanation of the status.
    """

    access: str
    status: Literal["accounted", "public", "simulation-only", "unaccounted"]
    note: str


class SelectionFacts(Part):
    """A private selection, as in `fedsynth.privacy.selection.Selection`."""

    candidates: list[list[list[float | int]]]
    poisson_mean: float | None
    eta: float | None
    gamma: float | None


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
    selection: SelectionFacts | None = None


class LedgerStart(Part):
    """A ledger's rows at some time, for example at the start of a run.

    Attributes:
        rows: the number of rows.
        chain: the chain hash over these rows. None if the ledger is in memory.
    """

    rows: int = Field(ge=0)
    chain: str | None


class LedgerHead(LedgerStart):
    """The ledger rows from which a report was computed.

    Attributes:
        rows_before: the number of rows that the ledger had when the run began.
    """

    rows_before: int = Field(ge=0)


class Accountant(Part):
    """The accountant that computed ε, and a second ε as a check.

    `rdp_epsilon` is the ε according to Rényi DP. It is None if it was not computed or is not
    finite.
    """

    name: str
    library: str
    computation: str
    discretisation_interval: float | None
    rdp_epsilon: float | None = None


class Audit(Part):
    """A canary audit's counts, and the lower bound on ε computed from them."""

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
    """An event in which a run deviated from its plan.

    Attributes:
        kind: "resumed", "ended" (the run ended before the last round), "absent" (a client did not
            participate), or "unstated" (a client was asked for a step, but has not sent its ledger
            since then).
        rounds_done: the number of finished rounds.
        client: the client whose budget ended the run, that did not participate, or that has not
            sent its ledger.
        rounds: the rounds in which this client was asked for a step.
        epsilon, epsilon_next: the client's ε at the end of the run, and its ε after one more round.
        why: the reason that another party stated. It cannot be computed from other figures.
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
        """Creates the event for a run ended by a refused release.

        Args:
            rounds_done: the number of finished rounds.
            spent: the client, its current ε, and its ε after one more round. None if only the
                client knows them.
            reason: the reason that the client stated. It is used only if `spent` is None.
        """
        if spent is None:
            return cls(kind="ended", rounds_done=rounds_done, why=reason)
        figures = dict(zip(("client", "epsilon", "epsilon_next"), spent, strict=True))
        return cls(kind="ended", rounds_done=rounds_done).model_copy(update=figures)


class RunFacts(Part):
    """Entries that describe a run. Entries without a value are None.

    Attributes:
        id: the name of the run folder when the run began.
        date: the date on which the run began, YYYY-MM-DD.
        responsible, purpose: the person who is responsible for the run and the purpose of the run,
            as the settings state them.
        sites: a mapping from each client to its site or sites.
    """

    id: str | None = None
    date: str | None = None
    responsible: str | None = None
    purpose: str | None = None
    sites: dict[str, str] = {}


class ReportFacts(Part):
    """The public content of a report that cannot be computed from the ledgers.

    Attributes:
        method, mechanism: the names of the method and of its mechanism.
        delta: δ.
        max_records: the declared public bound on the number of all records. None if it was not
            declared.
        epsilon_cap: the cap on ε. None if there is no cap.
        planned_rounds, rounds_done: the numbers of planned and of finished rounds of this run.
        public_items: a mapping from each public item to its value or to the reason why it is
            public.
        verdict: the reasons why there is no guarantee, and the warnings of the run.
        events: events in which the run deviated from its plan.
        ledger_kept: True if the ledgers are kept across runs.
        randomness: the source of the noise and of the sampling masks.
        published: comparisons of figures that papers state with the figures of this run.
        scope: all ways in which the run uses private data.
        adjacency: one of `releases.ADJACENCIES`.
        unit: the privacy unit.
        test_only_randomness: True if a test replaced the secret random generator. The run then has
            no guarantee.
        provenance: the hash of the settings, and the versions of the packages.
        noise_multiplier: the run's σ. None if the run has none.
        simulated: True if all clients ran in one process. Otherwise each ran where its data are.
        abandoned: True if the run did not finish and the report was built afterwards.
        shares: the number H of clients that together add the charged noise. Each adds noise with
            1/√H of the standard deviation, so only sums over clients may be seen. With 1, each
            client adds all of the noise.
        min_clients: the smallest number of clients in a sum that the server received. 0 if the
            server received the uploads of single clients.
        own_code: the operator's custom code that computes on private data, apart from the method.
        run: facts about the run, such as the person who is responsible for it.
        files: a mapping from file names to their SHA-256.
        exported: True if the report belongs to an exported folder, whose files `files` then lists.
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
    """A run's entire privacy report.

    Attributes:
        counted_shares: the largest H (see `ReportFacts.shares`) of all releases in the ledgers,
            including those of earlier runs.
        audit: the result of a canary audit of the settings. None if there was no audit.
    """

    schema_version: Literal[4] = 4
    guarantee: Guarantee | None
    ledger: list[LedgerEntry]
    ledger_heads: dict[str, LedgerHead]
    accountant: Accountant
    counted_shares: int
    audit: Audit | None


class Promise(Part):
    """The privacy section of summary.json.

    Attributes:
        aggregation: "executed" or "assumed, not executed", which states whether secure aggregation
            took place. None if clients do not share their noise.
    """

    guarantee: bool
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None
    mechanism: str
    aggregation: str | None = None


class RunStart(Part):
    """The start of a run.

    Attributes:
        id: the name of the run folder when the run began. None if there is no folder.
        date: the date on which the run began.
    """

    id: str | None
    date: str

    @classmethod
    def today(cls, folder: str | None) -> RunStart:
        """Creates the entry for a run that starts today in the given folder."""
        return cls(id=folder, date=datetime.date.today().isoformat())


class Start(Part):
    """The file privacy_start.json, with the public facts fixed at a run's start.

    `charge_id` marks the run's lines in the ledgers. It is empty in a run over a network.
    `selected` is True for the best trial of a private selection, whose row is in the ledgers.
    """

    schema_version: Literal[5]
    noise_multiplier: float | None
    data_set: DataSet
    test_images: Literal["public", "private", "none"]
    ledgers: dict[str, LedgerStart]
    run: RunStart
    simulated: bool
    warnings: list[str]
    charge_id: str
    selected: bool = False


class Resumptions(Part):
    """The file resumed.json, which lists the rounds after which a run was resumed."""

    after_rounds: list[Annotated[int, Field(ge=0)]]


class Owner(Part):
    """The file owner.json, which belongs to a data owner's report.

    Attributes:
        client: the index of the owner's client.
        rounds: the number of rounds that have begun, or after which the run ended.
        secret_noise: whether the keys for the noise came from the operating system.
    """

    client: int = Field(ge=0)
    rounds: int = Field(ge=0)
    secret_noise: bool


class Signature(Part):
    """The file signature.json of a run folder.

    The key and the signature are in base64. `files` maps each file name to its SHA-256.
    """

    fedsynth_signature: Literal[1]
    algorithm: Literal["Ed25519"]
    public_key: str
    files: dict[str, str]
    signature: str


def schema_problems(value: Any) -> list[str]:
    """Checks an untrusted value against a report's data model.

    Returns:
        One line for each key that is missing or unknown and for each value of the wrong type. If
        there is none, the value has all keys of `Report` with the right types.
    """
    try:
        Report.model_validate(value)
    except ValidationError as error:
        return faults(error)
    return [f"{key} is missing" for key in Report.model_fields if key not in value]
