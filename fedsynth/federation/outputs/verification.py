"""What a private run's report must say, made again from its folder: from config.toml,
privacy_start.json and the ledgers.

The run's plan is made as the run made it (`PrivacyPlan`), from what its ledgers held when it began.
The rows since then must be those that this plan charges, and the report, summary.json and the ε of
metrics.jsonl must follow from them. What rebuilds a report also makes the report of a run that was
killed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.errors import FedsynthError, Setting, Text
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.disclosed import (
    MODELS,
    ON_TEST,
    SOURCES,
    Declared,
    declared_row,
    declared_summary,
)
from fedsynth.federation.outputs.losses import NOT_COUNTED
from fedsynth.federation.outputs.report_context import handed_over, report_context
from fedsynth.federation.outputs.result import own_sources
from fedsynth.federation.outputs.run_files import (
    MismatchError,
    RunFiles,
    ledger_files,
    read_run,
    read_start,
)
from fedsynth.federation.outputs.run_folder import (
    INCOMPLETE,
    PRIVATE_START,
)
from fedsynth.federation.outputs.verified_losses import VerifiedLosses
from fedsynth.federation.outputs.verified_owner import OWNER, OwnersRun, owners_numbers
from fedsynth.federation.outputs.verified_served import ServedEvidence
from fedsynth.federation.terms.client_ledgers import data_set_id
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.public_context import public_context
from fedsynth.privacy.accounting import epsilon_by_round
from fedsynth.privacy.errors import BudgetExceededError, PrivacyError
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import chain_hashes, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import (
    NOT_PRIVATE,
    ReportContext,
    build_report,
)
from fedsynth.privacy.report_schema import schema_problems
from fedsynth.privacy.report_sections import over_clients
from fedsynth.privacy.verify import (
    HOSTILE,
    Held,
    Verification,
    differences,
    held_rows,
    read_report,
    report_problems,
    taken_as_stated,
)
from fedsynth.privacy.wording import shown
from fedsynth.synthesizer.condensation.sets import SyntheticSet
from fedsynth.version import __version__

CALIBRATED = 2e-3  # σ is found to 0.1 %: another version of the libraries may end elsewhere in that
Rows = Mapping[str, Sequence[Release]]


def verify_run(
    path: Path, *, ledger: Path | None = None, method: type[Method] | None = None
) -> Verification:
    """Checks a run folder's report against everything that it follows from.

    Args:
        path: the folder, or the privacy_report.json in it.
        ledger: folder of the ledger files; None takes `ledger/` in the run folder, or where
            config.toml says that ledgers are kept.
        method: the class of a method that fedsynth does not know by name.

    Raises:
        PrivacyError: there is no report of this schema to check.
    """
    if path.is_dir() and not (path / "privacy_report.json").exists() and is_unfinished(path):
        raise PrivacyError(
            f"the run in {path} did not finish and has no report yet: fedsynth privacy report "
            f"{path} builds it"
        )
    report = read_report(path)
    folder = path if path.is_dir() else path.parent
    problems = schema_problems(report)
    if problems:
        return Verification(problems)
    try:
        return _verified(folder, report, ledger, method)
    except (*HOSTILE, RuntimeError) as error:  # torch's complaints are RuntimeErrors
        raise PrivacyError(f"the run in {folder} is damaged: {shown(error)}") from None


def _verified(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> Verification:
    if (folder / OWNER).is_file():
        return _verified_owner(folder, report, ledger, method)
    finished = (folder / "summary.json").exists()
    abandoned = not finished and folder.resolve().suffix == INCOMPLETE
    missing = _missing(folder, abandoned)
    problems = [f"{name} is missing" for name in missing]
    notes: list[str] = []
    if not {"config.toml", PRIVATE_START} & set(missing):
        try:
            run = read_run(folder, method)
            files, exact = ledger_files(folder, run, ledger)
            held = held_rows(report, files, exact=exact)
            problems += held.problems
            notes.append(held.note)
            problems += Evidence(run, held, folder, abandoned=abandoned).problems(report)
        except (FedsynthError, PrivacyError) as error:
            problems.append(str(error))
    return _with_version(report, problems, notes)


def _verified_owner(
    folder: Path, report: dict[str, Any], ledger: Path | None, method: type[Method] | None
) -> Verification:
    """An owner's own report of a run over nodes."""
    try:
        start, settings, spec = read_start(folder, method)
        client, rounds = owners_numbers(folder / OWNER, settings.rounds)
        run = OwnersRun(settings, spec, start, client, rounds)
        problems, notes = run.problems(report, folder, ledger)
    except (FedsynthError, PrivacyError) as error:
        return _with_version(report, [str(error)], [])
    return _with_version(report, problems, notes)


