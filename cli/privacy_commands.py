"""The commands `fedsynth privacy …`.

These commands plan a privacy budget, change a ledger, and show, check, sign and audit the report of
a run.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options
from fedsynth.cli.application import (
    OptionError,
    imports_without_gc,
    keep_large_allocations,
    note,
    say,
)
from fedsynth.errors import FedsynthError
from fedsynth.files import claim, write_output
from fedsynth.results.file_names import CONFIG

if TYPE_CHECKING:
    from fedsynth.config.settings import RunSettings
    from fedsynth.federation.privacy_plan import PrivacyPlan
    from fedsynth.privacy.score_bounds import Bound
    from fedsynth.simulation.audit import AuditResult

MAX_PRINTED = 40  # the maximum number of differences that are printed

Run = Annotated[
    Path, options.path_argument("A run folder, or the privacy_report.json in it.", metavar="RUN")
]
LedgerFolder = Annotated[
    Path | None, options.path_option("Default: ledger/ in RUN, or as in config.toml.", "--ledger")
]


@options.takes_settings(*options.OWN_CODE, set_option=False)
def report(chosen: options.Sections, run: Run, ledger: LedgerFolder = None) -> None:
    """Show a run's privacy report as Markdown.

    The run folder also contains the report as privacy_report.html and privacy_report.json. If the
    run was killed and has no report yet, the report is built from the ledgers and written into the
    run folder.
    """
    from fedsynth.privacy.report.file import sound_report
    from fedsynth.privacy.report.pages import render_markdown

    _report_unfinished(run, ledger)
    print(render_markdown(sound_report(run)), end="")


def _report_unfinished(run: Path, ledger: Path | None) -> None:
    """Writes the privacy report of an unfinished run. Does nothing if the run is finished."""
    if not run.is_dir():
        return
    from fedsynth.privacy.report.file import GUARD_SETTINGS
    from fedsynth.results.finished import is_unfinished

    if not (run / GUARD_SETTINGS).exists() and is_unfinished(run):
        from fedsynth.privacy.report.build import write_report
        from fedsynth.results.file_names import LOCK
        from fedsynth.results.later_reports import unfinished_report

        with claim(
            run / LOCK, OptionError(f"the run in {run} is still active. Wait until it ends")
        ):
            write_report(unfinished_report(run, ledger=ledger), run)
        note(f"the run did not finish, so its report was built from the ledgers, in {run}")


@options.takes_settings(*options.OWN_CODE, set_option=False)
def verify(
    chosen: options.Sections,
    runs: Annotated[
        list[Path],
        options.path_argument("Run folders, or the privacy_report.json in one.", metavar="RUN…"),
    ],
    ledger: LedgerFolder = None,
    public_key: Annotated[
        Path | None, options.path_option("Also check the signature, with this key in PEM format.")
    ] = None,
) -> None:
    """Check a run's privacy report against the run's settings and ledgers.

    The command builds the report again, and prints each difference from the stored report,
    summary.json and metrics.jsonl. If there is a difference, the exit code is 1. For several runs,
    it prints a line for each. The command does not show that noise was really added.
    """
    from fedsynth.formatting import printable
    from fedsynth.privacy.signing import read_public_key

    key = None if public_key is None else read_public_key(public_key)
    if len(runs) > 1:
        results = {run: _in_one_line(run, ledger, key) for run in runs}
        for run, (problem, note) in results.items():
            print(printable(f"{run}: {problem or 'the report is correct'}{note}"))
        raise typer.Exit(1 if any(problem for problem, _ in results.values()) else 0)
    problems, notes = _verified(runs[0], ledger, key)
    for problem in problems[:MAX_PRINTED]:
        print(f"mismatch: {printable(problem)}")
    if len(problems) > MAX_PRINTED:
        print(f"{len(problems)} mismatches in total")
    if problems:
        raise typer.Exit(1)
    print(
        "the report follows from the run's settings and ledgers, and agrees with its other files. "
        "This does not show that noise was really added"
    )
    for text in notes:
        print(printable(text))


def _in_one_line(run: Path, ledger: Path | None, key: Any) -> tuple[str, str]:
    """Returns a run's first problem with the number of problems, and what was not compared.

    Both texts may be empty.
    """
    from fedsynth.results.verification import NO_LEDGER

    try:
        problems, notes = _verified(run, ledger, key)
    except FedsynthError as error:
        return str(error), ""
    if problems:
        return f"mismatches: {len(problems)}, first: {problems[0]}", ""
    uncompared = [note for note in notes if "not compared" in note or note == NO_LEDGER]
    return "", "".join(f". {note}" for note in uncompared)


def _verified(run: Path, ledger: Path | None, key: Any) -> tuple[list[str], list[str]]:
    """Verifies a run and its signature, and returns the problems and the notes."""
    with imports_without_gc():
        from fedsynth.results.verification import verify_run

    result = verify_run(run, ledger=ledger)
    problems, note = _signature(run if run.is_dir() else run.parent, key)
    return [*map(str, result.problems), *problems], [*result.notes, note]


def _signature(folder: Path, key: Any) -> tuple[list[str], str]:
    """Checks a run folder's signature.

    Returns the problems with the signature, and the message to print if there is no problem.
    """
    from fedsynth.privacy.signing import SIGNATURE, signature_problems

    if key is not None:
        problems = signature_problems(folder, key)
        return problems, "the signature is valid for this key and these files"
    if (folder / SIGNATURE).exists():
        return [], "the signature was not checked. To check the signature, use --public-key FILE"
    return [], "the run is not signed. Anyone who can change all files of the run can forge it"


def sign(
    run: Annotated[Path, options.path_argument("A run folder.", metavar="RUN")],
    key: Annotated[Path, options.path_option("A private Ed25519 key in PEM format.")],
) -> None:
    """Sign all files of a run folder except those in simulation_only/.

    The signature covers the hashes of the files, and is written to signature.json. To make a key
    pair, run `openssl genpkey -algorithm ed25519 -out key.pem` and `openssl pkey -in key.pem
    -pubout -out key.pub`.
    """
    from fedsynth.privacy.signing import read_private_key, sign_run

    say(f"signed: {sign_run(run, read_private_key(key))}")


AUDIT = "Audit"
_audit_option = partial(typer.Option, rich_help_panel=AUDIT)


@options.takes_settings(
    "run", "data.folder", "data.declaration", "data.dataset", "data.data_root", "partition",
    "model", "method", "privacy",
)  # fmt: skip
def audit(
    chosen: options.Sections,
    canaries: Annotated[int, _audit_option(help="The number of artificial records.")] = 1000,
    guesses: Annotated[
        int | None, _audit_option(help="An even number. Default: 2/5 of --canaries.")
    ] = None,
    confidence: Annotated[float, _audit_option(help="The confidence of each bound.")] = 0.999,
    repeats: Annotated[
        int, _audit_option(help="Audit the canaries of this many runs together.")
    ] = 1,
    run: Annotated[
        Path | None,
        options.path_option("Audit this run, and add the result to its report.", panel=AUDIT),
    ] = None,
    function: Annotated[
        str | None,
        _audit_option(
            metavar="FILE.py:NAME",
            help="Audit a function that gets vectors [n, d] and returns a noisy sum [d].",
        ),
    ] = None,
    dimension: Annotated[int, _audit_option(help="d, with --function.")] = 1000,
    page: Annotated[
        Path | None,
        options.path_option("Write an HTML page, with --function.", panel=AUDIT),
    ] = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Test a run's claimed ε with an attack on the run's releases.

    The audit computes lower bounds on ε and compares them with the claim. The exit code is 1 if one
    is above it. The command has the options of `fedsynth train`, and executes the run on random
    images, with real ledgers, masks, clipping and noise. The audit reads no records, and does not
    charge your ledgers. An audit can find a fault, but cannot prove privacy.

    With --function, your Python function is executed instead. Its claim is --dp-sigma or
    --dp-epsilon, with --dp-delta and --dp-clip.

    Examples: `fedsynth privacy audit --method feddm --dp-sigma 3`, `fedsynth privacy audit --run
    runs/… --canaries 1000`, `fedsynth privacy audit --function filter.py:noisy_sum --dp-sigma 1`.
    """
    from fedsynth.cli.progress import make_observer
    from fedsynth.simulation.audit import audit_run, settings_of_run, write_audit

    if function is None and page is not None:
        raise OptionError("--page is set without --function. Remove --page")
    if function is not None:
        for name, value in (("run", run), ("config", config), ("guesses", guesses)):
            if value is not None:
                raise OptionError(f"--{name} is set with --function. Remove --{name}")
        _audit_function(function, chosen, (dimension, canaries, confidence), page, as_json)
        return
    settings, first = _settings_to_audit(run, config, chosen)
    audited = settings if run is None else settings_of_run(run, settings)
    keep_large_allocations()
    with make_observer(audited, first) as observer:
        result = audit_run(
            audited,
            canaries=canaries,
            guesses=guesses,
            confidence=confidence,
            repeats=repeats,
            observer=observer,
        )
    command = shlex.join(["fedsynth", *sys.argv[1:]])
    if run is not None:
        command = (
            f"fedsynth privacy audit --run {shlex.quote(run.resolve().name)} --canaries "
            f"{result.canaries // repeats} --guesses {result.guesses // repeats} --confidence "
            f"{result.confidence}"
        )
        if repeats > 1:
            command += f" --repeats {repeats}"
        write_audit(run, settings, result.entry(command))
    _show(result, command, as_json)


