"""The privacy budget report: what was promised, on which assumptions, and what was left out.

The report is itself a release, so it is built from public settings and ledger rows alone: no
counts, no losses. Where there is no guarantee it says so and why, and states no ε at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.audit import NOT_RUN
from fedsynth.privacy.disclosure import ACCOUNTED, PUBLIC, SIMULATION_ONLY, UNACCOUNTED
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.files import sync_folder, write_durably
from fedsynth.privacy.history import History
from fedsynth.privacy.releases import (
    ADD_REMOVE,
    RECORD,
    USER,
    adjacency_words,
    check_adjacency,
    check_delta,
)
from fedsynth.privacy.report_html import render_html
from fedsynth.privacy.report_schema import (
    OF_EARLIER,
    Access,
    Budget,
    Guarantee,
    LedgerHead,
    NotCovered,
    Report,
    RunFacts,
    TrustModel,
    Unit,
    Verdict,
)
from fedsynth.privacy.report_text import render_markdown, summary_rows

__all__ = [
    "SCHEMA_VERSION",
    "ReportContext",
    "build_report",
    "render_html",
    "render_markdown",
    "summary_rows",
    "write_report",
]

SCHEMA_VERSION = 3
ABANDONED = (
    "This run did not finish: the report was built from what it left. Every charged release "
    "counts, whether or not it left the client; a run that is still going spends more."
)
ACCESS_STATUSES = (ACCOUNTED, PUBLIC, SIMULATION_ONLY, UNACCOUNTED)
FORMAL = "formal differential privacy, under the assumptions below"
NO_GUARANTEE = "no differential privacy guarantee"
_HELD_BY_ONE = {
    RECORD: "the partition is fixed, and each example is held by one client",
    USER: "the partition is fixed, all examples of a user are held by one client, and the data say "
    "rightly whose each is",
}
NOT_PRIVATE = "not private: a test-only source of randomness was used"

NAMELESS = RunFacts(id=None, date=None, responsible=None, purpose=None, sites={})
"""A run of which nothing is known but its report."""


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
        run: which run it is, and who answers for it; None makes a report as earlier versions did,
            without a first page.
        files: file of the run → its SHA-256.

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
    run: RunFacts | None = NAMELESS
    files: Mapping[str, str] = field(default_factory=dict)

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


def build_report(context: ReportContext, histories: Sequence[History]) -> dict[str, object]:
    """The report as a JSON-able dict (no NaN or infinity), schema version `SCHEMA_VERSION`.

    Args:
        context: what is public beside the ledgers.
        histories: what each client's ledger holds.

    `guarantee` and `budget` are None where there is no guarantee, or where test-only randomness was
    used.

    Raises:
        PrivacySettingError: a guarantee is claimed without any ledger.
    """
    rows = {one.client: one.releases for one in histories}
    reasons = [*context.no_guarantee, *sections.reasons_in_ledgers(rows)]
    reasons += [f"{one.what}: {one.note}" for one in context.accesses if one.status == UNACCOUNTED]
    private = not reasons and not context.test_only_randomness
    if private and not rows:
        raise PrivacySettingError(
            None, "ledgers", "must hold at least one client's for a privacy report"
        )
    promise = sections.guarantee(rows, context.delta, context.adjacency) if private else None
    worst = None if promise is None else promise.worst_client
    shares = max([context.shares, *(row.shares for some in rows.values() for row in some)])
    return Report(
        schema_version=SCHEMA_VERSION,
        verdict=_verdict(context, reasons, promise, shares),
        method=context.method,
        mechanism=context.mechanism,
        noise_multiplier=context.noise_multiplier,
        guarantee=promise,
        unit=protected_unit(private, context.unit, context.user_records),
        adjacency=adjacency_words(context.adjacency, context.unit),
        max_records=context.max_records,
        data_set=as_lists(context.data_set),
        trust_model=_trust_model(private, context, shares),
        public_items=dict(context.public_items),
        scope=[
            Access(access=one.what, status=one.status, note=one.note) for one in context.accesses
        ],
        ledger=sections.folded_ledger(rows),
        ledger_kept=not context.fresh_ledger,
        ledger_heads={one.client: _head(context, one) for one in histories},
        accountant=sections.accountant(rows, worst, context.delta, context.adjacency),
        budget=_budget(context, promise),
        published=[dict(row) for row in context.published] if private else [],
        randomness=context.randomness,
        deviations=[*_abandoned(context), *context.deviations],
        not_covered=NOT_COVERED,
        audit=NOT_RUN,
        provenance=dict(context.provenance),
        **_first_page(context),
    ).to_json()


def as_lists(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping as JSON has it: with lists in place of tuples."""
    found: dict[str, Any] = json.loads(json.dumps(dict(facts)))
    return found


def _head(context: ReportContext, held: History) -> LedgerHead:
    """Where a client's ledger stands."""
    before = context.rows_before.get(held.client, 0)
    return LedgerHead(rows=len(held.releases), chain=held.chain, rows_before=before)