def _with_version(report: Mapping[str, Any], problems: list[str], notes: list[str]) -> Verification:
    made_by = report["provenance"].get("fedsynth", "an unknown version")
    if problems and made_by != __version__:
        problems.append(
            f"(made by fedsynth {made_by}; this is {__version__}, whose reports may say other "
            "things)"
        )
    notes += [f"taken as stated: {fact}" for fact in taken_as_stated(report)]
    return Verification(problems, notes)


def _missing(folder: Path, abandoned: bool) -> list[str]:
    """Files that every private run leaves."""
    names = ["config.toml", PRIVATE_START, *(f"privacy_report.{end}" for end in ("md", "html"))]
    if not abandoned:
        names += ["summary.json", "model.safetensors"]
    return [name for name in names if not (folder / name).is_file()]


# -------------------------------------------------------------------------------------- rebuilding


def context_of(run: RunFiles) -> RoundContext:
    """The public context of the run's first round."""
    return public_context(run.settings, run.spec, torch.device("cpu"))


def rebuilt(run: RunFiles, before: Rows) -> PrivacyPlan:
    """The run's plan, as it was when the run began with these rows in its clients' ledgers."""
    context = context_of(run)
    run.settings.method.check_model(context.architecture)
    plan = PrivacyPlan.make(run.settings, context, _histories(run, before))
    stated = run.start["noise_multiplier"]
    found = plan.privacy.noise_multiplier
    given = run.settings.privacy and run.settings.privacy.noise_multiplier
    tolerance = 0.0 if given else CALIBRATED
    if stated is None or found is None or not math.isclose(stated, found, rel_tol=tolerance):
        raise MismatchError(
            f"{PRIVATE_START} says σ = {stated}, and config.toml and the ledgers give {found}"
        )
    return replace(plan, privacy=replace(plan.privacy, noise_multiplier=stated))


def _histories(run: RunFiles, rows: Rows) -> list[History]:
    """What these rows are of, in the clients' order."""
    return [History(client, tuple(rows[client])) for client in run.start["ledgers"]]


def plan_when_it_began(
    folder: Path,
    histories: Sequence[History],
    *,
    method: type[Method],
    rows: Sequence[dict[str, Any]],
) -> PrivacyPlan:
    """The plan of a run that is to be resumed: with σ, and what its ledgers held, as when it began.

    Args:
        folder: the run's.
        histories: what the clients' ledgers hold now, in the clients' order.
        method: the run's.
        rows: of the rounds that have ended, as its checkpoint has them.

    Raises:
        PrivacyError: a file is damaged, a ledger is not the one that the run began with, or it
            lacks what the run has charged: the run would forget it, and exceed its cap.
    """
    run = replace(read_run(folder, method), rows=list(rows))
    start = run.start["ledgers"]
    if [one.client for one in histories] != list(start):
        raise MismatchError(f"the run's clients are not those of {PRIVATE_START}")
    files, _ = ledger_files(folder, run, None)
    if files is None:
        raise MismatchError("the run's ledgers are not where its config.toml says")
    for one in histories:
        began = start[one.client]
        chains = chain_hashes(files / f"{one.client}.jsonl")
        if len(chains) <= began["rows"] or chains[began["rows"]] != began["chain"]:
            raise MismatchError(f"{one.client}: its ledger is not the one that the run began with")
    held = Held({one.client: one.releases for one in histories}, {}, {}, {}, [], "")
    evidence = Evidence(run, held, folder, abandoned=True)
    for client, lacking in evidence.lacking.items():
        if lacking:
            raise MismatchError(
                f"{client}: its ledger has lost rows that the run has charged: {_row(lacking[0])}"
            )
    return evidence.plan