def _audit_function(
    function: str,
    chosen: options.Sections,
    numbers: tuple[int, int, float],
    page: Path | None,
    as_json: bool,
) -> None:
    """Audits a function in a user's file, and shows the result.

    Args:
        function: the value of --function.
        chosen: the settings that the options give.
        numbers: the values of --dimension, --canaries and --confidence.
        page: the file of the page.
        as_json: True prints JSON.
    """
    from fedsynth.formatting import format_epsilon
    from fedsynth.own_code import load_own
    from fedsynth.privacy import audit as audit_function
    from fedsynth.privacy.audit_bounds import CAVEAT

    names = {"noise_multiplier": "sigma", "epsilon": "epsilon", "delta": "delta", "clip": "clip"}
    claim = chosen.pop("privacy")
    unused = [f"privacy.{name}" for name in claim if name not in names]
    unused += [f"{section}.{name}" for section, table in chosen.items() for name in table]
    if unused:
        raise OptionError(f"--function does not use {', '.join(unused)}. Remove these settings")
    definition, _ = load_own(None, "function", function)
    dimension, canaries, confidence = numbers
    result = audit_function(
        definition,
        **{names[name]: value for name, value in claim.items()},
        dimension=dimension,
        canaries=canaries,
        confidence=confidence,
    )
    if page is not None:
        write_output(page, result.page().encode())
    if as_json:
        facts = {
            "epsilon": result.epsilon,
            "delta": result.delta,
            "fault": result.fault,
            "bounds": [
                {"design": design.name, **asdict(bound)}
                for design in result.designs
                for bound in design.bounds
            ],
        }
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print(
            f"ε = {format_epsilon(result.epsilon)} claimed (δ = {result.delta:g}) · audited lower "
            f"bounds at {100 * result.confidence:g} % confidence from {canaries} canaries"
        )
        for design in result.designs:
            _show_bounds(f"{design.name}, ", design.bounds)
        print(f"({CAVEAT})")
    _exit_if_false(result.fault)