def _first_page(context: ReportContext) -> dict[str, Any]:
    """What a report has since it has a first page."""
    if context.run is None:
        return {}
    return {"run": context.run, "files": dict(context.files)}


def _budget(context: ReportContext, promise: Guarantee | None) -> Budget | None:
    if promise is None:
        return None
    return sections.budget(
        promise.epsilon, context.epsilon_cap, context.planned_rounds, context.rounds_done
    )


def _abandoned(context: ReportContext) -> list[str]:
    if not context.abandoned:
        return []
    return [
        f"abandoned after {context.rounds_done} of {context.planned_rounds} rounds; what was "
        "charged for a round under way is counted"
    ]


def _verdict(
    context: ReportContext, reasons: list[str], promise: Guarantee | None, shares: int
) -> Verdict:
    abandoned = [ABANDONED] if context.abandoned else []
    if promise is None:
        text = NO_GUARANTEE if reasons else NOT_PRIVATE
        if context.test_only_randomness:
            injected = "noise or sampling masks were injected by a test, so they are known"
            reasons = [*reasons, injected]
        return Verdict(text=text, formal=False, reasons=reasons, assumptions=[], warnings=abandoned)
    warnings = [*abandoned, *_sums_alone(context, shares), *sections.weakness(promise.epsilon)]
    if context.max_records is None:
        warnings.append(
            "No public bound on the number of records was declared, so delta was not checked "
            "against it."
        )
    return Verdict(
        text=FORMAL,
        formal=True,
        reasons=[],
        assumptions=_assumptions(context, shares),
        warnings=warnings,
    )


def _sums_alone(context: ReportContext, shares: int) -> list[str]:
    """The warning where noise is shared, in this run or in one whose releases are counted too."""
    if shares == 1:
        return []
    if context.fewest:
        return [
            "The noise of some releases is that of several clients together (see the ledger): "
            "epsilon holds against those who see the sums over clients, which is all that this "
            "run's server was sent, and not against a server with more clients on its side than "
            "the trust model has, who know their noise and the masks of others (see the "
            "assumptions)."
        ]
    return [
        "The noise of some releases is that of several clients together (see the ledger): epsilon "
        "holds only against those who see of these releases the sums over all clients, and no "
        "client's own upload. "
        f"A single upload has as little as 1/√{shares} of the noise that is charged: whoever sees "
        "one, such as a server without a secure aggregation, learns more than epsilon says."
    ]


def _assumptions(context: ReportContext, shares: int) -> list[str]:
    """What a guarantee rests on; `shares` is the largest H of all releases that are counted."""
    assumptions = [
        "the code that ran is this code, and it drew the noise and the sampling masks that the "
        "ledger lists",
        "every item under 'public' was fixed before the private data were read",
        _HELD_BY_ONE[context.unit],
        "all else that leaves a client is computed from the accounted releases and public items "
        "alone",
        "Gaussian noise in floating point stands for the exact one; attacks on its low-order bits "
        "are not ruled out",
    ]
    if context.own_code:
        assumptions.append(
            f"{' and '.join(context.own_code)}, which the user gave, makes of each example what "
            "depends on that example alone, and nothing in it comes from private data: a trial on "
            "random public images found no mixing of examples, and for the rest it is taken at its "
            "word"
        )
    if shares > 1 and context.fewest:
        assumptions.append(
            f"of this run's sums, which were made under masks of at least {context.fewest} "
            "clients: their server has passed on the clients' keys as they were and told all of "
            f"them the same, at most {context.fewest - context.shares} of a sum's clients are on "
            f"its side, and at least {context.shares} have added their noise and tell it to "
            "nobody; of earlier runs on the same ledgers what their reports assume"
        )
    elif shares > 1:
        assumptions.append(
            "a secure aggregation shows of every release whose noise is that of several clients "
            "together nothing but the sum over all clients, and as many clients as the ledger says "
            f"(up to {shares}) add their noise to it and tell it to nobody"
        )
    if context.max_records is not None:
        assumptions.append(
            f"all clients together hold at most {context.max_records} records, the declared bound"
        )
    if context.fresh_ledger:
        because = f", since {context.no_ledger}" if context.no_ledger else ""
        assumptions.append(
            f"no ledger was kept over runs (privacy.ledger){because}: this run began with an empty "
            "ledger, and earlier and later runs on the same data are not counted"
        )
    else:
        assumptions.append(
            "the ledger files hold every earlier release from the same data: what stands in them "
            "is counted, and a file that was empty when this run began counts from then on"
        )
    return assumptions