class Evidence:
    """What a run's files prove: the plan, the rows that it charged, and the report that follows.

    Args:
        held: the rows that the report speaks of.
        abandoned: the run did not finish.
    """

    def __init__(self, run: RunFiles, held: Held, folder: Path, *, abandoned: bool) -> None:
        self.run = run
        self.folder = folder
        self.abandoned = abandoned
        privacy = run.settings.privacy
        self.kept = run.served or (privacy is not None and privacy.ledger_folder is not None)
        self.done = len(run.rows)
        self.rounds = run.settings.rounds
        start = run.start["ledgers"]
        absent = [number for number, client in enumerate(start) if client not in held.rows]
        if not set(held.rows) <= set(start) or (absent and not run.served):
            raise MismatchError(f"the report has other clients than {PRIVATE_START}")
        self.there = {client: held.rows[client] for client in start if client in held.rows}
        self.held = replace(held, rows=self.there)
        rows = {client: self.there.get(client, ()) for client in start}
        self.before = {client: rows[client][: start[client]["rows"]] for client in start}
        self.since = {client: rows[client][start[client]["rows"] :] for client in start}
        self.served: ServedEvidence | None = None
        if run.served:
            self.served = ServedEvidence(absent, run.rows, run.resumptions, self.rounds)
        self.plan = rebuilt(run, self.before)
        self.context = context_of(run)
        self.losses = VerifiedLosses(self.plan, run.rows, served=run.served)
        self.now = _histories(run, rows)
        self.own: dict[str, list[Release]] = {}
        self.foreign: dict[str, list[Release]] = {}
        self.lacking: dict[str, list[Release]] = {}
        for number, client in enumerate(start):
            self._sort_rows(number, client)

    def problems(self, report: Mapping[str, Any]) -> list[str]:
        """Everything in which the run's files and its report differ."""
        return [
            *self._missing(),
            *self._ledger_problems(),
            *self._end_problems(),
            *report_problems(report, self._context(report), self.held, self.folder),
            *self._metrics_problems(),
            *self._summary_problems(),
        ]

    def _missing(self) -> list[str]:
        """Files that a run with at least one round leaves, beside those that every one does."""
        if self.run.summary is None or self.run.summary.get("rounds") == 0:
            return []
        names = ["metrics.jsonl"]
        counted = [row["round"] for row in self.run.rows if NOT_COUNTED not in row]
        method = self.run.settings.method
        by_server = method.makes_images(counted, self.run.settings.rounds)
        if by_server or (counted and issubclass(method.upload, SyntheticSet)):
            names.append("synthetic.safetensors")
        return [f"{name} is missing" for name in names if not (self.folder / name).is_file()]

    def _context(self, report: Mapping[str, Any]) -> ReportContext:
        """The context that the report was made in."""
        deviations = self._deviations(report["deviations"])
        # noise that a test injected leaves no other trace than this verdict
        secret = report["verdict"]["text"] != NOT_PRIVATE
        return report_context(
            self.plan,
            self.done,
            deviations,
            test=self.run.start["test_images"],
            secret=secret,
            abandoned=self.abandoned,
            began=self.run.began,
            files={} if self.abandoned else handed_over(self.folder),
            simulated=not self.run.served,
        )

    # ----------------------------------------------------------------- ledger rows against the plan

    def _sort_rows(self, number: int, client: str) -> None:
        """Sorts a client's rows since the start into those that the plan charges, also for a
        round under way, or once more for one in which the run was resumed, and others."""
        left = list(self.since[client])
        self.own[client], self.lacking[client] = [], []
        for planned, needed in self._planned_rows(number):
            match = next((row for row in left if _fits(row, planned)), None)
            if match is not None:
                left.remove(match)
                self.own[client].append(match)
            elif needed and planned.round <= self.done:
                self.lacking[client].append(planned)
        for repeated in self._repeated_rows(number):
            match = next((row for row in left if _fits(row, repeated)), None)
            if match is not None:
                left.remove(match)
                self.own[client].append(match)
        self.own[client].sort(key=lambda row: row.round)
        self.foreign[client] = left

    def _planned_rows(self, client: int) -> list[tuple[Release, bool]]:
        """What the plan charges this client for until the end of the round under way, and whether
        its ledger must have each."""
        rows: list[tuple[Release, bool]] = []
        rounds = self.plan.participation.rounds_of(client, min(self.done + 1, self.rounds))
        for number in rounds:
            rows += self.losses.charged(client, self._in_round(number))
        return rows

    def _repeated_rows(self, client: int) -> list[Release]:
        """What the client may have been charged for in rounds that were cut off and repeated."""
        contexts = [self._in_round(after + 1) for after in self.run.resumed]
        return [
            row
            for context in contexts
            if client in context.active
            for row in self.plan.client_rows(client, context)
        ]

    def _in_round(self, number: int) -> RoundContext:
        there = self.plan.participation.in_round(number)
        return replace(self.context, round=number, participants=there)

    def _ledger_problems(self) -> list[str]:
        problems = []
        for client, start in self.run.start["ledgers"].items():
            if self.held.starts.get(client, start["chain"]) != start["chain"]:
                problems.append(
                    f"{client}: the ledger's first {start['rows']} rows are not those of "
                    f"{PRIVATE_START}"
                )
            problems += [
                f"{client}: by config.toml {_row(row)} is charged, and the ledger has no such row"
                for row in self.lacking[client]
            ]
            if not self.kept:
                problems += [
                    f"{client}: the ledger has {_row(row)}, which by config.toml is not charged"
                    for row in self.foreign[client]
                ]
                own = data_set_id(self.run.settings)
                if self.held.data_sets.get(client, own) != own:
                    problems.append(f"{client}: the ledger is another data set's or partition's")
        return problems

    # --------------------------------------------------------------------------- the end of the run

    def _refusal(self) -> str | None:
        """Why no round more would have been allowed; None if it would have been."""
        try:
            self.plan.check_round(self.done + 1, self.now)
        except BudgetExceededError as error:
            return f"ended after {self.done} of {self.rounds} rounds: {error}"
        return None

    def _end_problems(self) -> list[str]:
        if self.abandoned or self.done == self.rounds:
            return []
        if self.done < self.rounds and (self.served or self._refusal() is not None):
            return []  # over nodes, owners' policies bound a run beside its own cap
        return [
            f"metrics.jsonl has {self.done} of {self.rounds} rounds, and no cap explains the end "
            "there"
        ]

    def _deviations(self, stated: Sequence[str]) -> list[str]:
        """What a report may say of the run: where it was resumed, and its end by the cap, in the
        words of the refusal."""
        if self.served is not None:
            return self.served.deviations(stated, self.done, abandoned=self.abandoned)
        resumed = self.run.resumptions
        expected = None if self.abandoned or self.done >= self.rounds else self._refusal()
        if expected is None:
            return resumed
        under_way = any(row.round > self.done for some in self.own.values() for row in some)
        alone = not any(self.foreign.values()) and not under_way
        last = list(stated[len(resumed) :])
        same = len(last) == 1 and _same_refusal(last[0], expected, exact=alone)
        return resumed + (last if same else [expected])

    # ------------------------------------------------------------------ metrics.jsonl, summary.json

    def _metrics_problems(self) -> list[str]:
        """Nothing but what may be shown, and the ε of each round."""
        declared = declared_row(type(self.run.settings.method))
        problems = [
            f"metrics.jsonl: round {row['round']} says {key}, which may not be shown"
            for row in self.run.rows
            for key in _not_shown(row, declared)
        ]
        return problems + self.losses.problems() + self._epsilon_problems()

    def _epsilon_problems(self) -> list[str]:
        """The ε of each round, from the rows that were charged until its end."""
        if not self.plan.guaranteed(self.plan.histories):
            return [
                f"metrics.jsonl gives an epsilon in round {row['round']}, where no figure would be "
                "true"
                for row in self.run.rows
                if "epsilon" in row
            ]
        table = self._epsilon_by_round()
        alone = not any(self.foreign.values())
        if self.served is not None and self.served.has_losses:
            table = {}  # what a lost client was charged for is known later
            alone = False
        problems = []
        spent = table.get(0, 0.0)
        most = self.plan.epsilon(self.now)
        for row in self.run.rows:
            spent = table.get(row["round"], spent)
            stated = row.get("epsilon")
            if stated is None and math.isinf(most):  # another run's release had no guarantee
                continue
            if alone:
                problems += differences(
                    f"metrics.jsonl: epsilon of round {row['round']}", spent, stated
                )
            elif type(stated) is not float or not spent * 0.999999 <= stated <= most * 1.000001:
                problems.append(  # when exactly another run charged the ledger is not known
                    f"metrics.jsonl: epsilon of round {row['round']} must be between {spent:.6g} "
                    f"and {most:.6g}"
                )
        return problems

    def _epsilon_by_round(self) -> dict[int, float]:
        """The worst client's ε after each round, and as round 0 from before the run; of this
        run's own rows."""
        privacy = self.plan.privacy
        histories = {}
        for client, before in self.before.items():
            earlier = [replace(row, round=0) for row in before]
            rows = [*earlier, *self.own[client]]
            histories[client] = epsilon_by_round(rows, privacy.delta, privacy.adjacency)
        return {point.round: point.worst for point in over_clients(histories)}

    def _summary_problems(self) -> list[str]:
        if self.run.summary is None:
            return []
        settings = self.run.settings
        method = self.run.settings.method
        expected = {
            "method": method.name,
            "settings": json.loads(json.dumps(method.told())),
            "dataset": settings.dataset,
            "rounds": self.done,
            "seed": settings.seed,
            "differential_privacy": privacy_words.summary(self.plan, self.now).to_json(),
        }
        unknown = _not_shown(self.run.summary, declared_summary(type(method)))
        return [
            *self._accuracy_problems(),
            *(f"summary.json: {key} is no key of a summary" for key in unknown),
            *self._source_problems(self.run.summary.get(SOURCES, {})),
            *(
                text
                for key, value in expected.items()
                for text in differences(f"summary.json: {key}", value, self.run.summary.get(key))
            ),
        ]

    def _source_problems(self, stated: Any) -> list[str]:
        """Files of one's own that are not those that the run was made with."""
        if not isinstance(stated, dict):
            return ["summary.json: sources must be a table"]
        return [
            f"summary.json: the {key}'s file {one.file} is another than the run's"
            for key, one in own_sources(self.run.settings).items()
            if not isinstance(stated.get(key), dict) or stated[key].get("sha256") != one.sha256
        ]

    def _accuracy_problems(self) -> list[str]:
        """Accuracies on test images that are private, or that are none, stand nowhere here."""
        summary = self.run.summary or {}
        test = self.run.start["test_images"]
        if test == "public":
            measured = type(summary.get("test_accuracy")) is float
            if "test_data" not in summary and (measured or not self.done):
                return []
            return ["summary.json has no accuracy on the public test images"]
        problems = differences("summary.json: test_data", test, summary.get("test_data"))
        problems += differences("summary.json: test_accuracy", None, summary.get("test_accuracy"))
        return problems + [
            f"{_of(row)} has an accuracy, and the test images are {test}"
            for row in (summary, *self.run.rows)
            if _measured_on_test(row)
        ]