def _show_bounds(prefix: str, bounds: Sequence[Bound]) -> None:
    from fedsynth.privacy.audit_bounds import down

    for bound in bounds:
        print(f"  {down(bound.epsilon)}  {prefix}{bound.name} (assumes {bound.assumes})")


def _exit_if_false(fault: bool) -> None:
    if fault:
        print("the claim is false, because a lower bound is above the claimed ε", file=sys.stderr)
        raise typer.Exit(1)


def _settings_to_audit(
    run: Path | None, config: Path | None, chosen: options.Sections
) -> tuple[RunSettings, str]:
    """Returns the settings of the run that is audited, and the line to print first.

    Args:
        run: the folder of a finished run. None: the options describe the run.
        config: the value of --config.
        chosen: the settings that the options give.
    """
    from fedsynth.config.resolve import resolve

    if run is None:
        sections = options.merged(options.read_config(config), chosen, say)
        settings = resolve(sections)
        if settings.privacy is None:
            raise OptionError(
                "the run to audit has no differential privacy. Set --dp-sigma, --dp-epsilon, or "
                "--run with the folder of a private run"
            )
        return settings, options.from_preset(sections)
    if config is not None:
        raise OptionError("--run and --config both define all settings. Remove one of them")
    sections = options.read_config(run / CONFIG)
    settings = resolve(sections)
    if resolve(options.merged(sections, chosen)) != settings:
        raise OptionError(f"the options contradict the settings of {run}. Remove the options")
    return settings, f"settings of {run}"


def _show(result: AuditResult, command: str, as_json: bool) -> None:
    from fedsynth.formatting import format_epsilon
    from fedsynth.privacy.audit_bounds import CAVEAT, down
    from fedsynth.privacy.score_bounds import steinke_bound

    if as_json:
        bounds = [asdict(bound) for bound in result.bounds]
        facts = {
            **result.entry(command),
            "epsilon": result.epsilon,
            "bounds": bounds,
            "fault": result.fault,
        }
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print(
            f"ε = {format_epsilon(result.epsilon)} claimed (δ = {result.delta:g}) · audited "
            f"lower bound {down(result.epsilon_lower_bound)} at {100 * result.confidence:g} "
            f"% confidence from {result.canaries} canaries, {result.guesses} guesses, "
            f"{result.correct} correct"
        )
        _show_bounds("", [steinke_bound(result.epsilon_lower_bound), *result.bounds])
        print(f"({CAVEAT}. The audit read no records, so it cost no privacy)")
    _exit_if_false(result.fault)


