"""What a private run's report must say, made again from its folder: from config.toml,
privacy_start.json and the ledgers.

The run's plan, and which rows of the ledgers are the run's, are made again by `verified_charges`.
The report, summary.json and the ε of metrics.jsonl (`verified_measured`) must follow from them.
What rebuilds a report also makes the report of a run that was killed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsynth.core.method import Method
from fedsynth.data.shared_set import SUMS
from fedsynth.errors import FedsynthError
from fedsynth.federation.outputs.lost_clients import NOT_COUNTED
from fedsynth.federation.outputs.report_context import handed_over, report_context
from fedsynth.federation.outputs.run_files import RunFiles, ledger_files, read_run, read_start
from fedsynth.federation.outputs.run_folder import INCOMPLETE, PRIVATE_START
from fedsynth.federation.outputs.verified_charges import Charges, rebuilt
from fedsynth.federation.outputs.verified_measured import metrics_problems, summary_problems
from fedsynth.federation.outputs.verified_owner import OWNER, OwnersRun, owners_numbers
from fedsynth.federation.outputs.verified_served import ServedEvidence
from fedsynth.privacy.errors import PrivacyError, shown
from fedsynth.privacy.held_rows import Held, held_rows
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.report import NOT_PRIVATE, build_report
from fedsynth.privacy.report_file import HOSTILE, read_report
from fedsynth.privacy.report_inputs import ReportContext
from fedsynth.privacy.report_schema import schema_problems
from fedsynth.privacy.verify import Verification, report_problems, taken_as_stated
from fedsynth.synthesizer.condensation.sets import SyntheticSet
from fedsynth.version import __version__


def verify_run(
    run: Path | str, *, ledger: Path | None = None, method: type[Method] | None = None
) -> Verification:
    """Checks a run folder's report against everything that it follows from.

    Args:
        run: the folder, or the privacy_report.json in it.
        ledger: folder of the ledger files; None takes `ledger/` in the run folder, or where
            config.toml says that ledgers are kept.
        method: the class of a method that fedsynth does not know by name.

    Raises:
        PrivacyError: there is no report of this schema to check.
    """
    path = Path(run)
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
    if (folder / SUMS).is_file() and {"config.toml", PRIVATE_START} <= set(missing):
        raise PrivacyError(
            f"{folder} was handed over without the run's settings and ledgers, from which alone a "
            "report is made again: whoever has the run's folder verifies it there; what came is "
            f"whole if `sha256sum -c {SUMS}` says so"
        )
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


class Evidence:
    """Everything in a run's files that bears on its report.

    Args:
        held: the rows that the report speaks of.
        abandoned: the run did not finish.
    """

    def __init__(self, run: RunFiles, held: Held, folder: Path, *, abandoned: bool) -> None:
        self.run = run
        self.folder = folder
        self.abandoned = abandoned
        self.charges = Charges(run, held)
        self.done = self.charges.done
        self.rounds = run.settings.rounds
        self.served: ServedEvidence | None = None
        if run.served:
            absent = self.charges.absent
            self.served = ServedEvidence(
                absent, run.rows, run.resumptions, run.resumed, self.rounds
            )

    def problems(self, report: Mapping[str, Any]) -> list[str]:
        """Everything in which the run's files and its report differ."""
        losses = self.served is not None and self.served.has_losses
        return [
            *self._missing(),
            *self.charges.problems(),
            *self._end_problems(),
            *report_problems(report, self._context(report), self.charges.held, self.folder),
            *metrics_problems(self.charges, losses=losses),
            *summary_problems(self.charges),
        ]

    def _missing(self) -> list[str]:
        """Files that a run with at least one round leaves, beside those that every one does."""
        if self.run.summary is None or self.run.summary.get("rounds") == 0:
            return []
        names = ["metrics.jsonl"]
        counted = [row["round"] for row in self.run.rows if NOT_COUNTED not in row]
        method = self.run.settings.method
        by_server = method.makes_images(counted)
        if by_server or (counted and issubclass(method.upload, SyntheticSet)):
            names.append("synthetic.safetensors")
        return [f"{name} is missing" for name in names if not (self.folder / name).is_file()]

    def _context(self, report: Mapping[str, Any]) -> ReportContext:
        """The context that the report was made in."""
        deviations = self._deviations(report["deviations"])
        # noise that a test injected leaves no other trace than this verdict
        secret = report["verdict"]["text"] != NOT_PRIVATE
        return report_context(
            self.charges.plan,
            self.done,
            deviations,
            test=self.run.start["test_images"],
            secret=secret,
            abandoned=self.abandoned,
            began=self.run.began,
            warnings=self.run.start["warnings"],
            files={} if self.abandoned else handed_over(self.folder),
            simulated=not self.run.served,
        )

    def _end_problems(self) -> list[str]:
        if self.abandoned or self.done == self.rounds:
            return []
        if self.done < self.rounds and (self.served or self.charges.refusal() is not None):
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
        expected = None if self.abandoned or self.done >= self.rounds else self.charges.refusal()
        if expected is None:
            return resumed
        under_way = any(row.round > self.done for some in self.charges.own.values() for row in some)
        alone = not any(self.charges.foreign.values()) and not under_way
        last = list(stated[len(resumed) :])
        same = len(last) == 1 and _same_refusal(last[0], expected, exact=alone)
        return resumed + (last if same else [expected])


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
                f"the run's ledgers are not where {folder / 'config.toml'} says: give their folder "
                "with --ledger (ledger=DIR)"
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
            warnings=run.start["warnings"],
        )
        return build_report(context, held)
    except (*HOSTILE, RuntimeError) as error:
        raise PrivacyError(f"the run in {folder} is damaged: {shown(error)}") from None