def _measured_on_test(row: Mapping[str, Any]) -> bool:
    """Whether a row, or one of its models' rows, has what is measured on the test images."""
    models = row.get(MODELS, {})
    within = models.values() if isinstance(models, dict) else (models,)
    rows = (row, *(one for one in within if isinstance(one, dict)))
    return any(one.get(key) is not None for one in rows for key in ON_TEST)


def _of(row: Mapping[str, Any]) -> str:
    return f"metrics.jsonl: round {row['round']}" if "round" in row else "summary.json"


def _not_shown(row: Mapping[str, Any], declared: Declared) -> list[str]:
    """Keys of a row, or of one of its models' rows, that no private run may show."""
    models = row.get(MODELS, {})
    within = models.values() if isinstance(models, dict) else ()
    keys = [*row, *(key for one in within if isinstance(one, dict) for key in one)]
    return sorted({key for key in keys if key not in declared or not declared[key].shown})


def _fits(row: Release, planned: Release) -> bool:
    """Whether a row is what was planned, but for rounding."""
    return differences("", asdict(planned), asdict(row)) == []


def _row(row: Release) -> str:
    return f"{row.quantity} in round {row.round} (σ = {row.noise_multiplier:.6g})"


_REFUSAL = re.compile(
    r"(ended after .{1,40} rounds: client )(.+)(: epsilon is )(\S+)( now and would be )(\S+)( with "
    r"the .+)"
)