SIGNAL = "S/N is an upper bound on the signal-to-noise ratio of the sum over all clients"

privacy_app = typer.Typer(
    help="Plan a privacy budget, show what is spent, or show, verify, sign and audit a report.",
    no_args_is_help=True,
)
for command in (report, verify, sign, audit):
    privacy_app.command()(command)


@privacy_app.command()
@options.takes_settings(
    "run.method", "run.rounds", "run.participation", "data.dataset", "data.folder",
    "data.declaration", "partition.kind", "partition.clients",
    "partition.subset", "partition.local_test", "privacy.epsilon", "privacy.noise_multiplier",
    "privacy.delta", "privacy.max_records", "privacy.mechanism", "privacy.sample_rate",
    "privacy.nominal_size", "privacy.adjacency", "privacy.unit",
)  # fmt: skip
def plan(chosen: options.Sections, as_json: options.AsJson = False) -> None:
    """Compute the noise σ that a privacy budget ε requires, or the ε that a given σ costs.

    The plan uses only public numbers and reads no data. With --data, these are in the declaration
    of your data, and the ledgers contain what earlier runs have spent. Without --data and
    --dataset, these are MNIST's. It also shows the signal-to-noise ratio that each release can
    have.

    Examples: `fedsynth privacy plan --dp-epsilon 8 --rounds 5`, `fedsynth privacy plan --data scans
    --dp-epsilon 1 --method fedstats`.
    """
    from fedsynth.federation.context import costs_of, plans_by_mechanism

    if "folder" not in chosen["data"]:
        chosen["data"].setdefault("dataset", "mnist")
    if not chosen["privacy"].keys() & {"epsilon", "noise_multiplier"}:
        raise OptionError("neither --dp-epsilon nor --dp-sigma is set. Set one of them")
    plans = plans_by_mechanism(chosen)
    if as_json:
        print(json.dumps(list(map(costs_of, plans)), indent=2))
    else:
        print_costs(plans)
        _warn(plans)


def _warn(plans: list[PrivacyPlan]) -> None:
    """Prints a note for each plan that exceeds the privacy budget, and a warning if ε is large."""
    for p in plans:
        rounds, target = p.shown_rounds, p.privacy.epsilon or math.inf
        limit = target * (1 + 1e-9)
        # ε never decreases, and each value takes a composition: a binary search
        first = bisect_left(rounds, True, key=lambda number: p.planned_epsilon(number) > limit)
        if first < len(rounds):
            mechanism = p.chief.mechanism
            note(f"with this σ, {mechanism} exceeds ε = {target:g} in round {rounds[first]}")
    if max(p.planned_epsilon() for p in plans) > 10:
        say("warning: an ε above 10 is a weak guarantee. Use a smaller ε, such as --dp-epsilon 8")


def print_dry_run(settings: RunSettings, as_json: bool) -> None:
    """Prints the privacy cost that a run would have, without reading its data.

    Raises:
        FedsynthError: the run would be refused before it reads data.
    """
    from fedsynth.federation.context import costs_of, plan_of, resolve_device
    from fedsynth.results.run_messages import headline

    resolve_device(settings.device)  # refuses one that does not exist
    planned = plan_of(settings) if settings.privacy is not None else None
    facts: dict[str, Any] = {"guarantee": False}
    if planned is not None and planned.guaranteed(planned.histories):
        planned.check_round(1, planned.histories)  # as the run itself would
        facts = {"guarantee": True, **costs_of(planned)}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(*headline(settings, planned), sep="\n")
    if planned is not None and facts["guarantee"]:
        print_costs([planned])


