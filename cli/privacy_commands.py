"""`fedsynth privacy …`: planning. Reports and signatures are in `report_commands`, the audit is in
`audit_command`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import Application, OptionError, note, say, write_text
from fedsynth.cli.options import KEYS, path_argument, path_option, takes_settings
from fedsynth.cli.report_commands import audit, report, sign, verify
from fedsynth.cli.settings_options import Sections, with_own_code
from fedsynth.methods import DEFAULT_METHOD

if TYPE_CHECKING:
    from fedsynth.federation.costs import MechanismCosts

NAMES = {f"privacy.{key}": f"--{key.replace('_', '-')}" for key in KEYS["privacy"].split()} | {
    "privacy.noise_multiplier": "--sigma",
    "privacy.nominal_size": "--n",
}
"""The names of `plan`'s options."""
SIGNAL = (
    "S/N: signal-to-noise ratio of the sum over all clients, if the examples of each class "
    "were equal and\n"
    "all classes orthogonal (for covariances: if features were white; docs/fedstats.md). "
    "Real data have less"
)

privacy_app = Application(
    help="Plan a privacy budget; read, verify, sign and audit a run's privacy report.",
    no_args_is_help=True,
)
for command in (report, verify, sign, audit):
    privacy_app.command()(command)


@privacy_app.command()
@takes_settings(
    "run.method", "run.rounds", "run.participation", "data.dataset", "partition.clients",
    "partition.subset", "partition.local_test", "privacy.epsilon", "privacy.noise_multiplier",
    "privacy.delta", "privacy.max_records", "privacy.mechanism", "privacy.sample_rate",
    "privacy.nominal_size", "privacy.adjacency", "privacy.unit", names=NAMES,
)  # fmt: skip
def plan(
    chosen: Sections,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Condensation steps per round (local epochs for methods that train models)."
        ),
    ] = None,
    plot: Annotated[Path | None, path_option("Also plot ε over rounds to this SVG file.")] = None,
    as_json: given.AsJson = False,
) -> None:
    """Show what a budget allows, or what a σ costs: only from public numbers, before any data are
    used.

    With fedstats also the signal-to-noise ratio that each release can have.

    Examples: `fedsynth privacy plan --epsilon 8 --rounds 5`, `fedsynth privacy plan --sigma 3
    --method fedavg --n 6000`.
    """
    from fedsynth.federation.costs import costs_by_mechanism, costs_plot

    chosen["data"].setdefault("dataset", "mnist")
    if steps is not None:
        chosen["method"] |= _steps_setting(chosen["run"].get("method", DEFAULT_METHOD), steps)
    sections = with_own_code(chosen)
    if not sections["privacy"].keys() & {"epsilon", "noise_multiplier"}:
        raise OptionError("a plan needs --epsilon (to compute σ) or --sigma (to compute ε)")
    plans = costs_by_mechanism(sections)
    if plot is not None:
        write_text(plot, costs_plot(plans))
    if as_json:
        print(json.dumps([vars(p) | {"epsilon": dict(p.epsilon)} for p in plans], indent=2))
    else:
        print_costs(plans)
        _warn(plans)


def _steps_setting(method: str, steps: int) -> dict[str, Any]:
    """Returns the setting of the method that --steps gives."""
    from dataclasses import fields

    from fedsynth.methods import method_class

    if method == "real":  # the command refuses it later
        return {}
    keys = {f.name for f in fields(method_class(method))}
    name = next((key for key in ("iterations", "local_epochs") if key in keys), None)
    if name is None:
        raise OptionError(f"--steps does not apply to {method}: leave it out")
    return {name: steps}


def _warn(plans: list[MechanismCosts]) -> None:
    for p in plans:
        first = _first_beyond(p)
        if first is not None:
            note(f"{p.mechanism} exceeds ε = {p.target:g} in round {first} with this σ")
    if any(p.epsilon[max(p.epsilon)] > 10 for p in plans):
        say("warning: ε above 10 is a weak guarantee; use --epsilon 8 for a stronger one")