def _same_refusal(stated: str, expected: str, *, exact: bool) -> bool:
    """Whether two refusals say the same but for rounding; or, if not `exact`, but for the client
    and its figures at that time."""
    one = _REFUSAL.fullmatch(stated)
    other = _REFUSAL.fullmatch(expected)
    if one is None or other is None:
        return stated == expected
    if any(one[part] != other[part] for part in (1, 3, 5, 7)):
        return False
    try:
        pairs = [(float(one[part]), float(other[part])) for part in (4, 6)]
    except ValueError:
        return False
    return not exact or (
        one[2] == other[2] and all(math.isclose(a, b, rel_tol=2e-3) for a, b in pairs)
    )


# ------------------------------------------------------------------------- runs that did not finish


def is_unfinished(path: Path) -> bool:
    """Whether this is the folder of a run that was killed, or is still going: its report has to
    be built from what is there."""
    if not (path / "config.toml").is_file() or (path / "summary.json").exists():
        return False
    return path.resolve().suffix == INCOMPLETE or not (path / "privacy_report.json").exists()


def unfinished_report(
    folder: Path, *, ledger: Path | None = None, method: type[Method] | None = None
) -> dict[str, object]:
    """The report of a run that did not finish, from what stands in its ledgers now; `write_report`
    puts it into the folder.

    Args:
        ledger, method: as in `verify_run`.

    Raises:
        PrivacyError: the run had no differential privacy, released nothing yet, or its files are
            missing or damaged.
    """
    if not (folder / PRIVATE_START).exists():
        raise PrivacyError(
            f"{folder} has no privacy report, and no {PRIVATE_START} to build one from: the run "
            "had no differential privacy, or ended "
            "before its first release"
        )
    try:
        run = read_run(folder, method)
        files, _ = ledger_files(folder, run, ledger)
        if files is None:
            raise PrivacyError(
                Text(
                    f"the run's ledgers are not where {folder / 'config.toml'} says: give their "
                    "folder with ",
                    Setting(None, "ledger"),
                )
            )
        start = run.start["ledgers"]
        held = [read_ledger(files / f"{client}.jsonl").history() for client in start]
        before = {one.client: one.releases[: start[one.client]["rows"]] for one in held}
        context = report_context(
            rebuilt(run, before),
            len(run.rows),
            run.resumptions,
            test=run.start["test_images"],
            abandoned=True,
            began=run.began,
        )
        return build_report(context, held)
    except (*HOSTILE, RuntimeError) as error:
        raise PrivacyError(f"the run in {folder} is damaged: {shown(error)}") from None