def print_costs(plans: list[PrivacyPlan]) -> None:
    """Prints the releases and the noise of each mechanism as a table, then ε after each round."""
    from rich.console import Console
    from rich.table import Table

    from fedsynth.federation.context import release_costs
    from fedsynth.formatting import format_epsilon
    from fedsynth.results.report_facts import privacy_unit

    console = Console()
    table = Table(title=f"plan for {privacy_unit(plans[0])}, δ = {plans[0].privacy.delta:g}")
    for name in ("mechanism", "ε", "releases", "σ", "clip", "q", "a round", "S/N"):
        table.add_column(name, no_wrap=name != "releases")  # numbers are not truncated
    for p in plans:
        for row in release_costs(p):
            cells = [p.chief.mechanism, format_epsilon(p.planned_epsilon()), row["quantity"]]
            for key in ("noise_multiplier", "clip", "sample_rate", "releases", "signal_to_noise"):
                cells.append(f"{row[key]:.10g}" if key == "releases" else f"{row[key]:.4g}")
            table.add_row(*cells)
    console.print(table)
    print(SIGNAL)
    by_round = Table("round", *(p.chief.mechanism for p in plans), title="ε after round")
    rounds = plans[0].shown_rounds
    for number in sorted({*rounds[:: max(1, len(rounds) // 10)], rounds[-1]}):
        by_round.add_row(str(number), *(format_epsilon(p.planned_epsilon(number)) for p in plans))
    console.print(by_round)


@privacy_app.command()
@options.takes_settings("privacy.epsilon", "privacy.delta", "privacy.adjacency", set_option=False)
def spent(
    chosen: options.Sections,
    ledgers: Annotated[
        Path, options.path_argument("The folder of --dp-ledger.", metavar="LEDGERS")
    ],
) -> None:
    """Show the ε that each client's ledger in a folder has spent.

    With --dp-epsilon E, the command also shows what remains below E. The ε of several releases
    together is less than the sum of their ε. The command changes nothing.

    Example: `fedsynth privacy spent ledgers --dp-epsilon 8`.
    """
    from fedsynth.formatting import format_rounded_up, printable
    from fedsynth.privacy.accounting import epsilon
    from fedsynth.privacy.audit_bounds import down
    from fedsynth.privacy.ledger.folder import LedgerFolder
    from fedsynth.privacy.report.build import reasons_in_ledgers
    from fedsynth.privacy.settings import PrivacySettings

    settings = PrivacySettings(**{"noise_multiplier": 1.0, **chosen["privacy"]})
    by_client = LedgerFolder(ledgers).ledgers()
    if not by_client:
        raise OptionError(f"folder {ledgers} contains no ledger NAME.jsonl. Check the path")
    for client, ledger in by_client.items():
        history = ledger.history()
        used = epsilon(history.releases, settings.delta, settings.adjacency)
        parts = [
            f"{client}: ε = {format_rounded_up(used, 4)} spent at δ = {settings.delta:g} "
            f"({settings.adjacency})",
            f"charges: {len(history.releases)}",
            f"releases: {sum(row.steps for row in history.releases)}",
            f"without a guarantee: {'; '.join(reasons_in_ledgers([history])) or 'none'}",
        ]
        if settings.epsilon is not None:
            unspent = max(0.0, settings.epsilon - used)
            parts.append(f"remaining below ε = {settings.epsilon:g}: {down(unspent, 4)}")
        print(printable(" · ".join(parts)))


@privacy_app.command(name="carry-over")
def carry_over(
    folder: Annotated[Path, options.path_argument("The ledger folder.", metavar="FOLDER")],
    client: Annotated[str, typer.Argument(help="The name of the client.")],
) -> None:
    """Allow a client to use changed records with its existing ledger.

    Otherwise, a ledger refuses runs on records other than those in earlier runs. After this
    command, the privacy budget that is already spent counts for all records of the client,
    including the new records.
    """
    from fedsynth.privacy.ledger.folder import LedgerFolder

    rows = LedgerFolder(folder).carry_over(client)
    print(f"the next run of {client} may use other records")
    print(f"ledger entries that count for all records of {client}: {rows}")


@privacy_app.command()
def repair(
    ledger: Annotated[Path, options.path_argument("The file NAME.jsonl.", metavar="LEDGER")],
) -> None:
    """Repair a ledger whose last line is incomplete, for example after a power cut or a full disk.

    The incomplete line is removed, and a copy of the original file is kept. No release belongs to
    an incomplete line, because noise is drawn only after the whole line is on the disk. If the file
    was cut off in another way, for example by an interrupted copy, restore it from a backup
    instead.
    """
    from fedsynth.privacy.ledger.ledger import repair_ledger

    result = repair_ledger(ledger)
    if result is None:
        print(f"nothing was changed, because {ledger} has no incomplete line")
        return
    outcome = "the line was removed, because nothing was released for it"
    if result.counts:
        outcome = "the line is complete and counts. Its missing line break was added"
    print(f"last line: {result.line!r}\n  {outcome}")
    print(f"a copy of the ledger before the repair is in {result.copy}")