def protected_unit(private: bool, unit: str, user_records: int | None) -> Unit:
    """Who is protected, and who is not."""
    if not private:
        return Unit(
            one="nobody",
            several="examples",
            protects="nothing that could be proved",
            does_not_protect="examples, persons or clients",
        )
    if unit == USER:
        bound = f"at most {user_records}, by a public choice" if user_records else "any number"
        return Unit(
            one="one user of one client",
            several="users",
            protects="ONE USER OF ONE CLIENT (all examples of theirs there together)",
            does_not_protect="a person with examples at several clients, or under several user "
            "ids; a client as a whole",
            records_per_user=f"{bound}; a user contributes the mean of their examples' vectors, "
            "clipped as one",
            group_privacy="j users together have the weaker guarantee of a group of j, which grows "
            "at least about j-fold; see 'groups' for what could be computed",
        )
    return Unit(
        one="one example of one client",
        several="examples",
        protects="ONE EXAMPLE OF ONE CLIENT (example level only)",
        does_not_protect="a person with several examples, or with examples at several clients; a "
        "client as a whole",
        records_per_user="no bound was declared or enforced (privacy.unit=user protects all "
        "examples of a person)",
        group_privacy="a person with j examples has the weaker guarantee of a group of j, which "
        "grows at least about j-fold; see 'groups' for what could be computed",
    )


def _earlier(shares: int) -> str:
    """Where this run's noise is each client's own, and that of earlier ones was shared."""
    return (
        f"{OF_EARLIER}: releases of earlier runs on the same ledgers are counted, of which each "
        f"client added as little as 1/√{shares} of the noise; for these the reports of those runs "
        "say whom they hold against"
    )


def _aggregated(model: TrustModel, context: ReportContext) -> TrustModel:
    """The model where noise is shared: it holds against who sees sums alone."""
    shares = context.shares
    if context.fewest:
        return model.model_copy(update=_executed(context))
    return model.model_copy(
        update={
            "trusted": "each client trusts its own machine and this software, a secure "
            f"aggregation, and that of a round's clients at least {shares}, it among them, add "
            "their noise and tell it to nobody",
            "adversary": "the server, the other clients but for those, and everybody else; they "
            "know all settings and code, every other example, and see the sum over all clients of "
            "every round, and no client's own upload",
            "secure_aggregation": f"assumed, not executed: each client adds 1/√{shares} of the "
            "noise that is charged, so whoever sees a single upload, as this simulation does, sees "
            "one with less noise",
        }
    )


def _executed(context: ReportContext) -> dict[str, str]:
    """What the model says where the sums were made under masks."""
    return {
        "trusted": "each client trusts its own machine and this software, that the server passes "
        "on the clients' keys as they are and tells all of them the same, and that of a sum's "
        f"clients at least {context.shares}, it among them, add their noise and tell it to nobody",
        "adversary": f"the server, at most {context.fewest - context.shares} of a sum's clients, "
        "and everybody else; they know all settings and code, every other example, and see the sum "
        "over the clients of every round, and of a client's own upload masked words",
        "secure_aggregation": "aggregation executed: the server was sent masked vectors (Bonawitz "
        "et al. 2017: X25519, ChaCha20, shares of Shamir's), and has made sums of at least "
        f"{context.fewest} clients of them; each client adds 1/√{context.shares} of the noise that "
        "is charged, and rounds after it to a grid that is the same for all",
    }


def _trust_model(private: bool, context: ReportContext, shares: int) -> TrustModel:
    model = TrustModel(
        trusted="each client trusts its own machine and this software, and nobody else",
        adversary="the server, the other clients and everybody else; they know all settings and "
        "code, every other example, and see every upload of every round",
        secure_aggregation="none",
        client_sampling="no amplification is claimed",
    )
    if not private:
        return model
    if context.shares > 1:
        model = _aggregated(model, context)
    elif shares > 1:
        model = model.model_copy(update={"secure_aggregation": _earlier(shares)})
    one = "user" if context.unit == USER else "example"
    whose = f"epsilon is the worst client's, for one {one} held by one client"
    return model.model_copy(update={"federation": whose})


NOT_COVERED = NotCovered(
    tuning_and_selection="not covered: choosing settings, methods or rounds by results on private "
    "data costs privacy that this report does not count",
    public_data_and_pretraining="not covered: what is declared public, pretrained weights "
    "included, gets no protection here",
    timing="not covered: how long a client takes can depend on its data",
    drop_outs="not covered: whether a client answers can depend on its data",
    simulation="losses, accuracies per client, partitions and true counts that a simulation shows "
    "are exact functions of the data and stand outside any guarantee",
)


def write_report(report: Mapping[str, object], folder: Path) -> tuple[Path, Path, Path]:
    """Write privacy_report.json, .md and .html into `folder`; each appears whole, and on the disk,
    or not at all.

    Raises:
        PrivacyError: the folder cannot be written to.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    stem = Path(folder) / "privacy_report"
    paths = (stem.with_suffix(".json"), stem.with_suffix(".md"), stem.with_suffix(".html"))
    contents = (text, render_markdown(report), render_html(report))
    for path, content in zip(paths, contents, strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content.encode())
            sync_folder(path.parent)
        except OSError as error:
            raise PrivacyError(f"cannot write {path}: {error}") from error
    return paths
