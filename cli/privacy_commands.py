"""`fedsynth privacy …`: planning. Reports and signatures are in `report_commands`, the audit is in
`audit_command`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import Application, OptionError, note, say
from fedsynth.cli.options import KEYS, path_argument, takes_settings
from fedsynth.cli.report_commands import audit, report, sign, verify
from fedsynth.cli.settings_options import Sections, with_own_code

if TYPE_CHECKING:
    from fedsynth.federation.costs import MechanismCosts

NAMES = {f"privacy.{key}": f"--{key.replace('_', '-')}" for key in KEYS["privacy"].split()} | {
    "privacy.noise_multiplier": "--sigma",
    "privacy.nominal_size": "--n",
}
"""The names of `plan`'s options."""
SIGNAL = (
    "S/N: signal-to-noise ratio of the sum over all clients in the best case (docs/fedstats.md);\n"
    "real data have less"
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
    as_json: given.AsJson = False,
) -> None:
    """Show what a budget allows, or what a σ costs: only from public numbers, before any data are
    used.

    With fedstats also the signal-to-noise ratio that each release can have.

    Examples: `fedsynth privacy plan --epsilon 8 --rounds 5`, `fedsynth privacy plan --sigma 3
    --method fedavg --n 6000`.
    """
    from fedsynth.federation.costs import costs_by_mechanism

    chosen["data"].setdefault("dataset", "mnist")
    sections = with_own_code(chosen)
    if not sections["privacy"].keys() & {"epsilon", "noise_multiplier"}:
        raise OptionError("a plan needs --epsilon (to compute σ) or --sigma (to compute ε)")
    plans = costs_by_mechanism(sections)
    if as_json:
        print(json.dumps([vars(p) | {"epsilon": dict(p.epsilon)} for p in plans], indent=2))
    else:
        print_costs(plans)
        _warn(plans)


def _warn(plans: list[MechanismCosts]) -> None:
    """Prints notes on budgets that are exceeded, and a warning if ε is large."""
    for p in plans:
        rounds, limit = list(p.epsilon), (p.target or math.inf) * (1 + 1e-9)
        # ε never decreases, and each value takes a composition: a binary search
        first = bisect_left(rounds, True, key=lambda number: p.epsilon[number] > limit)
        if first < len(rounds):
            note(f"{p.mechanism} exceeds ε = {p.target:g} in round {rounds[first]} with this σ")
    if max(p.epsilon[max(p.epsilon)] for p in plans) > 10:
        say("warning: ε above 10 is a weak guarantee; use --epsilon 8 for a stronger one")


def print_costs(plans: list[MechanismCosts]) -> None:
    """Prints two tables: the requirements of each mechanism, and ε by round."""
    from rich.console import Console
    from rich.table import Table

    from fedsynth.privacy.report.formatting import format_epsilon

    console = Console()
    table = Table(title=f"plan, for one example of one client, δ = {plans[0].delta:g}")
    columns = ["mechanism", "ε", "releases", "σ", "clip", "q", "a round"]
    has_signal = any("signal_to_noise" in row for p in plans for row in p.rows)
    if has_signal:
        columns.append("S/N")
    for name in columns:
        table.add_column(name, no_wrap=name != "releases")  # numbers are not truncated
    for p in plans:
        for row in p.rows:
            cells = [p.mechanism, format_epsilon(p.epsilon[max(p.epsilon)]), row["quantity"]]
            for key in ("noise_multiplier", "clip", "sample_rate", "releases", "signal_to_noise"):
                if key in row:
                    cells.append(f"{row[key]:.10g}" if key == "releases" else f"{row[key]:.4g}")
            table.add_row(*cells)
    console.print(table)
    if has_signal:
        print(SIGNAL)
    by_round = Table("round", *(p.mechanism for p in plans), title="ε after round")
    rounds = sorted(plans[0].epsilon)
    for number in sorted({*rounds[:: max(1, len(rounds) // 10)], rounds[-1]}):
        by_round.add_row(str(number), *(format_epsilon(p.epsilon[number]) for p in plans))
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
    entries = f"the entries of its ledger ({rows}) count for all of them"
    print(f"the next run may use other records of {client}; {entries}")


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
    outcome = "removed: nothing was released for it"
    if result.counts:
        outcome = "only its line break was missing, so it counts: the line break was added"
    print(f"torn line: {result.line!r}\n  {outcome}")
    print(f"copy of the ledger before the repair: {result.copy}")