def _first_beyond(plan: MechanismCosts) -> int | None:
    """Returns the first of the plan's rounds after which ε is above the target. ε never falls, and
    computing it takes a composition per round, so the search is binary.
    """
    rounds = list(plan.epsilon)
    target = plan.target
    if target is None:
        return None
    first = bisect_left(rounds, True, key=lambda number: plan.epsilon[number] > target * (1 + 1e-9))
    return rounds[first] if first < len(rounds) else None


def print_costs(plans: list[MechanismCosts]) -> None:
    """Prints two tables: the requirements of each mechanism, and ε by round."""
    from rich.console import Console
    from rich.table import Table

    from fedsynth.privacy.report.formatting import format_epsilon

    console = Console()
    table = Table(title=f"plan, for one example of one client, δ = {plans[0].delta:g}")
    has_signal = any("signal_to_noise" in row for p in plans for row in p.rows)
    names = ("mechanism", "ε", "releases", "σ", "clip", "q", "a round")
    for name in (*names, "S/N") if has_signal else names:
        table.add_column(name, no_wrap=name != "releases")  # numbers are not truncated
    for p in plans:
        for number, row in enumerate(p.rows):
            rate = f"{row['sample_rate']:.4g}" if row["sample_rate"] < 1 else "1"
            table.add_row(
                p.mechanism if number == 0 else "",
                format_epsilon(p.epsilon[max(p.epsilon)]) if number == 0 else "",
                row["quantity"],
                f"{row['noise_multiplier']:.4g}",
                f"{row['clip']:.4g}",
                rate,
                str(row["releases"]),
                *([f"{row['signal_to_noise']:.3g}"] if "signal_to_noise" in row else []),
            )
    console.print(table)
    if has_signal:
        print(SIGNAL)
    numbers = sorted(plans[0].epsilon)
    selected = numbers
    if len(numbers) > 10:
        chosen = {1, 2, 3, 5, numbers[-1]}
        every = max(1, len(numbers) // 5)
        selected = [n for n in numbers if n in chosen or n % every == 0]
    by_round = Table(title="ε after round")
    by_round.add_column("round")
    for p in plans:
        by_round.add_column(p.mechanism)
    for n in selected:
        by_round.add_row(str(n), *(format_epsilon(p.epsilon[n]) for p in plans))
    console.print(by_round)


@privacy_app.command(name="carry-over")
def carry_over(
    folder: Annotated[
        Path, path_argument("Folder of the ledgers (--dp-ledger).", metavar="FOLDER")
    ],
    client: Annotated[str, typer.Argument(help="The client's name.")],
) -> None:
    """Record that a client's data set has changed: its ledger continues with the next run's
    records.

    What was spent stays spent: it counts for every record of the client, also for new ones.
    """
    from fedsynth.privacy.ledger.folder import LedgerFolder

    rows = LedgerFolder(folder).carry_over(client)
    print(
        f"the next run may use other records of {client}; the entries of its ledger ({rows}) "
        "count for all of them"
    )


@privacy_app.command()
def repair(
    ledger: Annotated[Path, path_argument("The ledger file, NAME.jsonl.", metavar="LEDGER")],
) -> None:
    """Take a torn last line (a power cut, a full disk) out of a ledger; the file as it was is kept.

    No release belongs to a torn line, for noise is drawn only once the line is whole and on the
    disk. If something else cut the file, such as a copy that broke off, bring it back from a backup
    instead.
    """
    from fedsynth.privacy.ledger.lines import repair_ledger

    result = repair_ledger(ledger)
    if result is None:
        print(f"{ledger} has no incomplete line: nothing was changed")
        return
    print(f"torn line: {result.line!r}")
    if result.counts:
        print("  only its line break is missing, so it counts: the line break was added")
    else:
        print("  removed: nothing was released for it")
    print(f"copy of the ledger before the repair: {result.copy}")
